// Package planner decides which profile and plan a MoEDeployment needs, and under which plan it is served.
//
// Invariants:
//   - Profiles and plans are named by the hash of their inputs, so creating one twice is a no-op.
//   - The plan in service is read only from workloads: a deleted plan, or one with a lost status, is still in
//     service.
//   - A plan is a candidate only if it may be rolled out. Its failures are recorded on the plan itself.
//   - Decide and NextReplan are pure functions of a Snapshot. They return the writes, and a question if a read depends
//     on the decision. Package plans reads snapshots and answers questions.
package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/solver"
)

// Planning is the state of the profiles and plans of a MoEDeployment.
type Planning struct {
	// Profile is the profile that plans are made from; nil if it does not exist (yet).
	Profile *semmoev1.AffinityProfile
	// ProfileName is its name, known before it exists; empty if the spec requests none.
	ProfileName string
	// Hardware is the hardware profile for which plans are made.
	Hardware HardwareProfile
	// Base is the plan that the spec requests; nil if it does not exist (yet). Lineage contains the plans and profiles
	// made for drift since.
	Base    *semmoev1.PlacementPlan
	Lineage lineage
	// Plan is the plan with the wanted layout: Base, a plan made for drift, or the pinned plan; nil if it does not
	// exist (yet).
	Plan *semmoev1.PlacementPlan
	// Pin is why the pinned plan cannot be served; its zero value if it can, or if no plan is pinned.
	Pin desired.Finding
	// Tables is the plan whose tables are used with the layout in service; nil if the layout uses its own. TablesHold
	// is why newer tables are not used.
	Tables     *semmoev1.PlacementPlan
	TablesHold desired.Finding
	// TablesSince is when routers were last switched to other tables or back; zero if never.
	TablesSince time.Time
	// PinnedTables is the pinned plan if it contains new tables for an existing layout, else nil.
	PinnedTables *semmoev1.PlacementPlan
	// Named are the plans whose tables routers are configured to use. InUse are the candidates for the tables used so
	// far.
	Named []string
	InUse []*semmoev1.PlacementPlan
	// Plans are the MoEDeployment's own plans, newest first.
	Plans []*semmoev1.PlacementPlan
	// BatchSizes are the sizes that engines report, for which the next plan is made; nil if they report none, or if the
	// spec sets a size.
	BatchSizes []int32
	// Serving is the proven layout to serve under; nil for no plan.
	Serving *revisions.Layout
	// Candidate is the layout to try on a canary: that of Plan, once it may be rolled out; nil if there is none.
	Candidate *revisions.Layout
	// Promise is the plan of Serving; nil if it no longer exists, or has no forecast yet.
	Promise *semmoev1.PlacementPlan
	// Why explains why the serving plan does not reach the engine in the preferred way; empty if it does.
	Why string
	// Warnings are the features that the engine may lack under the serving plan, as sentences to append; empty if none.
	Warnings string
	// Again is the delay until the next check; zero if an event triggers it.
	Again time.Duration
	// Hold is why Plan is not rolled out although it is ready; its zero value if it is, or if there is none.
	Hold desired.Finding
}

// profileInputs are the inputs that distinguish the profiles of a MoEDeployment. Images, resources and parallel sizes
// are not included: the experts that a token activates do not depend on them.
type profileInputs struct {
	Path     string                   `json:"path"`
	Volume   corev1.VolumeSource      `json:"volume"`
	Model    string                   `json:"model"`
	Dataset  semmoev1.DatasetSpec     `json:"dataset"`
	Sampling semmoev1.SamplingSpec    `json:"sampling"`
	Target   semmoev1.ProfilingTarget `json:"target"`
}

// ProfileOf returns the profile that the spec requests, for a model that is not inspected yet; nil if the spec requests
// none.
func ProfileOf(moed *semmoev1.MoEDeployment) *semmoev1.AffinityProfile { return profileFor(moed, "") }

// profileFor returns the profile that the spec requests, for the model with this digest; nil if the spec requests none.
func profileFor(moed *semmoev1.MoEDeployment, modelDigest string) *semmoev1.AffinityProfile {
	profiling := moed.Spec.Profiling
	if profiling == nil || profiling.Dataset == nil {
		return nil
	}
	name := moed.Name + "-" + ownership.ShortHash(profileInputs{
		Path: moed.Spec.Model.Path, Volume: moed.Spec.Model.Volume, Model: modelDigest,
		Dataset: *profiling.Dataset, Sampling: profiling.SamplingSpec, Target: profiling.Target,
	}, 8)
	spec := semmoev1.AffinityProfileSpec{
		Model: moed.Spec.Model, Engine: moed.Spec.Engine, Parallelism: placedAs(moed),
		Dataset: profiling.Dataset, SamplingSpec: profiling.SamplingSpec, Target: profiling.Target,
		Template: schedulingOf(moed.Spec.Template),
	}
	if profiling.Target == semmoev1.ProfilingTargetServing {
		spec.DeploymentRef = &semmoev1.DeploymentReference{Name: moed.Name}
	} else {
		spec.Template = moed.Spec.Template
	}
	spec.Template = cmp.Or(profiling.Template, spec.Template)
	return &semmoev1.AffinityProfile{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: moed.Namespace, Name: name,
			Labels:          desired.Labels(moed, semmoev1.ComponentProfile),
			OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment"),
		},
		Spec: spec,
	}
}

// schedulingOf returns the part of a template that determines where pods run, and how their images are pulled.
func schedulingOf(template *corev1.PodTemplateSpec) *corev1.PodTemplateSpec {
	if template == nil {
		return nil
	}
	scheduling := corev1.PodSpec{
		Containers:       []corev1.Container{},
		NodeSelector:     template.Spec.NodeSelector,
		Affinity:         template.Spec.Affinity,
		Tolerations:      template.Spec.Tolerations,
		ImagePullSecrets: template.Spec.ImagePullSecrets,
	}
	if equality.Semantic.DeepEqual(scheduling, corev1.PodSpec{}) {
		return nil // a template without these fields gives the same profile as no template
	}
	return &corev1.PodTemplateSpec{Spec: scheduling}
}

// planInputs are the inputs that distinguish the plans of a MoEDeployment.
type planInputs struct {
	Profile   string                        `json:"profile"`
	Result    string                        `json:"result"`
	Attention semmoev1.AttentionParallelism `json:"attention"`
	Ranks     int32                         `json:"ranks"`
	Engine    semmoev1.EngineType           `json:"engine"`
	Solver    semmoev1.SolverSpec           `json:"solver"`
	// Realization is omitted if it is EngineMap, TokenShuffle if it is not Disabled.
	Realization  semmoev1.Realization  `json:"realization,omitempty"`
	TokenShuffle semmoev1.TokenShuffle `json:"tokenShuffle,omitempty"`
	// Hardware is omitted if it is the operator's own profile, HardwareDigest if the profile is in no ConfigMap.
	Hardware       *semmoev1.HardwareReference `json:"hardware,omitempty"`
	HardwareDigest string                      `json:"hardwareDigest,omitempty"`
	// Objective to ExpertLoadLimit are omitted if the spec does not set them.
	Objective        semmoev1.PlacementObjective `json:"objective,omitempty"`
	RanksPerNode     int32                       `json:"ranksPerNode,omitempty"`
	RedundantExperts int32                       `json:"redundantExperts,omitempty"`
	RedundantMemory  int64                       `json:"redundantMemory,omitempty"`
	TokenLoadLimit   *int32                      `json:"tokenLoadLimit,omitempty"`
	ExpertLoadLimit  *int32                      `json:"expertLoadLimit,omitempty"`
	// MinimumGain and BatchTokens are omitted if they have their defaults.
	MinimumGain *int32 `json:"minimumGain,omitempty"`
	BatchTokens int32  `json:"batchTokens,omitempty"`
}

// planFor returns the plan that the spec requests, for a profile, a realization, and the digest of the hardware profile
// in the spec (empty if that is in no ConfigMap).
func planFor(moed *semmoev1.MoEDeployment, profile *semmoev1.AffinityProfile, realization semmoev1.Realization, hardwareDigest string) *semmoev1.PlacementPlan {
	spec := semmoev1.PlacementPlanSpec{
		ProfileRef: semmoev1.ProfileReference{Name: profile.Name}, Attention: moed.Spec.Parallelism.Attention,
		ExpertParallelSize: moed.Spec.Parallelism.ExpertParallelSize, Engine: moed.Spec.Engine.Type, LayoutSpec: moed.Spec.Placement.LayoutSpec,
		RanksPerNode: ranksPerNode(moed),
		Realization:  realization, TokenShuffle: plannedShuffle(moed),
		Hardware: machines.ReferenceForPlan(moed.Spec.Placement.Hardware), HardwareDigest: hardwareDigest,
		MinimumGainPercent: moed.Spec.Rollout.MinimumGainPercent, BatchTokens: moed.Spec.Rollout.BatchTokens,
	}
	spec.RedundantExperts, spec.RedundantMemoryBytes = plannedCopies(moed)
	inputs := planInputs{
		Profile: profile.Name, Result: profile.Status.Result.Digest, Attention: spec.Attention, Ranks: spec.ExpertParallelSize,
		Engine: spec.Engine, Solver: spec.Solver, TokenShuffle: spec.TokenShuffle,
		Hardware: spec.Hardware, HardwareDigest: spec.HardwareDigest,
		Objective: spec.Objective, RanksPerNode: spec.RanksPerNode, RedundantExperts: spec.FixedRedundantExperts(),
		RedundantMemory: spec.RedundantMemory(),
		TokenLoadLimit:  spec.TokenLoadLimitPercent, ExpertLoadLimit: spec.ExpertLoadLimitPercent, BatchTokens: spec.BatchTokens,
	}
	if gain := spec.MinimumGainPercent; gain != nil && *gain != solver.DefaultMinimumGainPercent {
		inputs.MinimumGain = gain
	}
	if realization != semmoev1.RealizationEngineMap {
		inputs.Realization = realization
	}
	name := moed.Name + "-" + ownership.ShortHash(inputs, 8)
	return &semmoev1.PlacementPlan{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: moed.Namespace, Name: name,
			Labels:          desired.Labels(moed, semmoev1.ComponentPlan),
			OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment"),
		},
		Spec: spec,
	}
}

// Profiled reports whether the profile is complete, and belongs to the served model.
func Profiled(profile *semmoev1.AffinityProfile, modelDigest string) bool {
	return profile != nil && meta.IsStatusConditionTrue(profile.Status.Conditions, semmoev1.ConditionReady) &&
		profile.Status.Result != nil && profile.Status.Model != nil && profile.Status.Model.Digest == modelDigest
}

// Published reports whether the plan can be served: it is complete, and made for the model and the ranks of the spec.
func Published(plan *semmoev1.PlacementPlan, moed *semmoev1.MoEDeployment, modelDigest string) bool {
	return plan != nil && plan.DeletionTimestamp == nil &&
		meta.IsStatusConditionTrue(plan.Status.Conditions, semmoev1.ConditionReady) && plan.Status.PlanDigest != "" &&
		plan.Status.ModelDigest == modelDigest &&
		plan.Spec.ExpertParallelSize == moed.Spec.Parallelism.ExpertParallelSize && plan.Spec.Attention == moed.Spec.Parallelism.Attention &&
		plan.Spec.Engine == moed.Spec.Engine.Type
}

// release returns the release of the engine; its zero value if unknown.
func (s *Snapshot) release() engine.Release { return revisions.Release(s.Moed, s.Workloads) }

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
}

// chooseLayout decides what to serve under: the layout in service while it fits the spec, else no plan. The plan for
// the current inputs is the candidate if it may be rolled out. A layout with changed outputs is
// never chosen.
func (c *choice) chooseLayout() (serving, candidate *revisions.Layout, hold desired.Finding) {
	inService := c.inService()
	if inService != nil && (c.refusal(inService) != "" || c.answers.Stranded || c.contradicted(inService)) {
		inService = nil // under this layout no pod would become ready, or could be created
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
		case inService != nil && *l == *inService: // even if it would be rejected now: it is proven
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
		candidates = append(candidates, candidate{revisions.LayoutOf(c.wanted, realization), support})
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

// Foresee returns what a plan of the spec lacks in the engine, or, as its only finding, that no plan can reach the
// engine. It needs neither a plan nor a profile, so the webhooks report it before a device is used. Empty fields of the
// report are unknown, and exclude nothing.
func Foresee(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release) []desired.Finding {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return nil // validation reports an unknown engine
	}
	possible := realizations(moed, report, release, adapter)
	redundant := revisions.MinRedundantExperts(moed)
	keepsGroups := planRealization(possible, report.Groups) == semmoev1.RealizationReshuffledWeights
	if moed.Spec.Placement.PlanRef != nil {
		redundant, keepsGroups = 0, true // both depend on the pinned plan
	}
	var impossible []string
	for _, realization := range possible {
		support := supportOf(moed, report, release, adapter, realization, redundant, keepsGroups)
		if len(support.Refusals) == 0 {
			var findings []desired.Finding
			for _, warning := range support.Warnings {
				findings = append(findings, desired.Finding{Reason: warning.Reason, Message: warning.Message})
			}
			return findings
		}
		if why := support.Refusals[0].Message; !slices.Contains(impossible, why) {
			impossible = append(impossible, why)
		}
	}
	message := "No plan can reach the engine. " + strings.Join(impossible, ". ")
	return []desired.Finding{{Reason: reasonNotRealizable, Message: message}}
}

// supportOf returns the engine's support for a plan with this number of redundant experts and a realization.
func supportOf(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release, adapter engine.Adapter, realization semmoev1.Realization,
	redundant int32, keepsGroups bool,
) engine.Support {
	support := adapter.Support(situation(moed, report, release, realization, redundant, keepsGroups))
	if realization == semmoev1.RealizationReshuffledWeights && moed.Spec.Routing.Mode != semmoev1.RoutingModeRouter {
		support.Refuse("RouterRequired", "Reshuffled weights need spec.routing.mode Router: engines return permuted expert IDs, which only the router translates back")
	}
	return support
}

// situation returns the situation of an engine under a plan with this number of redundant experts.
func situation(moed *semmoev1.MoEDeployment, report checkpoint.Report, release engine.Release, realization semmoev1.Realization,
	redundant int32, keepsGroups bool,
) engine.Situation {
	launch := revisions.Launch(moed)
	launch.RedundantExperts = redundant
	return engine.Situation{
		Realization: engine.Realization(realization), Release: release, Launch: launch, UserArgs: moed.Spec.Engine.Args, UserEnv: revisions.UserEnv(moed),
		Family: report.Family, Wrapper: report.Wrapper, Quantization: report.Quantization, Groups: report.Groups, KeepsGroups: keepsGroups,
		Unpermutable: report.Unpermutable,
	}
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
		if l := layoutIn(workload); l != nil {
			return l
		}
	}
	return nil
}

// layoutIn returns the layout that a workload serves under; nil for none.
func layoutIn(workload *revisions.Workload) *revisions.Layout {
	template := workload.Template()
	for _, volume := range template.Spec.Volumes {
		if digest := template.Annotations[semmoev1.AnnotationPlanDigest]; digest != "" && volume.Name == semmoev1.PlanVolume && volume.ConfigMap != nil {
			return &revisions.Layout{
				Digest: digest, ConfigMap: volume.ConfigMap.Name, Realization: realizationOf(workload), RedundantExperts: redundantExperts(template.Annotations),
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

// promiseOf returns the plan with the digest of serving, among the plans with a forecast.
func promiseOf(serving *revisions.Layout, plans ...*semmoev1.PlacementPlan) *semmoev1.PlacementPlan {
	for _, plan := range plans {
		if serving != nil && plan != nil && plan.Status.PlanDigest == serving.Digest && plan.Status.Forecast != nil {
			return plan
		}
	}
	return nil
}

// reasonNotRealizable is the reason if no plan can reach the engine.
const reasonNotRealizable = "UnsupportedByEngine"

// reasonNoRoom is the reason if the rollout of a plan would interrupt the service.
const reasonNoRoom = "RolloutInterruptsService"

// holdBack returns why a ready plan is not rolled out; its zero value if it is.
func holdBack(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan, pinned bool) desired.Finding {
	short := plan.Status.Plan
	approved, approve := Approved(moed, short) || pinned, ApproveCommand(moed, short)
	no := func(reason, format string, args ...any) desired.Finding {
		return desired.Finding{Reason: reason, Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case plan.Status.Verdict != semmoev1.VerdictGain && plan.Status.Forecast == nil:
		return no(string(plan.Status.Verdict), "Plan %s predicts no gain from token counts, which contain no local activation rate, and is not rolled out", short)
	case plan.Status.Verdict != semmoev1.VerdictGain:
		return no(string(plan.Status.Verdict), "Plan %s predicts no gain (%s), and is not rolled out", short, promiseText(plan))
	case moed.Spec.Routing.Mode == semmoev1.RoutingModeNone && moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel && !approved:
		return no("NoRouter", "Plan %s has a gain only if requests are routed to the ranks of their experts. Set spec.routing.mode to Router or EndpointPicker, or, with your own routing, approve the plan with: %s", short, approve)
	case moed.Spec.Placement.Approval == semmoev1.ApprovalAdvisory:
		return no("Advisory", "Plan %s predicts %s; spec.placement.approval is Advisory: nothing is rolled out", short, promiseText(plan))
	case moed.Spec.Placement.Approval == semmoev1.ApprovalManual && !approved:
		return no("AwaitingApproval", "Plan %s predicts %s; approve it with: %s", short, promiseText(plan), approve)
	case *moed.Spec.Replicas == 1 && *moed.Spec.Rollout.MaxSurge == 0 && !approved:
		return no(reasonNoRoom, "Plan %s predicts %s; with one replica and spec.rollout.maxSurge 0, its rollout interrupts the service. Set maxSurge, or accept the interruption with: %s",
			short, promiseText(plan), approve)
	}
	return desired.Finding{}
}

func forecastOf(plan *semmoev1.PlacementPlan) semmoev1.PlanForecast {
	if plan == nil || plan.Status.Forecast == nil {
		return semmoev1.PlanForecast{}
	}
	return *plan.Status.Forecast
}

// promiseText describes the prediction of a plan, and the value without it.
func promiseText(plan *semmoev1.PlacementPlan) string {
	f := forecastOf(plan)
	if f.LARSummary == "" {
		return "a better placement from token counts, which contain no local activation rate"
	}
	if f.BaselineRemoteRanksMilli > 0 {
		return fmt.Sprintf("the experts of a token on %.2f other ranks, versus %.2f without the plan", float64(f.RemoteRanksMilli)/1000, float64(f.BaselineRemoteRanksMilli)/1000)
	}
	text := fmt.Sprintf("%s versus %s without the plan", f.LARSummary, f.BaselineSummary)
	switch {
	case plan.Status.Verdict != semmoev1.VerdictGain && f.Reason != "":
		text += "; " + f.Reason
	case f.LayerNanos > f.BaselineLayerNanos: // the rates do not explain the verdict
		text += fmt.Sprintf("; a layer takes %.1f µs versus %.1f µs", float64(f.LayerNanos)/1000, float64(f.BaselineLayerNanos)/1000)
	}
	return text
}

// PlannedText describes the prediction of a plan that can be served.
func PlannedText(plan *semmoev1.PlacementPlan) string {
	f := forecastOf(plan)
	if f.LARSummary == "" {
		return "was solved from token counts, which contain no local activation rate"
	}
	if f.BaselineRemoteRanksMilli > 0 {
		return fmt.Sprintf("predicts %s; tokens are not shuffled, and the local activation rate is %s under any plan", promiseText(plan), f.LARSummary)
	}
	return fmt.Sprintf("predicts a local activation rate of %s, versus %s for the default placement", f.LARSummary, f.BaselineSummary)
}

// Reasons of Profiled that are errors, not pending work.
const (
	ReasonProfileNotFound = "ProfileNotFound"
	ReasonOtherModel      = "ModelMismatch"
	ReasonOutputChanged   = "OutputChanged"
)

// ReasonRolledBack is the reason of RolledOut after a failed canary. The serving revision is not affected.
const ReasonRolledBack = "RolledBack"

// ChildVerdict returns the reason and message that an unready profile or plan reports itself.
func ChildVerdict(kind, name string, conditions []metav1.Condition, otherwise string) (reason, message string) {
	ready := meta.FindStatusCondition(conditions, semmoev1.ConditionReady)
	if ready == nil {
		return otherwise, fmt.Sprintf("%s %s has just been created", kind, name)
	}
	return ready.Reason, fmt.Sprintf("%s %s: %s", kind, name, ready.Message)
}

// TablesText names the tables used with the layout in service, and why newer ones are not used; empty if the layout
// uses its own.
func (p *Planning) TablesText() string {
	text := ""
	if p.Tables != nil {
		text = fmt.Sprintf(". Requests are routed by the tables of plan %s (PlacementPlan %s)", p.Tables.Status.Plan, p.Tables.Name)
	}
	if p.TablesHold.Reason != "" {
		text += ". " + p.TablesHold.Reason + ": " + p.TablesHold.Message
	}
	return text
}

// NewestFirst sorts objects by age. Ties are broken by name.
func NewestFirst[T metav1.Object](objects []T) {
	slices.SortFunc(objects, func(a, b T) int {
		return cmp.Or(b.GetCreationTimestamp().Compare(a.GetCreationTimestamp().Time), cmp.Compare(a.GetName(), b.GetName()))
	})
}

func Approved(moed *semmoev1.MoEDeployment, short string) bool {
	return moed.Annotations[semmoev1.AnnotationApprove] == short
}

// ApproveCommand returns the command that approves a plan.
func ApproveCommand(moed *semmoev1.MoEDeployment, short string) string {
	return fmt.Sprintf("kubectl annotate moed -n %s %s %s=%s --overwrite", moed.Namespace, moed.Name, semmoev1.AnnotationApprove, short)
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

// placedAs returns the parallelism for profiles and plans, which do not depend on the node of a rank.
func placedAs(moed *semmoev1.MoEDeployment) semmoev1.ParallelismSpec {
	parallelism := moed.Spec.Parallelism
	parallelism.PodsPerReplica = nil
	return parallelism
}

// plannedShuffle returns the tokenShuffle of plans: empty if requests have ranks, or if tokens are shuffled, which is
// the default of plans.
func plannedShuffle(moed *semmoev1.MoEDeployment) semmoev1.TokenShuffle {
	if moed.Spec.Parallelism.Attention == semmoev1.AttentionDataParallel || desired.Shuffles(moed) {
		return ""
	}
	return semmoev1.TokenShuffleDisabled
}

// plannedCopies returns the number of redundant experts, or Auto and the memory for them, in the form of plans: 0 is
// absent, and memory is normalized to a number of bytes, because the spec of a plan is immutable.
func plannedCopies(moed *semmoev1.MoEDeployment) (*intstr.IntOrString, *resource.Quantity) {
	given := moed.Spec.Placement.LayoutSpec
	switch {
	case given.ChoosesRedundantExperts():
		return given.RedundantExperts, resource.NewQuantity(given.RedundantMemory(), resource.BinarySI)
	case given.FixedRedundantExperts() > 0:
		return given.RedundantExperts, nil
	}
	return nil, nil
}

// ranksPerNode returns how many ranks share a node, if relevant: the ranks of a pod.
func ranksPerNode(moed *semmoev1.MoEDeployment) int32 {
	switch moed.Spec.Placement.Objective {
	case semmoev1.ObjectiveNodeDedup, semmoev1.ObjectiveHierarchical:
		return moed.Spec.Parallelism.ExpertParallelSize / desired.PodsPerReplica(moed)
	}
	return 0
}
