// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/solver"
)

// profileInputs are the inputs that distinguish the profiles of a MoEDeployment. Images, resources and parallel sizes
// are not included: the experts that a token activates do not depend on them.
type profileInputs struct {
	Path     string                   `json:"path"`
	LayoutAs string                   `json:"layoutAs,omitempty"`
	Volume   corev1.VolumeSource      `json:"volume"`
	Model    string                   `json:"model"`
	Dataset  semmoev1.DatasetSpec     `json:"dataset"`
	Sampling semmoev1.SamplingSpec    `json:"sampling"`
	Target   semmoev1.ProfilingTarget `json:"target"`
	// Backend is omitted if it is Engine.
	Backend semmoev1.ProfilingBackend `json:"backend,omitempty"`
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
	inputs := profileInputs{
		Path: moed.Spec.Model.Path, LayoutAs: moed.Spec.Model.LayoutAs, Volume: moed.Spec.Model.ModelVolume(), Model: modelDigest,
		Dataset: *profiling.Dataset, Sampling: profiling.SamplingSpec, Target: profiling.Target,
	}
	if profiling.Backend != semmoev1.ProfilingBackendEngine {
		inputs.Backend = profiling.Backend
	}
	name := moed.Name + "-" + ownership.ShortHash(inputs, 8)
	spec := semmoev1.AffinityProfileSpec{
		Model: moed.Spec.Model.Mounted(), Engine: moed.Spec.Engine.ForProfile(), Parallelism: placedAs(moed),
		Dataset: profiling.Dataset, SamplingSpec: profiling.SamplingSpec, Target: profiling.Target, BackendSpec: profiling.BackendSpec,
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
			Labels:          ownership.PassQueue(desired.Labels(moed, semmoev1.ComponentProfile), moed.Labels),
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
	if inputs.Solver.Forecast == semmoev1.ForecastAuto || !desired.Shuffles(moed) {
		inputs.Solver.Forecast = "" // the default, or Table, which is the only one
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
