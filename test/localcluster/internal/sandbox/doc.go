// Package sandbox runs one static binary as a container: its own mount, pid, UTS and IPC namespaces, a root that holds
// the binary and its mounts alone, and no capability.
//
// A container begins as a copy of the running program whose argv[0] is Stage (RunIfAsked, which main must call first):
// it builds the root on a tmpfs, moves into it, drops every capability and then executes the binary, so that nothing of
// the outside can be seen by what runs.
//
// Invariants: the caller holds CAP_SYS_ADMIN in a user namespace that owns its pid and mount namespaces. Nothing is
// mounted outside the container's own mount namespace, so the end of its process ends its mounts. The process is pid 1
// of its namespace: it gets only the signals that it handles, and its end ends every process that it left.
//
// What it is not: no cgroups (limits are not enforced), no seccomp filter, no network namespace, one user id.
package sandbox
