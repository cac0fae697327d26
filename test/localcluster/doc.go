// Package localcluster is a real Kubernetes control plane with one simulated node, for tests and demonstrations, on any
// Linux machine that allows unprivileged user namespaces. It needs no root, no container runtime, no images and no
// network.
//
// Start makes one user, network, mount and pid namespace. In it run etcd, kube-apiserver, kube-controller-manager and
// kube-scheduler of the pinned release, unchanged, and a simulated node that does what a kubelet, a container runtime and
// kube-proxy do together. A container is a process of a static binary whose root is a tmpfs with just that binary and
// its mounts. The program that calls Start is all of these: it executes itself, so main or TestMain must begin with
// RunChildIfAsked.
//
// Invariants: the end of the first process of the pid namespace ends every process of the cluster, and its
// end follows that of the program that called Start, however that ends. Nothing listens outside but the API server and
// the forwarded Services, on 127.0.0.1. Nothing is left behind outside Options.Dir (a temporary one outlives a caller
// that is killed). Several clusters can run at once.
//
// It is a test tool. What it is not:
//   - All containers share one network namespace. Each pod has an address of its own in 10.244.0.0/16, but a program
//     that listens on all addresses takes its port from every pod: let it bind its pod's address (status.podIP).
//     No hostNetwork, hostPort, UDP Services, NetworkPolicy or session affinity.
//   - Names come from a hosts file, one for each namespace; a program may see a change some seconds late, as with DNS.
//   - One user id, the caller's: runAsUser, runAsGroup and fsGroup have no effect. Containers have no capability at all.
//   - Requests count for scheduling against invented figures; limits are not enforced. There is no seccomp.
//   - No kubelet API: kubectl logs, exec and port-forward do not work; see Cluster.Logs and Cluster.Forward.
//   - Environment variables for Services are those of the API server alone. Image pull policies have no effect.
//   - Restarts back off from 1 s to 30 s, where a kubelet takes 10 s to 5 min; also a failed image pull is tried again
//     sooner.
//   - What would change the meaning of a pod and is not supported (exec probes and hooks, CSI and other volumes, host
//     namespaces, privileged containers and the like) is refused: the container waits with CreateContainerConfigError
//     and a message.
package localcluster
