package moedeployment

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// patience is how long a pod may wait for a node or its volumes before that is called a problem: during a roll-out the
// devices of its predecessor take a moment to become free.
const patience = 20 * time.Second

// problem is what keeps a pod from serving.
type problem struct{ Reason, Message string }

// findProblem returns the worst problem of the pods, and when to look again where a pod may yet turn out to have one.
// failedMounts holds, by pod, the last event of a volume that cannot be mounted.
func findProblem(pods []*corev1.Pod, failedMounts map[types.UID]string, now time.Time) (*problem, time.Duration) {
	pods = slices.Clone(pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	var again time.Duration
	for _, pod := range pods {
		if pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded {
			continue
		}
		if found := containerProblem(pod); found != nil {
			return found, 0
		}
		if age := now.Sub(pod.CreationTimestamp.Time); pod.Status.Phase == corev1.PodPending && age < patience {
			again = patience
			continue
		}
		if found := waitingProblem(pod, failedMounts[pod.UID]); found != nil {
			return found, 0
		}
	}
	return nil, again
}

// waitsForVolumes tells that a pod has a node, but its containers have not been created for longer than usual.
func waitsForVolumes(pod *corev1.Pod, now time.Time) bool {
	return pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodPending && pod.Spec.NodeName != "" &&
		now.Sub(pod.CreationTimestamp.Time) >= patience && containerProblem(pod) == nil
}

func containerProblem(pod *corev1.Pod) *problem {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		waiting := status.State.Waiting
		if waiting == nil {
			continue
		}
		where := fmt.Sprintf("pod %s, container %s", podLabel(pod), status.Name)
		switch waiting.Reason {
		case "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError":
			return &problem{"ImagePullFailed", fmt.Sprintf("%s: image %q cannot be pulled: check %s, and spec.template.spec.imagePullSecrets if it is private", where, status.Image, imageField(pod))}
		case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
			return &problem{"ContainerNotCreated", fmt.Sprintf("%s cannot be created: %s", where, waiting.Message)}
		case "CrashLoopBackOff":
			return &problem{"ContainerCrashing", fmt.Sprintf("%s ends again and again%s: see `kubectl logs -n %s %s -c %s --previous`", where, lastEnd(status), pod.Namespace, pod.Name, status.Name)}
		}
	}
	return nil
}

func imageField(pod *corev1.Pod) string {
	if pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentEngine {
		return "spec.engine.image"
	}
	return "the operator's --image"
}

// podLabel names a pod in a message. Pods of Jobs and Deployments have random names, which would make a message that
// never stays the same: their component stands for them.
func podLabel(pod *corev1.Pod) string {
	if pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentEngine {
		return pod.Name
	}
	return "of the " + pod.Labels[semmoev1.LabelComponent]
}

func lastEnd(status corev1.ContainerStatus) string {
	end := status.LastTerminationState.Terminated
	if end == nil {
		return ""
	}
	text := fmt.Sprintf(" (exit code %d)", end.ExitCode)
	if message := lastLine(end.Message); message != "" {
		text = fmt.Sprintf(" (exit code %d: %s)", end.ExitCode, message)
	}
	return text
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return truncate(strings.TrimSpace(lines[len(lines)-1]), 300)
}

func truncate(text string, length int) string {
	if len(text) <= length {
		return text
	}
	return strings.ToValidUTF8(text[:length-3], "") + "..."
}

func waitingProblem(pod *corev1.Pod, failedMount string) *problem {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return &problem{"Unschedulable", fmt.Sprintf("pod %s has no node: %s", podLabel(pod), condition.Message)}
		}
	}
	if failedMount != "" {
		return &problem{"VolumeNotMounted", fmt.Sprintf("pod %s waits for a volume: %s: check spec.model.volume", podLabel(pod), failedMount)}
	}
	if pod.Status.Phase == corev1.PodPending && pod.Spec.NodeName != "" && len(pod.Status.ContainerStatuses) > 0 {
		for _, status := range pod.Status.ContainerStatuses {
			if waiting := status.State.Waiting; waiting != nil && waiting.Reason == "ContainerCreating" {
				return &problem{"ContainerNotCreated", fmt.Sprintf("pod %s waits for its containers: see `kubectl describe pod -n %s %s`", podLabel(pod), pod.Namespace, pod.Name)}
			}
		}
	}
	return nil
}
