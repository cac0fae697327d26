// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"fmt"
	"slices"
	"strings"
	"time"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/observation/lar"
	"github.com/semmoe/operator/internal/rollout"
)

// decideCandidate decides the next step of the candidate on trial, and records what must outlive this reconciliation.
func (r *Rollout) decideCandidate(s *Snapshot, d *Decision, m moves, action rollout.Action) {
	workload, decision := m.workloads[m.in.Candidate], action.Decision
	name, approval := d.candidateName()
	r.RolloutState = RolloutState{
		Phase: semmoev1.RolloutPhaseCanary, Reason: decision.Reason, Candidate: d.CandidateRevision, Plan: d.candidatePlan(), Again: decision.Again,
		Message: fmt.Sprintf("%s runs as a canary on %d of %d replicas: %s", name, m.in.Trial.Canary, m.in.Budget.Replicas, decision.Message),
	}
	if d.Change == nil {
		r.Measured = gainOf(s, d, m.in.Trial.Comparison)
	}
	switch {
	case decision.Step == rollout.StepRollBack && m.in.Hold:
		r.Held, r.Reason = true, ReasonRollbackPending
		r.Message = fmt.Sprintf("%s failed on its canary (%s), and spec.rollout.rollback is Manual. Roll it back with: %s", name, decision.Reason, rollBackCommand(s, d, decision.Reason))
		r.mark(workload, semmoev1.RolloutCanary, s.Now, nil)
	case decision.Step == rollout.StepRollBack:
		r.Phase, r.Reason, r.Again = semmoev1.RolloutPhaseRollingBack, planner.ReasonRolledBack, time.Second
		r.Message = fmt.Sprintf("%s is being rolled back. %s: %s", name, decision.Reason, decision.Message)
		// The plan, and the workload in service, outlive the canary.
		failed := map[string]string{semmoev1.AnnotationFailed + d.CandidateRevision: printable.Line(decision.Reason+": "+decision.Message, 512)}
		if d.Change == nil {
			r.record(d.Planning.Plan, failed)
		} else {
			r.Reason = ReasonChangeRolledBack
			r.write(revisions.ChangeWorkload{Workload: d.Change.Stable, Annotations: failed})
		}
	case decision.Step == rollout.StepPromote:
		r.Phase, r.Reason = semmoev1.RolloutPhasePromoting, "Promoting"
		r.Message = fmt.Sprintf("%s passed its canary, and replicas move to it", name)
		switch {
		case !m.in.Trial.Promoting:
			if d.Change == nil {
				r.record(d.Planning.Plan, map[string]string{}) // before the mark, which prevents a second record
			}
			r.mark(workload, semmoev1.RolloutPromoting, s.Now, &writes.Event{
				Name: "CanaryPromoted", Action: "Reconcile",
				Message: fmt.Sprintf("Revision %s is promoted: %s", d.CandidateRevision, printable.Line(decision.Message, 900)),
			})
		case action.Proven: // all replicas have moved
			r.mark(workload, "", s.Now, nil)
		}
	case decision.Reason == rollout.ReasonInconclusive:
		proof := "better"
		if d.Change != nil {
			proof = "not slower"
		}
		r.Message += fmt.Sprintf(". It is promoted once requests prove that it is %s, or with: %s", proof, planner.ApproveCommand(s.Moed, approval))
	}
}

// rollBackCommand returns the command that rolls a failed candidate back.
func rollBackCommand(s *Snapshot, d *Decision, reason string) string {
	if d.Change != nil {
		return fmt.Sprintf("kubectl annotate moed -n %s %s %s=%s --overwrite", s.Moed.Namespace, s.Moed.Name, semmoev1.AnnotationRollBack, d.CandidateRevision)
	}
	return fmt.Sprintf("kubectl annotate pplan -n %s %s %s%s=%s", s.Moed.Namespace, d.Planning.Plan.Name, semmoev1.AnnotationFailed, d.CandidateRevision, reason)
}

// record writes annotations and the measured gain of the canary on its plan.
func (r *Rollout) record(plan *semmoev1.PlacementPlan, annotations map[string]string) {
	if text := r.Measured.text(); text != "" {
		annotations[semmoev1.AnnotationMeasured] = text
	}
	if len(annotations) > 0 {
		r.write(writes.Annotate{Object: plan, Annotations: annotations, Required: true})
	}
}

// trialOf collects the observed state of a candidate's workload.
func trialOf(s *Snapshot, d *Decision, candidate *revisions.Workload) rollout.Trial {
	moed := s.Moed
	_, approval := d.candidateName()
	trial := rollout.Trial{
		Now:        trialTime(s.Now, d.Reports),
		Canary:     rollout.CanarySize(*moed.Spec.Replicas, moed.Spec.Rollout.CanaryReplicas),
		Soak:       desired.Soak(moed),
		Promoting:  candidate.Annotations[semmoev1.AnnotationRollout] == semmoev1.RolloutPromoting,
		Approved:   planner.Approved(moed, approval) || d.Change == nil && d.Planning.PlanPinned(moed),
		Rejected:   planner.RolledBack(moed, approval),
		Measured:   desired.Observes(moed),
		NotSlower:  d.Change != nil,
		Comparison: rollout.Comparison{Verdict: rollout.TooFew},
	}
	for _, pod := range s.Pods {
		if candidate.Holds(pod) && pod.DeletionTimestamp == nil {
			trial.Replicas = append(trial.Replicas, revisions.ReplicaIn(candidate, pod))
		}
	}
	slices.SortFunc(trial.Replicas, func(a, b rollout.Replica) int { return strings.Compare(a.Name, b.Name) })
	if since, serves := trial.ServesSince(); serves {
		terms := d.terms()
		terms.Since, terms.Now, terms.Soak = since, trial.Now, trial.Soak
		trial.Comparison = rollout.Compare(sampleOf(d.Reports, candidate.Labels[semmoev1.LabelRevision], since), sampleOf(d.Reports, d.StableRevision(), since), terms)
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
