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
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/lar"
	"github.com/semmoe/operator/internal/printable"
	"github.com/semmoe/operator/internal/rollout"
)

// mark writes on a workload how far it has proven itself; empty is all the way, and is told with the time.
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
		return nil // it is written when it is created
	}
	return workload.Change(ctx, r.Client, "mark", set)
}

// markAlone writes on the workload that serves that a trial beside it is over: what was measured until now is of both. It is written again
// where the trial's workload could not be deleted.
func (r *Reconciler) markAlone(ctx context.Context, workload *revisions.Workload, now time.Time) error {
	if workload.UID == "" {
		return nil // it is about to be made, and serves from then on
	}
	return workload.Change(ctx, r.Client, "mark", func() {
		metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationProven, now.UTC().Format(time.RFC3339))
	})
}

// soakOf is how long a canary must serve.
func soakOf(moed *semmoev1.MoEDeployment) time.Duration {
	return time.Duration(*moed.Spec.Rollout.SoakSeconds) * time.Second
}

// trialOf is what is known of a candidate's workload.
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

// promisedDifference is by how much a candidate's plan promises a higher local activation rate than what serves; 0 where that is not known.
func promisedDifference(p planner.Planning) float64 {
	candidate := p.Plan
	if candidate == nil || p.Candidate == nil || candidate.Status.PlanDigest != p.Candidate.Digest {
		return 0
	}
	if c := candidate.Status.Comparison; c != nil {
		if c.Requests == 0 {
			return 0 // counts of tokens show no rate
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

// trialTime is the time by which a trial is judged: that of the routers' last samples, where the manager's clock is behind all of them. Pods
// and samples have the times of their nodes: by a clock that was set back hours a soak would last until it has caught up. One router
// that is ahead of the others has a wrong clock itself, by which replicas that load would be taken for broken.
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

// sampleOf is how requests to a revision have gone since a time. Local activation rates are of whole minutes, or of the last sampled
// requests where these are more, as in a quiet service or after a short time.
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

// giveUp records on a plan that its canary has failed, where that outlives the canary.
func (r *Reconciler) giveUp(ctx context.Context, plan *semmoev1.PlacementPlan, revision string, decision rollout.Decision, measured *measuredGain) error {
	return r.record(ctx, plan, map[string]string{semmoev1.AnnotationFailed + revision: printable.Line(decision.Reason+": "+decision.Message, 512)}, measured)
}

// record writes annotations on a plan, and what its canary has measured.
func (r *Reconciler) record(ctx context.Context, plan *semmoev1.PlacementPlan, annotations map[string]string, measured *measuredGain) error {
	if measured != nil {
		text, err := measured.text()
		if err != nil {
			return fmt.Errorf("encode annotation %s: %w", semmoev1.AnnotationMeasured, err)
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
		return fmt.Errorf("annotate PlacementPlan %s: %w", plan.Name, err)
	}
	return nil
}
