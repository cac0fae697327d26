// Package supervisor is the first process of a local cluster's namespaces: it sets them up, runs the control plane and
// the node, and forwards inherited listeners into the network namespace.
//
// It is called over an inherited connection (net/rpc), whose end is its own end. As the first process of its pid
// namespace it takes every other process with it.
//
// Invariants: it holds no state that outlives it; the files that it inherits are never passed on to a child.
package supervisor
