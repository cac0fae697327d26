// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/profile/inspection"
)

const (
	// progressPeriod is the interval at which the progress of a running Job is requested, and the minimum interval
	// between updates of the reported progress.
	progressPeriod = 10 * time.Second
	// storePeriod is the interval at which an unavailable store is retried.
	storePeriod = 15 * time.Second
	// waitPeriod is the interval at which the Job of another profile is checked. The end of that Job causes no event
	// for this profile.
	waitPeriod = 15 * time.Second
	// unseenPeriod is the interval at which a state of a deployment is checked whose end causes no event: its engine
	// pods, or its Service. Each check also queries the store, and the state may last.
	unseenPeriod = time.Minute
)

// observation is the input of all decisions and of the status.
type observation struct {
	// Invalid is an error in the spec.
	Invalid *invalidError
	// Inspection is the state of the inspection of model and data set.
	Inspection inspection.State
	// ID identifies the profile of these inputs. It is empty while the inputs are unknown.
	ID string
	// Result is the result in the artifact store; nil if there is none.
	Result *semmoev1.ProfileResult
	// StoreFailure is the error of a query to the store; empty if it succeeded. After a failure Result is the last
	// known result.
	StoreFailure string
	// Attempts are the attempts with these inputs.
	Attempts attempts
	// Deployment is the reason for which the deployment cannot compute the requests yet; empty if it can.
	Deployment string
	// Spoiled is the reason for which the responses would not give a profile of the model, so that a running Job must
	// be stopped; empty if they would.
	Spoiled string
	// Unseen is true if the end of Spoiled causes no event.
	Unseen bool
	// Live is the state of the samples of the routers; nil for other targets than Live, and if the routers were not
	// queried.
	Live *liveState
	// LiveWaits is the missing input of a live profile; empty if all inputs are present.
	LiveWaits string
	// LiveFailure is the error of making a profile from the samples; empty without error, and if it was not tried.
	LiveFailure string
	// Model is the model of the result of a live profile; nil without a result.
	Model *semmoev1.ModelStatus
	// Progress is the progress of the running Job; nil while it sends no requests.
	Progress *semmoev1.ProfileProgress
	// Problem is the reason for which a pod does not run.
	Problem *podhealth.Problem
	// Failure is an error of the reconciliation that retries may not resolve.
	Failure string
}

// action is the result of decide.
type action struct {
	// Create is the number of the attempt to start; 0 for none.
	Create int
	// End is a Job to end because its engine is dead.
	End *batchv1.Job
	// Stop is a Job to end because its deployment has changed. Another attempt follows.
	Stop *batchv1.Job
	// After is the delay of the next reconciliation; 0 if an event will trigger it.
	After time.Duration
}

// decide controls the use of devices. It starts an attempt only if the store was queried and has no result, no Job with
// these inputs is running, and no earlier failure would repeat.
func decide(o observation, now time.Time) action {
	a := o.Attempts
	switch {
	case o.Invalid != nil || o.ID == "":
		return action{}
	case o.Spoiled != "" && a.Ours && a.Running.DeletionTimestamp == nil && !a.suspended():
		return action{Stop: a.Running} // even if the store is unavailable: it may be available again when the run ends
	case o.StoreFailure != "":
		return action{After: storePeriod}
	case o.Result != nil:
		return action{}
	case a.Running != nil && a.Crash != "":
		return action{End: a.Running}
	case a.Ours && a.suspended():
		return action{} // the end of the suspension is an event
	case a.Running != nil && a.Ours:
		return action{After: progressPeriod}
	case a.Running != nil:
		return action{After: waitPeriod}
	case a.FinalReason == "" && o.Unseen:
		return action{After: unseenPeriod}
	case a.FinalReason != "", o.Deployment != "":
		return action{}
	case now.Before(a.NextAt):
		return action{After: min(a.NextAt.Sub(now), slowBackOff)} // the clock may be behind, and be corrected during the delay
	}
	return action{Create: a.Next, After: waitPeriod}
}

// waitsFor returns the reason for which a deployment cannot compute the requests of a profile yet; the empty string if
// it can. Responses of several revisions, or of another model, would not give a profile of this model. A dedicated
// engine needs no deployment, but is not started while its owner is paused.
func waitsFor(target semmoev1.ProfilingTarget, name string, moed *semmoev1.MoEDeployment, modelDigest string) string {
	serving := target == semmoev1.ProfilingTargetServing
	switch {
	case moed == nil && !serving:
		return "" // the owner is deleted, and the profile will be
	case moed == nil:
		return fmt.Sprintf("spec.deploymentRef: MoEDeployment %q does not exist in this namespace", name)
	case moed.Spec.Reconciliation == semmoev1.ReconciliationPaused:
		return fmt.Sprintf("MoEDeployment %s is paused (spec.reconciliation)", name)
	case !serving:
		return ""
	case moed.Status.ObservedGeneration != moed.Generation || !meta.IsStatusConditionTrue(moed.Status.Conditions, semmoev1.ConditionReady):
		return fmt.Sprintf("MoEDeployment %s is not ready", name)
	case moed.Spec.Replicas != nil && *moed.Spec.Replicas == 0:
		return fmt.Sprintf("MoEDeployment %s has no replicas", name)
	case moed.Status.Model == nil || moed.Status.Model.Digest != modelDigest:
		return otherModel(name, modelDigest)
	case moed.Status.UpdatedReplicas != moed.Status.ReadyReplicas || moed.Spec.Replicas != nil && moed.Status.Replicas > *moed.Spec.Replicas:
		// Pods that are not ready do not respond, and are ignored: a replica without a node may never become ready.
		return fmt.Sprintf("MoEDeployment %s is rolling out: its replicas are of several revisions", name)
	}
	return ""
}

func otherModel(name, modelDigest string) string {
	return fmt.Sprintf("MoEDeployment %s does not serve the model of this profile (digest %s)", name, modelDigest)
}
