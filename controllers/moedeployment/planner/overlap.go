// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/solver"
)

// Overlap is the decision on spec.engine.overlap with mode Auto.
type Overlap struct {
	// Why is the state: settings are in use, gain nothing, or are not used yet.
	Why desired.Finding
	// Refused is the revision whose settings failed on a canary; empty if none did.
	Refused string
}

// OverlapBasis is what overlap settings were chosen from, with the result. Workloads record it, so that the settings
// change only with the plan, its batch sizes or the spec, and not with the version of the operator.
type OverlapBasis struct {
	// BatchTokens are the batch sizes, over all ranks.
	BatchTokens []int32 `json:"batchTokens"`
	// LayerNanos and UnsplitNanos are the modelled times of an MoE layer with and without the settings; 0 if unknown.
	LayerNanos   int64 `json:"layerNanos,omitempty"`
	UnsplitNanos int64 `json:"unsplitNanos,omitempty"`
	// Reason and Message explain the choice.
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// BasisOf returns the basis of the settings of a layout; its zero value if there is none.
func BasisOf(l *revisions.Layout) OverlapBasis {
	var basis OverlapBasis
	if l != nil && l.OverlapBasis != "" && json.Unmarshal([]byte(l.OverlapBasis), &basis) != nil {
		return OverlapBasis{} // another client edited the annotation: the settings are chosen again
	}
	return basis
}

// overlapIn returns the settings in pod annotations, which the operator has written.
func overlapIn(annotations map[string]string) semmoev1.OverlapSpec {
	var settings semmoev1.OverlapSpec
	if text := annotations[semmoev1.AnnotationOverlap]; text != "" && json.Unmarshal([]byte(text), &settings) != nil {
		return semmoev1.OverlapSpec{}
	}
	return settings
}

// OverlapModel asks for the models of a plan.
type OverlapModel struct{ Plan *semmoev1.PlacementPlan }

// OverlapModelOf is the answer: the models, nil if the plan has none, or why they cannot be read.
type OverlapModelOf struct {
	Model *overlap.Model
	Fault string
}

// overlapChoice contains the settings for the wanted plan, and their basis as JSON.
type overlapChoice struct {
	Values semmoev1.OverlapSpec
	basis  string
}

// maxOverlapMessage is the maximum length of a message, in bytes.
const maxOverlapMessage = 512

const (
	reasonOverlapping        = "Overlapping"
	reasonOverlapUnsupported = "OverlapUnsupported"
	reasonOverlapNotModelled = "OverlapNotModelled"
)

// overlapReasons are the reasons of settings without a change, by verdict.
var overlapReasons = map[overlap.Verdict]string{
	overlap.Keep: string(semmoev1.VerdictNoGainExpected), overlap.Unsupported: reasonOverlapUnsupported, overlap.NotModelled: reasonOverlapNotModelled,
}

// decideOverlap chooses the overlap settings of the wanted plan or, if that is in service already or gains nothing, of the
// plan in service, at the batch sizes of the newest plan: a plan without gain that was made for other batch sizes changes
// the settings, but not the plan.
func (d *Decision) decideOverlap(s *Snapshot, c *choice) {
	if !s.Moed.Spec.Engine.Overlap.Chosen() {
		return
	}
	inService := c.inService()
	d.Overlap.Why = OverlapWhy(inService)
	if !Published(c.wanted, c.moed, c.report.ModelDigest) {
		return
	}
	of := c.wanted
	if inService != nil && c.wanted.Status.Verdict != semmoev1.VerdictGain {
		of = PlanWithDigest(inService.Digest, appendPlan(s.Plans, c.wanted))
	}
	if of == nil {
		return // the plan in service was deleted
	}
	newest := d.newestPlan(s)
	digest, sizes := of.Status.PlanDigest, planSizes(newest)
	chosen, known := c.chosenBefore(digest, sizes)
	fault := ""
	if !known {
		model, asked := s.OverlapModels[digest]
		if !asked {
			d.Question = OverlapModel{of}
			return
		}
		if fault = model.Fault; fault == "" {
			if chosen, d.Err = c.chooseOverlap(model.Model, of, sizes, inService); d.Err != nil {
				return
			}
		}
	}
	if inService == nil || inService.Digest != digest {
		c.overlap = map[string]overlapChoice{digest: chosen} // the settings come with the plan
		return
	}
	var why desired.Finding
	switch {
	case fault != "":
		why = desired.Finding{Reason: reasonOverlapNotModelled, Message: printable.Line("The settings in use are kept: the models of the plan cannot be read: "+fault, maxOverlapMessage)}
	case chosen.Values != inService.Overlap:
		d.Overlap.Refused, why = c.holdOverlap(newest, inService, chosen.Values)
	}
	if why.Reason != "" {
		chosen = overlapChoice{inService.Overlap, inService.OverlapBasis}
	} else {
		why = OverlapWhy(&revisions.Layout{OverlapBasis: chosen.basis})
	}
	d.Overlap.Why, c.overlap = why, map[string]overlapChoice{digest: chosen}
}

// OverlapWhy explains the settings of a layout, which may be nil.
func OverlapWhy(l *revisions.Layout) desired.Finding {
	if l == nil {
		return desired.Finding{Reason: "NoPlan", Message: "No settings are chosen until a plan serves, whose models choose them"}
	}
	basis := BasisOf(l)
	return desired.Finding{Reason: cmp.Or(basis.Reason, "WaitingForPlan"), Message: cmp.Or(basis.Message, "The settings are chosen once the plan for the current inputs is ready")}
}

// withOverlap returns a layout with the settings that were decided for its plan.
func (c *choice) withOverlap(l *revisions.Layout) *revisions.Layout {
	changed := *l
	if chosen, decided := c.overlap[l.Digest]; decided {
		changed.Overlap, changed.OverlapBasis = chosen.Values, chosen.basis
	}
	return &changed
}

// newestPlan returns the newest plan that is solved: the pinned one, or of those that the spec has led to.
func (d *Decision) newestPlan(s *Snapshot) *semmoev1.PlacementPlan {
	if s.Moed.Spec.Placement.PlanRef != nil {
		return d.Plan
	}
	for _, plan := range d.Lineage.plans {
		if Published(plan, s.Moed, s.Report.ModelDigest) {
			return plan
		}
	}
	return d.Plan
}

// planSizes returns the batch sizes that a plan was made for.
func planSizes(plan *semmoev1.PlacementPlan) []int32 {
	switch {
	case plan.Spec.BatchTokens > 0:
		return []int32{plan.Spec.BatchTokens}
	case len(plan.Spec.ObservedBatchTokens) > 0:
		return plan.Spec.ObservedBatchTokens
	}
	var sizes []int32
	for _, size := range solver.DefaultBatchTokens {
		sizes = append(sizes, int32(size))
	}
	return sizes
}

// chosenBefore returns the settings of a workload with a plan, if they were chosen for the same batch sizes and the same
// spec.
func (c *choice) chosenBefore(digest string, sizes []int32) (overlapChoice, bool) {
	for _, workload := range c.workloads {
		l := LayoutIn(workload)
		if l == nil || l.Digest != digest || !slices.Equal(BasisOf(l).BatchTokens, sizes) {
			continue
		}
		if revisions.Of(c.moed, c.report, l) == workload.Labels[semmoev1.LabelRevision] {
			return overlapChoice{l.Overlap, l.OverlapBasis}, true
		}
	}
	return overlapChoice{}, false
}

// chooseOverlap chooses the settings by the models of a plan. Settings in service are kept unless others are faster by the
// minimum gain.
func (c *choice) chooseOverlap(model *overlap.Model, of *semmoev1.PlacementPlan, sizes []int32, inService *revisions.Layout) (overlapChoice, error) {
	adapter, err := registry.For(string(c.moed.Spec.Engine.Type))
	if err != nil {
		return overlapChoice{}, err
	}
	o := overlap.Options{
		Ranks: int(c.moed.Spec.Parallelism.ExpertParallelSize), BatchTokens: sizes, Adapter: adapter, Automatic: true,
		MinGain:   float64(ptr.Deref(c.moed.Spec.Rollout.MinimumGainPercent, solver.DefaultMinimumGainPercent)) / 100,
		Situation: situation(c.moed, c.report, c.release, semmoev1.RealizationEngineMap, of.RedundantExperts(), true),
	}
	if model != nil {
		o.LAR = model.Schedule.LAR
	}
	if inService != nil && overlap.Supports(adapter, o.Situation, inService.Overlap) == nil {
		o.Present = inService.Overlap
	}
	found := overlap.Choose(model, o)
	if found.Verdict == overlap.NotModelled {
		found.Values = semmoev1.OverlapSpec{}
	}
	basis := OverlapBasis{BatchTokens: sizes, Reason: overlapReasons[found.Verdict], Message: printable.Line(overlap.Text(found.Values)+": "+found.Why, maxOverlapMessage)}
	if found.Unsplit > 0 {
		basis.LayerNanos, basis.UnsplitNanos = int64(1000*found.Microseconds()), int64(1000*found.Unsplit)
	}
	if found.Values.MicroBatches > 0 {
		basis.Reason = reasonOverlapping
	} else if found.Verdict == overlap.Change {
		basis.Reason = string(semmoev1.VerdictNoGainExpected)
	}
	text, err := json.Marshal(basis)
	return overlapChoice{found.Values, string(text)}, err
}

// holdOverlap returns why other settings for the plan in service are not rolled out, and their revision if they failed on
// a canary; zero values if they are rolled out. newest is the plan whose batch sizes they are for.
func (c *choice) holdOverlap(newest *semmoev1.PlacementPlan, inService *revisions.Layout, settings semmoev1.OverlapSpec) (refused string, why desired.Finding) {
	changed := *inService
	changed.Overlap = settings
	revision := revisions.Of(c.moed, c.report, &changed)
	name := fmt.Sprintf("The settings for the current batch sizes (%s)", overlap.Text(settings))
	hold := func(reason, format string, args ...any) desired.Finding {
		return desired.Finding{Reason: reason, Message: printable.Line(name+fmt.Sprintf(format, args...), maxOverlapMessage)}
	}
	if difference := c.refusal(&changed); difference != "" {
		return "", hold(ReasonOutputChanged, " change the outputs of the model: %s", difference)
	}
	for _, workload := range revisions.Proven(c.workloads) {
		if failure := workload.Annotations[semmoev1.AnnotationFailed+revision]; failure != "" {
			return revision, hold(ReasonRolledBack, " failed on a canary, and are not tried again until batch sizes or spec change, or annotation %s%s is removed from workload %s. %s", semmoev1.AnnotationFailed, revision, workload.Name, failure)
		}
	}
	short := newest.Status.Plan
	if revisions.Of(c.moed, c.report, inService) != c.revisionInService(inService) || Approved(c.moed, short) {
		return "", desired.Finding{} // the spec replaces the pods anyway, or a user approves
	}
	approve := ApproveCommand(c.moed, short)
	switch {
	case c.moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory:
		return "", hold("Advisory", " gain; spec.placement.approval is Advisory: they are not rolled out")
	case c.moed.Spec.Placement.Approval == semmoev1.ApprovalManual:
		why = hold("AwaitingApproval", " gain; approve them with: %s", approve)
	case *c.moed.Spec.Replicas == 1 && *c.moed.Spec.Rollout.MaxSurge == 0:
		why = hold(reasonNoRoom, " gain; with one replica and spec.rollout.maxSurge 0, their rollout interrupts the service. Set maxSurge, or accept the interruption with: %s", approve)
	default:
		return "", desired.Finding{}
	}
	why.Pending = short
	return "", why
}

// revisionInService returns the revision of the newest proven workload with a layout.
func (c *choice) revisionInService(l *revisions.Layout) string {
	for _, workload := range revisions.Proven(c.workloads) {
		if in := LayoutIn(workload); in != nil && in.Same(l) {
			return workload.Labels[semmoev1.LabelRevision]
		}
	}
	return ""
}
