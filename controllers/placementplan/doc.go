// Package placementplan solves PlacementPlans and publishes them: all of a plan in the artifact store, and what an engine
// reads in a ConfigMap.
//
// Invariants:
//   - The inputs of a plan are the profile's digest and the options of the solver. The first solution that is published
//     for them in the store wins; while it and its plan live there, nothing is solved again, whatever else was lost.
//   - Every decision is derived from the spec, the profile, the ConfigMap and the store. Status is a report; what it tells
//     of the plan is used only to find in the store what neither profile nor ConfigMap name any more.
//   - A ConfigMap is created or deleted, never changed. It is immutable, and named by what it holds; a plan that belongs to no
//     MoEDeployment has a copy under a name that is known before.
//   - Solving never runs on the reconciler's goroutines. Jobs are counted by a bound, and end with their plan or with the
//     manager; only their progress and their last failure are kept in memory.
package placementplan
