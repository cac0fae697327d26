// Package discovery finds the engine pods that serve and their endpoints. It uses the API server, and a snapshot of the
// last known state.
//
// Invariants:
//   - An endpoint is a (pod, rank). Every ready pod is reported, except pods with a deletion timestamp and pods of incomplete
//     replicas.
//   - An invalid annotation counts as absent. The pod still serves, with less metadata.
//   - The snapshot contains the complete last state. A router that starts without the API server starts from it.
package discovery
