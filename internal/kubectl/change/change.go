// Package change decides what a user's word changes: the patches that approve, roll back, pause and resume write. Each does what the
// documentation tells to do by hand, and nothing else.
//
// Invariants:
//   - A patch names one annotation or one field; what else stands in the object stays as it is.
//   - What cannot be done in the present state is a *StateError that says what could be done instead. What is so already is a change
//     without a patch, and no error: whoever repeats a command finds it done.
package change

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// Change is what is to be written, and what to say of it.
type Change struct {
	// Kind and Name are those of the object.
	Kind, Name string
	// Patch is a merge patch; nil where it is so already.
	Patch map[string]any
	// Done says what is so afterwards, as the end of a sentence that begins with the object.
	Done string
	// Declared is the field that a repository may declare otherwise, with its value; empty for annotations, which nobody declares.
	Declared string
}

// StateError says why something cannot be done in the present state.
type StateError struct{ message string }

func (e *StateError) Error() string { return e.message }

func statef(format string, args ...any) error { return &StateError{fmt.Sprintf(format, args...)} }

const (
	deploymentKind = "MoEDeployment"
	planKind       = "PlacementPlan"
)

// nested is a value at a path.
func nested(value any, path ...string) map[string]any {
	for _, key := range slices.Backward(path) {
		value = map[string]any{key: value}
	}
	return value.(map[string]any)
}

// SetReconciliation pauses or resumes a deployment.
func SetReconciliation(moed *semmoev1.MoEDeployment, mode semmoev1.ReconciliationMode) Change {
	c := Change{Kind: deploymentKind, Name: moed.Name, Declared: "spec.reconciliation: " + string(mode)}
	c.Done = "resumed: profiles, plans and roll-outs may begin"
	if mode == semmoev1.ReconciliationPaused {
		c.Done = "paused: no profile, plan or roll-out begins; repair and serving go on"
	}
	if moed.Spec.Reconciliation != mode {
		c.Patch = nested(string(mode), "spec", "reconciliation")
	}
	return c
}

// Approve lets a plan be rolled out: the one given, or, without one, that which waits. plans are those of the namespace.
func Approve(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan, plan *semmoev1.PlacementPlan) (Change, error) {
	if plan == nil {
		var err error
		if plan, err = waiting(moed, plans); err != nil {
			return Change{}, err
		}
	}
	short := plan.Status.Plan
	switch {
	case short == "":
		return Change{}, statef("PlacementPlan %s is not solved yet: there is nothing to approve", plan.Name)
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory:
		return Change{}, advisoryError(moed)
	case plan.Status.Verdict != semmoev1.VerdictGain:
		return Change{}, statef("plan %s promises no gain (verdict %s), and is not rolled out whoever approves it: kubectl semmoe explain %s", short, plan.Status.Verdict, plan.Name)
	}
	if err := misfit(moed, plan); err != nil {
		return Change{}, err
	}
	if !concerns(moed, plan) {
		return Change{}, statef("PlacementPlan %s is not one that the operator has made for MoEDeployment %s: approval alone does not bring it into service; kubectl semmoe rollback %s --to %s pins it, which needs no approval", plan.Name, moed.Name, moed.Name, plan.Name)
	}
	if err := untried(moed, plan); err != nil {
		return Change{}, err
	}
	c := Change{Kind: deploymentKind, Name: moed.Name, Done: fmt.Sprintf("approved for plan %s (PlacementPlan %s)%s%s", short, plan.Name, whileMarked(moed, plan), whilePaused(moed))}
	if moed.Annotations[semmoev1.AnnotationApprove] != short {
		c.Patch = nested(short, "metadata", "annotations", semmoev1.AnnotationApprove)
	}
	return c, nil
}

func advisoryError(moed *semmoev1.MoEDeployment) error {
	return statef("spec.placement.approval of MoEDeployment %s is Advisory: no plan is ever rolled out; set it to Manual or Automatic first", moed.Name)
}

// whilePaused says, after what is so, why nothing follows from it yet; empty where something does.
func whilePaused(moed *semmoev1.MoEDeployment) string {
	if moed.Spec.Reconciliation != semmoev1.ReconciliationPaused {
		return ""
	}
	return fmt.Sprintf("; spec.reconciliation is Paused: nothing comes into service until kubectl semmoe resume %s", moed.Name)
}

// concerns tells that a deployment may try a plan: it was made for that, or the spec pins it.
func concerns(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) bool {
	ref := moed.Spec.Placement.PlanRef
	return plan.Labels[semmoev1.LabelDeployment] == moed.Name || plan.Name == moed.Status.Plan || ref != nil && ref.Name == plan.Name
}

func serves(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) bool {
	return plan.Status.Plan == moed.Status.PlanDigest
}

// misfit is why a deployment can never serve under a plan; nil where it may.
func misfit(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) error {
	parallelism, engine := moed.Spec.Parallelism, moed.Spec.Engine.Type
	switch {
	case moed.Status.Model != nil && plan.Status.ModelDigest != moed.Status.Model.Digest:
		return statef("PlacementPlan %s is for another checkpoint than MoEDeployment %s serves", plan.Name, moed.Name)
	case plan.Spec.ExpertParallelSize != parallelism.ExpertParallelSize || plan.Spec.Attention != parallelism.Attention:
		return statef("PlacementPlan %s is for attention %s on %d ranks; MoEDeployment %s has %s on %d",
			plan.Name, plan.Spec.Attention, plan.Spec.ExpertParallelSize, moed.Name, parallelism.Attention, parallelism.ExpertParallelSize)
	case (plan.Spec.TokenShuffle == semmoev1.TokenShuffleDisabled) != leavesTokens(moed):
		return statef("PlacementPlan %s has tokenShuffle %s; spec.placement.tokenShuffle of MoEDeployment %s is %s", plan.Name,
			cmp.Or(plan.Spec.TokenShuffle, semmoev1.TokenShuffleEnabled), moed.Name, cmp.Or(moed.Spec.Placement.TokenShuffle, semmoev1.TokenShuffleDisabled))
	case plan.Spec.Engine != engine:
		return statef("PlacementPlan %s is for engine %s; MoEDeployment %s has %s", plan.Name, plan.Spec.Engine, moed.Name, engine)
	case plan.Status.Tier == semmoev1.TierTables && parallelism.Attention != semmoev1.AttentionDataParallel:
		return statef("PlacementPlan %s has new tables alone; with attention %s engines read the tables of their plan once, when they start: it would not be used", plan.Name, parallelism.Attention)
	}
	return nil
}

// untried is why a plan that fits is not tried as things are, be it approved or pinned; nil where it may be.
func untried(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) error {
	reason, rollout := "", moed.Status.Rollout
	if rolledOut := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut); rolledOut != nil {
		reason = rolledOut.Reason
	}
	switch failed, changed := marksOf(plan, semmoev1.AnnotationFailed), marksOf(plan, semmoev1.AnnotationOutputChanged); {
	case serves(moed, plan):
		return nil
	case len(failed) > 0 && metav1.IsControlledBy(plan, moed):
		return statef("PlacementPlan %s has failed on a canary (revision %s), and is not tried again: to try it all the same, %s",
			plan.Name, strings.TrimPrefix(failed[0], semmoev1.AnnotationFailed), unmarkCommand(plan, failed))
	case reason == "RollbackPending" && rollout != nil && rollout.CandidatePlan == plan.Status.Plan:
		return statef("PlacementPlan %s has failed on its canary, and stays there because spec.rollout.rollback of MoEDeployment %s is Manual: no approval promotes it while it fails; to take it back, kubectl semmoe rollback %s", plan.Name, moed.Name, moed.Name)
	case reason == "OutputChanged" && plan.Name == moed.Status.Plan && len(changed) > 0:
		return statef("the engine gives other answers under PlacementPlan %s (revision %s): it is not tried again until the engine's image, its arguments or the plan change",
			plan.Name, strings.TrimPrefix(changed[0], semmoev1.AnnotationOutputChanged))
	}
	return nil
}

// whileMarked says, after what is so, which revisions have failed under a plan; empty where none has. Which one is next, and whose each of
// them is, the operator alone can tell: marks of another deployment's revisions hold nothing here, and are not ours to remove.
func whileMarked(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) string {
	failed, changed := marksOf(plan, semmoev1.AnnotationFailed), marksOf(plan, semmoev1.AnnotationOutputChanged)
	if len(failed)+len(changed) == 0 || serves(moed, plan) {
		return ""
	}
	var revisions []string
	for _, mark := range append(failed, changed...) {
		_, revision, _ := strings.Cut(mark, "/")
		revisions = append(revisions, revision)
	}
	return fmt.Sprintf("; should the next revision be one that has failed under it before (%s), it is held, and status.conditions says so", strings.Join(revisions, ", "))
}

// marksOf are the annotations of a plan that begin with a prefix, which a revision follows.
func marksOf(plan *semmoev1.PlacementPlan, prefix string) []string {
	keys := slices.Sorted(maps.Keys(plan.Annotations))
	return slices.DeleteFunc(keys, func(key string) bool { return !strings.HasPrefix(key, prefix) })
}

// unmarkCommand removes annotations of a plan.
func unmarkCommand(plan *semmoev1.PlacementPlan, keys []string) string {
	return fmt.Sprintf("kubectl annotate pplan -n %s %s %s-", plan.Namespace, plan.Name, strings.Join(keys, "- "))
}

// leavesTokens tells that the engine leaves tokens on the ranks where attention puts them. With attention DataParallel they follow requests.
func leavesTokens(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel && moed.Spec.Placement.TokenShuffle != semmoev1.TokenShuffleEnabled
}

// holds are the reasons of RolledOut for which a plan waits for approval.
var holds = []string{"AwaitingApproval", "RolloutInterruptsService", "NoRouter", "CanaryInconclusive"}

// waiting is the plan that waits for approval, or has been approved and is on its way.
func waiting(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan) (*semmoev1.PlacementPlan, error) {
	rolledOut := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
	if rolledOut == nil {
		return nil, statef("the operator has not looked at MoEDeployment %s yet: nothing waits for approval", moed.Name)
	}
	for i := range plans {
		plan := &plans[i]
		short := plan.Status.Plan
		if short == "" || !concerns(moed, plan) {
			continue
		}
		candidate := moed.Status.Rollout != nil && moed.Status.Rollout.CandidatePlan == short
		wanted := slices.Contains(holds, rolledOut.Reason) && (candidate || moed.Status.Rollout == nil && plan.Name == moed.Status.Plan)
		// Tables that wait are told of beside the layout that serves, and are no layout to be wanted.
		tables := plan.Status.Tier == semmoev1.TierTables && strings.Contains(rolledOut.Message, "AwaitingApproval") && strings.Contains(rolledOut.Message, "="+short)
		if wanted && plan.Status.Tier != semmoev1.TierTables || tables {
			return plan, nil
		}
	}
	for i := range plans {
		if short := plans[i].Status.Plan; short != "" && short == moed.Annotations[semmoev1.AnnotationApprove] {
			return &plans[i], nil // it is approved already, and not held any more
		}
	}
	return nil, statef("no plan of MoEDeployment %s waits for approval (%s: %s)", moed.Name, rolledOut.Reason, rolledOut.Message)
}

// TakeBack takes back the plan that is on trial: its canary has failed by a person's judgement.
func TakeBack(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan, why string) (Change, error) {
	rollout := moed.Status.Rollout
	if rollout == nil || rollout.CandidateRevision == "" {
		return Change{}, statef("no plan of MoEDeployment %s is on trial: name the plan to go back to with --to, which pins it", moed.Name)
	}
	for _, plan := range plans {
		if plan.Status.Plan == "" || plan.Status.Plan != rollout.CandidatePlan || !concerns(moed, &plan) {
			continue
		}
		key := semmoev1.AnnotationFailed + rollout.CandidateRevision
		c := Change{Kind: planKind, Name: plan.Name, Done: fmt.Sprintf("taken back: revision %s goes, and is not tried again until the annotation %s is removed", rollout.CandidateRevision, key)}
		if plan.Annotations[key] == "" {
			c.Patch = nested(why, "metadata", "annotations", key)
		}
		return c, nil
	}
	return Change{}, statef("there is no PlacementPlan of plan %s, which is on trial", rollout.CandidatePlan)
}

// Pin serves a plan, whatever others promise, until Unpin: the way back to an earlier one.
func Pin(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) (Change, error) {
	if !meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) || plan.Status.Plan == "" {
		return Change{}, statef("PlacementPlan %s is not published: it cannot be served", plan.Name)
	}
	if err := misfit(moed, plan); err != nil {
		return Change{}, err
	}
	switch {
	case plan.Status.Verdict != semmoev1.VerdictGain:
		return Change{}, statef("PlacementPlan %s promises no gain (verdict %s): the operator would not serve it", plan.Name, plan.Status.Verdict)
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory && !serves(moed, plan):
		return Change{}, advisoryError(moed)
	}
	if err := untried(moed, plan); err != nil {
		return Change{}, err
	}
	how, yet := "it serves once its canary has proven it", whileMarked(moed, plan)+whilePaused(moed)
	switch {
	case serves(moed, plan):
		how, yet = "it stays in service", ""
	case plan.Status.Tier == semmoev1.TierTables:
		how = "its tables are used with the placement that they are for"
	}
	c := Change{
		Kind: deploymentKind, Name: moed.Name, Declared: "spec.placement.planRef.name: " + plan.Name,
		Done: fmt.Sprintf("pinned to PlacementPlan %s (plan %s): %s, and no drift replaces it%s", plan.Name, plan.Status.Plan, how, yet),
	}
	if ref := moed.Spec.Placement.PlanRef; ref == nil || ref.Name != plan.Name {
		c.Patch = nested(plan.Name, "spec", "placement", "planRef", "name")
	}
	return c, nil
}

// Unpin lets the operator choose the plan again.
func Unpin(moed *semmoev1.MoEDeployment) Change {
	c := Change{
		Kind: deploymentKind, Name: moed.Name, Declared: "the removal of spec.placement.planRef",
		Done: "no longer pinned: the plan that the spec asks for, or what drift has led to since, comes into service",
	}
	if moed.Spec.Placement.PlanRef != nil {
		c.Patch = nested(nil, "spec", "placement", "planRef")
	}
	return c
}
