// SPDX-License-Identifier: Apache-2.0

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

const maxBackOff = 5 * time.Minute

// BackOff returns the delay after the n-th failure: for the first ten attempts, a fix by the user is picked up within a
// minute; an object that stays broken for hours costs one Job every five minutes.
func BackOff(attempt int) time.Duration {
	if attempt > 10 {
		return maxBackOff
	}
	return min(10*time.Second<<(attempt-1), time.Minute)
}

// Attempt returns the number at the end of the name of a Job that may be retried; 0 if there is none.
func Attempt(job *batchv1.Job) int {
	attempt, err := strconv.Atoi(job.Name[strings.LastIndexByte(job.Name, '-')+1:])
	if err != nil {
		return 0
	}
	return attempt
}

// Finished returns the condition with which a Job ended in this way; nil if it did not.
func Finished(job *batchv1.Job, kind batchv1.JobConditionType) *batchv1.JobCondition {
	for i, condition := range job.Status.Conditions {
		if condition.Type == kind && condition.Status == corev1.ConditionTrue {
			return &job.Status.Conditions[i]
		}
	}
	return nil
}

// Terminated returns the termination state of a Job's container in its newest pod; nil if it still runs or the pod is
// deleted.
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

// TerminationMessage returns the termination message of the container; empty if unknown.
func TerminationMessage(job *batchv1.Job, pods []*corev1.Pod) string {
	if state := Terminated(job, pods); state != nil {
		return strings.TrimSpace(state.Message)
	}
	return ""
}

// ExitCode returns the exit code of the container; 0 if unknown.
func ExitCode(job *batchv1.Job, pods []*corev1.Pod) int32 {
	if state := Terminated(job, pods); state != nil {
		return state.ExitCode
	}
	return 0
}

// FailurePolicy returns a policy that fails a Job with a container that exits with one of the final codes: another attempt
// would fail in the same way. Evictions do not count, and the Job controller creates another pod.
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
