// SPDX-License-Identifier: Apache-2.0

// Package localcluster runs a real Kubernetes control plane with one simulated node, for tests and demonstrations. It
// runs on any Linux machine that allows unprivileged user namespaces, and needs no root, no container runtime, no
// images and no network.
//
// Start creates one user, network, mount and PID namespace. The namespaces contain etcd, kube-apiserver,
// kube-controller-manager and kube-scheduler of the pinned release, unmodified, and a simulated node that replaces
// kubelet, container runtime and kube-proxy. A container is a process of a static binary. Its root is a tmpfs with only
// the binary and its mounts. The program that calls Start executes itself to run the supervisor, the node and the
// containers, so main or TestMain must begin with RunChildIfAsked.
//
// Invariants: when the first process of the PID namespace ends, every process of the cluster ends. The first process
// ends when the program that called Start ends, in any way. Outside the namespace, only the API server and the
// forwarded Services listen, on 127.0.0.1. No files remain outside Options.Dir; a temporary directory remains if the
// caller is killed. Several clusters can run at the same time.
//
// Limitations of this test tool:
//   - All containers share one network namespace. Each pod has its own address in 10.244.0.0/16, but a program that
//     listens on all addresses occupies its port for every pod: bind to the pod's address (status.podIP). There is no
//     hostNetwork, hostPort, UDP Service, NetworkPolicy or session affinity.
//   - Names are resolved from a hosts file per namespace. As with DNS, a program may see a change some seconds late.
//   - The caller's user ID is the only one: runAsUser, runAsGroup and fsGroup have no effect. Containers have no
//     capabilities.
//   - The scheduler compares requests with an arbitrary node capacity. Limits are not enforced. There is no seccomp.
//   - There is no kubelet API: kubectl logs, exec and port-forward do not work; see Cluster.Logs and Cluster.Forward.
//   - Service environment variables exist only for the API server. Image pull policies have no effect.
//   - Restart back-off grows from 1 s to 30 s; a kubelet uses 10 s to 5 min. A failed image pull is also retried
//     faster.
//   - Unsupported fields that change the meaning of a pod (exec probes and hooks, CSI and other volumes, host
//     namespaces, privileged containers and similar fields) are refused: the container waits with
//     CreateContainerConfigError and a message.
package localcluster
