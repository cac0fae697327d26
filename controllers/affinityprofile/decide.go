package affinityprofile

import (
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/inspection"
	"github.com/semmoe/operator/internal/podhealth"
)

const (
	// progressPeriod is how often a Job at work is asked how far it is, and the least time between two changes of what the
	// status says of it.
	progressPeriod = 10 * time.Second
	// storePeriod is how often a store that is away is asked again.
	storePeriod = 15 * time.Second
	// waitPeriod is how often another profile's Job is looked at: its end is not our event.
	waitPeriod = 15 * time.Second
	// unseenPeriod is how often is looked at what a deployment has that ends without an event of ours: engines, or a Service. Each look asks
	// the store, too, and such a state may last.
	unseenPeriod = time.Minute
)

// observation is all that is decided and reported from.
type observation struct {
	// Invalid is a fault of the spec.
	Invalid *invalidError
	// Inspection is the state of the inspection of model and data set.
	Inspection inspection.State
	// ID names the profile of these inputs; empty while they are not known.
	ID string
	// Result is what the artifact store has; nil where it has nothing.
	Result *semmoev1.ProfileResult
	// StoreFailure is why the store could not be asked; empty where it could. Result is then the last known one.
	StoreFailure string
	// Attempts are those that were made with these inputs.
	Attempts attempts
	// Deployment is why the deployment that is to answer the requests cannot yet; empty where it can.
	Deployment string
	// Spoiled is why what it answers would be no profile of the model, so that a Job at work must not go on; empty where it would.
	Spoiled string
	// Unseen tells that this may end without an event of ours.
	Unseen bool
	// Live is what routers have sampled; nil for other targets than Live, and where they were not asked.
	Live *liveState
	// LiveWaits is what of its inputs a live profile lacks; empty where it lacks nothing.
	LiveWaits string
	// LiveFailure is why what they have could not be made a profile; empty where it could, or was not tried.
	LiveFailure string
	// Model is the model of a live profile's result; nil without one.
	Model *semmoev1.ModelStatus
	// Progress is how far the Job at work is; nil while it does not send requests.
	Progress *semmoev1.ProfileProgress
	// Problem is what keeps a pod from running.
	Problem *podhealth.Problem
	// Failure is an error that a phase of the reconciliation met and that a retry alone will not cure.
	Failure string
}

// action is what to do about an observation.
type action struct {
	// Create is the number of the attempt to start; 0 for none.
	Create int
	// End is a Job to end, since its engine is dead.
	End *batchv1.Job
	// Stop is a Job to end, since its deployment has come to answer otherwise; another attempt follows.
	Stop *batchv1.Job
	// After is when to look again; 0 where an event will tell.
	After time.Duration
}

// decide is where devices are spent: only where the store was asked and has no result, no Job of these inputs is under
// way, and nothing says that another attempt would end like the last.
func decide(o observation, now time.Time) action {
	a := o.Attempts
	switch {
	case o.Invalid != nil || o.ID == "":
		return action{}
	case o.Spoiled != "" && a.Ours && a.Running.DeletionTimestamp == nil:
		return action{Stop: a.Running} // whether or not the store can be asked: it could be back when the run ends
	case o.StoreFailure != "":
		return action{After: storePeriod}
	case o.Result != nil:
		return action{}
	case a.Running != nil && a.Crash != "":
		return action{End: a.Running}
	case a.Running != nil && a.Ours:
		return action{After: progressPeriod}
	case a.Running != nil:
		return action{After: waitPeriod}
	case a.FinalReason == "" && o.Unseen:
		return action{After: unseenPeriod}
	case a.FinalReason != "", o.Deployment != "":
		return action{}
	case now.Before(a.NextAt):
		return action{After: a.NextAt.Sub(now)}
	}
	return action{Create: a.Next, After: waitPeriod}
}

// waitsFor is why a deployment cannot answer the requests of a profile yet: answers of several revisions, or of another
// model, would be no profile of this one. It is empty where it can. An engine of the profile's own needs no deployment, but
// waits like everything else while its owner is paused.
func waitsFor(target semmoev1.ProfilingTarget, name string, moed *semmoev1.MoEDeployment, modelDigest string) string {
	serving := target == semmoev1.ProfilingTargetServing
	switch {
	case moed == nil && !serving:
		return "" // the owner is gone, and the profile will follow
	case moed == nil:
		return fmt.Sprintf("spec.deploymentRef: there is no MoEDeployment %q in this namespace", name)
	case moed.Spec.Reconciliation == semmoev1.ReconciliationPaused:
		return fmt.Sprintf("MoEDeployment %s is paused (spec.reconciliation)", name)
	case !serving:
		return ""
	case moed.Status.ObservedGeneration != moed.Generation || !meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionReady):
		return fmt.Sprintf("MoEDeployment %s is not ready", name)
	case moed.Spec.Replicas != nil && *moed.Spec.Replicas == 0:
		return fmt.Sprintf("MoEDeployment %s has no replica to answer the requests", name)
	case moed.Status.Model == nil || moed.Status.Model.Digest != modelDigest:
		return otherModel(name, modelDigest)
	case moed.Status.UpdatedReplicas != moed.Status.ReadyReplicas || moed.Spec.Replicas != nil && moed.Status.Replicas > *moed.Spec.Replicas:
		// What is not ready answers nothing: a replica without a node may stay so for ever.
		return fmt.Sprintf("MoEDeployment %s is rolling out: not all of its replicas are of one revision", name)
	}
	return ""
}

func otherModel(name, modelDigest string) string {
	return fmt.Sprintf("MoEDeployment %s does not serve the model of this profile (digest %s)", name, modelDigest)
}
