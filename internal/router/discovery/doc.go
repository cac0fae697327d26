// Package discovery tells a router which engine pods serve, and where: from the API server, and from a snapshot of what that said last.
//
// Invariants:
//   - An endpoint is a (pod, rank). Every ready pod is told; a pod that is being deleted, or is no whole replica, is not.
//   - What a pod's annotations say wrongly is taken as not said: it is served with less known of it, never refused.
//   - The snapshot holds what was told last, whole. A router that starts without the API server starts from it.
package discovery
