// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/kube/conditionevents"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/internal/kube/jobstate"
)

// statusOf returns the status for an observation. It reads the previous status only to keep transition times, and to
// distinguish work for a new generation from repair.
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
		return &conditions.Fault{Reason: "InspectionFailed", Message: "Inspection of the model or the data set failed and is retried: " + o.Inspection.Failure}
	case o.StoreFailure != "":
		return &conditions.Fault{Reason: "StoreUnavailable", Message: o.StoreFailure}
	case o.Result != nil:
		return nil
	case o.Live != nil && o.Live.None:
		return &conditions.Fault{Reason: "NoLiveSamples", Message: "The request routers do not keep the samples in spec.live.samples. Set spec.profiling.liveSamples of the MoEDeployment to Sequences, or create a profile of Counts"}
	case o.LiveFailure != "":
		return &conditions.Fault{Reason: "ProfilingFailed", Message: "Making a profile from the samples of the routers failed and is retried: " + o.LiveFailure}
	case a.Running == nil && a.FinalReason != "":
		return &conditions.Fault{Reason: a.FinalReason, Message: fmt.Sprintf("%s. Another attempt would fail in the same way. Fix the cause and delete Job %s, or create another AffinityProfile", a.Failure, a.Last.Name), Stalls: true}
	case a.Crash != "":
		return &conditions.Fault{Reason: "EngineFailed", Message: a.Crash}
	case o.Problem != nil:
		return &conditions.Fault{Reason: o.Problem.Reason, Message: o.Problem.Message}
	case o.Failure != "":
		return &conditions.Fault{Reason: "ReconcileFailed", Message: o.Failure}
	case a.Last != nil && a.FinalReason == "" && (a.Running != nil || o.Deployment == ""):
		return &conditions.Fault{Reason: "ProfilingFailed", Message: fmt.Sprintf("Attempt %d failed and is retried: %s", jobstate.Attempt(a.Last), a.Failure)}
	}
	return nil
}

func readyVerdict(o observation, wrong *conditions.Fault) conditions.Verdict {
	switch r := o.Result; {
	case r != nil:
		message := fmt.Sprintf("Profile %s is in the artifact store: %d tokens, %d of them in the routing trace of %d requests", o.ID, r.Tokens, r.TracedTokens, r.Requests)
		if r.NoEmbeddings != "" {
			message += "; it has no token embeddings (status.result.noEmbeddings), so plans score unseen tokens without neighbours"
		}
		return conditions.True("Profiled", message)
	case wrong != nil:
		return conditions.False(wrong.Reason, wrong.Message)
	}
	reason, message := stage(o)
	return conditions.False(reason, message)
}

// stage returns the current step of a profile without a result.
func stage(o observation) (reason, message string) {
	a := o.Attempts
	switch {
	case o.ID == "":
		return "Inspecting", "The model and the data set are being inspected before any device is used"
	case o.LiveWaits != "":
		return "WaitingForInputs", o.LiveWaits
	case o.Live != nil && o.Live.enough():
		return "Queued", "The samples of the routers are read after those of another profile"
	case o.Live != nil:
		return "WaitingForSamples", waitingText(o.Live)
	case a.Running != nil && !a.Ours:
		return "WaitingForOtherProfile", fmt.Sprintf("Job %s of AffinityProfile %s records a profile of the same inputs, whose result will be shared", a.Running.Name, a.Running.Labels[semmoev1.LabelProfile])
	case a.Running != nil && a.Running.DeletionTimestamp != nil:
		return "WaitingForJob", fmt.Sprintf("Job %s is being deleted; a new Job follows", a.Running.Name)
	case a.suspended():
		return "Queued", fmt.Sprintf("Job %s is suspended, and starts once its queue admits it", a.Running.Name)
	case a.Gate != "":
		return "Queued", fmt.Sprintf("The pod of Job %s waits for its scheduling gate %s", a.Running.Name, a.Gate)
	case a.Ours && o.Spoiled != "":
		return "WaitingForDeployment", fmt.Sprintf("Job %s is being stopped, and a new Job follows: %s", a.Running.Name, o.Spoiled)
	case a.Running != nil && o.Progress == nil:
		return "Profiling", fmt.Sprintf("Job %s waits for its engine to start", a.Running.Name)
	case a.Running != nil:
		return "Profiling", fmt.Sprintf("Job %s sends the requests of the data set (see status.progress)", a.Running.Name)
	case o.Spoiled != "":
		return "WaitingForDeployment", o.Spoiled + ". Profiling waits for a change"
	case o.Deployment != "":
		return "WaitingForDeployment", o.Deployment + ". Profiling waits until it serves"
	}
	return "StartingJob", "The profiling Job is being created"
}

// waitingText describes the samples that a live profile waits for. status.progress contains their current number.
func waitingText(l *liveState) string {
	text := fmt.Sprintf("The profile is complete once the request routers have sampled %d tokens", l.WantTokens)
	if l.WantRequests > 0 {
		text += fmt.Sprintf(" of %d requests", l.WantRequests)
	}
	if l.Routers == 0 {
		return text + "; no request router can be reached now"
	}
	return text + " (see status.progress)"
}

func progressingVerdict(o observation, stalled bool) conditions.Verdict {
	switch {
	case stalled:
		return conditions.False("Stalled", "No progress is possible until the cause in condition Stalled is fixed")
	case o.Result != nil:
		return conditions.False("Complete", "The profile is in the artifact store")
	}
	reason, message := stage(o)
	return conditions.True(reason, message)
}

// reconcilingVerdict is True only until the first result. Repeating a lost profile is repair.
func reconcilingVerdict(profile *semmoev1.AffinityProfile, o observation, stalled bool) conditions.Verdict {
	switch {
	case stalled:
		return conditions.False("Stalled", "Condition Stalled names the cause to fix")
	case o.Result != nil, conditions.Finished(profile.Status.Conditions, profile.Generation):
		return conditions.False("Complete", "The profile is complete")
	}
	return conditions.True("InProgress", "The profile is being recorded")
}

// applyStatus writes the status if it differs from the recorded one, and records condition transitions as events.
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
		conditionevents.NewEventRecorder(r.Recorder, profile, nil).RecordSteps(profile.Status.Conditions, status.Conditions)
	}
	return err
}
