// SPDX-License-Identifier: Apache-2.0

// Package retention deletes artifacts from the artifact store that no object references.
//
// Invariants:
//   - An artifact stays while an AffinityProfile, a PlacementPlan, a plan's ConfigMap, a workload or a pod references
//     it, regardless of the creator of the object and the age of the artifact.
//   - An artifact stays for the retention period after its last reference. Each sweep marks the referenced artifacts in
//     the store, so that every manager knows the time of the last reference.
//   - With an incomplete view nothing is deleted: an error in any list ends the sweep, and an object that does not
//     reference its artifacts yet protects all artifacts of its namespace.
//   - Namespaces that the manager does not watch are not swept.
package retention
