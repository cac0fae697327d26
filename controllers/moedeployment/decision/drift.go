// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/observation/lar"
)

// Assess collects the evidence of drift for the layout in service and evaluates it.
func Assess(s *Snapshot, p planner.Planning, reports []lar.Report) (locality.Assessment, planner.Question) {
	moed, workloads, now := s.Moed, s.Workloads, s.Now
	serving, promise, plans := p.Serving, p.Promise, p.Plans
	if p.Tables != nil { // created by this controller or by a user
		plans = append(slices.Clone(plans), p.Tables)
	}
	in := locality.Input{
		Now: now, Spec: moed.Spec.Drift, Planned: serving != nil, Plan: promise,
		Engine: moed.Spec.Engine.Type, EngineReportsRoutedExperts: desired.EngineReportsRoutedExperts(moed), Observed: desired.Observes(moed), WasBelow: wasBelow(moed),
		Paused: desired.Paused(moed), Pinned: moed.Spec.Placement.PlanRef != nil, RollingOut: rollingOut(workloads), Replans: ReplansOf(moed, plans),
		BatchesMoved: p.BatchesMoved(),
	}
	if moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel {
		in.Ranks, in.Shuffled = moed.Spec.Parallelism.ExpertParallelSize, desired.Shuffles(moed)
	}
	if serving == nil {
		return locality.Assess(in), nil
	}
	if in.Shuffled {
		in.Engines = locality.EngineEvidenceOf(reports, TablesOf(p), now, time.Duration(moed.Spec.Drift.WindowSeconds)*time.Second)
		in.EnginesRead = desired.ObservesTokens(moed)
	}
	window := time.Duration(moed.Spec.Drift.WindowSeconds) * time.Second
	in.Routers = locality.EvidenceOf(reports, serving.Digest, now, window)
	in.Rate = locality.RateUnder(reports, serving.Digest, in.Routers.Tables, now, window)
	// The candidate may be the plan for this drift, or the routers may not use its tables yet.
	in.RollingOut = in.RollingOut || p.Candidate != nil || in.Routers.Tables != "" && in.Routers.Tables != TablesOf(p)
	if newer := planner.PlanWithDigest(in.Routers.Tables, plans); newer != nil {
		in.Plan = newer
	}
	if in.Plan != nil {
		in.Promise = in.Plan.Status.Forecast
	}
	if in.Promise == nil && promise != nil {
		in.Promise = promise.Status.Forecast
	}
	in.Promise = locality.PromiseAt(in.Promise, moed.Status.BatchTokens) // of the status, which changes in steps
	switch {
	case in.Plan == nil:
	case moed.Spec.Drift.Source == semmoev1.DriftSourcePrometheus:
		if s.Prometheus == nil {
			return locality.Assessment{}, PrometheusValues{Since: inUseSince(in.Plan, p, workloads)}
		}
		in.Prometheus = *s.Prometheus
	case in.Routers.Tables == in.Plan.Status.PlanDigest:
		calibration, known := s.Calibrations[in.Plan.Status.PlanDigest]
		if !known {
			return locality.Assessment{}, Calibration{Plan: in.Plan}
		}
		in.Routers.Calibration = calibration
	}
	return locality.Assess(in), nil
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

// TablesOf returns the digest of the plan whose tables are to be used with the layout in service.
func TablesOf(p planner.Planning) string {
	if p.Tables != nil {
		return p.Tables.Status.PlanDigest
	}
	return p.Serving.Digest
}

// ReplansOf returns the times at which drift plans were created, newest first. It counts the PlacementPlan objects, so
// that a lost status does not allow an additional plan.
func ReplansOf(moed *semmoev1.MoEDeployment, plans []*semmoev1.PlacementPlan) []time.Time {
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
