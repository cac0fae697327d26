// SPDX-License-Identifier: Apache-2.0

// Package plans fetches, stores and loads the plans that engine pods serve under, and scores requests with their
// tables.
//
// Invariants:
//   - A Layout is immutable. New tables result in a new Layout with the same placement.
//   - The Keeper adds only complete and verified plans to the pool, and stores them on disk. A router that starts without the
//     artifact store uses the plans that pods named before. A plan that no pod names is deleted after a grace period.
//   - The scored part of a prompt is bounded and sampled evenly from the prompt.
//   - A plan that cannot be loaded reduces locality. It never causes a failed request.
package plans
