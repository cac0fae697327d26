// SPDX-License-Identifier: Apache-2.0

// Package supervisor implements the first process in the namespaces of a local cluster. It sets up the namespaces, runs
// the control plane and the node, and forwards inherited listeners into the network namespace.
//
// The supervisor serves net/rpc calls on an inherited connection, and ends when the connection is closed. Because it is
// the first process of its PID namespace, every other process of the cluster ends with it.
//
// Invariants: the supervisor holds no state that outlives it. Children do not inherit the files that it inherited.
package supervisor
