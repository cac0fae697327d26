// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/internal/rollout"
)

// Rollout is the decision on the workloads of all revisions.
type Rollout struct {
	RolloutState
	// Settled reports whether all desired replicas belong to the desired revision.
	Settled bool
	// Writes are in order: a write must not happen if one before it failed.
	Writes []writes.Write
	// Err prevented the decision. There are no writes then.
	Err error
}

// RolloutState is the state of the rollout of a candidate: a new plan, or a change of the spec.
type RolloutState struct {
	// Phase is empty if no candidate is being rolled out.
	Phase semmoev1.RolloutPhase
	// Reason and Message explain what the rollout waits for, or why it failed.
	Reason, Message string
	// Candidate is the revision of the candidate. Plan is the short digest of its plan; empty if it has no new one.
	Candidate, Plan string
	// Held reports a failed rollout that only a user may roll back, or replace by another change.
	Held bool
	// Measured is the gain that the canary has measured, or nil if unknown.
	Measured *MeasuredGain
	// Again is the delay until the next check, or zero if an event triggers it.
	Again time.Duration
}

// ReasonRollbackPending is the reason of a failed canary that only a user may roll back.
const ReasonRollbackPending = "RollbackPending"

// moves are the workloads of a MoEDeployment, newest first, and the input of the decision on them.
type moves struct {
	workloads []*revisions.Workload
	in        rollout.Input
}

// DecideRollout creates the workload of the desired revision, moves replicas to it within the budget, runs the canary
// of a candidate, and deletes empty old workloads.
func DecideRollout(s *Snapshot, d *Decision) Rollout {
	var r Rollout
	var m moves
	if m, r.Err = movesOf(s, d); r.Err != nil {
		return r
	}
	action := rollout.Next(m.in)
	if m.in.Stable != rollout.None {
		r.mark(m.workloads[m.in.Stable], "", s.Now, nil) // the serving workload counts as proven
		if m.in.Candidate == rollout.None {
			r.forgetFailures(d, m.workloads[m.in.Stable])
			r.recordBasis(d, m.workloads[m.in.Stable])
			r.RolloutState = withoutCandidate(d, m)
		} else if r.decideCandidate(s, d, m, action); r.Phase == semmoev1.RolloutPhaseRollingBack {
			// A candidate is removed once the cache shows that its plan failed. Removing it before could start it
			// again.
			return r
		}
	}
	for i, workload := range m.workloads {
		// While the serving revision is unknown, keep empty workloads: one of them may identify it.
		wanted := m.in.Stable == rollout.None || i == m.in.Stable || i == m.in.Candidate
		replicas := revisions.UsableReplicas(workload, action.Replicas[i], s.Workers)
		switch {
		case workload.UID == "":
			*workload.Replicas() = replicas
			// Keep the plan before deleting the old workload, which may be the last object that references it.
			plans := d.Planning.PlansWithDigest(workload.Template().Annotations[semmoev1.AnnotationPlanDigest])
			r.write(revisions.CreateWorkload{Workload: workload, Plans: plans, Event: overlapEvent(s, d, workload)}, revisions.KeepPlan{Workload: workload})
		case *workload.Replicas() != replicas:
			r.write(revisions.ChangeWorkload{Workload: workload, Replicas: &replicas})
		case !wanted && replicas == 0 && workload.Drained(s.Pods):
			if stable := m.workloads[m.in.Stable]; revisions.OnTrial(workload) && stable.UID != "" {
				// The trial next to the serving workload has ended: measurements up to now cover both workloads. This
				// is recorded before the last object of the trial is deleted, again if the deletion fails.
				r.write(revisions.ChangeWorkload{Workload: stable, Annotations: map[string]string{semmoev1.AnnotationProven: timeText(s.Now)}})
			}
			r.write(writes.Delete{Object: workload.Object, Unchanged: true})
		}
	}
	r.Settled = d.Change == nil && m.in.Stable != rollout.None && m.in.Revisions[m.in.Stable].Replicas == m.in.Budget.Replicas && totalReplicas(m.in.Revisions) == m.in.Budget.Replicas
	return r
}

// recordBasis records on the workload in service what its overlap settings were chosen from, if that was another plan
// with the same result.
func (r *Rollout) recordBasis(d *Decision, serving *revisions.Workload) {
	wanted := d.Planning.Serving
	if wanted == nil || d.Change != nil || serving.UID == "" || serving.Labels[semmoev1.LabelRevision] != d.Revision || wanted.OverlapBasis == "" {
		return
	}
	if serving.Annotations[semmoev1.AnnotationOverlapBasis] != wanted.OverlapBasis {
		r.write(revisions.ChangeWorkload{Workload: serving, Annotations: map[string]string{semmoev1.AnnotationOverlapBasis: wanted.OverlapBasis}})
	}
}

func (r *Rollout) write(writes ...writes.Write) { r.Writes = append(r.Writes, writes...) }

// mark records the rollout step of an existing workload. An empty step means proven, and is recorded with the time.
func (r *Rollout) mark(workload *revisions.Workload, step string, now time.Time, event *writes.Event) {
	if workload.Annotations[semmoev1.AnnotationRollout] == step {
		return
	}
	annotations := map[string]string{semmoev1.AnnotationRollout: step}
	if step == "" {
		annotations[semmoev1.AnnotationProven] = timeText(now)
	}
	r.write(revisions.ChangeWorkload{Workload: workload, Annotations: annotations, Event: event})
}

func timeText(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// movesOf adds the workloads to be created to the existing ones: the workload of the serving revision, and the workload
// of the candidate once no other change is in progress.
func movesOf(s *Snapshot, d *Decision) (moves, error) {
	moed := s.Moed
	m := moves{slices.Clone(s.Workloads), rollout.Input{
		Budget: rollout.Budget{Replicas: *moed.Spec.Replicas, MaxUnavailable: *moed.Spec.Rollout.MaxUnavailable, MaxSurge: *moed.Spec.Rollout.MaxSurge},
		Stable: rollout.None, Candidate: rollout.None, Canary: moed.Spec.Rollout.CanaryReplicas, Hold: moed.Spec.Rollout.Rollback == semmoev1.RollbackManual,
	}}
	for _, workload := range s.Workloads {
		m.in.Revisions = append(m.in.Revisions, revisions.StateOf(workload, s.Pods, s.Workers))
	}
	if d.Invalid != nil || d.Revision == "" || desired.Paused(moed) {
		return m, nil
	}
	find := func(revision string) int {
		return slices.IndexFunc(m.workloads, func(w *revisions.Workload) bool { return w.Name == moed.Name+"-"+revision })
	}
	if m.in.Stable = find(d.StableRevision()); m.in.Stable == rollout.None {
		if err := m.add(s, d.Revision, d.Planning.Serving, ""); err != nil {
			return m, err
		}
		m.in.Stable = 0
	}
	layout, has := d.candidate()
	if !has {
		return m, nil
	}
	switch at := find(d.CandidateRevision); {
	case at >= 0 && revisions.OnTrial(m.workloads[at]):
		m.in.Candidate = at
	case at >= 0: // left over from earlier service: it is deleted first, and created again as a canary
	case rollout.MayTry(m.in.Budget, m.in.Revisions, m.in.Stable):
		if err := m.add(s, d.CandidateRevision, layout, semmoev1.RolloutCanary); err != nil {
			return m, err
		}
		m.in.Stable, m.in.Candidate = m.in.Stable+1, 0
	}
	if m.in.Candidate != rollout.None {
		m.in.Trial = trialOf(s, d, m.workloads[m.in.Candidate])
		m.in.Hold = m.in.Hold && !m.in.Trial.Rejected
	}
	return m, nil
}

// overlapEvent returns the event for a new workload whose overlap settings the operator chose, if they differ from those
// in service.
func overlapEvent(s *Snapshot, d *Decision, workload *revisions.Workload) *writes.Event {
	settings := func(w *revisions.Workload) (o semmoev1.OverlapSpec) {
		if l := planner.LayoutIn(w); l != nil {
			o = l.Overlap
		}
		return o
	}
	before, after := semmoev1.OverlapSpec{}, settings(workload)
	if stable := workloadOf(s, d.StableRevision()); stable != nil {
		before = settings(stable)
	}
	if !s.Moed.Spec.Engine.Overlap.Chosen() || before == after {
		return nil
	}
	basis := planner.BasisOf(planner.LayoutIn(workload))
	message := fmt.Sprintf("Revision %s has %s, instead of %s", revisionOf(workload), overlap.Text(after), overlap.Text(before))
	if basis.LayerNanos > 0 {
		message += fmt.Sprintf(": a layer takes %.0f µs, and %.0f µs without micro-batches, modelled", float64(basis.LayerNanos)/1000, float64(basis.UnsplitNanos)/1000)
	}
	return &writes.Event{Name: "OverlapChosen", Action: "Reconcile", Message: message}
}

// add inserts the not yet created workload of a revision before the others.
func (m *moves) add(s *Snapshot, revision string, under *revisions.Layout, step string) error {
	if s.OwnUnread != nil {
		return s.OwnUnread
	}
	workload, err := revisions.Render(s.Moed, revision, *s.Report, under, s.Own)
	if err != nil {
		return err
	}
	if step != "" {
		metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationRollout, step)
	}
	m.workloads = slices.Insert(m.workloads, 0, workload)
	m.in.Revisions = slices.Insert(m.in.Revisions, 0, revisions.StateOf(workload, s.Pods, s.Workers))
	return nil
}

// withoutCandidate returns the state while no candidate is on trial: a failed candidate may be rolling back, or a new
// one may wait for another change to complete.
func withoutCandidate(d *Decision, m moves) RolloutState {
	var state RolloutState
	if d.Change != nil {
		return d.Change.withoutTrial(d, m)
	}
	if d.Planning.Candidate != nil {
		state.Reason = "WaitingForReplicas"
		state.Message = fmt.Sprintf("Plan %s starts its canary once all replicas run revision %s", d.Planning.Candidate.Short(), d.Revision)
	}
	for i, workload := range m.workloads {
		if state := m.in.Revisions[i]; i == m.in.Stable || !revisions.OnTrial(workload) || state.Replicas == 0 && state.Existing == 0 {
			continue
		}
		if reason := d.Planning.Hold.Reason; reason == planner.ReasonRolledBack || reason == planner.ReasonOutputChanged {
			digest := artifact.Digest(workload.Annotations[semmoev1.AnnotationPlanDigest])
			return RolloutState{
				Phase: semmoev1.RolloutPhaseRollingBack, Reason: reason, Message: d.Planning.Hold.Message,
				Candidate: workload.Labels[semmoev1.LabelRevision], Plan: digest.Short(),
			}
		}
	}
	return state
}

func totalReplicas(states []rollout.Revision) int32 {
	var total int32
	for _, state := range states {
		total += state.Replicas
	}
	return total
}
