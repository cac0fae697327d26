// Package retention deletes from the artifact store what nothing names any more.
//
// Invariants:
//   - What an AffinityProfile, a PlacementPlan, a plan's ConfigMap, a workload or a pod names stays, whoever made it, and
//     however old it is.
//   - What they have named stays for the retention period after that: the sweep marks in the store what is named, so that every
//     manager knows.
//   - Without a whole view nothing is deleted: an error in any list ends the sweep, and an object that has not named its
//     artifacts yet protects all of its namespace.
//   - Namespaces that the manager does not watch are left alone.
package retention
