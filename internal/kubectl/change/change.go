// SPDX-License-Identifier: Apache-2.0

// Package change computes the patches of the commands approve, rollback, pause, resume and replan. Each patch equals
// the manual change that the documentation describes.
//
// Invariants:
//   - A patch sets one annotation or one field. All other fields of the object stay as they are.
//   - If the present state does not allow a change, the result is a *StateError that names a possible action. If the
//     object already has the requested state, the change has no patch and is no error, so that commands can be
//     repeated.
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

// Change is a patch of one object, and its description.
type Change struct {
	// Kind and Name identify the object.
	Kind, Name string
	// Patch is a JSON merge patch. It is nil if the object already has the requested state.
	Patch map[string]any
	// Done describes the new state. It completes a sentence that begins with the name of the object.
	Done string
	// Declared is the changed field with its new value, for the hint to commit it to a GitOps repository. It is empty
	// for annotations, which repositories do not declare.
	Declared string
}

// StateError reports why the present state does not allow a change.
type StateError struct{ message string }

func (e *StateError) Error() string { return e.message }

func statef(format string, args ...any) error { return &StateError{fmt.Sprintf(format, args...)} }

const (
	deploymentKind = "MoEDeployment"
	planKind       = "PlacementPlan"
)

// nested returns nested maps that contain the value at a path.
func nested(value any, path ...string) map[string]any {
	for _, key := range slices.Backward(path) {
		value = map[string]any{key: value}
	}
	return value.(map[string]any)
}

// SetReconciliation pauses or resumes a deployment.
func SetReconciliation(moed *semmoev1.MoEDeployment, mode semmoev1.ReconciliationMode) Change {
	c := Change{Kind: deploymentKind, Name: moed.Name, Declared: "spec.reconciliation: " + string(mode)}
	c.Done = "resumed: profiles, plans and rollouts can start"
	if mode == semmoev1.ReconciliationPaused {
		c.Done = "paused: no profile, plan or rollout starts; repair and serving continue"
	}
	if moed.Spec.Reconciliation != mode {
		c.Patch = nested(string(mode), "spec", "reconciliation")
	}
	return c
}

// Approve approves the given plan, or the pending plan if plan is nil. plans are the PlacementPlans of the namespace.
func Approve(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan, plan *semmoev1.PlacementPlan) (Change, error) {
	if plan == nil {
		if revision := changeOnTrial(moed); revision != "" && moed.Status.PendingPlan == revision {
			return approveChange(moed, revision), nil
		}
		var err error
		if plan, err = pendingPlan(moed, plans); err != nil {
			return Change{}, err
		}
	}
	short := plan.Status.Plan
	switch {
	case short == "":
		return Change{}, statef("PlacementPlan %s is not solved yet and cannot be approved", plan.Name)
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory:
		return Change{}, advisoryError(moed)
	case overlapWaits(moed, short):
		return approveOverlap(moed, short), nil
	case plan.Status.Verdict != semmoev1.VerdictGain:
		return Change{}, statef("plan %s promises no gain (verdict %s) and is not rolled out even if approved: run kubectl semmoe explain %s", short, plan.Status.Verdict, plan.Name)
	}
	if err := incompatibility(moed, plan); err != nil {
		return Change{}, err
	}
	if !appliesTo(moed, plan) {
		return Change{}, statef("PlacementPlan %s was not created by the operator for MoEDeployment %s, and an approval does not roll it out. To pin it without approval, run kubectl semmoe rollback %s --to %s", plan.Name, moed.Name, moed.Name, plan.Name)
	}
	if err := rolloutBlock(moed, plan); err != nil {
		return Change{}, err
	}
	c := Change{Kind: deploymentKind, Name: moed.Name, Done: fmt.Sprintf("approved for plan %s (PlacementPlan %s)%s%s", short, plan.Name, failedRevisionsNote(moed, plan), pausedNote(moed))}
	if moed.Annotations[semmoev1.AnnotationApprove] != short {
		c.Patch = nested(short, "metadata", "annotations", semmoev1.AnnotationApprove)
	}
	return c, nil
}

// changeOnTrial returns the revision of the change of the spec that is on a canary or being promoted; empty if there is
// none. The canary of a plan runs next to the desired revision; the canary of a change is the desired revision.
func changeOnTrial(moed *semmoev1.MoEDeployment) string {
	if rollout := moed.Status.Rollout; rollout != nil && rollout.CandidateRevision == moed.Status.Revision {
		return rollout.CandidateRevision
	}
	return ""
}

// approveChange approves a change whose canary is inconclusive.
func approveChange(moed *semmoev1.MoEDeployment, revision string) Change {
	c := Change{Kind: deploymentKind, Name: moed.Name, Done: "approved for revision " + revision + pausedNote(moed)}
	if moed.Annotations[semmoev1.AnnotationApprove] != revision {
		c.Patch = nested(revision, "metadata", "annotations", semmoev1.AnnotationApprove)
	}
	return c
}

// overlapWaits reports whether overlap settings for the batch sizes of a plan wait for approval. The plan may gain nothing.
func overlapWaits(moed *semmoev1.MoEDeployment, short string) bool {
	overlap := moed.Status.Overlap
	return overlap != nil && moed.Status.PendingPlan == short && (overlap.Reason == "AwaitingApproval" || overlap.Reason == "RolloutInterruptsService")
}

// approveOverlap approves overlap settings for the plan in service.
func approveOverlap(moed *semmoev1.MoEDeployment, short string) Change {
	c := Change{Kind: deploymentKind, Name: moed.Name, Done: "approved for overlap settings at the batch sizes of plan " + short + pausedNote(moed)}
	if moed.Annotations[semmoev1.AnnotationApprove] != short {
		c.Patch = nested(short, "metadata", "annotations", semmoev1.AnnotationApprove)
	}
	return c
}

func advisoryError(moed *semmoev1.MoEDeployment) error {
	return statef("spec.placement.approval of MoEDeployment %s is Advisory, so no plan is rolled out; set it to Manual or Automatic first", moed.Name)
}

// pausedNote returns a suffix for the description of a change to a paused deployment: the change has no effect until
// it is resumed.
func pausedNote(moed *semmoev1.MoEDeployment) string {
	if moed.Spec.Reconciliation != semmoev1.ReconciliationPaused {
		return ""
	}
	return fmt.Sprintf("; spec.reconciliation is Paused: no plan is rolled out until you run kubectl semmoe resume %s", moed.Name)
}

// appliesTo reports whether a deployment may roll out a plan: the plan was created for the deployment, or the spec pins
// it.
func appliesTo(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) bool {
	ref := moed.Spec.Placement.PlanRef
	return plan.Labels[semmoev1.LabelDeployment] == moed.Name || plan.Name == moed.Status.Plan || ref != nil && ref.Name == plan.Name
}

func serves(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) bool {
	return plan.Status.Plan == moed.Status.PlanDigest
}

// incompatibility returns an error if a deployment can never serve with a plan.
func incompatibility(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) error {
	parallelism, engine := moed.Spec.Parallelism, moed.Spec.Engine.Type
	switch {
	case moed.Status.Model != nil && plan.Status.ModelDigest != moed.Status.Model.Digest:
		return statef("PlacementPlan %s is for a different checkpoint than the one that MoEDeployment %s serves", plan.Name, moed.Name)
	case plan.Spec.ExpertParallelSize != parallelism.ExpertParallelSize || plan.Spec.Attention != parallelism.Attention:
		return statef("PlacementPlan %s is for attention %s on %d ranks; MoEDeployment %s has %s on %d",
			plan.Name, plan.Spec.Attention, plan.Spec.ExpertParallelSize, moed.Name, parallelism.Attention, parallelism.ExpertParallelSize)
	case (plan.Spec.TokenShuffle == semmoev1.TokenShuffleDisabled) != leavesTokens(moed):
		return statef("PlacementPlan %s has tokenShuffle %s; spec.placement.tokenShuffle of MoEDeployment %s is %s", plan.Name,
			cmp.Or(plan.Spec.TokenShuffle, semmoev1.TokenShuffleEnabled), moed.Name, cmp.Or(moed.Spec.Placement.TokenShuffle, semmoev1.TokenShuffleDisabled))
	case plan.Spec.Engine != engine:
		return statef("PlacementPlan %s is for engine %s; MoEDeployment %s has %s", plan.Name, plan.Spec.Engine, moed.Name, engine)
	case plan.Status.Tier == semmoev1.TierTables && parallelism.Attention != semmoev1.AttentionDataParallel:
		return statef("PlacementPlan %s only changes tables, and cannot be used: with attention %s engines read the tables of their plan only at startup", plan.Name, parallelism.Attention)
	}
	return nil
}

// rolloutBlock returns an error if the operator would not roll out a fitting plan in the present state, even if it is
// approved or pinned.
func rolloutBlock(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) error {
	reason, rollout := "", moed.Status.Rollout
	if rolledOut := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut); rolledOut != nil {
		reason = rolledOut.Reason
	}
	switch failed, changed := marksOf(plan, semmoev1.AnnotationFailed), marksOf(plan, semmoev1.AnnotationOutputChanged); {
	case serves(moed, plan):
		return nil
	case len(failed) > 0 && metav1.IsControlledBy(plan, moed):
		return statef("PlacementPlan %s has failed on a canary (revision %s) and is not tried again; to try it again, run %s",
			plan.Name, strings.TrimPrefix(failed[0], semmoev1.AnnotationFailed), unmarkCommand(plan, failed))
	case reason == "RollbackPending" && rollout != nil && rollout.CandidatePlan == plan.Status.Plan:
		return statef("PlacementPlan %s fails on its canary, and spec.rollout.rollback of MoEDeployment %s is Manual: an approval does not promote it while it fails; to roll it back, run kubectl semmoe rollback %s", plan.Name, moed.Name, moed.Name)
	case reason == "OutputChanged" && plan.Name == moed.Status.Plan && len(changed) > 0:
		return statef("the outputs of the engine change with PlacementPlan %s (revision %s): it is not tried again until the engine's image, its arguments or the plan change",
			plan.Name, strings.TrimPrefix(changed[0], semmoev1.AnnotationOutputChanged))
	}
	return nil
}

// failedRevisionsNote returns a suffix that lists the revisions that failed with a plan. It is empty if there are none. Only
// the operator knows the next revision, and which deployment each revision belongs to: a mark of another deployment's
// revision does not block this deployment, and must not be removed.
func failedRevisionsNote(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) string {
	failed, changed := marksOf(plan, semmoev1.AnnotationFailed), marksOf(plan, semmoev1.AnnotationOutputChanged)
	if len(failed)+len(changed) == 0 || serves(moed, plan) {
		return ""
	}
	var revisions []string
	for _, mark := range append(failed, changed...) {
		_, revision, _ := strings.Cut(mark, "/")
		revisions = append(revisions, revision)
	}
	return fmt.Sprintf("; if the next revision is one that failed with this plan before (%s), the rollout is blocked, and status.conditions reports it", strings.Join(revisions, ", "))
}

// marksOf returns the annotation keys of a plan that consist of a prefix and a revision, sorted.
func marksOf(plan *semmoev1.PlacementPlan, prefix string) []string {
	keys := slices.Sorted(maps.Keys(plan.Annotations))
	return slices.DeleteFunc(keys, func(key string) bool { return !strings.HasPrefix(key, prefix) })
}

// unmarkCommand returns the kubectl command that removes annotations of a plan.
func unmarkCommand(plan *semmoev1.PlacementPlan, keys []string) string {
	return fmt.Sprintf("kubectl annotate pplan -n %s %s %s-", plan.Namespace, plan.Name, strings.Join(keys, "- "))
}

// leavesTokens reports whether tokens stay on the ranks where attention places them. With attention DataParallel tokens
// follow requests, so it is false.
func leavesTokens(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Parallelism.Attention != semmoev1.AttentionDataParallel && moed.Spec.Placement.TokenShuffle != semmoev1.TokenShuffleEnabled
}

// approvalReasons are the reasons of the condition RolledOut with which a plan waits for approval.
var approvalReasons = []string{"AwaitingApproval", "RolloutInterruptsService", "NoRouter", "CanaryInconclusive"}

// pendingPlan returns the plan that waits for approval, or the plan that is already approved.
func pendingPlan(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan) (*semmoev1.PlacementPlan, error) {
	rolledOut := meta.FindStatusCondition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
	if rolledOut == nil {
		return nil, statef("the operator has not reconciled MoEDeployment %s yet: no plan waits for approval", moed.Name)
	}
	for i := range plans {
		plan := &plans[i]
		short := plan.Status.Plan
		if short == "" || !appliesTo(moed, plan) {
			continue
		}
		candidate := moed.Status.Rollout != nil && moed.Status.Rollout.CandidatePlan == short
		wanted := slices.Contains(approvalReasons, rolledOut.Reason) && (candidate || moed.Status.Rollout == nil && plan.Name == moed.Status.Plan)
		// Pending tables are reported in the message, next to the layout in service. They are no candidate layout.
		tables := plan.Status.Tier == semmoev1.TierTables && strings.Contains(rolledOut.Message, "AwaitingApproval") && strings.Contains(rolledOut.Message, "="+short)
		if wanted && plan.Status.Tier != semmoev1.TierTables || tables || overlapWaits(moed, short) {
			return plan, nil
		}
	}
	for i := range plans {
		if short := plans[i].Status.Plan; short != "" && short == moed.Annotations[semmoev1.AnnotationApprove] {
			return &plans[i], nil // already approved, and no longer waiting
		}
	}
	return nil, statef("no plan of MoEDeployment %s waits for approval (%s: %s)", moed.Name, rolledOut.Reason, rolledOut.Message)
}

// RollBack rolls back the candidate: it marks the candidate revision as failed by a user's decision.
func RollBack(moed *semmoev1.MoEDeployment, plans []semmoev1.PlacementPlan, why string) (Change, error) {
	rollout := moed.Status.Rollout
	if rollout == nil || rollout.CandidateRevision == "" {
		return Change{}, statef("no plan of MoEDeployment %s is being rolled out; to return to another plan, select it with --to, which pins it", moed.Name)
	}
	if revision := changeOnTrial(moed); revision != "" {
		c := Change{Kind: deploymentKind, Name: moed.Name, Done: fmt.Sprintf("rolled back: revision %s is removed, and is not tried again until the spec changes", revision)}
		if rollout.Phase != semmoev1.RolloutPhaseRollingBack && moed.Annotations[semmoev1.AnnotationRollBack] != revision {
			c.Patch = nested(revision, "metadata", "annotations", semmoev1.AnnotationRollBack)
		}
		return c, nil
	}
	for _, plan := range plans {
		if plan.Status.Plan == "" || plan.Status.Plan != rollout.CandidatePlan || !appliesTo(moed, &plan) {
			continue
		}
		key := semmoev1.AnnotationFailed + rollout.CandidateRevision
		c := Change{Kind: planKind, Name: plan.Name, Done: fmt.Sprintf("rolled back: revision %s is removed, and is not tried again until the annotation %s is removed", rollout.CandidateRevision, key)}
		if plan.Annotations[key] == "" {
			c.Patch = nested(why, "metadata", "annotations", key)
		}
		return c, nil
	}
	return Change{}, statef("plan %s is being rolled out, but its PlacementPlan does not exist", rollout.CandidatePlan)
}

// Pin selects a plan until Unpin, regardless of the promises of other plans. It is used to return to an earlier plan.
func Pin(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) (Change, error) {
	if !meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) || plan.Status.Plan == "" {
		return Change{}, statef("PlacementPlan %s is not published and cannot be served", plan.Name)
	}
	if err := incompatibility(moed, plan); err != nil {
		return Change{}, err
	}
	switch {
	case plan.Status.Verdict != semmoev1.VerdictGain:
		return Change{}, statef("PlacementPlan %s promises no gain (verdict %s), so the operator would not serve it", plan.Name, plan.Status.Verdict)
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory && !serves(moed, plan):
		return Change{}, advisoryError(moed)
	}
	if err := rolloutBlock(moed, plan); err != nil {
		return Change{}, err
	}
	effect, caveat := "it serves after its canary succeeds", failedRevisionsNote(moed, plan)+pausedNote(moed)
	switch {
	case serves(moed, plan):
		effect, caveat = "it stays in service", ""
	case plan.Status.Tier == semmoev1.TierTables:
		effect = "its tables are used with the placement that they belong to"
	}
	c := Change{
		Kind: deploymentKind, Name: moed.Name, Declared: "spec.placement.planRef.name: " + plan.Name,
		Done: fmt.Sprintf("pinned to PlacementPlan %s (plan %s): %s, and drift does not replace it%s", plan.Name, plan.Status.Plan, effect, caveat),
	}
	if ref := moed.Spec.Placement.PlanRef; ref == nil || ref.Name != plan.Name {
		c.Patch = nested(plan.Name, "spec", "placement", "planRef", "name")
	}
	return c, nil
}

// Unpin removes the pin, so that the operator selects the plan.
func Unpin(moed *semmoev1.MoEDeployment) Change {
	c := Change{
		Kind: deploymentKind, Name: moed.Name, Declared: "the removal of spec.placement.planRef",
		Done: "no longer pinned: the operator rolls out the plan for the spec, or a newer plan that was made because of drift",
	}
	if moed.Spec.Placement.PlanRef != nil {
		c.Patch = nested(nil, "spec", "placement", "planRef")
	}
	return c
}
