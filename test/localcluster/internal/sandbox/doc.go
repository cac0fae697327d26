// SPDX-License-Identifier: Apache-2.0

// Package sandbox runs one static binary as a container: separate mount, PID, UTS and IPC namespaces, a root with only
// the binary and its mounts, and no capabilities.
//
// A container starts as a copy of the running program with argv[0] set to Stage; RunIfAsked, which main must call
// first, handles it. The copy builds the root on a tmpfs, pivots into it, drops every capability and then executes the
// binary, so that the binary cannot see anything outside the root.
//
// Invariants: the caller holds CAP_SYS_ADMIN in a user namespace that owns its PID and mount namespaces. All mounts are
// in the container's mount namespace, so they end with the container's process. The process is PID 1 of its namespace:
// it receives only the signals that it handles, and all its remaining descendants end with it.
//
// Limitations: no cgroups (limits are not enforced), no seccomp filter, no network namespace, one user ID.
package sandbox
