// Package controlplane runs etcd, kube-apiserver, kube-controller-manager and kube-scheduler as plain processes.
//
// Invariants: the caller owns a network namespace in which Address is local, so addresses and ports are fixed. All
// state is below one directory and is worth nothing after the end: etcd does not sync its writes to disk. The programs
// are the caller's children; one that ends takes the whole control plane with it, unless
// it is the API server and was asked to restart.
package controlplane
