// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// observation is the state of a pod in addition to the records of its containers.
type observation struct {
	hostIP, podIP string
	startTime     metav1.Time
	// stopped is set when the pod has been stopped permanently and no container runs.
	stopped bool
	// reason and message explain why the node ended the pod. They are empty if the pod completed or was deleted.
	reason, message string
}

// podStatus returns the status to report. Fields and conditions of other owners are copied from pod.Status.
func podStatus(pod *corev1.Pod, records map[string]*record, o observation, now time.Time) corev1.PodStatus {
	s := *pod.Status.DeepCopy()
	s.ObservedGeneration = pod.Generation
	s.StartTime = &o.startTime
	s.HostIP = o.hostIP
	s.HostIPs = []corev1.HostIP{{IP: o.hostIP}}
	if o.podIP != "" {
		s.PodIP = o.podIP
		s.PodIPs = []corev1.PodIP{{IP: o.podIP}}
	}
	s.Reason, s.Message = o.reason, o.message
	restartable := !o.stopped && pod.DeletionTimestamp == nil && o.reason == ""
	s.InitContainerStatuses, s.ContainerStatuses = nil, nil
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		r := records[c.Name]
		again := isSidecar(c) || r.failed() && pod.Spec.RestartPolicy != corev1.RestartPolicyNever
		status := containerStatus(c, r, restartable && again, "PodInitializing", now)
		if !isSidecar(c) {
			status.Ready = r.succeeded()
		}
		s.InitContainerStatuses = append(s.InitContainerStatuses, status)
	}
	waitReason := "ContainerCreating"
	if !initialized(pod, records) {
		waitReason = "PodInitializing"
	}
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		r := records[c.Name]
		s.ContainerStatuses = append(s.ContainerStatuses, containerStatus(c, r, restartable && restarts(pod, r), waitReason, now))
	}
	s.Phase = phase(pod, records, o)
	setConditions(&s, pod, records, now)
	return s
}

// containerStatus returns the status of one container. again means that the container restarts after its end.
func containerStatus(c *corev1.Container, r *record, again bool, waitReason string, now time.Time) corev1.ContainerStatus {
	started := r.started
	s := corev1.ContainerStatus{
		Name: c.Name, Image: c.Image, ImageID: r.image, ContainerID: r.id, RestartCount: r.restarts,
		Ready: r.ready, Started: &started,
	}
	switch {
	case r.running != nil:
		s.State.Running = r.running
		s.LastTerminationState.Terminated = r.previous
	case r.waiting != nil:
		s.State.Waiting = r.waiting
		s.LastTerminationState.Terminated = r.ended
	case r.ended != nil && again && r.retryAt.After(now):
		s.State.Waiting = &corev1.ContainerStateWaiting{
			Reason:  "CrashLoopBackOff",
			Message: fmt.Sprintf("back-off %s restarting failed container=%s pod", r.backoff, c.Name),
		}
		s.LastTerminationState.Terminated = r.ended
	case r.ended != nil:
		s.State.Terminated = r.ended
		s.LastTerminationState.Terminated = r.previous
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: waitReason}
	}
	return s
}

func phase(pod *corev1.Pod, records map[string]*record, o observation) corev1.PodPhase {
	if o.stopped {
		if o.reason != "" {
			return corev1.PodFailed
		}
		for _, c := range pod.Spec.Containers {
			if !records[c.Name].succeeded() {
				return corev1.PodFailed
			}
		}
		return corev1.PodSucceeded
	}
	for _, c := range pod.Spec.Containers {
		if !records[c.Name].everRan() {
			return corev1.PodPending
		}
	}
	return corev1.PodRunning
}

// setConditions sets the conditions that a kubelet owns.
func setConditions(s *corev1.PodStatus, pod *corev1.Pod, records map[string]*record, now time.Time) {
	completed := ""
	switch s.Phase {
	case corev1.PodSucceeded:
		completed = "PodCompleted"
	case corev1.PodFailed:
		completed = "PodFailed"
	}
	set := func(kind corev1.PodConditionType, ok bool, reason, message string) {
		c := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message, ObservedGeneration: pod.Generation}
		if ok {
			c.Status, c.Reason, c.Message = corev1.ConditionTrue, "", ""
		}
		setCondition(s, c, now)
	}
	set(corev1.PodReadyToStartContainers, s.PodIP != "" && completed == "", "", "")

	var waitingInit []string
	for _, c := range pod.Spec.InitContainers {
		if r := records[c.Name]; !r.succeeded() && !(isSidecar(&c) && r.started) {
			waitingInit = append(waitingInit, c.Name)
		}
	}
	set(corev1.PodInitialized, initialized(pod, records), "ContainersNotInitialized",
		fmt.Sprintf("containers with incomplete status: %v", waitingInit))

	unready := unreadyContainers(pod, records)
	reason, message := "ContainersNotReady", fmt.Sprintf("containers with unready status: %v", unready)
	if completed != "" {
		reason, message = completed, ""
	}
	ready := len(unready) == 0 && completed == ""
	set(corev1.ContainersReady, ready, reason, message)
	for _, gate := range pod.Spec.ReadinessGates {
		if ready && !conditionTrue(s, gate.ConditionType) {
			ready = false
			reason, message = "ReadinessGatesNotReady", fmt.Sprintf("condition %s is not True", gate.ConditionType)
		}
	}
	set(corev1.PodReady, ready, reason, message)
}

func unreadyContainers(pod *corev1.Pod, records map[string]*record) []string {
	var unready []string
	for _, c := range pod.Spec.InitContainers {
		if isSidecar(&c) && !records[c.Name].ready {
			unready = append(unready, c.Name)
		}
	}
	for _, c := range pod.Spec.Containers {
		if !records[c.Name].ready {
			unready = append(unready, c.Name)
		}
	}
	return unready
}

func conditionTrue(s *corev1.PodStatus, kind corev1.PodConditionType) bool {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// setCondition adds a condition or replaces the condition of the same type. The transition time changes only with the
// status of the condition.
func setCondition(s *corev1.PodStatus, condition corev1.PodCondition, now time.Time) {
	condition.LastTransitionTime = wireTime(now)
	for i, old := range s.Conditions {
		if old.Type != condition.Type {
			continue
		}
		if old.Status == condition.Status {
			condition.LastTransitionTime = old.LastTransitionTime
		}
		condition.LastProbeTime = old.LastProbeTime
		s.Conditions[i] = condition
		return
	}
	s.Conditions = append(s.Conditions, condition)
}
