// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/rollout"
)

// ReasonChangeRolledBack is the reason of a change of the spec whose canary was rolled back.
const ReasonChangeRolledBack = "ChangeRolledBack"

// Change is a change of the spec that needs a canary (spec.rollout.compare All).
type Change struct {
	// Stable is the workload in service, of the spec before the change.
	Stable *revisions.Workload
	// Layout is the layout of the changed revision; nil for none.
	Layout *revisions.Layout
	// Refused is why the canary was rolled back; empty if it was not. It is recorded on Stable, by revision.
	Refused string
}

// decideChange determines whether the spec needs a canary: it differs by more than the plan from the revision in
// service, or the overlap settings do. A change is rolled out directly if its workload is proven already, or if there is
// nothing to compare with. A change and a plan that waits for its canary are one revision. If that revision is rolled
// back, the change is tried without the plan.
func (d *Decision) decideChange(s *Snapshot) {
	if d.Revision == "" {
		return
	}
	direct := workloadOf(s, d.Revision)
	if direct != nil && !revisions.OnTrial(direct) {
		return
	}
	stable, ready := mostReady(s)
	switch {
	case stable == nil:
		return
	case revisions.Of(s.Moed, *s.Report, planner.LayoutIn(stable)) == revisionOf(stable):
		if !d.changesOverlap(s, stable) {
			return
		}
	case s.Moed.Spec.Rollout.Compare != semmoev1.CompareAll:
		return
	}
	layouts := []*revisions.Layout{d.Planning.Serving}
	if d.Planning.Candidate != nil && direct == nil { // a canary without the plan continues
		layouts = slices.Insert(layouts, 0, d.Planning.Candidate)
	}
	for _, layout := range layouts {
		revision := revisions.Of(s.Moed, *s.Report, layout)
		refused := stable.Annotations[semmoev1.AnnotationFailed+revision]
		if refused == "" && !isComparable(s, stable, ready, workloadOf(s, revision) != nil) {
			return
		}
		d.Change, d.Revision, d.CandidateRevision = &Change{stable, layout, refused}, revision, ""
		if refused == "" {
			d.CandidateRevision = revision
			return
		}
	}
}

// changesOverlap reports whether the operator chose other overlap settings for the plan in service. As a new plan, they
// are tried on a canary, if requests can be compared.
func (d *Decision) changesOverlap(s *Snapshot, stable *revisions.Workload) bool {
	before, after := planner.LayoutIn(stable), d.Planning.Serving
	return s.Moed.Spec.Engine.Overlap.Chosen() && s.Moed.Spec.Routing.Mode != semmoev1.RoutingModeNone &&
		before != nil && after != nil && before.Digest == after.Digest && before.Overlap != after.Overlap
}

// isComparable reports whether a canary next to the stable workload can be compared with it. A canary that exists is
// not proven by an outage of the stable workload.
func isComparable(s *Snapshot, stable *revisions.Workload, ready int, tried bool) bool {
	replicas, surge := *s.Moed.Spec.Replicas, *s.Moed.Spec.Rollout.MaxSurge
	switch {
	case revisions.ChangedOutputs(s.Pods)[revisionOf(stable)] != "", replicas == 1 && surge == 0:
		return false
	case tried:
		return true
	}
	return ready > 0 && replicas > 0
}

// mostReady returns the proven workload with the most ready replicas, and their number. Of equal ones it returns the
// one with the most desired replicas, and then the newest one.
func mostReady(s *Snapshot) (best *revisions.Workload, ready int) {
	for _, workload := range revisions.Proven(s.Workloads) {
		count := 0
		for _, pod := range s.Pods {
			if workload.Holds(pod) && podhealth.Ready(pod) {
				count++
			}
		}
		if best == nil || cmp.Or(cmp.Compare(count, ready), cmp.Compare(*workload.Replicas(), *best.Replicas())) > 0 {
			best, ready = workload, count
		}
	}
	return best, ready
}

func revisionOf(workload *revisions.Workload) string { return workload.Labels[semmoev1.LabelRevision] }

// workloadOf returns the workload of a revision, or nil.
func workloadOf(s *Snapshot, revision string) *revisions.Workload {
	for _, workload := range s.Workloads {
		if revisionOf(workload) == revision {
			return workload
		}
	}
	return nil
}

// StableRevision returns the revision that serves next to a canary: the revision before a change that is not proven, or
// else the desired one.
func (d *Decision) StableRevision() string {
	if d.Change != nil {
		return revisionOf(d.Change.Stable)
	}
	return d.Revision
}

// candidate returns the layout of the candidate, and whether there is a candidate.
func (d *Decision) candidate() (*revisions.Layout, bool) {
	switch {
	case d.Change != nil:
		return d.Change.Layout, d.Change.Refused == ""
	default:
		return d.Planning.Candidate, d.Planning.Candidate != nil
	}
}

// candidatePlan returns the short digest of the plan that the candidate has in addition; empty if it has none.
func (d *Decision) candidatePlan() string {
	if layout, _ := d.candidate(); layout != nil && layout == d.Planning.Candidate {
		return layout.Short()
	}
	return ""
}

// candidateName is the subject of messages on the candidate. approval is the value of annotations that approve it, or
// roll it back.
func (d *Decision) candidateName() (name, approval string) {
	plan := d.candidatePlan()
	switch {
	case d.Change == nil:
		return "Plan " + plan, plan
	case plan != "":
		return fmt.Sprintf("Revision %s with plan %s", d.Revision, plan), d.Revision
	}
	return "Revision " + d.Revision, d.Revision
}

// terms returns the terms of the comparison of the candidate. Local activation rates of a change are compared if both
// revisions have a plan, or if the candidate has one and the revision in service is the baseline of its promise.
func (d *Decision) terms() rollout.Terms {
	if d.Change == nil {
		return rollout.Terms{Promised: promisedDifference(d.Planning)}
	}
	terms := rollout.Terms{NotSlower: true, AnyLocality: true}
	if layout, before := d.Change.Layout, planner.LayoutIn(d.Change.Stable); layout != nil && digestOf(before) == digestOf(d.Planning.Serving) {
		terms.AnyLocality = false
		if d.candidatePlan() != "" {
			terms.Promised = promisedDifference(d.Planning)
		}
	}
	return terms
}

func digestOf(layout *revisions.Layout) string {
	if layout == nil {
		return ""
	}
	return layout.Digest
}

// withoutTrial returns the state of a change without a candidate: it waits for its canary, or it was rolled back.
func (c *Change) withoutTrial(d *Decision, m moves) RolloutState {
	name, _ := d.candidateName()
	if c.Refused == "" {
		return RolloutState{Reason: "WaitingForReplicas", Message: fmt.Sprintf("%s starts its canary once all replicas are of revision %s, and enough of them are ready", name, d.StableRevision())}
	}
	state := RolloutState{
		Held: true, Reason: ReasonChangeRolledBack,
		Message: fmt.Sprintf("%s failed on a canary and was rolled back. %s. Revision %s serves. Change the spec, or remove annotation %s%s from workload %s to try again",
			name, c.Refused, d.StableRevision(), semmoev1.AnnotationFailed, d.Revision, c.Stable.Name),
	}
	for i, workload := range m.workloads {
		if found := m.in.Revisions[i]; revisionOf(workload) == d.Revision && (found.Replicas > 0 || found.Existing > 0) {
			state.Phase, state.Candidate, state.Plan = semmoev1.RolloutPhaseRollingBack, d.Revision, d.candidatePlan()
		}
	}
	return state
}

// forgetFailures removes the records of rolled back changes from the workload in service, once it serves the spec: after
// the spec was reverted, a change may be tried again.
func (r *Rollout) forgetFailures(d *Decision, serving *revisions.Workload) {
	forgotten := map[string]string{}
	for key := range serving.Annotations {
		if strings.HasPrefix(key, semmoev1.AnnotationFailed) && key != semmoev1.AnnotationFailed+d.Planning.Overlap.Refused {
			forgotten[key] = ""
		}
	}
	if d.Change == nil && len(forgotten) > 0 {
		r.write(revisions.ChangeWorkload{Workload: serving, Annotations: forgotten})
	}
}
