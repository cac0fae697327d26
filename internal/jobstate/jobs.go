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

// FailurePolicy ends a Job whose container ends with one of the final codes: another attempt would end in the same way. An eviction is
// nobody's fault, and the Job controller makes another pod.
func FailurePolicy(container string, final ...int32) *batchv1.PodFailurePolicy {
	return &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{
		{Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{
			{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue},
		}},
		{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
			ContainerName: ptr.To(container), Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: final,
		}},
	}}
}
