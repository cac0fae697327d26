package moedeployment

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/podhealth"
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
	// Again is when to look again; zero where something else will call.
	Again time.Duration
}

const (
	reasonUnconfirmed  = rollout.ReasonUnconfirmed
	reasonRollbackHeld = "RollbackHeld"
)

// rollOut are the workloads of a MoEDeployment, the newest first, and what replicas are moved towards among them.
type rollOut struct {
	workloads []*appsv1.StatefulSet
	states    []rollout.Revision
	budget    rollout.Budget
	// stable and candidate are indices; rollout.None where there is none.
	stable, candidate int
}

// reconcileRevisions creates the workload of the revision that the spec asks for, moves replicas towards it within the
// budget, tries the candidate beside it, and removes empty old ones. It reports whether all replicas are asked of that revision
// alone, and how the candidate fares.
func (r *Reconciler) reconcileRevisions(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, workloads []*appsv1.StatefulSet, now time.Time) (bool, rolloutState, error) {
	var state rolloutState
	moves, err := r.revisionsOf(moed, o, workloads)
	if err != nil {
		return false, state, err
	}
	goal := rollout.Goal{Stable: moves.stable, Candidate: rollout.None}
	if moves.stable != rollout.None {
		// What serves is proven, whoever has proven it.
		if err := r.mark(ctx, moves.workloads[moves.stable], ""); err != nil {
			return false, state, err
		}
		if goal, state, err = r.tryCandidate(ctx, moed, o, moves, now); err != nil {
			return false, state, err
		}
	}
	target := rollout.Replicas(moves.budget, moves.states, goal)
	for i, workload := range moves.workloads {
		if err := r.scale(ctx, workload, target[i], i == moves.stable || i == moves.candidate); err != nil {
			return false, state, err
		}
	}
	settled := moves.stable != rollout.None && moves.states[moves.stable].Replicas == moves.budget.Replicas && totalReplicas(moves.states) == moves.budget.Replicas
	return settled, state, nil
}

// revisionsOf adds the workloads that are to be created to those that exist: that of the revision that serves, and that of the
// candidate once nothing else is being changed.
func (r *Reconciler) revisionsOf(moed *semmoev1.MoEDeployment, o observation, workloads []*appsv1.StatefulSet) (rollOut, error) {
	m := rollOut{
		workloads: slices.Clone(workloads), stable: rollout.None, candidate: rollout.None,
		budget: rollout.Budget{Replicas: *moed.Spec.Replicas, MaxUnavailable: *moed.Spec.Rollout.MaxUnavailable, MaxSurge: *moed.Spec.Rollout.MaxSurge},
	}
	if o.Invalid == nil && o.Revision != "" && !paused(moed) {
		if err := r.add(&m, moed, o); err != nil {
			return m, err
		}
	}
	for _, workload := range m.workloads {
		m.states = append(m.states, stateOf(workload, o.Pods))
	}
	return m, nil
}

// add finds or makes the workloads of the revision that serves and of the candidate.
func (r *Reconciler) add(m *rollOut, moed *semmoev1.MoEDeployment, o observation) error {
	find := func(revision string) int {
		return slices.IndexFunc(m.workloads, func(w *appsv1.StatefulSet) bool { return w.Name == moed.Name+"-"+revision })
	}
	if m.stable = find(o.Revision); m.stable < 0 {
		workload, err := render(moed, o.Revision, *o.Inspection.Report, o.Planning.Serving, r.Image)
		if err != nil {
			return err
		}
		m.workloads, m.stable = slices.Insert(m.workloads, 0, workload), 0
	}
	if o.Planning.Candidate == nil {
		return nil
	}
	at := find(o.CandidateRevision)
	switch {
	case at >= 0 && onTrial(m.workloads[at]):
		m.candidate = at
	case at >= 0: // left over from when it was in service: it goes, and comes back as a canary
	case m.mayTry(o.Pods):
		workload, err := render(moed, o.CandidateRevision, *o.Inspection.Report, o.Planning.Candidate, r.Image)
		if err != nil {
			return err
		}
		metav1.SetMetaDataAnnotation(&workload.ObjectMeta, semmoev1.AnnotationRollout, semmoev1.RolloutCanary)
		m.workloads, m.stable, m.candidate = slices.Insert(m.workloads, 0, workload), m.stable+1, 0
	}
	return nil
}

// mayTry tells that the revision that serves is complete, and nothing else is left: a user's change comes first.
func (m *rollOut) mayTry(pods []*corev1.Pod) bool {
	for i, workload := range m.workloads {
		state := stateOf(workload, pods)
		switch {
		case i != m.stable && (state.Replicas > 0 || state.Existing > 0):
			return false
		case i == m.stable && (state.Replicas != m.budget.Replicas || state.ReadyReplicas(state.Replicas) < max(1, m.budget.Minimum())):
			return false
		}
	}
	return true
}

// tryCandidate decides on the candidate, and what replicas are moved towards by that.
func (r *Reconciler) tryCandidate(ctx context.Context, moed *semmoev1.MoEDeployment, o observation, m rollOut, now time.Time) (rollout.Goal, rolloutState, error) {
	goal := rollout.Goal{Stable: m.stable, Candidate: rollout.None}
	if m.candidate == rollout.None {
		return goal, withoutCandidate(o, m), nil
	}
	workload := m.workloads[m.candidate]
	decision := rollout.Judge(trialOf(moed, workload, o, now))
	plan := o.Planning.Candidate.Short()
	state := rolloutState{
		Phase: semmoev1.RolloutPhaseCanary, Reason: decision.Reason, Candidate: o.CandidateRevision, Plan: plan, Again: decision.Again,
		Message: fmt.Sprintf("Plan %s is tried on %d of %d replicas: %s", plan, rollout.CanarySize(m.budget.Replicas, moed.Spec.Rollout.CanaryReplicas), m.budget.Replicas, decision.Message),
	}
	canary := rollout.Goal{Stable: m.stable, Candidate: m.candidate, Canary: moed.Spec.Rollout.CanaryReplicas}
	switch {
	case decision.Step == rollout.StepRollBack && moed.Spec.Rollout.Rollback == semmoev1.RollbackManual:
		state.Held, state.Reason = true, reasonRollbackHeld
		state.Message = fmt.Sprintf("Plan %s has failed on its canary, and spec.rollout.rollback is Manual. %s: %s. Take it back with: kubectl annotate pplan -n %s %s %s%s=Manual",
			plan, decision.Reason, decision.Message, moed.Namespace, o.Planning.Plan.Name, semmoev1.AnnotationFailed, o.CandidateRevision)
		return canary, state, r.mark(ctx, workload, semmoev1.RolloutCanary)
	case decision.Step == rollout.StepRollBack:
		state.Phase, state.Message = semmoev1.RolloutPhaseRollingBack, fmt.Sprintf("Plan %s is taken back. %s: %s", plan, decision.Reason, decision.Message)
		return goal, state, r.giveUp(ctx, o.Planning.Plan, o.CandidateRevision, decision)
	case decision.Step == rollout.StepPromote:
		state.Phase, state.Reason = semmoev1.RolloutPhasePromoting, "Promoting"
		state.Message = fmt.Sprintf("Plan %s has proven itself, and replicas move to it", plan)
		goal.Stable = m.candidate
		return goal, state, r.promote(ctx, moed, m, decision)
	case decision.Reason == reasonUnconfirmed:
		state.Message += fmt.Sprintf(". It is promoted once it is seen to be better (spec.routing.samplePercent above 0, and requests), or with: %s", approveCommand(moed, plan))
	}
	return canary, state, nil
}

// withoutCandidate is the state where no candidate is tried: one that has failed may be going back, or one may wait for a change
// that the user has made.
func withoutCandidate(o observation, m rollOut) rolloutState {
	var state rolloutState
	if o.Planning.Candidate != nil {
		state.Reason = "WaitingForReplicas"
		state.Message = fmt.Sprintf("Plan %s is tried once revision %s is on all replicas", o.Planning.Candidate.Short(), o.Revision)
	}
	for i, workload := range m.workloads {
		if i == m.stable || !onTrial(workload) || m.states[i].Replicas == 0 && m.states[i].Existing == 0 {
			continue
		}
		if reason := o.Planning.Hold.reason; reason == reasonRolledBack || reason == reasonOutputChanged {
			digest := workload.Annotations[semmoev1.AnnotationPlanDigest]
			return rolloutState{
				Phase: semmoev1.RolloutPhaseRollingBack, Reason: reason, Message: o.Planning.Hold.message,
				Candidate: workload.Labels[semmoev1.LabelRevision], Plan: digest[:min(len(digest), 16)],
			}
		}
	}
	return state
}

// promote lets replicas move to the candidate, and takes it for proven when nothing else is left.
func (r *Reconciler) promote(ctx context.Context, moed *semmoev1.MoEDeployment, m rollOut, decision rollout.Decision) error {
	workload := m.workloads[m.candidate]
	if workload.Annotations[semmoev1.AnnotationRollout] != semmoev1.RolloutPromoting {
		if err := r.mark(ctx, workload, semmoev1.RolloutPromoting); err != nil {
			return err
		}
		r.Recorder.Eventf(moed, nil, corev1.EventTypeNormal, "CanaryPromoted", "Reconcile", "Revision %s is promoted: %s", workload.Labels[semmoev1.LabelRevision], podhealth.Truncate(decision.Message, 900))
		return nil
	}
	for i, state := range m.states {
		if i != m.candidate && (state.Replicas > 0 || state.Existing > 0) {
			return nil
		}
	}
	if state := m.states[m.candidate]; state.Replicas == m.budget.Replicas && state.ReadyReplicas(state.Replicas) >= m.budget.Minimum() {
		return r.mark(ctx, workload, "")
	}
	return nil
}

// rolloutStatus reports how a new plan comes into service. It reads what was reported before only for the time since when.
func rolloutStatus(previous *semmoev1.RolloutStatus, o observation, now time.Time) *semmoev1.RolloutStatus {
	if o.Rollout.Phase == "" {
		return nil
	}
	status := &semmoev1.RolloutStatus{
		Phase: o.Rollout.Phase, Since: metav1.NewTime(now.Truncate(time.Second)), StableRevision: o.Revision,
		CandidateRevision: o.Rollout.Candidate, CandidatePlan: o.Rollout.Plan, Message: podhealth.Truncate(o.Rollout.Message, 1024),
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
func (r *Reconciler) scale(ctx context.Context, workload *appsv1.StatefulSet, replicas int32, wanted bool) error {
	switch {
	case workload.UID == "":
		workload.Spec.Replicas = &replicas
		if err := r.Create(ctx, workload, client.FieldOwner(manager)); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create workload %s: %w", workload.Name, err)
		}
	case *workload.Spec.Replicas != replicas:
		base := workload.DeepCopy()
		workload.Spec.Replicas = &replicas
		// The lock refuses a decision that was made from a stale cache.
		if err := r.Patch(ctx, workload, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}), client.FieldOwner(manager)); err != nil {
			return fmt.Errorf("scale workload %s: %w", workload.Name, err)
		}
	case !wanted && replicas == 0 && workload.Status.Replicas == 0 && workload.Status.ObservedGeneration == workload.Generation:
		if err := r.Delete(ctx, workload, client.Preconditions{UID: &workload.UID, ResourceVersion: &workload.ResourceVersion}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete workload %s: %w", workload.Name, err)
		}
	}
	return nil
}

// stateOf is the planner's view of a workload and its pods.
func stateOf(workload *appsv1.StatefulSet, pods []*corev1.Pod) rollout.Revision {
	state := rollout.Revision{Replicas: *workload.Spec.Replicas, Trial: onTrial(workload)}
	if workload.UID == "" {
		return state
	}
	state.Ready = make([]bool, state.Replicas)
	for _, pod := range pods {
		if !metav1.IsControlledBy(pod, workload) || pod.DeletionTimestamp != nil {
			continue
		}
		state.Existing++
		ordinal, err := strconv.Atoi(pod.Name[strings.LastIndexByte(pod.Name, '-')+1:])
		if err == nil && ordinal < len(state.Ready) {
			state.Ready[ordinal] = podhealth.Ready(pod)
		}
	}
	return state
}
