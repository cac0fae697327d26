// SPDX-License-Identifier: Apache-2.0

// Package rollout decides how replicas move from one revision to another. A change by the user is rolled out within a
// budget of unavailable and additional replicas. A plan must prove itself first, and any other change if the user
// requests it: a canary of a few replicas soaks next to the revision in service, the two are compared, and the candidate
// is promoted or rolled back.
//
// All decisions are computed from the current observation, without memory, so that a controller continues correctly
// after a crash or a change of leader.
package rollout
