// SPDX-License-Identifier: Apache-2.0

// Package view describes objects of the API server and metrics of the request routers: the state of a deployment, the
// benefit of a plan, the difference of two plans, and the load of the ranks.
//
// Invariants:
//   - Functions are pure: the result depends only on the arguments, which include the present time.
//   - Each description is a value with a JSON form for scripts. The text is drawn only from that value, so that both
//     agree.
//   - Unknown figures are omitted or shown as unknown. No figure is guessed.
package view
