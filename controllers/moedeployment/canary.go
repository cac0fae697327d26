package moedeployment

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/rollout"
)

// mark records the rollout step of a workload in an annotation. An empty step means proven, and is recorded with the
// time.
func (r *Reconciler) mark(ctx context.Context, workload *revisions.Workload, step string, now time.Time) error {
	if workload.Annotations[semmoev1.AnnotationRollout] == step {
		return nil
	}
	set := func() {
		if step == "" {
			delete(workload.Annotations, semmoev1.AnnotationRollout)
			workload.Annotations[semmoev1.AnnotationProven] = now.UTC().Format(time.RFC3339)
		} else {
			metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationRollout, step)
		}
	}
	if workload.UID == "" {
		set()
		return nil // written by the create request
	}
	return childobjects.ChangeWorkload(ctx, r.Client, workload, "mark", set)
}

// markTrialEnded records on the serving workload that the trial next to it has ended: measurements up to now cover both
// workloads. It writes the time again if deleting the trial's workload failed.
func (r *Reconciler) markTrialEnded(ctx context.Context, workload *revisions.Workload, now time.Time) error {
	if workload.UID == "" {
		return nil // not created yet: it serves from its creation on
	}
	return childobjects.ChangeWorkload(ctx, r.Client, workload, "mark", func() {
		metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationProven, now.UTC().Format(time.RFC3339))
	})
}

// soakOf returns how long a canary must serve.
func soakOf(moed *semmoev1.MoEDeployment) time.Duration {
	return time.Duration(*moed.Spec.Rollout.SoakSeconds) * time.Second
}

// trialOf collects the observed state of a candidate's workload.
func trialOf(moed *semmoev1.MoEDeployment, candidate *revisions.Workload, o observation, now time.Time) rollout.Trial {
	trial := rollout.Trial{
		Now:        trialTime(now, o.Reports),
		Canary:     rollout.CanarySize(*moed.Spec.Replicas, moed.Spec.Rollout.CanaryReplicas),
		Soak:       soakOf(moed),
		Promoting:  candidate.Annotations[semmoev1.AnnotationRollout] == semmoev1.RolloutPromoting,
		Approved:   planner.Approved(moed, o.Planning.Candidate.Short()) || o.Planning.PlanPinned(moed),
		Measured:   desired.Observes(moed),
		Comparison: rollout.Comparison{Verdict: rollout.TooFew},
	}
	for _, pod := range o.Pods {
		if candidate.Holds(pod) && pod.DeletionTimestamp == nil {
			trial.Replicas = append(trial.Replicas, revisions.ReplicaIn(candidate, pod))
		}
	}
	slices.SortFunc(trial.Replicas, func(a, b rollout.Replica) int { return strings.Compare(a.Name, b.Name) })
	if since, serves := trial.ServesSince(); serves {
		trial.Comparison = rollout.Compare(sampleOf(o.Reports, candidate.Labels[semmoev1.LabelRevision], since), sampleOf(o.Reports, o.Revision, since),
			rollout.Terms{Promised: promisedDifference(o.Planning), Since: since, Now: trial.Now, Soak: trial.Soak})
	}
	return trial
}

// promisedDifference returns the predicted local activation rate of the candidate minus that of the plan in service, or
// 0 if unknown.
func promisedDifference(p planner.Planning) float64 {
	candidate := p.Plan
	if candidate == nil || p.Candidate == nil || candidate.Status.PlanDigest != p.Candidate.Digest {
		return 0
	}
	if c := candidate.Status.Comparison; c != nil {
		if c.Requests == 0 {
			return 0 // token counts contain no rate
		}
		return float64(c.CandidateLARMilli-c.CurrentLARMilli) / 1000
	}
	forecast := candidate.Status.Forecast
	switch {
	case forecast == nil:
		return 0
	case p.Serving == nil:
		return float64(forecast.LARMilli-forecast.BaselineMilli) / 1000
	case p.Promise == nil:
		return 0
	}
	return float64(forecast.LARMilli-p.Promise.Status.Forecast.LARMilli) / 1000
}

// trialTime returns the clock for judging a trial: the time of the routers' newest samples if the manager's clock is
// behind all routers, else the manager's clock. Pods and samples carry the time of their nodes. With a manager clock
// set back by hours, a soak would last until that clock catches up. A single router ahead of the others has a wrong
// clock itself; following it would make loading replicas look broken.
func trialTime(now time.Time, reports []lar.Report) time.Time {
	var earliest time.Time
	for _, report := range reports {
		var newest time.Time
		for _, observation := range report.Observations {
			if observation.Time.After(newest) {
				newest = observation.Time
			}
		}
		if !newest.IsZero() && (earliest.IsZero() || newest.Before(earliest)) {
			earliest = newest
		}
	}
	if earliest.After(now) {
		return earliest
	}
	return now
}

// sampleOf aggregates the requests to a revision since a time. The local activation rate covers whole minutes, or the
// most recent sampled requests if these are more (low traffic, or a short time).
func sampleOf(reports []lar.Report, revision string, since time.Time) rollout.Sample {
	var sample rollout.Sample
	var last lar.Ratio
	for _, report := range reports {
		for minute, served := range report.ServiceSince(revision, since) {
			sample.Add(minute, served)
			sample.Locality.Merge(served.Locality)
		}
		for _, observation := range report.Observations {
			if observation.Revision == revision && observation.Routed() && !observation.Time.Before(since) {
				last.Add(observation.Activations)
			}
		}
	}
	if last.Requests > sample.Locality.Requests {
		sample.Locality = last
	}
	return sample
}

// recordFailure records the failure of a canary on its plan, which outlives the canary.
func (r *Reconciler) recordFailure(ctx context.Context, plan *semmoev1.PlacementPlan, revision string, decision rollout.Decision, measured *measuredGain) error {
	return r.record(ctx, plan, map[string]string{semmoev1.AnnotationFailed + revision: printable.Line(decision.Reason+": "+decision.Message, 512)}, measured)
}

// record writes annotations and the measured gain of the canary on a plan.
func (r *Reconciler) record(ctx context.Context, plan *semmoev1.PlacementPlan, annotations map[string]string, measured *measuredGain) error {
	if measured != nil {
		text, err := measured.text()
		if err != nil {
			return fmt.Errorf("failed to encode annotation %s: %w", semmoev1.AnnotationMeasured, err)
		}
		annotations[semmoev1.AnnotationMeasured] = text
	}
	if len(annotations) == 0 {
		return nil
	}
	base := plan.DeepCopy()
	for name, value := range annotations {
		metav1.SetMetaDataAnnotation(&plan.ObjectMeta, name, value)
	}
	if err := r.Patch(ctx, plan, client.MergeFrom(base), client.FieldOwner(desired.Manager)); err != nil {
		return fmt.Errorf("failed to annotate PlacementPlan %s: %w", plan.Name, err)
	}
	childobjects.LogWrite(ctx, 0, "Recorded the result of a canary", plan, "annotations", annotations)
	return nil
}
