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
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/printable"
	"github.com/semmoe/operator/internal/rollout"
)

// rolloutState is how a new plan comes into service.
type rolloutState struct {
	// Phase is empty where none does.
	Phase semmoev1.RolloutPhase
	// Reason and Message say what it waits for, or why it has failed.
	Reason, Message string
	// Candidate is the revision of the new plan, Plan its short digest.
	Candidate, Plan string
	// Held tells that it has failed, and that nobody may take it back but a human.
	Held bool
	// Measured is what the candidate saves by its canary; nil where that is not known.
	Measured *measuredGain
	// Again is when to look again; zero where something else will call.
	Again time.Duration
}

const (
	reasonInconclusive = rollout.ReasonInconclusive
	reasonRollbackHeld = "RollbackPending"
)

// moves are the workloads of a MoEDeployment, the newest first, and what is to be decided from them.
type moves struct {
	workloads []*revisions.Workload
	in        rollout.Input
}

// reconcileRevisions creates the workload of the revision that the spec asks for, moves replicas towards it within the
// budget, tries the candidate beside it, and removes empty old ones. It reports whether all replicas are asked of that revision
// alone, and how the candidate fares.
func (r *Reconciler) reconcileRevisions(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, workloads []*revisions.Workload, now time.Time) (bool, rolloutState, error) {
	var state rolloutState
	m, err := r.movesOf(ctx, moed, o, workloads, now)
	if err != nil {
		return false, state, err
	}
	action := rollout.Next(m.in)
	if m.in.Stable != rollout.None {
		// What serves is proven, whoever has proven it.
		if err := r.mark(ctx, m.workloads[m.in.Stable], "", now); err != nil {
			return false, state, err
		}
		if m.in.Candidate == rollout.None {
			state = withoutCandidate(o, m)
		} else if state, err = r.decided(ctx, moed, o, m, action, now); err != nil || state.Phase == semmoev1.RolloutPhaseRollingBack {
			// A candidate goes when the cache shows that its plan has failed: else it could be begun again in between.
			return false, state, err
		}
	}
	for i, workload := range m.workloads {
		// Where it is not known what serves, an empty workload may be all that tells it.
		wanted := m.in.Stable == rollout.None || i == m.in.Stable || i == m.in.Candidate
		if !wanted && revisions.OnTrial(workload) && *workload.Replicas() == 0 && workload.Drained(o.Pods) {
			if err := r.markAlone(ctx, m.workloads[m.in.Stable], now); err != nil { // before the last sign of the trial is gone
				return false, state, err
			}
		}
		if err := r.scale(ctx, moed, workload, o.Pods, revisions.Vacant(workload, action.Replicas[i], o.Workers), wanted); err != nil {
			return false, state, err
		}
	}
	settled := m.in.Stable != rollout.None && m.in.Revisions[m.in.Stable].Replicas == m.in.Budget.Replicas && totalReplicas(m.in.Revisions) == m.in.Budget.Replicas
	return settled, state, nil
}

// movesOf adds the workloads that are to be created to those that exist: that of the revision that serves, and that of the
// candidate once nothing else is being changed.
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
	case at >= 0: // left over from when it was in service: it goes, and comes back as a canary
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

// add puts the workload of a revision, that is still to be created, before the others.
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

// decided records what was decided on the candidate, where it outlives this reconciliation, and tells it.
func (r *Reconciler) decided(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, m moves, action rollout.Action, now time.Time) (rolloutState, error) {
	workload, decision, plan := m.workloads[m.in.Candidate], action.Decision, o.Planning.Candidate.Short()
	state := rolloutState{
		Phase: semmoev1.RolloutPhaseCanary, Reason: decision.Reason, Candidate: o.CandidateRevision, Plan: plan, Again: decision.Again,
		Measured: gainOf(o, m.in.Trial.Comparison),
		Message:  fmt.Sprintf("Plan %s is tried on %d of %d replicas: %s", plan, m.in.Trial.Canary, m.in.Budget.Replicas, decision.Message),
	}
	switch {
	case decision.Step == rollout.StepRollBack && m.in.Hold:
		state.Held, state.Reason = true, reasonRollbackHeld
		state.Message = fmt.Sprintf("Plan %s has failed on its canary (%s), and spec.rollout.rollback is Manual. Take it back with: kubectl annotate pplan -n %s %s %s%s=%s",
			plan, decision.Reason, moed.Namespace, o.Planning.Plan.Name, semmoev1.AnnotationFailed, o.CandidateRevision, decision.Reason)
		return state, r.mark(ctx, workload, semmoev1.RolloutCanary, now)
	case decision.Step == rollout.StepRollBack:
		state.Phase, state.Reason, state.Again = semmoev1.RolloutPhaseRollingBack, planner.ReasonRolledBack, time.Second
		state.Message = fmt.Sprintf("Plan %s is taken back. %s: %s", plan, decision.Reason, decision.Message)
		return state, r.giveUp(ctx, o.Planning.Plan, o.CandidateRevision, decision, state.Measured)
	case decision.Step == rollout.StepPromote:
		state.Phase, state.Reason = semmoev1.RolloutPhasePromoting, "Promoting"
		state.Message = fmt.Sprintf("Plan %s has proven itself, and replicas move to it", plan)
		return state, r.promote(ctx, moed, workload, o.Planning.Plan, action, state.Measured, now)
	case decision.Reason == reasonInconclusive:
		state.Message += fmt.Sprintf(". It is promoted once requests prove it, or with: %s", planner.ApproveCommand(moed, plan))
	}
	return state, nil
}

// promote lets replicas move to a candidate, and takes it for proven when nothing else is left.
func (r *Reconciler) promote(ctx context.Context, moed *semmoev1.MoEDeployment, workload *revisions.Workload, plan *semmoev1.PlacementPlan, action rollout.Action, measured *measuredGain, now time.Time) error {
	if workload.Annotations[semmoev1.AnnotationRollout] == semmoev1.RolloutPromoting {
		if action.Proven {
			return r.mark(ctx, workload, "", now)
		}
		return nil
	}
	if err := r.record(ctx, plan, map[string]string{}, measured); err != nil { // the workload's mark says that it is done
		return err
	}
	if err := r.mark(ctx, workload, semmoev1.RolloutPromoting, now); err != nil {
		return err
	}
	r.Recorder.Eventf(moed, nil, corev1.EventTypeNormal, "CanaryPromoted", "Reconcile", "Revision %s is promoted: %s",
		workload.Labels[semmoev1.LabelRevision], printable.Line(action.Decision.Message, 900))
	return nil
}

// withoutCandidate is the state where no candidate is tried: one that has failed may be going back, or one may wait for a change
// that the user has made.
func withoutCandidate(o observation, m moves) rolloutState {
	var state rolloutState
	if o.Planning.Candidate != nil {
		state.Reason = "WaitingForReplicas"
		state.Message = fmt.Sprintf("Plan %s is tried once revision %s is on all replicas", o.Planning.Candidate.Short(), o.Revision)
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

// rolloutStatus reports how a new plan comes into service. It reads what was reported before only for the time since when.
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

// scale creates the workload, brings it to a number of replicas, or deletes it once it is neither wanted nor has pods.
func (r *Reconciler) scale(ctx context.Context, moed *semmoev1.MoEDeployment, workload *revisions.Workload, pods []*corev1.Pod, replicas int32, wanted bool) error {
	switch {
	case workload.UID == "":
		*workload.Replicas() = replicas
		if err := r.Create(ctx, workload.Object, client.FieldOwner(desired.Manager)); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create workload %s: %w", workload.Name, err)
		}
		// Before the one that goes may be the last that keeps the plan.
		return revisions.KeepPlan(ctx, r.Client, workload)
	case *workload.Replicas() != replicas:
		return workload.Change(ctx, r.Client, "scale", func() { *workload.Replicas() = replicas })
	case !wanted && replicas == 0 && workload.Drained(pods):
		if changed, err := desired.SpecChanged(ctx, r.Live, moed); err != nil || changed {
			return err
		}
		if err := r.Delete(ctx, workload.Object, client.Preconditions{UID: &workload.UID, ResourceVersion: &workload.ResourceVersion}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete workload %s: %w", workload.Name, err)
		}
	}
	return nil
}
