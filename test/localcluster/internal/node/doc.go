// SPDX-License-Identifier: Apache-2.0

// Package node is the agent of a simulated node. For the pods and Services of a local cluster it does the work of
// kubelet, container runtime and kube-proxy, as far as tests need it (the parent package lists the limitations).
//
// Each pod has one worker goroutine that owns all state of the pod. Changes of the object, the end of a container, and
// probe results reach the worker as events. After each event the worker derives the next actions (decide) and the
// status (podStatus) from its records. Both are pure functions.
//
// Invariants: at most one instance of a container runs at a time, and no container starts after its pod has begun to
// stop. A terminal phase is reported only when no container of the pod runs. The object of a deleted pod is removed
// only after its last container has ended. The API object is written only when the status differs.
package node
