// SPDX-License-Identifier: Apache-2.0

// Package affinityprofile makes profiles. It inspects the model and the data set, queries the artifact store for a
// profile of the same inputs, and runs a Job that records a profile if there is none.
//
// Invariants:
//   - Decisions are derived from observed objects and from the artifact store. Status is a report: clearing it changes no
//     decision.
//   - No device is used while the store has the result, while an unfinished Job has the same inputs (of any
//     AffinityProfile: the name of a Job contains its inputs), or after an attempt that would fail again in the same way.
//   - Jobs are created, and never applied. A failed attempt is kept to record the number of attempts.
//   - Four parts are pure functions: attempts (from Jobs and pods), decide (from observation to action), render (from spec
//     to Job), and the conditions (from observation to status).
package affinityprofile
