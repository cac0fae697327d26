// Package node is the agent of a simulated node: what a kubelet, a container runtime and kube-proxy do for the pods and
// Services of a local cluster, as far as tests need it (the parent package says what is missing).
//
// Each pod has one worker goroutine that owns everything known about it; whatever happens to the pod (a change of the
// object, the end of a container, the result of a probe) reaches it as an event. After each event the worker derives
// what to do (decide) and what to report (podStatus) from its records, by pure functions.
//
// Invariants: a container is started at most once at a time, and never again once its pod has begun to stop. A terminal
// phase is reported only when no container of the pod runs. The object of a deleted pod is removed only after its last
// container has ended. The API object is written only when the status differs.
package node
