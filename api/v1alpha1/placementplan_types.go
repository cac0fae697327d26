// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PlacementPlan is one solved plan: the assignment of experts to ranks, and the tables that request routers use to
// choose ranks. It is published as a ConfigMap and in the artifact store. A plan can be used without a MoEDeployment:
// mount its ConfigMap in any workload.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=pplan,categories=semmoe
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Plan",type=string,JSONPath=`.status.plan`
// +kubebuilder:printcolumn:name="LAR",type=string,JSONPath=`.status.forecast.larSummary`
// +kubebuilder:printcolumn:name="Baseline",type=string,JSONPath=`.status.forecast.baselineSummary`
// +kubebuilder:printcolumn:name="Tier",type=string,JSONPath=`.status.tier`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Profile",type=string,priority=1,JSONPath=`.spec.profileRef.name`
// +kubebuilder:printcolumn:name="ConfigMap",type=string,priority=1,JSONPath=`.status.configMap`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="metadata.name must be at most 63 characters: lower-case letters, digits and '-'"
type PlacementPlan struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the problem to solve. It is immutable: create another PlacementPlan instead.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the spec of a PlacementPlan cannot be changed: create another one"
	Spec PlacementPlanSpec `json:"spec"`

	// status is the most recently observed state.
	// +optional
	Status PlacementPlanStatus `json:"status,omitempty"`
}

// RedundantExperts returns the number of redundant experts of the plan, or 0 while the solver has not chosen it.
func (p *PlacementPlan) RedundantExperts() int32 {
	if p.Spec.ChoosesRedundantExperts() {
		return p.Status.RedundantExperts
	}
	return p.Spec.FixedRedundantExperts()
}

// PlacementPlanList is a list of PlacementPlans.
//
// +kubebuilder:object:root=true
type PlacementPlanList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PlacementPlan `json:"items"`
}

// PlacementPlanSpec is the problem to solve.
//
// +kubebuilder:validation:XValidation:rule="has(self.current) || !has(self.priorProfileRef)",message="priorProfileRef needs current: without current only the profile of profileRef is used",fieldPath=".priorProfileRef"
// +kubebuilder:validation:XValidation:rule="!has(self.batchTokens) || !has(self.observedBatchTokens)",message="observedBatchTokens and batchTokens must not both be set",fieldPath=".observedBatchTokens"
// +kubebuilder:validation:XValidation:rule="!has(self.tokenShuffle) || self.attention == 'TensorParallel'",message="tokenShuffle needs attention TensorParallel: with DataParallel tokens follow the rank of their request",fieldPath=".tokenShuffle"
// +kubebuilder:validation:XValidation:rule="!has(self.tokenShuffle) || self.tokenShuffle == 'Enabled' || !has(self.current)",message="tokenShuffle Disabled must not be set with current: the rate depends only on the number of ranks, so traffic does not change it",fieldPath=".tokenShuffle"
// +kubebuilder:validation:XValidation:rule="!has(self.hardwareDigest) || has(self.hardware) && has(self.hardware.configMap)",message="hardwareDigest needs hardware.configMap: it is the digest of its content",fieldPath=".hardwareDigest"
// +kubebuilder:validation:XValidation:rule="has(self.ranksPerNode) == (has(self.objective) && self.objective in ['NodeDedup', 'Hierarchical'])",message="ranksPerNode is required with objective NodeDedup or Hierarchical, and not allowed with other objectives",fieldPath=".ranksPerNode"
// +kubebuilder:validation:XValidation:rule="!has(self.ranksPerNode) || self.ranksPerNode < self.expertParallelSize && self.expertParallelSize % self.ranksPerNode == 0",message="ranksPerNode must divide expertParallelSize, and be smaller: the objective needs at least two nodes",fieldPath=".ranksPerNode"
// +kubebuilder:validation:XValidation:rule="!has(self.objective) || self.objective != 'Activation' || !has(self.tokenShuffle) || self.tokenShuffle == 'Enabled'",message="objective Activation needs tokenShuffle Enabled: with Disabled the objective is the same for every placement; use RankDedup",fieldPath=".objective"
// +kubebuilder:validation:XValidation:rule="!has(self.solver) || !has(self.solver.forecast) || self.solver.forecast in ['Auto', 'Table'] || self.attention == 'TensorParallel' && (!has(self.tokenShuffle) || self.tokenShuffle == 'Enabled')",message="forecast Transition, LookBack or LookAhead needs attention TensorParallel and tokenShuffle Enabled: no other engine assigns single tokens to ranks; use Auto or Table",fieldPath=".solver.forecast"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || type(self.redundantExperts) != int || self.redundantExperts % self.expertParallelSize == 0",message="redundantExperts must be a multiple of expertParallelSize: all ranks have the same number of slots",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || self.realization != 'ReshuffledWeights' && self.engine != 'VLLM'",message="redundantExperts needs realization EngineMap, and an engine that reads an expert map (VLLM does not): a permuted checkpoint contains each expert once",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || !has(self.tokenShuffle) || self.tokenShuffle == 'Enabled'",message="redundantExperts Auto needs tokenShuffle Enabled: with Disabled copies are not chosen by modelled time; set a number",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || !has(self.current)",message="redundantExperts Auto must not be set with current: a new plan keeps the number of copies of the current plan; set that number",fieldPath=".redundantExperts"
type PlacementPlanSpec struct {
	// profileRef is the AffinityProfile, in the same namespace, that the plan is made from.
	// +required
	ProfileRef ProfileReference `json:"profileRef"`

	// attention is the attention parallelism of the engine: DataParallel (requests have ranks) or TensorParallel
	// (tokens have ranks). Default DataParallel.
	// +optional
	// +kubebuilder:default=DataParallel
	Attention AttentionParallelism `json:"attention,omitempty"`

	// expertParallelSize is the number of ranks of one replica. It must divide the number of experts of the model.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	ExpertParallelSize int32 `json:"expertParallelSize"`

	// engine is the type of the engine for which the ConfigMap contains an expert map. Default SGLang.
	// +optional
	// +kubebuilder:default=SGLang
	Engine EngineType `json:"engine,omitempty"`

	// realization is the mechanism by which the plan reaches the engine: EngineMap or ReshuffledWeights. Default
	// EngineMap. Some gates first choose among groups of experts. With ReshuffledWeights such a group is kept as a
	// whole, because only then a permuted checkpoint computes the same output. EngineMap has no such limit. For a gate
	// without groups both realizations give the same plan.
	// +optional
	// +kubebuilder:default=EngineMap
	// +kubebuilder:validation:Enum=EngineMap;ReshuffledWeights
	Realization Realization `json:"realization,omitempty"`

	// tokenShuffle is Enabled where the engine sends tokens to the ranks of the plan's tables. Default Enabled. With
	// Disabled tokens stay on the ranks that attention assigns: the share of local activations is 1/expertParallelSize
	// under any plan, so the plan minimizes the number of ranks that hold the experts of a token. It requires attention
	// TensorParallel.
	// +optional
	TokenShuffle TokenShuffle `json:"tokenShuffle,omitempty"`

	LayoutSpec `json:",inline"`

	// ranksPerNode is the number of ranks that share a node. It is required with the objectives NodeDedup and
	// Hierarchical, and not allowed with others.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	RanksPerNode int32 `json:"ranksPerNode,omitempty"`

	// hardware is the hardware profile of the serving machines. Times are modelled by it, and the plan contains it.
	// Default: the built-in profile h200-nvlink.
	// +optional
	Hardware *HardwareReference `json:"hardware,omitempty"`

	// hardwareDigest is the expected sha256 of the content of hardware.configMap, in hexadecimal. The plan is not
	// solved while the content has another digest. Without hardwareDigest any content is used.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	HardwareDigest string `json:"hardwareDigest,omitempty"`

	// current is the plan in service that this plan is to replace. The search starts from it, and the result is
	// compared with it. The result is new tables for the current placement where they gain nearly as much as a new
	// placement.
	// +optional
	Current *CurrentPlan `json:"current,omitempty"`

	// priorProfileRef is the AffinityProfile that the current plan was made from. It supplies the activations of tokens
	// that are rare or missing in the profile of profileRef. It requires current.
	// +optional
	PriorProfileRef *ProfileReference `json:"priorProfileRef,omitempty"`

	// minimumGainPercent is the minimum relative reduction of the modelled time of an MoE layer, in percent, for the
	// verdict Gain. The reference is the current plan, or without current the default placement. Default 2 without
	// current, and 0 with current.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=99
	MinimumGainPercent *int32 `json:"minimumGainPercent,omitempty"`

	// batchTokens is the number of tokens of a step, over all ranks of a replica, for which the plan is solved and
	// evaluated. The larger the batch, the more locality pays. Without batchTokens and observedBatchTokens, 4096, 16384
	// and 65536 tokens have equal weights.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	BatchTokens int32 `json:"batchTokens,omitempty"`

	// observedBatchTokens is the distribution of the number of tokens of a step, over all ranks of a replica, that the
	// engines reported when the plan was created. All sizes have equal weights. The plan is solved and evaluated for
	// them. It excludes batchTokens.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=16777216
	ObservedBatchTokens []int32 `json:"observedBatchTokens,omitempty"`
}

// CurrentPlan identifies a plan in service by its digests in the artifact store.
type CurrentPlan struct {
	// planDigest is the full digest of the plan that the pods were made for.
	// +required
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	PlanDigest string `json:"planDigest"`

	// tablesDigest is the full digest of the plan whose tables the request routers use, where it differs from
	// planDigest.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	TablesDigest string `json:"tablesDigest,omitempty"`

	// targetLARMilli is the local activation rate, in thousandths, at which new tables for the current placement
	// suffice, independent of the gain of a new placement. Without it new tables must gain nearly as much as a new
	// placement.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	TargetLARMilli int32 `json:"targetLARMilli,omitempty"`
}

// Verdict is the result of the evaluation of a plan.
//
// +kubebuilder:validation:Enum=Gain;NoGainExpected;LocalityDoesNotPay
type Verdict string

const (
	// VerdictGain means that the plan reduces the modelled time of an MoE layer by at least the minimum gain on
	// held-out requests, and increases it at no batch size. Unless the minimum gain is 0, the 95% confidence interval
	// of the gain is above 0.
	VerdictGain Verdict = "Gain"
	// VerdictNoGainExpected means that the plan does not fulfil the conditions of Gain. It is not rolled out.
	VerdictNoGainExpected Verdict = "NoGainExpected"
	// VerdictLocalityDoesNotPay means that latencies dominate the time of a layer: even a local activation rate of 100%
	// would not reach the minimum gain. The plan is not rolled out.
	VerdictLocalityDoesNotPay Verdict = "LocalityDoesNotPay"
)

// Tier is the part of a plan in service that a new plan changes.
//
// +kubebuilder:validation:Enum=Tables;Layout
type Tier string

const (
	// TierTables means new tables for the placement in service: request routers swap them, and no pod restarts.
	TierTables Tier = "Tables"
	// TierLayout means a new placement, which is rolled out.
	TierLayout Tier = "Layout"
)

// PlacementPlanStatus is the most recently observed state of a PlacementPlan.
type PlacementPlanStatus struct {
	// conditions are Ready (the plan is published), Progressing, Degraded, Reconciling and Stalled. Each has a reason
	// and a message.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation of the spec that this status describes.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// plan is the short digest of the plan: the first 16 characters of planDigest.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Plan string `json:"plan,omitempty"`

	// planDigest is the digest of the plan (sha256 of its manifest), in hexadecimal.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	PlanDigest string `json:"planDigest,omitempty"`

	// modelDigest is the digest of the checkpoint that the plan is for.
	// +optional
	// +kubebuilder:validation:MaxLength=71
	ModelDigest string `json:"modelDigest,omitempty"`

	// configMap is the name of the ConfigMap that contains the placement and the expert map of the engine.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ConfigMap string `json:"configMap,omitempty"`

	// stableConfigMap is the name of a ConfigMap with the same content whose name is known before the plan is solved:
	// the name of the plan, followed by "-plan". User-provided workloads can mount it. It is created where the plan
	// belongs to no MoEDeployment, and never changes.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	StableConfigMap string `json:"stableConfigMap,omitempty"`

	// redundantExperts is the number of additional copies of experts in each layer, over all ranks: the number in the
	// spec, or the number that the solver chose for Auto.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RedundantExperts int32 `json:"redundantExperts,omitempty"`

	// verdict is the result of the evaluation. Only a plan with verdict Gain is rolled out.
	// +optional
	Verdict Verdict `json:"verdict,omitempty"`

	// forecast is the score of the plan on the held-out requests of the profile.
	// +optional
	Forecast *PlanForecast `json:"forecast,omitempty"`

	// tier is the part that a plan with spec.current changes: Tables or Layout. It is empty where the plan changes
	// nothing.
	// +optional
	Tier Tier `json:"tier,omitempty"`

	// comparison compares a plan with spec.current with the current plan, on the same requests.
	// +optional
	Comparison *PlanComparison `json:"comparison,omitempty"`
}

// PlanComparison compares a plan with the plan in service, on held-out requests of its profile.
type PlanComparison struct {
	// currentLARMilli is the predicted local activation rate of the plan in service, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CurrentLARMilli int32 `json:"currentLARMilli"`

	// candidateLARMilli is the predicted local activation rate of this plan, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CandidateLARMilli int32 `json:"candidateLARMilli"`

	// currentNanos is the modelled time of an MoE layer under the plan in service, in nanoseconds: send, receive, and
	// the GEMM of the slowest rank. It is absent where the profile does not contain the sizes of the model.
	// +optional
	// +kubebuilder:validation:Minimum=0
	CurrentNanos int64 `json:"currentNanos,omitempty"`

	// candidateNanos is the modelled time of an MoE layer under this plan, in nanoseconds. It is absent where
	// currentNanos is.
	// +optional
	// +kubebuilder:validation:Minimum=0
	CandidateNanos int64 `json:"candidateNanos,omitempty"`

	// hardware is the name of the hardware profile that the times are modelled with. It is absent where the times are.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Hardware string `json:"hardware,omitempty"`

	// movedExperts is the number of experts, summed over the layers, that are on another rank than under the plan in
	// service.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MovedExperts int32 `json:"movedExperts,omitempty"`

	// reason is why the tier was chosen, or why the plan changes nothing.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Reason string `json:"reason,omitempty"`

	// requests is the number of requests that were compared. It is 0 where the profile contains only counts of tokens.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Requests int32 `json:"requests,omitempty"`
}

// BatchLAR is a local activation rate in batches of one size.
type BatchLAR struct {
	// batchTokens is the size of a batch, in tokens over all ranks of a replica.
	// +required
	// +kubebuilder:validation:Minimum=1
	BatchTokens int32 `json:"batchTokens"`

	// larMilli is the predicted local activation rate, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LARMilli int32 `json:"larMilli"`
}

// PlanForecast is the score of a plan on the held-out requests of its profile.
type PlanForecast struct {
	// larMilli is the predicted local activation rate, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LARMilli int32 `json:"larMilli"`

	// larByBatch contains the predicted local activation rate by batch size, ascending. larMilli is for batches of 4,096
	// tokens. It is absent with attention DataParallel, whose rate does not depend on batch sizes, and where tokens are
	// not shuffled.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	LARByBatch []BatchLAR `json:"larByBatch,omitempty"`

	// baselineMilli is the local activation rate of the default placement with round-robin requests, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	BaselineMilli int32 `json:"baselineMilli"`

	// upperBoundMilli is an upper bound of the local activation rate of any plan, in thousandths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	UpperBoundMilli int32 `json:"upperBoundMilli,omitempty"`

	// method is the forecast of the plan's tables: Table, Transition, LookBack or LookAhead. Where spec.solver.forecast
	// is Auto, it is the chosen one, and the message of condition Ready contains the compared times. It is absent where
	// tokens are not shuffled, and with attention DataParallel.
	// +optional
	Method SolverForecast `json:"method,omitempty"`

	// layerNanos is the modelled time of an MoE layer under the plan, in nanoseconds, as the mean over batchTokens:
	// send, receive, and the GEMM of the slowest rank. It is absent where the profile does not contain the sizes of the
	// model, and for a plan with spec.current (see status.comparison).
	// +optional
	// +kubebuilder:validation:Minimum=0
	LayerNanos int64 `json:"layerNanos,omitempty"`

	// baselineLayerNanos is the modelled time of an MoE layer in the default placement, in nanoseconds. It is absent
	// where layerNanos is.
	// +optional
	// +kubebuilder:validation:Minimum=0
	BaselineLayerNanos int64 `json:"baselineLayerNanos,omitempty"`

	// hardware is the name of the hardware profile that the times are modelled with. It is absent where layerNanos is.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Hardware string `json:"hardware,omitempty"`

	// batchTokens are the batch sizes over which the times are averaged, in tokens over all ranks of a replica.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	BatchTokens []int32 `json:"batchTokens,omitempty"`

	// savedMilli is the relative reduction from baselineLayerNanos to layerNanos, in thousandths. A negative value
	// means a slower layer.
	// +optional
	SavedMilli int32 `json:"savedMilli,omitempty"`

	// savedLowMilli is the lower end of the 95% confidence interval of savedMilli.
	// +optional
	SavedLowMilli int32 `json:"savedLowMilli,omitempty"`

	// savedHighMilli is the upper end of the 95% confidence interval of savedMilli.
	// +optional
	SavedHighMilli int32 `json:"savedHighMilli,omitempty"`

	// reason is why the plan has its verdict, in one sentence.
	// +optional
	// +kubebuilder:validation:MaxLength=250
	Reason string `json:"reason,omitempty"`

	// chosen identifies the point of the Pareto front that was chosen: the start of the search and the limit of the
	// expert load.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Chosen string `json:"chosen,omitempty"`

	// windowImbalanceMilli is the load of the busiest rank divided by the mean load, over the last 128 requests, in
	// thousandths, averaged over the windows.
	// +optional
	// +kubebuilder:validation:Minimum=0
	WindowImbalanceMilli int32 `json:"windowImbalanceMilli,omitempty"`

	// remoteRanksMilli is the mean number of remote ranks that hold experts of a token under the plan, in thousandths.
	// It is present where tokens are not shuffled.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RemoteRanksMilli int32 `json:"remoteRanksMilli,omitempty"`

	// baselineRemoteRanksMilli is the mean number of remote ranks that hold experts of a token in the default
	// placement, in thousandths. It is present where tokens are not shuffled.
	// +optional
	// +kubebuilder:validation:Minimum=0
	BaselineRemoteRanksMilli int32 `json:"baselineRemoteRanksMilli,omitempty"`

	// larSummary is the predicted rate in percent, for printer columns only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	LARSummary string `json:"larSummary,omitempty"`

	// baselineSummary is the baseline rate in percent, for printer columns only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	BaselineSummary string `json:"baselineSummary,omitempty"`
}
