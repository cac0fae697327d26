package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// PlacementObjective is what a placement is to keep small.
//
// +kubebuilder:validation:Enum=Time;Activation;RankDedup;NodeDedup;Hierarchical
type PlacementObjective string

const (
	// ObjectiveTime is the modelled time of an MoE layer: what the busiest rank exchanges, and what the slowest one computes.
	ObjectiveTime PlacementObjective = "Time"
	// ObjectiveActivation counts the activations whose expert is on another rank.
	ObjectiveActivation PlacementObjective = "Activation"
	// ObjectiveRankDedup counts the other ranks that a token is sent to, each once.
	ObjectiveRankDedup PlacementObjective = "RankDedup"
	// ObjectiveNodeDedup counts the other nodes that a token is sent to, each once.
	ObjectiveNodeDedup PlacementObjective = "NodeDedup"
	// ObjectiveHierarchical counts both, each by what a message costs.
	ObjectiveHierarchical PlacementObjective = "Hierarchical"
)

// LayoutSpec says which expert is to be on which rank: for what, within which limits, and how that is searched for.
//
// +kubebuilder:validation:XValidation:rule="!has(self.objective) || self.objective in ['Time', 'Activation'] || !has(self.solver.algorithm) || self.solver.algorithm == 'auto'",message="objectives other than Time and Activation need solver.algorithm auto: the others know one objective, their own",fieldPath=".objective"
// +kubebuilder:validation:XValidation:rule="!has(self.tokenLoadLimitPercent) || !has(self.solver.algorithm) || self.solver.algorithm in ['auto', 'contiguous']",message="tokenLoadLimitPercent needs solver.algorithm auto or contiguous: the others know no limits",fieldPath=".tokenLoadLimitPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.expertLoadLimitPercent) || !has(self.solver.algorithm) || self.solver.algorithm in ['auto', 'contiguous']",message="expertLoadLimitPercent needs solver.algorithm auto or contiguous: the others know no limits",fieldPath=".expertLoadLimitPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || !has(self.solver.algorithm) || self.solver.algorithm in ['auto', 'eplb', 'contiguous', 'round-robin']",message="redundantExperts needs solver.algorithm auto, eplb, contiguous or round-robin: the others know no copies",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || !has(self.expertLoadLimitPercent)",message="expertLoadLimitPercent goes without redundantExperts: which copy computes an expert is the engine's choice",fieldPath=".expertLoadLimitPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || (type(self.redundantExperts) == int ? self.redundantExperts >= 0 && self.redundantExperts <= 65536 : self.redundantExperts == 'Auto')",message="redundantExperts must be a number from 0 to 65536, or Auto",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || has(self.redundantMemoryBytes)",message="redundantExperts Auto needs redundantMemoryBytes: the memory of a rank that copies may take",fieldPath=".redundantMemoryBytes"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantMemoryBytes) || has(self.redundantExperts) && self.redundantExperts == 'Auto'",message="redundantMemoryBytes needs redundantExperts Auto: a number of copies takes the memory that it needs",fieldPath=".redundantMemoryBytes"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantMemoryBytes) || (type(self.redundantMemoryBytes) == int ? self.redundantMemoryBytes > 0 : quantity(self.redundantMemoryBytes).isGreaterThan(quantity('0')))",message="redundantMemoryBytes must be above 0",fieldPath=".redundantMemoryBytes"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || (!has(self.objective) || self.objective == 'Time') && (!has(self.solver.algorithm) || self.solver.algorithm == 'auto')",message="redundantExperts Auto needs objective Time and solver.algorithm auto: copies are chosen by the modelled time",fieldPath=".redundantExperts"
type LayoutSpec struct {
	// objective is what a placement is to keep small: Time (the modelled time of an MoE layer over the sizes of batches), Activation
	// (activations whose expert is on another rank), RankDedup (other ranks that a token is sent to), NodeDedup (other nodes), or
	// Hierarchical (both, each by what a message costs). The counts suit all-to-alls that Time does not model: those that send a token to a
	// rank, or to a node, once. NodeDedup and Hierarchical are for replicas of several nodes. Default Time; RankDedup where attention is
	// TensorParallel and tokenShuffle Disabled.
	// +optional
	Objective PlacementObjective `json:"objective,omitempty"`

	// redundantExperts is how many copies of experts a layer has beyond one of each, over all ranks: a multiple of expertParallelSize, or
	// Auto, which takes as many as pay in modelled time and fit redundantMemoryBytes. Each rank then holds copies of those experts of
	// other ranks that its tokens activate most: memory buys locality. It needs an engine with an expert map that has room for copies.
	// +optional
	// +kubebuilder:validation:XIntOrString
	RedundantExperts *intstr.IntOrString `json:"redundantExperts,omitempty"`

	// redundantMemoryBytes is the memory of each rank that copies of experts may take with redundantExperts Auto, over all layers, such as
	// 8Gi. Memory for less than an expert of each layer leaves a plan without copies.
	// +optional
	RedundantMemoryBytes *resource.Quantity `json:"redundantMemoryBytes,omitempty"`

	// tokenLoadLimitPercent is the largest token load of a rank, in percent of its share: of the profile under the placement (without it
	// 102), and of the last 128 requests where requests are sent to ranks (without it 115).
	// +optional
	// +kubebuilder:validation:Minimum=100
	// +kubebuilder:validation:Maximum=1000
	TokenLoadLimitPercent *int32 `json:"tokenLoadLimitPercent,omitempty"`

	// expertLoadLimitPercent is the largest load of a rank's experts in a layer on the profile, in percent of the mean: a layer waits
	// for its slowest rank. Without it any load will do. A limit that no placement keeps is kept as nearly as can be.
	// +optional
	// +kubebuilder:validation:Minimum=100
	// +kubebuilder:validation:Maximum=1000
	ExpertLoadLimitPercent *int32 `json:"expertLoadLimitPercent,omitempty"`

	// solver says how the placement is searched for.
	// +optional
	// +kubebuilder:default={}
	Solver SolverSpec `json:"solver,omitempty"`
}

// RedundantExpertsAuto is the value of redundantExperts that leaves the number to the solver.
const RedundantExpertsAuto = "Auto"

// ChoosesRedundantExperts reports whether the solver chooses the number of redundant experts.
func (l *LayoutSpec) ChoosesRedundantExperts() bool {
	return l.RedundantExperts != nil && *l.RedundantExperts == intstr.FromString(RedundantExpertsAuto)
}

// FixedRedundantExperts is the number of redundant experts that the spec gives; 0 where the solver chooses it.
func (l *LayoutSpec) FixedRedundantExperts() int32 {
	if l.RedundantExperts == nil || l.RedundantExperts.Type != intstr.Int {
		return 0
	}
	return l.RedundantExperts.IntVal
}

// RedundantMemory is the memory of a rank in bytes from which the number of redundant experts is chosen; 0 where the spec gives the number.
func (l *LayoutSpec) RedundantMemory() int64 {
	if !l.ChoosesRedundantExperts() || l.RedundantMemoryBytes == nil {
		return 0
	}
	return l.RedundantMemoryBytes.Value()
}

// SolverAlgorithm is how a placement is searched for: a name that semmoe solve --algorithm takes.
//
// +kubebuilder:validation:Enum=auto;alternating;alternating-printed;cross-entropy;cross-entropy-printed;kmeans2d;eplb;coactivation;exflow;moetuner;contiguous;round-robin
type SolverAlgorithm string

// SolverSpec says how a placement is searched for.
type SolverSpec struct {
	// algorithm is auto, the default, or one of the published ones that it is compared with (docs/solving.md has them). A plan that
	// replaces another one, for traffic that has changed, is always searched for by auto.
	// +optional
	Algorithm SolverAlgorithm `json:"algorithm,omitempty"`

	// timeBudgetSeconds cuts the search off; a plan that it cut off says so.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	TimeBudgetSeconds int32 `json:"timeBudgetSeconds,omitempty"`

	// seed makes split and search repeatable.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	Seed *int64 `json:"seed,omitempty"`

	// trainPercent of the profile's requests are learnt from, by whole documents; the others judge the plan.
	// +optional
	// +kubebuilder:default=80
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=99
	TrainPercent int32 `json:"trainPercent,omitempty"`
}
