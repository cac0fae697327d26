package jobstate

import (
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// BackOff is how long to wait after the n-th failure: somebody who mends a volume sees it picked up within a minute, and
// an object that stays broken for hours costs a Job every five minutes.
func BackOff(attempt int) time.Duration {
	if attempt > 10 {
		return 5 * time.Minute
	}
	return min(10*time.Second<<(attempt-1), time.Minute)
}

// Attempt is the number at the end of the name of a Job that may be tried again; 0 where there is none.
func Attempt(job *batchv1.Job) int {
	attempt, err := strconv.Atoi(job.Name[strings.LastIndexByte(job.Name, '-')+1:])
	if err != nil {
		return 0
	}
	return attempt
}

// Finished is the condition by which a Job has ended in that way; nil where it has not.
func Finished(job *batchv1.Job, kind batchv1.JobConditionType) *batchv1.JobCondition {
	for i, condition := range job.Status.Conditions {
		if condition.Type == kind && condition.Status == corev1.ConditionTrue {
			return &job.Status.Conditions[i]
		}
	}
	return nil
}

// Terminated is the end of a Job's container, in its youngest pod; nil where it has not ended or is gone.
func Terminated(job *batchv1.Job, pods []*corev1.Pod) *corev1.ContainerStateTerminated {
	var youngest *corev1.Pod
	for _, pod := range pods {
		if metav1.IsControlledBy(pod, job) && len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].State.Terminated != nil {
			if youngest == nil || youngest.CreationTimestamp.Before(&pod.CreationTimestamp) {
				youngest = pod
			}
		}
	}
	if youngest == nil {
		return nil
	}
	return youngest.Status.ContainerStatuses[0].State.Terminated
}

// TerminationMessage is what the container said when it ended; empty where that is not known.
func TerminationMessage(job *batchv1.Job, pods []*corev1.Pod) string {
	if state := Terminated(job, pods); state != nil {
		return strings.TrimSpace(state.Message)
	}
	return ""
}

// ExitCode is the exit code of the container; 0 where that is not known.
func ExitCode(job *batchv1.Job, pods []*corev1.Pod) int32 {
	if state := Terminated(job, pods); state != nil {
		return state.ExitCode
	}
	return 0
}

// RestrictedPod and RestrictedContainer satisfy the restricted pod security standard; 65532 is the user of our image.
func RestrictedPod() *corev1.PodSecurityContext {
	return &corev1.PodSecurityContext{
		RunAsNonRoot:   ptr.To(true),
		RunAsUser:      ptr.To[int64](65532),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

func RestrictedContainer() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr.To(false),
		ReadOnlyRootFilesystem:   ptr.To(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// RestrictedBeside satisfies the standard for a container of ours beside one of the user's, whose pod need not keep to it: what the
// user says for the whole pod holds for ours too. It names no user, since the volumes may be for the one that the pod names. A pod of
// root's is not contradicted: the kubelet would refuse to start the container, and such a pod is not admitted where the standard is
// enforced.
func RestrictedBeside(pod *corev1.PodSecurityContext) *corev1.SecurityContext {
	container, ours := RestrictedContainer(), RestrictedPod()
	if pod == nil {
		pod = &corev1.PodSecurityContext{}
	}
	if pod.RunAsNonRoot == nil && ptr.Deref(pod.RunAsUser, 1) != 0 {
		container.RunAsNonRoot = ours.RunAsNonRoot
	}
	if pod.SeccompProfile == nil {
		container.SeccompProfile = ours.SeccompProfile
	}
	return container
}
