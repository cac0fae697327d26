package affinityprofile

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/jobstate"
	"github.com/semmoe/operator/internal/podhealth"
)

const (
	// exitInputs and exitEngine are the exit codes by which `semmoe profile` says that another attempt would end in the
	// same way: the inputs, or the engine, are at fault.
	exitInputs = 3
	exitEngine = 4
	// exitStoreFull is the one by which it says that the artifact store is full: devices are not used every few minutes until somebody
	// has made room.
	exitStoreFull = 5

	// quickAttempts are made with the usual back-off; later ones every slowBackOff.
	quickAttempts = 6
	slowBackOff   = time.Hour
	// keptAttempts is how many failed Jobs are kept: the last one counts the attempts, the one before helps to compare.
	keptAttempts = 2
	// reasonInputsInvalid is the reason of a failure with exitInputs.
	reasonInputsInvalid = "InputsInvalid"
	// crashes is how often an engine may end before it is given up.
	crashes = 3
)

// attempts is what the Jobs of one set of inputs tell.
type attempts struct {
	// Running is the Job that is not over yet, of whichever profile; nil where there is none.
	Running *batchv1.Job
	// Ours tells that Running belongs to this profile.
	Ours bool
	// Crash is why Running should be ended: its engine crashes repeatedly.
	Crash string
	// Last is the last finished Job of this profile, Failure why it has not led to a result. Final failures would come
	// again: FinalReason says who is at fault.
	Last        *batchv1.Job
	Failure     string
	FinalReason string
	// Next is the number of the next attempt, not before NextAt.
	Next   int
	NextAt time.Time
	// Obsolete are Jobs that nothing needs any more.
	Obsolete []*batchv1.Job
}

// attemptsOf reads the attempts of a profile from all Jobs with its inputs and their pods. A Job that is being deleted and
// not over still uses devices: it is running. What other profiles' Jobs have failed in says nothing, since engine, image
// and resources are not among the inputs.
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

// inspectionOutdated tells that an attempt has found other inputs than an inspection before it: they have changed since, and
// what is there now is worth a look, and an attempt of its own. An inspection after it that finds the same is no news.
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

// failureOf is why a finished Job has not led to a result, and the reason of a failure that would come again.
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
	case failed.Reason == batchv1.JobReasonPodFailurePolicy: // the pod is gone, but the Job knows the code
		return message, "ProfilingFailed"
	}
	return message, ""
}

// crashOf tells that the engine of a Job crashes repeatedly, although it is restarted; empty where it does not.
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
			message := fmt.Sprintf("the engine has ended %d times, at last with exit code %d", status.RestartCount+1, end.ExitCode)
			if line := podhealth.LastLine(end.Message); line != "" {
				message += ": " + line
			}
			return message
		}
	}
	return ""
}
