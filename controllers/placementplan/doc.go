// SPDX-License-Identifier: Apache-2.0

// Package placementplan solves PlacementPlans and publishes them: the complete plan in the artifact store, and the
// files that an engine reads in a ConfigMap.
//
// Invariants:
//   - The inputs of a plan are the digest of the profile and the options of the solver. The first solution that is
//     published for the inputs wins: while the store has it and its plan, the inputs are not solved again, even if all
//     other objects are lost.
//   - decide is a pure function from an observation to an action. Decisions are derived from the spec, the profile, the
//     ConfigMap and the store. Status is a report. Its plan digest is used only to find a plan in the store that neither
//     the profile nor the ConfigMap identifies.
//   - A ConfigMap is created or deleted, never changed. It is immutable, and its name contains the digest of its content. A
//     plan that belongs to no MoEDeployment has a copy with a name that is known in advance.
//   - Solving never runs on the goroutines of the reconciler. The number of concurrent jobs is bounded. Jobs stop with
//     their plan or with the manager. Only their progress and their last failure are kept in memory.
package placementplan
