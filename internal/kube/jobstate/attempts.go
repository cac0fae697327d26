// SPDX-License-Identifier: Apache-2.0

package jobstate

import (
	"cmp"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/writes"
)

// lostGrace is the time after which a missing result counts as lost.
const lostGrace = 10 * time.Second

// Attempts is the state of a task, derived from its Jobs and their pods. A new Job is created until one has a result, the
// text of its termination message. The controller stores the result in AnnotationReport, so that it outlives the pod.
type Attempts struct {
	// Report is the result; empty until there is one.
	Report string
	// Recorded is the Job with the result in its annotation. If it is deleted, the task is repeated. Unrecorded is the Job
	// whose pod contains the result, while the annotation of the Job does not.
	Recorded, Unrecorded *batchv1.Job
	// Running is the running Job.
	Running *batchv1.Job
	// Failure is the message of the last failure. Invalid is true if another attempt fails in the same way until a user
	// changes something.
	Failure string
	Invalid bool
	// NextAttempt is the number of the Job to create, not before NextAt; 0 if no Job is needed.
	NextAttempt int
	NextAt      time.Time
	// Obsolete are Jobs to delete.
	Obsolete []*batchv1.Job
}

// Task describes the Jobs of Attempts.
type Task struct {
	// Name is the name of the task in messages. Inputs is the hash of its inputs, in LabelInputs of its Jobs.
	Name, Inputs string
	// ExitInvalid is the exit code of a failure that another attempt would repeat.
	ExitInvalid int32
	// Valid reports whether a text is a result.
	Valid func(report string) bool
}

// Observe derives the state of the task from the Jobs of its kind, of all inputs, and their pods. A failed Job is kept
// until the next attempt ends, to record the number of attempts.
func (t Task) Observe(jobs []*batchv1.Job, pods []*corev1.Pod) Attempts {
	var ours, others []*batchv1.Job
	for _, job := range jobs {
		if job.DeletionTimestamp != nil {
			continue
		}
		if job.Labels[semmoev1.LabelInputs] == t.Inputs {
			ours = append(ours, job)
		} else {
			others = append(others, job)
		}
	}
	slices.SortFunc(ours, func(a, b *batchv1.Job) int { return cmp.Compare(Attempt(b), Attempt(a)) })
	if len(ours) == 0 {
		return Attempts{NextAttempt: 1}
	}
	latest := ours[0]
	state := Attempts{}
	switch {
	case latest.Annotations[semmoev1.AnnotationReport] != "":
		if report := latest.Annotations[semmoev1.AnnotationReport]; t.Valid(report) {
			state.Report, state.Recorded = report, latest
		}
		state.Obsolete = append(ours[1:], others...)
	case Finished(latest, batchv1.JobComplete) != nil:
		if report := TerminationMessage(latest, pods); t.Valid(report) {
			return Attempts{Report: report, Unrecorded: latest, Obsolete: append(ours[1:], others...)}
		}
	case Finished(latest, batchv1.JobFailed) != nil:
		condition := Finished(latest, batchv1.JobFailed)
		state.Failure = TerminationMessage(latest, pods)
		if state.Failure == "" {
			state.Failure = "the " + t.Name + " Job failed: " + condition.Message
		}
		state.Invalid = ExitCode(latest, pods) == t.ExitInvalid
		state.NextAttempt = Attempt(latest) + 1
		state.NextAt = condition.LastTransitionTime.Add(BackOff(Attempt(latest)))
		state.Obsolete = ours[1:]
		return state
	default:
		state.Running = latest
		if len(ours) > 1 { // the failure of the previous attempt stays in the state until this attempt ends
			state.Failure = TerminationMessage(ours[1], pods)
			state.Invalid = ExitCode(ours[1], pods) == t.ExitInvalid
			state.Obsolete = ours[2:]
		}
		return state
	}
	if state.Report == "" {
		// The Job is complete, but its pod was deleted before the result was recorded, or the result is invalid: run
		// again. Jobs and pods have separate caches, and the end of the pod may be observed after the end of the Job, so
		// lostGrace passes first.
		state.NextAttempt = Attempt(latest) + 1
		if complete := Finished(latest, batchv1.JobComplete); complete != nil {
			state.NextAt = complete.LastTransitionTime.Add(lostGrace)
		}
	}
	return state
}

// Writes returns the writes that record a result, delete obsolete Jobs and start the next attempt, in order, and the
// delay of the next decision. If newJob is nil, no attempt is started.
func (a Attempts) Writes(newJob func(attempt int) *batchv1.Job, now time.Time) (ordered []writes.Write, again time.Duration) {
	if a.Unrecorded != nil {
		ordered = append(ordered, writes.Annotate{Object: a.Unrecorded, Annotations: map[string]string{semmoev1.AnnotationReport: a.Report}})
	}
	for _, job := range a.Obsolete {
		ordered = append(ordered, writes.Delete{Object: job})
	}
	switch wait := a.NextAt.Sub(now); {
	case a.NextAttempt == 0 || newJob == nil:
		return ordered, 0
	case wait > 0:
		return ordered, min(wait, maxBackOff) // the clock may be behind, and be corrected during the delay
	}
	return append(ordered, writes.Create{Object: newJob(a.NextAttempt)}), 0
}
