// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// choice is the input for the choice of a layout.
type choice struct {
	moed   *semmoev1.MoEDeployment
	report checkpoint.Report
	// release is the release of the engine; its zero value if unknown.
	release engine.Release
	// wanted is the plan for the current inputs; nil if it does not exist yet.
	wanted *semmoev1.PlacementPlan
	// pinned reports whether the spec pins the wanted plan.
	pinned    bool
	workloads []*revisions.Workload
	// changed contains, by revision, the difference of the outputs to those without a plan.
	changed map[string]string
	answers answers
	// overlap contains the overlap settings that were decided, by the digest of the plan.
	overlap map[string]overlapChoice
}

// chooseLayout decides what to serve under: the layout in service while it fits the spec, else no plan. The plan for
// the current inputs is the candidate if it may be rolled out. A layout with changed outputs is
// never chosen.
func (c *choice) chooseLayout() (serving, candidate *revisions.Layout, hold desired.Finding) {
	inService := c.inService()
	if inService != nil && (c.refusal(inService) != "" || c.answers.Stranded || c.contradicted(inService)) {
		inService = nil // under this layout no pod would become ready, or could be created
	}
	if inService != nil {
		inService = c.withOverlap(inService)
	}
	if !Published(c.wanted, c.moed, c.report.ModelDigest) {
		if inService == nil {
			hold = c.foreseen()
		}
		return inService, nil, hold
	}
	var refused, open []*revisions.Layout
	var impossible []string
	for _, candidate := range c.candidates() {
		switch l := candidate.layout; {
		case inService != nil && l.Same(inService): // even if it would be rejected now: it is proven
			return inService, nil, desired.Finding{}
		case len(candidate.support.Refusals) > 0:
			impossible = append(impossible, candidate.support.Refusals[0].Message)
		case c.refusal(l) != "":
			refused = append(refused, l)
		default:
			open = append(open, l)
		}
	}
	no := func(reason, message string) desired.Finding { return desired.Finding{Reason: reason, Message: message} }
	hold = holdBack(c.moed, c.wanted, c.pinned)
	if hold.Reason == reasonNoRoom && len(open) > 0 && c.promoting(open[0]) {
		hold = desired.Finding{} // the previous revision may have no replica left: a rollback interrupts the service too
	}
	switch {
	case len(open) == 0 && len(refused) > 0:
		hold = no(ReasonOutputChanged, c.refusedText(refused))
	case len(open) == 0 && hold.Reason == "":
		hold = no(reasonNotRealizable, fmt.Sprintf("Plan %s cannot reach the engine. %s", c.wanted.Status.Plan, strings.Join(impossible, ". ")))
	case hold.Reason != "":
	case c.failedText(open[0]) != "":
		hold = no(ReasonRolledBack, c.failedText(open[0]))
	case c.answers.Missing != "" && !c.tried(open[0]):
		hold = no("AwaitingBaselineOutputs", fmt.Sprintf("Plan %s waits until its outputs can be compared with the baseline: %s", c.wanted.Status.Plan, c.answers.Missing))
	case !c.needsTrial(inService, open[0]):
		return open[0], nil, desired.Finding{}
	default:
		return inService, open[0], desired.Finding{}
	}
	return inService, nil, hold
}

// needsTrial reports whether a layout needs a canary: it belongs to another plan than the one in service.
func (c *choice) needsTrial(inService, l *revisions.Layout) bool {
	return len(c.workloads) > 0 && (inService == nil || inService.Digest != l.Digest)
}

// tried reports whether a layout has a workload already.
func (c *choice) tried(l *revisions.Layout) bool { return c.workloadOf(l) != nil }

// promoting reports whether a layout passed its canary, and replicas move to its workload.
func (c *choice) promoting(l *revisions.Layout) bool {
	workload := c.workloadOf(l)
	return workload != nil && workload.Annotations[semmoev1.AnnotationRollout] == semmoev1.RolloutPromoting
}

// workloadOf returns the workload of a layout's revision; nil if there is none.
func (c *choice) workloadOf(l *revisions.Layout) *revisions.Workload {
	revision := revisions.Of(c.moed, c.report, l)
	for _, workload := range c.workloads {
		if workload.Labels[semmoev1.LabelRevision] == revision {
			return workload
		}
	}
	return nil
}

// failedText returns the failure of a layout's plan on its canary; empty if it did not fail.
func (c *choice) failedText(l *revisions.Layout) string {
	key, message := failure(c.moed, c.wanted, revisions.Of(c.moed, c.report, l))
	if key == "" {
		return ""
	}
	return fmt.Sprintf("Plan %s failed on a canary and was rolled back. %s. It is not tried again until annotation %s is removed from PlacementPlan %s", l.Short(), message, key, c.wanted.Name)
}

// candidate is a realization of the wanted plan.
type candidate struct {
	layout *revisions.Layout
	// support is the engine's support for it.
	support engine.Support
}

// candidates returns the realizations that the spec allows, preferred one first.
func (c *choice) candidates() []candidate {
	adapter, err := registry.For(string(c.moed.Spec.Engine.Type))
	if err != nil || c.wanted == nil {
		return nil // validation reports an unknown engine
	}
	var candidates []candidate
	keepsGroups := c.wanted.Spec.Realization == semmoev1.RealizationReshuffledWeights
	for _, realization := range realizations(c.moed, c.report, c.release, adapter) {
		support := supportOf(c.moed, c.report, c.release, adapter, realization, c.wanted.RedundantExperts(), keepsGroups)
		candidates = append(candidates, candidate{c.withOverlap(revisions.LayoutOf(c.wanted, realization)), support})
	}
	return candidates
}

// foreseen returns why no plan of the spec can reach the engine; its zero value if one may. A pinned plan may differ in
// kind.
func (c *choice) foreseen() desired.Finding {
	if c.moed.Spec.Placement.PlanRef != nil {
		return desired.Finding{}
	}
	if findings := Foresee(c.moed, c.report, c.release); len(findings) == 1 && findings[0].Reason == reasonNotRealizable {
		return findings[0]
	}
	return desired.Finding{}
}

// contradicted reports whether the spec now contains settings that cannot be served under a layout, for example an
// argument that the plan sets. The model is then served without a plan. A layout that serves with the current spec
// stays: an upgrade of the operator that rejects more does not take it out of service.
func (c *choice) contradicted(l *revisions.Layout) bool {
	adapter, err := registry.For(string(c.moed.Spec.Engine.Type))
	return err == nil && !c.tried(l) && len(adapter.Support(situation(c.moed, c.report, c.release, l.Realization, l.RedundantExperts, true)).Refusals) > 0
}

// refusal returns how the outputs of a layout's revision differ; empty if unknown.
func (c *choice) refusal(l *revisions.Layout) string {
	return c.changed[revisions.Of(c.moed, c.report, l)]
}

// inService returns the layout of the newest workload with replicas (the newest of all if none has replicas), if it
// still fits the spec. It reads only the workload: a plan whose status was lost, or which was deleted, is still in
// service. It skips workloads that were seen to change outputs, and workloads that are not proven.
func (c *choice) inService() *revisions.Layout {
	empty := func(w *revisions.Workload) bool { return *w.Replicas() == 0 }
	workloads := revisions.Proven(c.workloads)
	scaledToZero := !slices.ContainsFunc(workloads, func(w *revisions.Workload) bool { return !empty(w) })
	for i, workload := range workloads {
		if empty(workload) && !(scaledToZero && i == 0) || c.changed[workload.Labels[semmoev1.LabelRevision]] != "" {
			continue
		}
		template := workload.Template()
		digest := template.Annotations[semmoev1.AnnotationPlanDigest]
		if digest == "" || template.Annotations[semmoev1.AnnotationModelDigest] != c.report.ModelDigest || !shapedAs(c.moed.Spec.Parallelism, template.Annotations) {
			continue
		}
		realization := realizationOf(workload)
		if realization == semmoev1.RealizationReshuffledWeights && c.moed.Spec.Routing.Mode != semmoev1.RoutingModeRouter {
			continue // this engine returns permuted expert IDs, which only the router translates back
		}
		if engine := cmp.Or(template.Annotations[semmoev1.AnnotationEngine], string(semmoev1.EngineSGLang)); engine != string(c.moed.Spec.Engine.Type) {
			continue // the ConfigMap contains the map of another engine
		}
		if l := LayoutIn(workload); l != nil {
			if !c.moed.Spec.Engine.Overlap.Chosen() {
				l.Overlap, l.OverlapBasis = semmoev1.OverlapSpec{}, "" // the spec has them
			}
			return l
		}
	}
	return nil
}

// LayoutIn returns the layout that a workload serves under; nil for none.
func LayoutIn(workload *revisions.Workload) *revisions.Layout {
	template := workload.Template()
	for _, volume := range template.Spec.Volumes {
		if digest := template.Annotations[semmoev1.AnnotationPlanDigest]; digest != "" && volume.Name == semmoev1.PlanVolume && volume.ConfigMap != nil {
			return &revisions.Layout{
				Digest: digest, ConfigMap: volume.ConfigMap.Name, Realization: realizationOf(workload), RedundantExperts: redundantExperts(template.Annotations),
				Overlap: overlapIn(template.Annotations), OverlapBasis: workload.Annotations[semmoev1.AnnotationOverlapBasis],
			}
		}
	}
	return nil
}

// redundantExperts returns the number of redundant experts in pod annotations, which the operator has written.
func redundantExperts(annotations map[string]string) int32 {
	copies, _ := strconv.ParseInt(annotations[semmoev1.AnnotationRedundantExperts], 10, 32)
	return int32(copies)
}

// shapedAs reports whether pods with these annotations, under a plan, have the ranks and the attention of a spec.
func shapedAs(parallelism semmoev1.ParallelismSpec, annotations map[string]string) bool {
	requestRanks, ranks := annotations[semmoev1.AnnotationRanks], strconv.Itoa(int(parallelism.ExpertParallelSize))
	if parallelism.Attention == semmoev1.AttentionDataParallel {
		return requestRanks == ranks
	}
	return requestRanks == "" && annotations[semmoev1.AnnotationExpertParallelSize] == ranks
}

// holdBack returns why a ready plan is not rolled out; its zero value if it is.
func holdBack(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan, pinned bool) desired.Finding {
	short := plan.Status.Plan
	approved, approve := Approved(moed, short) || pinned, ApproveCommand(moed, short)
	no := func(reason, format string, args ...any) desired.Finding {
		return desired.Finding{Reason: reason, Message: fmt.Sprintf(format, args...)}
	}
	wait := func(reason, format string, args ...any) desired.Finding {
		return desired.Finding{Reason: reason, Message: fmt.Sprintf(format, args...), Pending: short}
	}
	switch {
	case plan.Status.Verdict != semmoev1.VerdictGain && plan.Status.Forecast == nil:
		return no(string(plan.Status.Verdict), "Plan %s predicts no gain from token counts, which contain no local activation rate, and is not rolled out", short)
	case plan.Status.Verdict != semmoev1.VerdictGain:
		return no(string(plan.Status.Verdict), "Plan %s predicts no gain (%s), and is not rolled out", short, promiseText(plan))
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone && moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel && !approved:
		return wait("NoRouter", "Plan %s has a gain only if requests are routed to the ranks of their experts. Set spec.routing.mode to Router or EndpointPicker, or, with your own routing, approve the plan with: %s", short, approve)
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory:
		return no("Advisory", "Plan %s predicts %s; spec.placement.approval is Advisory: nothing is rolled out", short, promiseText(plan))
	case moed.Spec.Placement.Approval == semmoev1.ApprovalManual && !approved:
		return wait("AwaitingApproval", "Plan %s predicts %s; approve it with: %s", short, promiseText(plan), approve)
	case *moed.Spec.Replicas == 1 && *moed.Spec.Rollout.MaxSurge == 0 && !approved:
		return wait(reasonNoRoom, "Plan %s predicts %s; with one replica and spec.rollout.maxSurge 0, its rollout interrupts the service. Set maxSurge, or accept the interruption with: %s",
			short, promiseText(plan), approve)
	}
	return desired.Finding{}
}

func Approved(moed *semmoev1.MoEDeployment, short string) bool {
	return moed.Annotations[semmoev1.AnnotationApprove] == short
}

// RolledBack reports whether a user ends the roll-out of a plan.
func RolledBack(moed *semmoev1.MoEDeployment, short string) bool {
	return moed.Annotations[semmoev1.AnnotationRollBack] == short
}

// failure returns the annotation key that records a failed canary of the plan, and its value; empty if there is none.
// The MoEDeployment's own plan is not tried again in another revision either. The failure of a plan that others use too
// may belong to them.
func failure(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan, revision string) (key, message string) {
	for _, key := range slices.Sorted(maps.Keys(plan.Annotations)) {
		of, ok := strings.CutPrefix(key, semmoev1.AnnotationFailed)
		if ok && (of == revision || metav1.IsControlledBy(plan, moed)) {
			return key, plan.Annotations[key]
		}
	}
	return "", ""
}
