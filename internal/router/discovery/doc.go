// SPDX-License-Identifier: Apache-2.0

// Package discovery finds the engines that serve and their endpoints. A Source is one of two: the ready pods of the API
// server, with a snapshot of the last known state (Watch), or a list of addresses without Kubernetes (List).
//
// Invariants:
//   - An endpoint is a (pod, rank). Every ready pod is reported, except pods with a deletion timestamp and pods of incomplete
//     replicas.
//   - An invalid annotation counts as absent. The pod still serves, with less metadata.
//   - An invalid list is an error at the start. Later, the last valid list stays in effect.
//   - The snapshot contains the complete last state. A router that starts without the API server starts from it.
package discovery
