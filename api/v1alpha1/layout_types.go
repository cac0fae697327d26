// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// PlacementObjective is the quantity that a placement minimizes.
//
// +kubebuilder:validation:Enum=Time;Activation;RankDedup;NodeDedup;Hierarchical
type PlacementObjective string

const (
	// ObjectiveTime is the modelled time of an MoE layer: the exchange of the busiest rank plus the computation of the
	// slowest rank.
	ObjectiveTime PlacementObjective = "Time"
	// ObjectiveActivation is the number of activations whose expert is on another rank than the token.
	ObjectiveActivation PlacementObjective = "Activation"
	// ObjectiveRankDedup is the number of remote ranks that a token is sent to, each counted once.
	ObjectiveRankDedup PlacementObjective = "RankDedup"
	// ObjectiveNodeDedup is the number of remote nodes that a token is sent to, each counted once.
	ObjectiveNodeDedup PlacementObjective = "NodeDedup"
	// ObjectiveHierarchical is the weighted sum of remote ranks and remote nodes. The weights are the costs of a
	// message.
	ObjectiveHierarchical PlacementObjective = "Hierarchical"
)

// LayoutSpec configures the assignment of experts to ranks: the objective, the constraints and the search.
//
// +kubebuilder:validation:XValidation:rule="!has(self.objective) || self.objective in ['Time', 'Activation'] || !has(self.solver.algorithm) || self.solver.algorithm == 'auto'",message="objectives other than Time and Activation need solver.algorithm auto: each of the other algorithms has a fixed objective",fieldPath=".objective"
// +kubebuilder:validation:XValidation:rule="!has(self.tokenLoadLimitPercent) || !has(self.solver.algorithm) || self.solver.algorithm in ['auto', 'contiguous']",message="tokenLoadLimitPercent needs solver.algorithm auto or contiguous: the other algorithms do not support limits",fieldPath=".tokenLoadLimitPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.expertLoadLimitPercent) || !has(self.solver.algorithm) || self.solver.algorithm in ['auto', 'contiguous']",message="expertLoadLimitPercent needs solver.algorithm auto or contiguous: the other algorithms do not support limits",fieldPath=".expertLoadLimitPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || !has(self.solver.algorithm) || self.solver.algorithm in ['auto', 'eplb', 'contiguous']",message="redundantExperts needs solver.algorithm auto, eplb or contiguous: the other algorithms do not support copies",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || !has(self.expertLoadLimitPercent)",message="expertLoadLimitPercent must not be set with redundantExperts: the engine chooses which copy computes an expert",fieldPath=".expertLoadLimitPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || (type(self.redundantExperts) == int ? self.redundantExperts >= 0 && self.redundantExperts <= 65536 : self.redundantExperts == 'Auto')",message="redundantExperts must be a number from 0 to 65536, or Auto",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || has(self.redundantMemoryBytes)",message="redundantExperts Auto needs redundantMemoryBytes: the memory of a rank that copies may take",fieldPath=".redundantMemoryBytes"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantMemoryBytes) || has(self.redundantExperts) && self.redundantExperts == 'Auto'",message="redundantMemoryBytes needs redundantExperts Auto: it does not limit a fixed number of copies",fieldPath=".redundantMemoryBytes"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantMemoryBytes) || (type(self.redundantMemoryBytes) == int ? self.redundantMemoryBytes > 0 : self.redundantMemoryBytes.matches('^[0-9.]{1,20}([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?$') && quantity(self.redundantMemoryBytes).isGreaterThan(quantity('0')))",message="redundantMemoryBytes must be above 0: a number of bytes such as 8Gi, with at most two digits in an exponent",fieldPath=".redundantMemoryBytes"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || (!has(self.objective) || self.objective == 'Time') && (!has(self.solver.algorithm) || self.solver.algorithm == 'auto')",message="redundantExperts Auto needs objective Time and solver.algorithm auto: copies are chosen by the modelled time",fieldPath=".redundantExperts"
type LayoutSpec struct {
	// objective is the quantity that the placement minimizes: Time (the modelled time of an MoE layer over the batch
	// sizes), Activation (activations whose expert is on another rank), RankDedup (remote ranks per token), NodeDedup
	// (remote nodes per token), or Hierarchical (remote ranks and nodes, weighted by the cost of a message). Default
	// Time; RankDedup where attention is TensorParallel and tokenShuffle is Disabled. RankDedup, NodeDedup and
	// Hierarchical suit an all-to-all that Time does not model: one that sends a token once to each rank or node.
	// NodeDedup and Hierarchical require replicas with several nodes.
	// +optional
	Objective PlacementObjective `json:"objective,omitempty"`

	// redundantExperts is the number of additional copies of experts in each layer, over all ranks: a multiple of
	// expertParallelSize, or Auto. Default 0. Auto takes the number that is best in modelled time and fits
	// redundantMemoryBytes. Each rank gets copies of the remote experts that its tokens activate most, so memory buys
	// locality. It requires an engine whose expert map supports copies.
	// +optional
	// +kubebuilder:validation:XIntOrString
	RedundantExperts *intstr.IntOrString `json:"redundantExperts,omitempty"`

	// redundantMemoryBytes is the memory of each rank for copies of experts, over all layers, with redundantExperts
	// Auto: a quantity such as 8Gi. A size below one expert per layer results in a plan without copies.
	// +optional
	RedundantMemoryBytes *resource.Quantity `json:"redundantMemoryBytes,omitempty"`

	// tokenLoadLimitPercent is the maximum token load of a rank, in percent of an equal share. It limits the placement
	// on the profile (default 102), and request routing over the last 128 requests where requests have ranks (default
	// 115).
	// +optional
	// +kubebuilder:validation:Minimum=100
	// +kubebuilder:validation:Maximum=1000
	TokenLoadLimitPercent *int32 `json:"tokenLoadLimitPercent,omitempty"`

	// expertLoadLimitPercent is the maximum load of the experts of a rank in a layer on the profile, in percent of the
	// mean. Default: no limit. A layer waits for its slowest rank. Where no placement satisfies the limit, the solver
	// minimizes the excess.
	// +optional
	// +kubebuilder:validation:Minimum=100
	// +kubebuilder:validation:Maximum=1000
	ExpertLoadLimitPercent *int32 `json:"expertLoadLimitPercent,omitempty"`

	// solver configures the search for the placement.
	// +optional
	// +kubebuilder:default={}
	Solver SolverSpec `json:"solver,omitempty"`
}

// RedundantExpertsAuto is the value of redundantExperts with which the solver chooses the number.
const RedundantExpertsAuto = "Auto"

// ChoosesRedundantExperts reports whether the solver chooses the number of redundant experts.
func (l *LayoutSpec) ChoosesRedundantExperts() bool {
	return l.RedundantExperts != nil && *l.RedundantExperts == intstr.FromString(RedundantExpertsAuto)
}

// FixedRedundantExperts returns the number of redundant experts in the spec, or 0 where the solver chooses the number.
func (l *LayoutSpec) FixedRedundantExperts() int32 {
	if l.RedundantExperts == nil || l.RedundantExperts.Type != intstr.Int {
		return 0
	}
	return l.RedundantExperts.IntVal
}

// RedundantMemory returns the memory of a rank for redundant experts, in bytes, or 0 where the spec sets their number.
func (l *LayoutSpec) RedundantMemory() int64 {
	if !l.ChoosesRedundantExperts() || l.RedundantMemoryBytes == nil {
		return 0
	}
	return l.RedundantMemoryBytes.Value()
}

// SolverAlgorithm is a placement algorithm for production. semmoe solve --algorithm has more of them, for comparisons.
//
// +kubebuilder:validation:Enum=auto;alternating;cross-entropy;eplb;contiguous
type SolverAlgorithm string

// SolverForecast is what the tables of a plan predict the experts of a token from, with attention TensorParallel. semmoe
// solve --forecast has more of them, for comparisons.
//
// +kubebuilder:validation:Enum=Auto;Table;Transition;LookBack;LookAhead
type SolverForecast string

const (
	// ForecastAuto chooses one of the others by modelled time on held-out documents of the profile.
	ForecastAuto SolverForecast = "Auto"
	// ForecastTable predicts from the token ID.
	ForecastTable SolverForecast = "Table"
	// ForecastTransition also uses the ranks of the token's experts in the two previous MoE layers.
	ForecastTransition SolverForecast = "Transition"
	// ForecastLookBack also uses the ranks of the token's experts in up to four previous MoE layers, with fitted weights.
	ForecastLookBack SolverForecast = "LookBack"
	// ForecastLookAhead predicts from the gate of the layer, applied before the layer's attention.
	ForecastLookAhead SolverForecast = "LookAhead"
)

// SolverSpec configures the search for a placement.
type SolverSpec struct {
	// algorithm is auto, or another algorithm of docs/compare-algorithms.md. Default auto. A plan that
	// replaces another plan after drift always uses auto.
	// +optional
	Algorithm SolverAlgorithm `json:"algorithm,omitempty"`

	// forecast is what the plan's tables predict the experts of a token from: Auto, Table, Transition, LookBack or
	// LookAhead (docs/forecasts.md). Default Auto, which takes the smallest tables whose modelled layer time is within
	// 1% of the best one; status.forecast.method of the plan is its choice. With attention DataParallel it is Table.
	// Transition, LookBack and LookAhead require tokenShuffle Enabled, and an engine whose token shuffle supports them.
	// LookAhead also requires a profile with a look-ahead. A plan that replaces another one for new traffic keeps the
	// forecast of the plan in service with Auto.
	// +optional
	Forecast SolverForecast `json:"forecast,omitempty"`

	// timeBudgetSeconds is the time limit of the search. Default 300. A plan whose search was stopped by the limit
	// reports this.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	TimeBudgetSeconds int32 `json:"timeBudgetSeconds,omitempty"`

	// seed is the seed of the random train/test split and of the search. Default 1. The same inputs and seed give the
	// same plan.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	Seed *int64 `json:"seed,omitempty"`

	// trainPercent is the share of the requests of the profile that the plan is made from, in percent, split by whole
	// documents. Default 80. The remaining requests are held out to evaluate the plan.
	// +optional
	// +kubebuilder:default=80
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=99
	TrainPercent int32 `json:"trainPercent,omitempty"`
}
