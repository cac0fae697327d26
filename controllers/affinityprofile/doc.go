// Package affinityprofile makes profiles: it inspects the model and the data set, asks the artifact store for a profile of
// the same inputs, and where there is none runs a Job that records one.
//
// Invariants:
//   - Every decision is derived from observed objects and from the artifact store. Status is a report; wiping it changes
//     nothing.
//   - No device is used while the store has the result, while a Job of the same inputs is not over (whichever
//     AffinityProfile it belongs to: Jobs are named by their inputs), or after an attempt that would fail again in the
//     same way.
//   - Jobs are created and never applied; an attempt that has failed is kept as the memory of how often it was tried.
//   - The cores are pure: attempts (Jobs and pods to what happened), decide (observation to action), render (spec to Job)
//     and the conditions (observation to status).
package affinityprofile
