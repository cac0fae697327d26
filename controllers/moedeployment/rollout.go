package moedeployment

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/rollout"
)

// rolloutState is the state of the rollout of a new plan.
type rolloutState struct {
	// Phase is empty if no plan is being rolled out.
	Phase semmoev1.RolloutPhase
	// Reason and Message explain what the rollout waits for, or why it failed.
	Reason, Message string
	// Candidate is the revision of the new plan; Plan is its short digest.
	Candidate, Plan string
	// Held reports a failed rollout that only a user may roll back.
	Held bool
	// Measured is the gain that the canary has measured, or nil if unknown.
	Measured *measuredGain
	// Again is the delay until the next check, or zero if an event triggers it.
	Again time.Duration
}

const (
	reasonInconclusive = rollout.ReasonInconclusive
	reasonRollbackHeld = "RollbackPending"
)

// moves are the workloads of a MoEDeployment, newest first, and the input of the decision on them.
type moves struct {
	workloads []*revisions.Workload
	in        rollout.Input
}

// reconcileRevisions creates the workload of the desired revision, moves replicas to it within the budget, runs the
// canary of a candidate, and deletes empty old workloads. It reports whether all desired replicas belong to that
// revision, and returns the state of the candidate.
func (r *Reconciler) reconcileRevisions(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, workloads []*revisions.Workload, now time.Time) (bool, rolloutState, error) {
	var state rolloutState
	m, err := r.movesOf(ctx, moed, o, workloads, now)
	if err != nil {
		return false, state, err
	}
	action := rollout.Next(m.in)
	if m.in.Stable != rollout.None {
		// The serving workload counts as proven.
		if err := r.mark(ctx, m.workloads[m.in.Stable], "", now); err != nil {
			return false, state, err
		}
		if m.in.Candidate == rollout.None {
			state = withoutCandidate(o, m)
		} else if state, err = r.decided(ctx, moed, o, m, action, now); err != nil || state.Phase == semmoev1.RolloutPhaseRollingBack {
			// A candidate is removed once the cache shows that its plan failed. Removing it before could start it
			// again.
			return false, state, err
		}
	}
	for i, workload := range m.workloads {
		// While the serving revision is unknown, keep empty workloads: one of them may identify it.
		wanted := m.in.Stable == rollout.None || i == m.in.Stable || i == m.in.Candidate
		if !wanted && revisions.OnTrial(workload) && *workload.Replicas() == 0 && workload.Drained(o.Pods) {
			if err := r.markTrialEnded(ctx, m.workloads[m.in.Stable], now); err != nil { // before the last object of the trial is deleted
				return false, state, err
			}
		}
		if err := r.scale(ctx, moed, workload, o.Pods, revisions.UsableReplicas(workload, action.Replicas[i], o.Workers), wanted); err != nil {
			return false, state, err
		}
	}
	settled := m.in.Stable != rollout.None && m.in.Revisions[m.in.Stable].Replicas == m.in.Budget.Replicas && totalReplicas(m.in.Revisions) == m.in.Budget.Replicas
	return settled, state, nil
}

// movesOf adds the workloads to be created to the existing ones: the workload of the serving revision, and the workload
// of the candidate once no other change is in progress.
func (r *Reconciler) movesOf(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, workloads []*revisions.Workload, now time.Time) (moves, error) {
	m := moves{slices.Clone(workloads), rollout.Input{
		Budget: rollout.Budget{Replicas: *moed.Spec.Replicas, MaxUnavailable: *moed.Spec.Rollout.MaxUnavailable, MaxSurge: *moed.Spec.Rollout.MaxSurge},
		Stable: rollout.None, Candidate: rollout.None, Canary: moed.Spec.Rollout.CanaryReplicas, Hold: moed.Spec.Rollout.Rollback == semmoev1.RollbackManual,
	}}
	for _, workload := range workloads {
		m.in.Revisions = append(m.in.Revisions, revisions.StateOf(workload, o.Pods, o.Workers))
	}
	if o.Invalid != nil || o.Revision == "" || desired.Paused(moed) {
		return m, nil
	}
	find := func(revision string) int {
		return slices.IndexFunc(m.workloads, func(w *revisions.Workload) bool { return w.Name == moed.Name+"-"+revision })
	}
	if m.in.Stable = find(o.Revision); m.in.Stable == rollout.None {
		if err := r.add(ctx, &m, moed, o, o.Revision, o.Planning.Serving, ""); err != nil {
			return m, err
		}
		m.in.Stable = 0
	}
	if o.Planning.Candidate == nil {
		return m, nil
	}
	switch at := find(o.CandidateRevision); {
	case at >= 0 && revisions.OnTrial(m.workloads[at]):
		m.in.Candidate = at
	case at >= 0: // left over from earlier service: it is deleted first, and created again as a canary
	case rollout.MayTry(m.in.Budget, m.in.Revisions, m.in.Stable):
		if err := r.add(ctx, &m, moed, o, o.CandidateRevision, o.Planning.Candidate, semmoev1.RolloutCanary); err != nil {
			return m, err
		}
		m.in.Stable, m.in.Candidate = m.in.Stable+1, 0
	}
	if m.in.Candidate != rollout.None {
		m.in.Trial = trialOf(moed, m.workloads[m.in.Candidate], o, now)
	}
	return m, nil
}

// add inserts the not yet created workload of a revision before the others.
func (r *Reconciler) add(ctx context.Context, m *moves, moed *semmoev1.MoEDeployment, o observation, revision string, under *revisions.Layout, step string) error {
	own, err := r.own(ctx, moed)
	if err != nil {
		return err
	}
	workload, err := revisions.Render(moed, revision, *o.Inspection.Report, under, own)
	if err != nil {
		return err
	}
	if step != "" {
		metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationRollout, step)
	}
	m.workloads = slices.Insert(m.workloads, 0, workload)
	m.in.Revisions = slices.Insert(m.in.Revisions, 0, revisions.StateOf(workload, o.Pods, o.Workers))
	return nil
}

// decided executes the decision on the candidate, records what must outlive this reconciliation, and returns the state
// to report.
func (r *Reconciler) decided(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, m moves, action rollout.Action, now time.Time) (rolloutState, error) {
	workload, decision, plan := m.workloads[m.in.Candidate], action.Decision, o.Planning.Candidate.Short()
	state := rolloutState{
		Phase: semmoev1.RolloutPhaseCanary, Reason: decision.Reason, Candidate: o.CandidateRevision, Plan: plan, Again: decision.Again,
		Measured: gainOf(o, m.in.Trial.Comparison),
		Message:  fmt.Sprintf("Plan %s runs as a canary on %d of %d replicas: %s", plan, m.in.Trial.Canary, m.in.Budget.Replicas, decision.Message),
	}
	switch {
	case decision.Step == rollout.StepRollBack && m.in.Hold:
		state.Held, state.Reason = true, reasonRollbackHeld
		state.Message = fmt.Sprintf("Plan %s failed on its canary (%s), and spec.rollout.rollback is Manual. Roll it back with: kubectl annotate pplan -n %s %s %s%s=%s",
			plan, decision.Reason, moed.Namespace, o.Planning.Plan.Name, semmoev1.AnnotationFailed, o.CandidateRevision, decision.Reason)
		return state, r.mark(ctx, workload, semmoev1.RolloutCanary, now)
	case decision.Step == rollout.StepRollBack:
		state.Phase, state.Reason, state.Again = semmoev1.RolloutPhaseRollingBack, planner.ReasonRolledBack, time.Second
		state.Message = fmt.Sprintf("Plan %s is being rolled back. %s: %s", plan, decision.Reason, decision.Message)
		return state, r.recordFailure(ctx, o.Planning.Plan, o.CandidateRevision, decision, state.Measured)
	case decision.Step == rollout.StepPromote:
		state.Phase, state.Reason = semmoev1.RolloutPhasePromoting, "Promoting"
		state.Message = fmt.Sprintf("Plan %s passed its canary, and replicas move to it", plan)
		return state, r.promote(ctx, moed, workload, o.Planning.Plan, action, state.Measured, now)
	case decision.Reason == reasonInconclusive:
		state.Message += fmt.Sprintf(". It is promoted once requests prove that it is better, or with: %s", planner.ApproveCommand(moed, plan))
	}
	return state, nil
}

// promote starts moving replicas to a candidate, and marks the candidate as proven once all replicas have moved.
func (r *Reconciler) promote(ctx context.Context, moed *semmoev1.MoEDeployment, workload *revisions.Workload, plan *semmoev1.PlacementPlan, action rollout.Action, measured *measuredGain, now time.Time) error {
	if workload.Annotations[semmoev1.AnnotationRollout] == semmoev1.RolloutPromoting {
		if action.Proven {
			return r.mark(ctx, workload, "", now)
		}
		return nil
	}
	if err := r.record(ctx, plan, map[string]string{}, measured); err != nil { // recorded before the mark, which prevents a second run
		return err
	}
	if err := r.mark(ctx, workload, semmoev1.RolloutPromoting, now); err != nil {
		return err
	}
	r.Recorder.Eventf(moed, nil, corev1.EventTypeNormal, "CanaryPromoted", "Reconcile", "Revision %s is promoted: %s",
		workload.Labels[semmoev1.LabelRevision], printable.Line(action.Decision.Message, 900))
	return nil
}

// withoutCandidate returns the state while no candidate is on trial: a failed candidate may be rolling back, or a new
// one may wait for another change to complete.
func withoutCandidate(o observation, m moves) rolloutState {
	var state rolloutState
	if o.Planning.Candidate != nil {
		state.Reason = "WaitingForReplicas"
		state.Message = fmt.Sprintf("Plan %s starts its canary once all replicas run revision %s", o.Planning.Candidate.Short(), o.Revision)
	}
	for i, workload := range m.workloads {
		if state := m.in.Revisions[i]; i == m.in.Stable || !revisions.OnTrial(workload) || state.Replicas == 0 && state.Existing == 0 {
			continue
		}
		if reason := o.Planning.Hold.Reason; reason == planner.ReasonRolledBack || reason == planner.ReasonOutputChanged {
			digest := artifact.Digest(workload.Annotations[semmoev1.AnnotationPlanDigest])
			return rolloutState{
				Phase: semmoev1.RolloutPhaseRollingBack, Reason: reason, Message: o.Planning.Hold.Message,
				Candidate: workload.Labels[semmoev1.LabelRevision], Plan: digest.Short(),
			}
		}
	}
	return state
}

// rolloutStatus reports the rollout of a new plan. It uses the previous report only for the start time of the phase.
func rolloutStatus(previous *semmoev1.RolloutStatus, o observation, now time.Time) *semmoev1.RolloutStatus {
	if o.Rollout.Phase == "" {
		return nil
	}
	status := &semmoev1.RolloutStatus{
		Phase: o.Rollout.Phase, Since: metav1.NewTime(now.Truncate(time.Second)), StableRevision: o.Revision,
		CandidateRevision: o.Rollout.Candidate, CandidatePlan: o.Rollout.Plan, Message: printable.Line(o.Rollout.Message, 1024),
	}
	if previous != nil && previous.Phase == status.Phase && previous.CandidateRevision == status.CandidateRevision {
		status.Since = previous.Since
	}
	return status
}

func totalReplicas(states []rollout.Revision) int32 {
	var total int32
	for _, state := range states {
		total += state.Replicas
	}
	return total
}

// scale creates the workload, sets its replicas, or deletes it once it is unwanted and has no pods.
func (r *Reconciler) scale(ctx context.Context, moed *semmoev1.MoEDeployment, workload *revisions.Workload, pods []*corev1.Pod, replicas int32, wanted bool) error {
	switch {
	case workload.UID == "":
		*workload.Replicas() = replicas
		err := r.Create(ctx, workload.Object, client.FieldOwner(desired.Manager))
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("failed to create workload %s: %w", workload.Name, err)
		}
		if err == nil {
			childobjects.LogWrite(ctx, 0, "Created a workload", workload.Object, "replicas", replicas, "rollout", workload.Annotations[semmoev1.AnnotationRollout])
		}
		// Keep the plan before deleting the old workload, which may be the last object that references it.
		return childobjects.KeepPlan(ctx, r.Client, workload)
	case *workload.Replicas() != replicas:
		return childobjects.ChangeWorkload(ctx, r.Client, workload, "scale", func() { *workload.Replicas() = replicas })
	case !wanted && replicas == 0 && workload.Drained(pods):
		if changed, err := childobjects.SpecChanged(ctx, r.Live, moed); err != nil || changed {
			return err
		}
		err := r.Delete(ctx, workload.Object, client.Preconditions{UID: &workload.UID, ResourceVersion: &workload.ResourceVersion})
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("failed to delete workload %s: %w", workload.Name, err)
		}
		if err == nil {
			childobjects.LogWrite(ctx, 0, "Deleted a workload", workload.Object)
		}
	}
	return nil
}
