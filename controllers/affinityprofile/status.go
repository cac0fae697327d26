package affinityprofile

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	semmoeac "github.com/semmoe/operator/api/v1alpha1/applyconfiguration/api/v1alpha1"
	"github.com/semmoe/operator/internal/conditions"
	"github.com/semmoe/operator/internal/jobstate"
	"github.com/semmoe/operator/internal/transition"
)

// statusOf reports an observation. It reads the previous status only to keep the times of transitions, and to tell work
// that a new generation causes from repair.
func statusOf(profile *semmoev1.AffinityProfile, o observation, now time.Time) semmoev1.AffinityProfileStatus {
	status := semmoev1.AffinityProfileStatus{
		Conditions:         append([]metav1.Condition(nil), profile.Status.Conditions...),
		ObservedGeneration: profile.Generation,
		Model:              cmp.Or(o.Inspection.Model(), o.Model),
		Inputs:             o.ID,
		Result:             o.Result,
	}
	if o.Result == nil {
		status.Progress = o.Progress
	}
	wrong := faultOf(o)
	stalled := wrong != nil && wrong.Stalls
	set := func(kind string, v conditions.Verdict) {
		conditions.Set(&status.Conditions, kind, v, profile.Generation, now)
	}
	set(semmoev1.ConditionReady, readyVerdict(o, wrong))
	set(semmoev1.ConditionProgressing, progressingVerdict(o, stalled))
	set(semmoev1.ConditionDegraded, conditions.Degraded(wrong))
	set(semmoev1.ConditionStalled, conditions.Stalled(wrong))
	set(semmoev1.ConditionReconciling, reconcilingVerdict(profile, o, stalled))
	return status
}

func faultOf(o observation) *conditions.Fault {
	a := o.Attempts
	switch {
	case o.Invalid != nil:
		return &conditions.Fault{Reason: o.Invalid.reason, Message: o.Invalid.message, Stalls: true}
	case o.Inspection.Failure != "" && o.Inspection.Invalid && strings.HasPrefix(o.Inspection.Failure, "data set"):
		return &conditions.Fault{Reason: "DatasetInvalid", Message: o.Inspection.Failure, Stalls: true}
	case o.Inspection.Failure != "" && o.Inspection.Invalid:
		return &conditions.Fault{Reason: "ModelInvalid", Message: o.Inspection.Failure, Stalls: true}
	case o.Inspection.Failure != "":
		return &conditions.Fault{Reason: "InspectionFailed", Message: "The model or the data set could not be read, and will be again: " + o.Inspection.Failure}
	case o.StoreFailure != "":
		return &conditions.Fault{Reason: "StoreUnavailable", Message: o.StoreFailure}
	case o.Result != nil:
		return nil
	case o.Live != nil && o.Live.None:
		return &conditions.Fault{Reason: "NoLiveSamples", Message: "The request routers do not keep the samples of spec.live.samples: set spec.profiling.liveSamples of the MoEDeployment to Sequences, or make a profile of Counts"}
	case o.LiveFailure != "":
		return &conditions.Fault{Reason: "ProfilingFailed", Message: "The routers' samples could not be made a profile, and are read again: " + o.LiveFailure}
	case a.Running == nil && a.FinalReason != "":
		return &conditions.Fault{Reason: a.FinalReason, Message: fmt.Sprintf("%s. Another attempt would end in the same way, so none is made: mend it and delete Job %s, or create another AffinityProfile", a.Failure, a.Last.Name), Stalls: true}
	case a.Crash != "":
		return &conditions.Fault{Reason: "EngineFailed", Message: a.Crash}
	case o.Problem != nil:
		return &conditions.Fault{Reason: o.Problem.Reason, Message: o.Problem.Message}
	case o.Failure != "":
		return &conditions.Fault{Reason: "ReconcileFailed", Message: o.Failure}
	case a.Last != nil && a.FinalReason == "" && (a.Running != nil || o.Deployment == ""):
		return &conditions.Fault{Reason: "ProfilingFailed", Message: fmt.Sprintf("Attempt %d failed, and is repeated: %s", jobstate.Attempt(a.Last), a.Failure)}
	}
	return nil
}

func readyVerdict(o observation, wrong *conditions.Fault) conditions.Verdict {
	switch r := o.Result; {
	case r != nil:
		return conditions.True("Profiled", fmt.Sprintf("The artifact store has the profile %s: %d tokens, of which %d in the routing trace of %d requests", o.ID, r.Tokens, r.TracedTokens, r.Requests))
	case wrong != nil:
		return conditions.False(wrong.Reason, wrong.Message)
	}
	reason, message := stage(o)
	return conditions.False(reason, message)
}

// stage is what a profile without a result waits for.
func stage(o observation) (reason, message string) {
	a := o.Attempts
	switch {
	case o.ID == "":
		return "Inspecting", "The model and the data set are being inspected; no device is used before they are found to be sound"
	case o.LiveWaits != "":
		return "WaitingForInputs", o.LiveWaits
	case o.Live != nil && o.Live.enough():
		return "Queued", "The routers' samples are read once those of another profile have been"
	case o.Live != nil:
		return "WaitingForSamples", waitingText(o.Live)
	case a.Running != nil && !a.Ours:
		return "WaitingForOtherProfile", fmt.Sprintf("Job %s of AffinityProfile %s records a profile of the same inputs: its result will be shared", a.Running.Name, a.Running.Labels[semmoev1.LabelProfile])
	case a.Running != nil && a.Running.DeletionTimestamp != nil:
		return "WaitingForJob", fmt.Sprintf("Job %s is being deleted; another one follows", a.Running.Name)
	case a.Ours && o.Spoiled != "":
		return "WaitingForDeployment", fmt.Sprintf("Job %s is ended, and another one follows: %s", a.Running.Name, o.Spoiled)
	case a.Running != nil && o.Progress == nil:
		return "Profiling", fmt.Sprintf("Job %s waits for its engine", a.Running.Name)
	case a.Running != nil:
		return "Profiling", fmt.Sprintf("Job %s sends the requests of the data set: see status.progress", a.Running.Name)
	case o.Spoiled != "":
		return "WaitingForDeployment", o.Spoiled + ": the profile is taken once that has changed"
	case o.Deployment != "":
		return "WaitingForDeployment", o.Deployment + ": the profile is taken once it serves"
	}
	return "StartingJob", "The profiling Job is being created"
}

// waitingText says what a live profile waits for; how much of it there is, status.progress tells.
func waitingText(l *liveState) string {
	text := fmt.Sprintf("The profile is complete once the request routers have sampled %d tokens", l.WantTokens)
	if l.WantRequests > 0 {
		text += fmt.Sprintf(" of %d requests", l.WantRequests)
	}
	if l.Routers == 0 {
		return text + ": none of them can be asked now"
	}
	return text + ": see status.progress"
}

func progressingVerdict(o observation, stalled bool) conditions.Verdict {
	switch {
	case stalled:
		return conditions.False("Stalled", "No progress is possible until the problem in the condition Stalled is fixed")
	case o.Result != nil:
		return conditions.False("Complete", "The profile is in the artifact store")
	}
	reason, message := stage(o)
	return conditions.True(reason, message)
}

// reconcilingVerdict is True only until the first result: a profile that is lost and taken again is repair.
func reconcilingVerdict(profile *semmoev1.AffinityProfile, o observation, stalled bool) conditions.Verdict {
	switch {
	case stalled:
		return conditions.False("Stalled", "See the condition Stalled for the problem to fix")
	case o.Result != nil, conditions.Finished(profile.Status.Conditions, profile.Generation):
		return conditions.False("Complete", "The profile is complete")
	}
	return conditions.True("InProgress", "The profile is being made")
}

// applyStatus writes the status where it differs from the recorded one, and tells the transitions as events.
func (r *Reconciler) applyStatus(ctx context.Context, profile *semmoev1.AffinityProfile, status semmoev1.AffinityProfileStatus) error {
	wrote, err := r.statuses.Write(profile, profile.Status, status, func(data []byte) (string, error) {
		intent := semmoeac.AffinityProfile(profile.Name, profile.Namespace).WithStatus(&semmoeac.AffinityProfileStatusApplyConfiguration{})
		if err := json.Unmarshal(data, intent.Status); err != nil {
			return "", err
		}
		err := r.Status().Apply(ctx, intent, client.FieldOwner(manager), client.ForceOwnership)
		return ptr.Deref(intent.ResourceVersion, ""), err
	})
	if wrote {
		transition.NewTeller(r.Recorder, profile, nil).TellSteps(profile.Status.Conditions, status.Conditions)
	}
	return err
}
