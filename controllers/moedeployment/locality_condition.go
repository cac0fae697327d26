package moedeployment

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/controllers/moedeployment/traffic"
	"github.com/semmoe/operator/internal/kube/conditions"
	"github.com/semmoe/operator/internal/observation/lar"
)

// assess collects the evidence of drift for the layout in service and evaluates it.
func (r *Reconciler) assess(ctx context.Context, moed *semmoev1.MoEDeployment, p planner.Planning, reports []lar.Report, workloads []*revisions.Workload, now time.Time) locality.Assessment {
	serving, promise, plans := p.Serving, p.Promise, p.Plans
	if p.Tables != nil { // created by this controller or by a user
		plans = append(slices.Clone(plans), p.Tables)
	}
	in := locality.Input{
		Now: now, Spec: moed.Spec.Drift, Planned: serving != nil, Plan: promise,
		Engine: moed.Spec.Engine.Type, EngineReportsRoutedExperts: desired.EngineReportsRoutedExperts(moed), Observed: desired.Observes(moed), WasBelow: wasBelow(moed),
		Paused: desired.Paused(moed), Pinned: moed.Spec.Placement.PlanRef != nil, RollingOut: rollingOut(workloads), Replans: replansOf(moed, plans),
		BatchesMoved: p.BatchesMoved(),
	}
	if moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel {
		in.Ranks, in.Shuffled = moed.Spec.Parallelism.ExpertParallelSize, desired.Shuffles(moed)
	}
	if serving == nil {
		return locality.Assess(in)
	}
	window := time.Duration(moed.Spec.Drift.WindowSeconds) * time.Second
	in.Routers = locality.EvidenceOf(reports, serving.Digest, now, window)
	in.Rate = locality.RateUnder(reports, serving.Digest, in.Routers.Tables, now, window)
	// The candidate may be the plan for this drift, or the routers may not use its tables yet.
	in.RollingOut = in.RollingOut || p.Candidate != nil || in.Routers.Tables != "" && in.Routers.Tables != tablesOf(p)
	if newer := planner.PlanWithDigest(in.Routers.Tables, plans); newer != nil {
		in.Plan = newer
	}
	if in.Plan != nil {
		in.Promise = in.Plan.Status.Forecast
	}
	if in.Promise == nil && promise != nil {
		in.Promise = promise.Status.Forecast
	}
	switch {
	case in.Plan == nil:
	case moed.Spec.Drift.Source == semmoev1.DriftSourcePrometheus:
		in.Prometheus = traffic.Prometheus{Client: r.Prometheus, Secrets: r.Secrets, Namespace: r.Namespace}.Ask(ctx, moed, inUseSince(in.Plan, p, workloads), now)
	case in.Routers.Tables == in.Plan.Status.PlanDigest:
		in.Routers.Calibration = traffic.CalibrationOf(ctx, r.Client, in.Plan)
	}
	return locality.Assess(in)
}

// wasBelow reads from the previous status whether the rate was reported below the target. It is used only as
// hysteresis, so that the condition does not flap.
func wasBelow(moed *semmoev1.MoEDeployment) bool {
	condition := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionLocalityOnTarget)
	return condition != nil && condition.Reason == string(locality.BelowPromise)
}

// rollingOut reports whether several revisions have desired replicas, or whether the only one is on trial.
func rollingOut(workloads []*revisions.Workload) bool {
	asked := slices.DeleteFunc(slices.Clone(workloads), func(w *revisions.Workload) bool { return *w.Replicas() == 0 })
	return len(asked) > 1 || slices.ContainsFunc(asked, revisions.OnTrial)
}

// tablesOf returns the digest of the plan whose tables the routers are configured to use for the layout in service.
func tablesOf(p planner.Planning) string {
	if p.Tables != nil {
		return p.Tables.Status.PlanDigest
	}
	return p.Serving.Digest
}

// replansOf returns the times at which drift plans were created, newest first. It counts the PlacementPlan objects, so
// that a lost status does not allow an additional plan.
func replansOf(moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan) []time.Time {
	var made []time.Time
	for _, p := range plans {
		if p.Spec.Current != nil && metav1.IsControlledBy(p, moed) {
			made = append(made, p.CreationTimestamp.Time)
		}
	}
	slices.SortFunc(made, func(a, b time.Time) int { return b.Compare(a) })
	return made
}

// maxTablesDelay is the maximum time until new tables are in use: the kubelet updates a mounted ConfigMap with a delay.
const maxTablesDelay = 2 * time.Minute

// inUseSince returns the time from which all traffic can meet the prediction of the plan in use: the plan exists, its
// workload is proven, and the routers have its tables. A pod that restarts later does not move this time, because the
// other pods serve under the plan throughout.
func inUseSince(inUse *semmoev1.PlacementPlan, p planner.Planning, workloads []*revisions.Workload) time.Time {
	times := []time.Time{inUse.CreationTimestamp.Time}
	if !p.TablesSince.IsZero() {
		times = append(times, p.TablesSince.Add(maxTablesDelay))
	}
	for _, w := range workloads {
		if w.Template().Annotations[semmoev1.AnnotationPlanDigest] == p.Serving.Digest {
			times = append(times, revisions.ServesSince(w))
		}
	}
	return slices.MaxFunc(times, time.Time.Compare)
}

const (
	// driftSteps sets the step of the reported statistic to 1/driftSteps of the threshold or of the statistic,
	// whichever is larger. Status is not a metric, and the statistic fluctuates around zero.
	driftSteps = 4
	// causeStep is the minimum change, in thousandths, that updates the reported causes.
	causeStep = 100
)

// driftStatus returns the reported state of the drift test. It keeps the previous report until the value differs by a
// step and one minute has passed. An alarm is reported immediately.
func driftStatus(previous *semmoev1.DriftStatus, a locality.Assessment, now time.Time) *semmoev1.DriftStatus {
	switch {
	case a.Status == "":
		return previous
	case !a.Tested:
		return nil
	}
	status := &semmoev1.DriftStatus{StatisticMilli: milliOf(a.Statistic), ThresholdMilli: milliOf(a.Threshold), ObservedTime: new(metav1.NewTime(now.Truncate(time.Second)))}
	if a.Status == locality.Drifted {
		status.Since = new(metav1.NewTime(a.Since.Truncate(time.Second)))
		if a.Causes != nil {
			status.Causes = &semmoev1.DriftCauses{NewTokensMilli: milliOf(a.Causes.NewTokens), ChangedMixMilli: milliOf(a.Causes.Mix), LoadBalancingMilli: milliOf(a.Causes.Balance)}
		}
	}
	if previous == nil || (previous.Since == nil) != (status.Since == nil) || previous.ThresholdMilli != status.ThresholdMilli || previous.ObservedTime == nil {
		return status
	}
	// The samples in which a long drift began are eventually dropped. The start time stays.
	status.Since = previous.Since
	if justReported(previous.ObservedTime, now) || !moved(previous, status) {
		return previous.DeepCopy()
	}
	return status
}

// moved reports whether a report differs from the previous one by a step.
func moved(previous, status *semmoev1.DriftStatus) bool {
	far := func(a, b, step int32) bool { return max(a-b, b-a) >= step }
	if far(previous.StatisticMilli, status.StatisticMilli, max(status.ThresholdMilli, previous.StatisticMilli)/driftSteps) {
		return true
	}
	if previous.Causes == nil || status.Causes == nil {
		return previous.Causes != status.Causes
	}
	was, is := previous.Causes, status.Causes
	return far(was.NewTokensMilli, is.NewTokensMilli, causeStep) || far(was.ChangedMixMilli, is.ChangedMixMilli, causeStep) || far(was.LoadBalancingMilli, is.LoadBalancingMilli, causeStep)
}

// maxMilli keeps differences of thousandths within the range of an int32.
const maxMilli = 1e9

func milliOf(value float64) int32 {
	return int32(math.Round(min(max(1000*value, 0), maxMilli)))
}

// localityVerdict returns the condition LocalityOnTarget. It uses the figures of the status, which change in steps.
// With raw figures the condition would be written every minute.
func localityVerdict(a locality.Assessment, rate *semmoev1.LARStatus, test *semmoev1.DriftStatus) conditions.Verdict {
	status := metav1.ConditionTrue
	switch a.Status {
	case "":
		return conditions.Unknown("NotEvaluated", "The serving revision is not known yet")
	case locality.Unknown:
		return conditions.Unknown(a.Reason, a.Message)
	case locality.BelowPromise, locality.Drifted:
		status = metav1.ConditionFalse
	}
	text := a.Message + "."
	if rate != nil && rate.ObservedMilli != nil {
		text += fmt.Sprintf(" The observed local activation rate is %s", desired.Percent(*rate.ObservedMilli))
		if promised := a.Promise.LARSummary; promised != "" { // a plan from token counts predicts no rate
			text += ", the plan predicts " + promised
		}
		text += "."
	}
	if a.Status != locality.Drifted {
		return conditions.Verdict{Status: status, Reason: a.Reason, Message: text}
	}
	if test != nil && test.Causes != nil {
		text += " " + causesText(*test.Causes)
	}
	if a.Hold.Reason != "" {
		text += fmt.Sprintf(" No new plan is made now (%s): %s.", a.Hold.Reason, a.Hold.Message)
	}
	return conditions.Verdict{Status: status, Reason: a.Reason, Message: text}
}

// causesText explains the lost locality by cause.
func causesText(c semmoev1.DriftCauses) string {
	rest := max(0, 1000-c.NewTokensMilli-c.ChangedMixMilli-c.LoadBalancingMilli)
	return fmt.Sprintf("Causes of the loss: new tokens %s, changed mix of requests %s, load balancing %s, changed expert activations %s.",
		desired.Percent(c.NewTokensMilli), desired.Percent(c.ChangedMixMilli), desired.Percent(c.LoadBalancingMilli), desired.Percent(rest))
}
