// SPDX-License-Identifier: Apache-2.0

package podhealth

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// patience is how long a pod may wait for a node or its volumes before this is a problem: during a rollout, the devices
// of its predecessor take some time to become free.
const patience = 20 * time.Second

// unreadyPatience is how long a started container may fail its readiness probe: on a busy node, the request router
// needs half a minute to discover its endpoints.
const unreadyPatience = time.Minute

// Problem is what prevents a pod from serving.
type Problem struct{ Reason, Message string }

// Find returns the worst problem of the pods, and the delay until a pod that waits may turn out to have a problem.
// failedMounts contains, by pod, the last event of a failed volume mount.
func Find(pods []*corev1.Pod, failedMounts map[types.UID]string, now time.Time) (*Problem, time.Duration) {
	pods = slices.Clone(pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	var again time.Duration
	for _, pod := range pods {
		if nodeLost(pod) { // also for a terminating pod, which stays until its node confirms the termination
			return &Problem{"NodeLost", fmt.Sprintf("pod %s is on node %s, which does not respond. The pod serves again when the node is back. To replace the pod now, delete the Node, or force-delete the pod", podLabel(pod), pod.Spec.NodeName)}, 0
		}
		if pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || gated(pod) {
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
		found, after := unreadyProblem(pod, now)
		if found != nil {
			return found, 0
		}
		again = max(again, after)
	}
	return nil, again
}

// unreadyProblem returns the problem of a pod with a container that has started and has failed its readiness probe for
// longer than unreadyPatience. A container that still loads has not passed its startup probe. The second result is the
// delay until the next check.
func unreadyProblem(pod *corev1.Pod, now time.Time) (*Problem, time.Duration) {
	if gate, since := missingGate(pod); gate != "" {
		if age := now.Sub(since); age < unreadyPatience {
			return nil, unreadyPatience - max(0, age) // the clock may be behind, and be corrected during the delay
		}
		return &Problem{"NotReady", fmt.Sprintf("the containers of pod %s are ready, and its readiness gate %s is not True: check the controller that sets it, or remove the gate from the pod template", podLabel(pod), gate)}, 0
	}
	var since time.Time
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.ContainersReady && condition.Status == corev1.ConditionFalse {
			since = condition.LastTransitionTime.Time
		}
	}
	for _, status := range pod.Status.ContainerStatuses {
		running := status.State.Running
		if since.IsZero() || status.Ready || running == nil || status.Started == nil || !*status.Started {
			continue
		}
		if running.StartedAt.After(since) {
			since = running.StartedAt.Time
		}
		if age := now.Sub(since); age < unreadyPatience {
			return nil, unreadyPatience - max(0, age) // the clock may be behind, and be corrected during the delay
		}
		return &Problem{"NotReady", fmt.Sprintf("pod %s, container %s runs and fails its readiness probe: see `kubectl logs -n %s %s -c %s`",
			podLabel(pod), status.Name, pod.Namespace, logsOf(pod), status.Name)}, 0
	}
	return nil, 0
}

// missingGate returns the first readiness gate that a pod with ready containers waits for, and since when they are ready.
func missingGate(pod *corev1.Pod) (gate corev1.PodConditionType, since time.Time) {
	met := map[corev1.PodConditionType]bool{}
	for _, condition := range pod.Status.Conditions {
		if met[condition.Type] = condition.Status == corev1.ConditionTrue; condition.Type == corev1.ContainersReady {
			since = condition.LastTransitionTime.Time
		}
	}
	for _, of := range pod.Spec.ReadinessGates {
		if met[corev1.ContainersReady] && !met[of.ConditionType] {
			return of.ConditionType, since
		}
	}
	return "", since
}

// logsOf returns the arguments of kubectl logs. It selects pods of Deployments by label: their random names would
// change the message with each pod.
func logsOf(pod *corev1.Pod) string {
	if pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentRouter {
		return fmt.Sprintf("-l %s=%s,%s=%s", semmoev1.LabelDeployment, pod.Labels[semmoev1.LabelDeployment], semmoev1.LabelComponent, semmoev1.ComponentRouter)
	}
	return pod.Name
}

// PodsRejected returns the problem of pods that the API server rejects with this message.
func PodsRejected(message string) *Problem {
	return &Problem{"PodsRejected", "The API server rejects the pods (" + rejectionAdvice("spec.template", message) + "): " + withoutPodName(message)}
}

// RouterPodsRejected returns the problem of request router pods that the API server rejects.
func RouterPodsRejected(message string) *Problem {
	return &Problem{"PodsRejected", "The API server rejects the pods of the router (" + rejectionAdvice("spec.routing.template", message) + "): " + withoutPodName(message)}
}

// podName matches the name of a rejected pod.
var podName = regexp.MustCompile(`pods "[^"]*"`)

// withoutPodName removes the pod's name from a rejection. Jobs and ReplicaSets try a new random name each time, and each
// attempt would change the status.
func withoutPodName(message string) string { return podName.ReplaceAllString(message, "the pod") }

// rejectionAdvice returns what to do about pods that the API server rejects. template is the field of their template.
func rejectionAdvice(template, message string) string {
	of := func(signs ...string) bool {
		return slices.ContainsFunc(signs, func(sign string) bool { return strings.Contains(message, sign) })
	}
	switch {
	case of("quota"):
		return "raise the quota, or set resources in " + template
	case of("usage per", "limit to request ratio"): // a LimitRange
		return "change the LimitRange, or set resources in " + template
	case of("PodSecurity", "ecurityContext", "security context"):
		return "set the security contexts in " + template
	}
	return "create what is missing, or change " + template
}

// WaitsForVolumes reports whether a pod has a node, but its containers have not been created for longer than patience.
func WaitsForVolumes(pod *corev1.Pod, now time.Time) bool {
	return pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodPending && pod.Spec.NodeName != "" &&
		now.Sub(pod.CreationTimestamp.Time) >= patience && containerProblem(pod) == nil
}

// nodeLost reports whether the node controller has set a pod to unready because its node does not respond. A kubelet
// would set the containers to unready too.
func nodeLost(pod *corev1.Pod) bool {
	conditions := map[corev1.PodConditionType]corev1.ConditionStatus{}
	for _, condition := range pod.Status.Conditions {
		conditions[condition.Type] = condition.Status
	}
	return pod.Status.Phase == corev1.PodRunning && len(pod.Spec.ReadinessGates) == 0 &&
		conditions[corev1.PodReady] == corev1.ConditionFalse && conditions[corev1.ContainersReady] == corev1.ConditionTrue
}

func containerProblem(pod *corev1.Pod) *Problem {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		waiting := status.State.Waiting
		if waiting == nil {
			continue
		}
		where := fmt.Sprintf("pod %s, container %s", podLabel(pod), status.Name)
		switch waiting.Reason {
		case "ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "SignatureValidationFailed", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError":
			return &Problem{"ImagePullFailed", fmt.Sprintf("%s: image %q cannot be pulled%s: check %s, and spec.template.spec.imagePullSecrets if it is private", where, status.Image, pullCause(waiting, status.Image), imageField(pod, status.Name))}
		case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
			return &Problem{"ContainerNotCreated", fmt.Sprintf("%s cannot be created: %s", where, withoutIDs(waiting.Message))}
		case "CrashLoopBackOff":
			return &Problem{"ContainerCrashing", fmt.Sprintf("%s crashes repeatedly%s: see `kubectl logs -n %s %s -c %s --previous`", where, lastEnd(status), pod.Namespace, logsOf(pod), status.Name)}
		}
	}
	return nil
}

// containerID matches the ID of a container, or a digest.
var containerID = regexp.MustCompile(`(sha256:)?[0-9a-f]{64}`)

// withoutIDs removes the IDs of containers from a kubelet's message: each attempt has another one, and would change the
// status.
func withoutIDs(message string) string {
	return containerID.ReplaceAllStringFunc(message, func(id string) string {
		if strings.HasPrefix(id, "sha256:") {
			return id
		}
		return "ID"
	})
}

// pullCauses map texts in a kubelet's message to a cause: the messages themselves vary between attempts, by port and
// request number.
var pullCauses = []struct {
	cause string
	signs []string
}{
	{"the rate limit of the registry is exceeded", []string{"toomanyrequests", "too many requests"}},
	{"the registry cannot be reached", []string{"registryunavailable", "no such host", "timeout", "timed out", "deadline exceeded", "connection re", "no route to host", "unreachable"}},
	{"the node does not trust the registry's certificate", []string{"x509", "tls:"}},
	{"its signature is not valid", []string{"signaturevalidationfailed"}},
	{"the registry denies access, or has no such repository", []string{"unauthorized", "denied", "forbidden", "authorization", "authentication"}},
	{"it is not built for the node's platform", []string{"no match for platform"}},
	{"the registry has no such image", []string{"not found", "manifest unknown"}},
	{"the node has no disk space left", []string{"no space left"}},
}

// pullCause returns why an image cannot be pulled; empty if unknown. A kubelet alternates between pull errors and
// back-off with the same cause, so the result must be the same for both.
func pullCause(waiting *corev1.ContainerStateWaiting, image string) string {
	switch waiting.Reason {
	case "InvalidImageName", "ErrImageNeverPull", "ImageInspectError":
		return fmt.Sprintf(" (%s: %s)", waiting.Reason, LastLine(waiting.Message))
	}
	text := strings.ToLower(waiting.Reason + " " + strings.ReplaceAll(waiting.Message, image, ""))
	for _, known := range pullCauses {
		if slices.ContainsFunc(known.signs, func(sign string) bool { return strings.Contains(text, sign) }) {
			return fmt.Sprintf(" (%s)", known.cause)
		}
	}
	return ""
}

// ours are the names of the containers that the operator adds to pods based on spec.template.
var ours = []string{"fetch-tables", "follow-tables", "hold-weights", "profile", "prove-lossless", "reshuffle-weights", "verify-plan"}

// imageField returns where the image of a container is configured.
func imageField(pod *corev1.Pod, container string) string {
	switch {
	case container == semmoev1.EngineContainer:
		return "spec.engine.image"
	case slices.Contains(ours, container) || slices.Contains([]string{semmoev1.ComponentDownload, semmoev1.ComponentInspect, semmoev1.ComponentRouter}, pod.Labels[semmoev1.LabelComponent]):
		return "the operator's --image"
	}
	return "the container's image in spec.template"
}

// podLabel returns the name of a pod for a message. For pods of Jobs and Deployments it returns their component: their
// random names would change the message with each pod.
func podLabel(pod *corev1.Pod) string {
	switch component := pod.Labels[semmoev1.LabelComponent]; component {
	case semmoev1.ComponentEngine, semmoev1.ComponentWorker:
		return pod.Name
	case semmoev1.ComponentInspect:
		return "of the inspection"
	case semmoev1.ComponentDownload:
		return "of the download Job"
	case semmoev1.ComponentProfile:
		return "of the profiling Job"
	default:
		return "of the " + component
	}
}

func lastEnd(status corev1.ContainerStatus) string {
	end := status.LastTerminationState.Terminated
	if end == nil {
		return ""
	}
	return endText(end)
}

func endText(end *corev1.ContainerStateTerminated) string {
	text := fmt.Sprintf(" (exit code %d)", end.ExitCode)
	if message := LastLine(end.Message); message != "" {
		text = fmt.Sprintf(" (exit code %d: %s)", end.ExitCode, message)
	}
	return text
}

// FirstFailure returns which container of the pods failed first, and how; empty if none failed.
func FirstFailure(pods []*corev1.Pod) string {
	var first *corev1.ContainerStateTerminated
	var text string
	for _, pod := range pods {
		for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			for _, end := range []*corev1.ContainerStateTerminated{status.LastTerminationState.Terminated, status.State.Terminated} {
				if end != nil && end.ExitCode != 0 && (first == nil || end.FinishedAt.Before(&first.FinishedAt)) {
					first, text = end, fmt.Sprintf("pod %s, container %s%s", podLabel(pod), status.Name, endText(end))
				}
			}
		}
	}
	return text
}

// LastLine returns the last line of a text, at most 300 bytes.
func LastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return truncate(strings.TrimSpace(lines[len(lines)-1]), 300)
}

// truncate shortens a text to a length in bytes, and marks the cut with "...".
func truncate(text string, length int) string {
	if len(text) <= length {
		return text
	}
	return strings.ToValidUTF8(text[:length-3], "") + "..."
}

func waitingProblem(pod *corev1.Pod, failedMount string) *Problem {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return &Problem{"Unschedulable", fmt.Sprintf("pod %s has no node: %s%s", podLabel(pod), strings.TrimSuffix(condition.Message, "."), schedulingAdvice(pod))}
		}
	}
	pending := pod.Status.Phase == corev1.PodPending
	switch {
	case failedMount != "":
		return &Problem{"VolumeNotMounted", fmt.Sprintf("pod %s waits for a volume: %s: %s", podLabel(pod), failedMount, volumeAdvice(pod, failedMount))}
	case pending && pod.Spec.NodeName == "":
		return &Problem{"Unschedulable", fmt.Sprintf("pod %s has no node: scheduler %q has not handled it. Start this scheduler, or change schedulerName in the pod template", podLabel(pod), pod.Spec.SchedulerName)}
	case pending && len(pod.Status.ContainerStatuses)+len(pod.Status.InitContainerStatuses) == 0:
		return &Problem{"ContainerNotCreated", fmt.Sprintf("pod %s waits for its containers: node %s has not started it. Check that the node exists and is ready", podLabel(pod), pod.Spec.NodeName)}
	case pending:
		for _, status := range pod.Status.ContainerStatuses {
			if waiting := status.State.Waiting; waiting != nil && waiting.Reason == "ContainerCreating" {
				return &Problem{"ContainerNotCreated", fmt.Sprintf("pod %s waits for its containers: see `kubectl describe pod -n %s %s`", podLabel(pod), pod.Namespace, pod.Name)}
			}
		}
	}
	return nil
}

// schedulingAdvice names the field that determines which nodes accept a router pod; empty for other pods, whose
// template is spec.template or spec.profiling.template.
func schedulingAdvice(pod *corev1.Pod) string {
	if pod.Labels[semmoev1.LabelComponent] != semmoev1.ComponentRouter {
		return ""
	}
	return ". Add a node for it, or set tolerations, nodeSelector, affinity or resources in spec.routing.template"
}

// routerVolumes maps the volumes of a router pod to the fields that name their Secrets.
var routerVolumes = map[string]string{
	"tls": "spec.routing.tls.secretName", "client-ca": "spec.routing.tls.clientCASecretName", "api-keys": "spec.routing.auth.secretName",
	"collector-ca": "spec.routing.tracing.caSecretName",
}

// volumeAdvice returns what to do about a failed volume mount.
func volumeAdvice(pod *corev1.Pod, failedMount string) string {
	// A kubelet names volumes in quotation marks, or as a list: unmounted volumes=[dataset].
	of := func(volume string) bool {
		return strings.Contains(failedMount, `"`+volume+`"`) || strings.Contains(failedMount, "["+volume)
	}
	switch {
	case of(semmoev1.DatasetVolume):
		return "create the ConfigMap (with the key) or the PersistentVolumeClaim of the data set"
	case of(semmoev1.PlanVolume):
		return "the operator recreates the ConfigMap of a plan, unless the PlacementPlan with that name prefix reports a problem; if that PlacementPlan does not exist, create it again with its former spec"
	}
	for _, volume := range pod.Spec.Volumes {
		field := routerVolumes[volume.Name]
		switch {
		case !of(volume.Name):
		case field != "" && pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentRouter:
			return "check " + field
		case volume.Name != "model":
			return fmt.Sprintf("check volume %q in the pod template", volume.Name)
		}
	}
	return "check spec.model.volume"
}

// Gate returns the first scheduling gate of a pod; empty for none. A pod with a gate waits for the controller of the
// gate, usually a queue. It has no node, uses no device, and has not failed, however long it waits.
func Gate(pod *corev1.Pod) string {
	if pod.DeletionTimestamp != nil || len(pod.Spec.SchedulingGates) == 0 {
		return ""
	}
	return pod.Spec.SchedulingGates[0].Name
}

// gated reports whether a pod has a scheduling gate, or the scheduler has not handled it since the last gate was
// removed.
func gated(pod *corev1.Pod) bool {
	return Gate(pod) != "" || slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonSchedulingGated
	})
}

// Unscheduled reports whether the scheduler found no node for the pod.
func Unscheduled(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse
	})
}

// Ready reports whether a pod is ready and not being deleted.
func Ready(pod *corev1.Pod) bool {
	if pod.DeletionTimestamp != nil {
		return false
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}
