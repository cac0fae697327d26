// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/podhealth"
)

const (
	// exitInputs and exitEngine are exit codes of `semmoe profile`. Another attempt would fail in the same way, because
	// the inputs or the engine are invalid.
	exitInputs = 3
	exitEngine = 4
	// exitStoreFull is the exit code for a full artifact store. The retry interval is then long, so that devices are
	// not used every few minutes until space is free.
	exitStoreFull = 5

	// The first quickAttempts attempts use the usual back-off. Later attempts start every slowBackOff.
	quickAttempts = 6
	slowBackOff   = time.Hour
	// keptAttempts is the number of failed Jobs to keep: the last one counts the attempts, and the one before helps to
	// compare.
	keptAttempts = 2
	// reasonInputsInvalid is the reason of a failure with exitInputs.
	reasonInputsInvalid = "InputsInvalid"
	// crashes is the number of restarts after which an engine is given up.
	crashes = 3
)

// attempts is the state of the Jobs of one set of inputs.
type attempts struct {
	// Running is the unfinished Job, of any profile; nil if there is none.
	Running *batchv1.Job
	// Ours is true if Running belongs to this profile.
	Ours bool
	// Gate is the scheduling gate that the pod of Running waits for; empty for none.
	Gate string
	// Crash is the reason to end Running: its engine keeps crashing. It is empty without crashes.
	Crash string
	// Last is the last finished Job of this profile. Failure is the reason that it has no result. FinalReason is the
	// condition reason of a failure that another attempt would repeat; it is empty for other failures.
	Last        *batchv1.Job
	Failure     string
	FinalReason string
	// Next is the number of the next attempt. It starts at NextAt or later.
	Next   int
	NextAt time.Time
	// Obsolete are Jobs to delete.
	Obsolete []*batchv1.Job
}

// suspended reports whether the unfinished Job is suspended, usually by a queue that has not admitted it. A suspended
// Job has no pods, uses no devices, and is not late: its time limit belongs to the pod.
func (a attempts) suspended() bool {
	return a.Running != nil && ptr.Deref(a.Running.Spec.Suspend, false)
}

// attemptsOf derives the attempts of a profile from all Jobs with its inputs and their pods. A Job that is being
// deleted and is not finished still uses devices, so it counts as running. Failures of the Jobs of other profiles are
// ignored, because engine, image and resources are not part of the inputs.
func attemptsOf(profile *semmoev1.AffinityProfile, jobs []*batchv1.Job, pods []*corev1.Pod) attempts {
	a := attempts{Next: 1}
	var finished []*batchv1.Job
	for _, job := range jobs {
		ours := metav1.IsControlledBy(job, profile)
		over := jobstate.Finished(job, batchv1.JobFailed) != nil || jobstate.Finished(job, batchv1.JobComplete) != nil
		switch {
		case !over:
			a.Running, a.Ours = job, ours
		case job.DeletionTimestamp == nil:
			a.Next = max(a.Next, jobstate.Attempt(job)+1)
			if ours {
				finished = append(finished, job)
			}
		}
	}
	for _, pod := range pods {
		if a.Running != nil && metav1.IsControlledBy(pod, a.Running) {
			a.Gate = cmp.Or(a.Gate, podhealth.Gate(pod))
		}
	}
	if a.Ours && a.Running.DeletionTimestamp == nil {
		a.Crash = crashOf(a.Running, pods)
	}
	if len(finished) == 0 {
		return a
	}
	slices.SortFunc(finished, func(x, y *batchv1.Job) int { return cmp.Compare(jobstate.Attempt(y), jobstate.Attempt(x)) })
	a.Last = finished[0]
	a.Obsolete = finished[min(keptAttempts, len(finished)):]
	a.Failure, a.FinalReason = failureOf(a.Last, pods)
	a.NextAt = endOf(a.Last).Add(backOff(jobstate.Attempt(a.Last), jobstate.ExitCode(a.Last, pods)))
	return a
}

// inspectionOutdated reports whether an attempt found other inputs than an earlier inspection. The inputs have changed
// since, so they are inspected again, and get another attempt. An inspection after the attempt with the same result is
// not outdated.
func inspectionOutdated(inspected *batchv1.Job, a attempts) bool {
	return inspected != nil && a.FinalReason == reasonInputsInvalid && inspected.CreationTimestamp.Time.Before(endOf(a.Last))
}

func backOff(attempt int, exitCode int32) time.Duration {
	if attempt > quickAttempts || exitCode == exitStoreFull {
		return slowBackOff
	}
	return jobstate.BackOff(attempt)
}

func endOf(job *batchv1.Job) time.Time {
	for _, kind := range []batchv1.JobConditionType{batchv1.JobFailed, batchv1.JobComplete} {
		if condition := jobstate.Finished(job, kind); condition != nil {
			return condition.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// failureOf returns the reason that a finished Job has no result, and the condition reason if another attempt would
// fail in the same way.
func failureOf(job *batchv1.Job, pods []*corev1.Pod) (message, finalReason string) {
	if message := job.Annotations[annotationFailure]; message != "" {
		return message, "EngineFailed"
	}
	if message := job.Annotations[annotationStopped]; message != "" {
		return message, ""
	}
	failed := jobstate.Finished(job, batchv1.JobFailed)
	if failed == nil {
		return "Job " + job.Name + " is complete, but its result is not in the artifact store", ""
	}
	message = jobstate.TerminationMessage(job, pods)
	if message == "" {
		message = "Job " + job.Name + " failed: " + failed.Message
	}
	switch code := jobstate.ExitCode(job, pods); {
	case code == exitInputs:
		return message, reasonInputsInvalid
	case code == exitEngine:
		return message, "EngineFailed"
	case failed.Reason == batchv1.JobReasonPodFailurePolicy: // the pod is deleted, but the Job recorded the exit code
		return message, "ProfilingFailed"
	}
	return message, ""
}

// crashOf returns a message if the engine of a Job keeps crashing after restarts, or the empty string.
func crashOf(job *batchv1.Job, pods []*corev1.Pod) string {
	for _, pod := range pods {
		if !metav1.IsControlledBy(pod, job) || pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		for _, status := range pod.Status.InitContainerStatuses {
			end := cmp.Or(status.State.Terminated, status.LastTerminationState.Terminated)
			if status.Name != semmoev1.EngineContainer || status.RestartCount < crashes || end == nil || status.State.Running != nil {
				continue
			}
			message := fmt.Sprintf("the engine terminated %d times, most recently with exit code %d", status.RestartCount+1, end.ExitCode)
			if line := podhealth.LastLine(end.Message); line != "" {
				message += ": " + line
			}
			return message
		}
	}
	return ""
}
