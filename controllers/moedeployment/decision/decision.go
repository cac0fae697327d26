// SPDX-License-Identifier: Apache-2.0

// Package decision decides what a MoEDeployment needs from one snapshot of its objects, traffic and clock: the plan and
// the revision to serve, whether traffic drifted, and the next step after a drift.
//
// Invariants:
//   - Decide is a pure function. It has no client, no clock and no HTTP; test/architecture checks the imports.
//   - A read that depends on a decision is a question, which Decide returns. The controller answers it in the snapshot,
//     and decides again.
//   - Writes are part of the decision, in order. The writes of a rollout are decided last, from what the writes before
//     them recorded on the workloads.
package decision

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/download"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/observation/stepsizes"
	"github.com/semmoe/operator/internal/profile/inspection"
	"github.com/semmoe/operator/solver/drift"
)

// Snapshot is everything that a reconciliation observed.
type Snapshot struct {
	// Snapshot contains the MoEDeployment, its workloads and serving pods, and its profiles, plans and tables.
	planner.Snapshot
	// Unread is an error that prevented reading profiles, plans or tables, or answering a question.
	Unread error

	Jobs []*batchv1.Job
	// Workers are the pods of replicas that do not serve requests themselves.
	Workers, InspectPods, DownloadPods, RouterPods []*corev1.Pod
	// Router is the Deployment of the request router; nil if there is none.
	Router *appsv1.Deployment
	// Groups reports whether the cluster has the kind LeaderWorkerSet.
	Groups bool
	// Download is the state of the model's download.
	Download download.State
	// Inspection is the state of the model's inspection. It starts when the download is complete.
	Inspection inspection.State
	// Own are the settings of the operator's own containers in the pods of new revisions. OwnUnread is an error that
	// prevented reading them.
	Own       revisions.Own
	OwnUnread error
	// StoreFailure is why the artifact store does not answer; empty if it does, or if no plan is needed.
	StoreFailure string

	// Reports, Prometheus and Calibrations (by plan digest) are the answers to questions; nil if not asked.
	Reports      *[]lar.Report
	Prometheus   *locality.PrometheusEvidence
	Calibrations map[string]*drift.Calibration
}

type (
	// RouterReports asks for the reports of the request routers.
	RouterReports struct{}
	// PrometheusValues asks for the values of the series since a time.
	PrometheusValues struct{ Since time.Time }
	// Calibration asks for the calibration of a plan.
	Calibration struct{ Plan *semmoev1.PlacementPlan }
)

// Decision is what a MoEDeployment needs.
type Decision struct {
	// Question must be answered before the decision is complete; nil if it is.
	Question planner.Question
	// Undecided reports that an error, Err, prevented the decision. Serving pods are not affected.
	Undecided bool
	Err       error
	// Refused reports objects of other owners that are in the way. The decision is valid anyway.
	Refused error

	// Invalid is an error in the spec.
	Invalid *revisions.InvalidError
	// Planning is the state of profiles and plans. Writes are the writes that bring it about, in order.
	Planning planner.Planning
	Writes   []writes.Write
	// Revision is the desired revision, CandidateRevision the revision on trial; empty if unknown, or if there is none.
	Revision, CandidateRevision string
	// Change is the change of the spec that is on trial, waits for it or was rolled back; nil if Revision needs no trial.
	Change *Change
	// Serving is the workload that serves requests if it is not of Revision, else nil. InService describes its plan.
	Serving   *revisions.Workload
	InService planner.Planning
	// Ranks is the number of ranks of the serving workload; 0 if requests have no rank, or nothing has been started.
	Ranks int32
	// Release is the release that the serving engine reported.
	Release engine.Release
	// Reports are the reports of the routers; Steps are the engine steps in them.
	Reports []lar.Report
	Steps   stepsizes.Sum
	// Observed is the traffic that routers sampled of the serving revision.
	Observed locality.Traffic
	// Drift compares the traffic to the plan in service.
	Drift locality.Assessment
	// Replan is the state of the plan for a drift; its zero value if none is being made. ReplanWrites are the writes of
	// the next step. They are the last ones: a plan replaces what serves then.
	Replan       desired.Finding
	ReplanWrites []writes.Write
}

// ServingRevision returns the revision that serves requests, or "" if unknown.
func (d *Decision) ServingRevision() string {
	if d.Serving != nil {
		return d.Serving.Labels[semmoev1.LabelRevision]
	}
	return d.Revision
}

// ServingPlanning returns the planning state of the serving workload.
func (d *Decision) ServingPlanning() planner.Planning {
	if d.Serving != nil {
		return d.InService
	}
	return d.Planning
}

// WithoutDecision returns the part of a decision that remains valid after an error: the plan is unknown, and there is
// no desired revision.
func (d Decision) WithoutDecision(err error) Decision {
	return Decision{Invalid: d.Invalid, Planning: d.Planning, Reports: d.Reports, Steps: d.Steps, Refused: d.Refused, Undecided: true, Err: err}
}

// Decide decides what the MoEDeployment needs. Each step depends on the results of the steps before it.
func Decide(s *Snapshot) Decision {
	d := Decision{Invalid: Invalid(s)}
	for _, step := range []func(*Decision, *Snapshot){
		(*Decision).decideSteps,
		(*Decision).decidePlanning,
		(*Decision).decideChange,
		(*Decision).decideServing,
		(*Decision).decideTraffic,
		(*Decision).decideDrift,
		(*Decision).decideReplan,
	} {
		if step(&d, s); d.Question != nil {
			return d
		}
		if d.Err != nil {
			return d.WithoutDecision(d.Err)
		}
	}
	return d
}

// Invalid returns the first error in the spec that prevents serving, or nil.
func Invalid(s *Snapshot) *revisions.InvalidError {
	for _, check := range []func(*Snapshot) *revisions.InvalidError{
		func(s *Snapshot) *revisions.InvalidError { return revisions.Validate(s.Moed) },
		func(s *Snapshot) *revisions.InvalidError {
			return revisions.ValidateRelease(s.Moed, revisions.Release(s.Moed, s.Workloads))
		},
		func(s *Snapshot) *revisions.InvalidError { return revisions.ValidateGroups(s.Moed, s.Groups) },
		func(s *Snapshot) *revisions.InvalidError {
			if s.Inspection.Report == nil {
				return nil
			}
			return revisions.ValidateModel(s.Moed, *s.Inspection.Report)
		},
	} {
		if invalid := check(s); invalid != nil {
			return invalid
		}
	}
	return nil
}

// decideSteps determines the batch sizes of the engines.
func (d *Decision) decideSteps(s *Snapshot) {
	if desired.ObservesSteps(s.Moed) && d.hasReports(s) {
		d.Steps = StepsOf(d.Reports)
	}
}

// sizesForPlans returns the observed batch sizes for which plans are made; nil if the spec sets its size.
func (d *Decision) sizesForPlans(s *Snapshot) []int32 {
	if s.Moed.Spec.Rollout.BatchTokens > 0 {
		return nil
	}
	return d.Steps.Sizes
}

// hasReports adds the reports of routers to the decision, and asks for them if they are unknown.
func (d *Decision) hasReports(s *Snapshot) bool {
	if s.Reports == nil {
		d.Question = RouterReports{}
		return false
	}
	d.Reports = *s.Reports
	return true
}

// decidePlanning determines the profile, the plan and the revision to serve.
func (d *Decision) decidePlanning(s *Snapshot) {
	if s.Report == nil || d.Invalid != nil {
		return
	}
	if d.Err = s.Unread; d.Err != nil {
		return
	}
	plan := s.Snapshot
	plan.BatchSizes = d.sizesForPlans(s)
	p := planner.Decide(&plan)
	d.Planning, d.Writes, d.Refused, d.Question, d.Err = p.Planning, p.Writes, p.Refused, p.Question, p.Err
	if d.Question != nil || d.Err != nil {
		return
	}
	d.Revision = revisions.Of(s.Moed, *s.Report, p.Serving)
	if p.Candidate != nil {
		d.CandidateRevision = revisions.Of(s.Moed, *s.Report, p.Candidate)
	}
}

// decideServing determines the serving workload, and its plan if it is not the desired one.
func (d *Decision) decideServing(s *Snapshot) {
	last := ""
	if s.Moed.Status.Serving != nil {
		last = s.Moed.Status.Serving.Revision
	}
	serving := revisions.Serving(s.Workloads, s.Pods, d.StableRevision(), last)
	if serving == nil {
		return
	}
	d.Release = revisions.ReportedRelease(serving)
	if d.Ranks = revisions.Ranks(serving); serving.Labels[semmoev1.LabelRevision] == d.Revision {
		return
	}
	if d.Err = s.Unread; d.Err == nil {
		d.Serving = serving
		d.InService, d.Question = planner.InService(&s.Snapshot, serving)
	}
}

// decideTraffic sums the traffic of the serving revision.
func (d *Decision) decideTraffic(s *Snapshot) {
	if (PollsRouters(s.Moed, d.ServingRevision(), d.ServingPlanning()) || d.Change != nil) && !d.hasReports(s) {
		return
	}
	if desired.Observes(s.Moed) || desired.ObservesTokens(s.Moed) {
		d.Observed = locality.TrafficOf(d.Reports, d.ServingRevision())
	}
}

// PollsRouters reports whether the controller polls the routers: they sample requests, or a plan is in service (which
// needs engines that respect ranks), or plans depend on the steps of engines.
func PollsRouters(moed *semmoev1.MoEDeployment, serving string, p planner.Planning) bool {
	return serving != "" && (desired.Observes(moed) || p.Serving != nil || desired.ObservesSteps(moed))
}

// decideDrift evaluates whether the traffic still matches the plan in service.
func (d *Decision) decideDrift(s *Snapshot) {
	d.Drift, d.Question = Assess(s, d.ServingPlanning(), d.Reports)
}

// decideReplan determines the next step after a drift.
func (d *Decision) decideReplan(s *Snapshot) {
	if d.Revision == "" {
		return
	}
	plan := s.Snapshot
	plan.BatchSizes = d.sizesForPlans(s)
	d.Replan, d.ReplanWrites, d.Question = planner.NextReplan(&plan, d.Planning, planner.DriftOf(d.Drift, s.Now))
}

// StepsOf sums the engine steps that routers reported, over all revisions: batch sizes depend on the traffic, not on
// the revision.
func StepsOf(reports []lar.Report) stepsizes.Sum {
	var pods [][]stepsizes.Pod
	for _, report := range reports {
		pods = append(pods, report.Steps)
	}
	return stepsizes.Merge(pods...)
}
