// SPDX-License-Identifier: Apache-2.0

// Package controlplane runs etcd, kube-apiserver, kube-controller-manager and kube-scheduler as plain processes.
//
// Invariants: the caller owns a network namespace in which Address is local, so addresses and ports are fixed. All
// state is below one directory and is useless after the end, because etcd does not sync its writes to disk. The
// programs are children of the caller. When a program exits, the whole control plane ends, except after a requested
// restart of the API server.
package controlplane
