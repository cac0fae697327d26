package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PlacementPlan is one solved plan: which expert sits on which rank, and the tables that send requests there. It is
// published as a ConfigMap and in the artifact store. A plan can be used alone: mount its ConfigMap in any workload.
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

	// spec is what to solve. It cannot be changed: make another plan instead.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the spec of a PlacementPlan cannot be changed: create another one"
	Spec PlacementPlanSpec `json:"spec"`

	// status is what the operator last observed.
	// +optional
	Status PlacementPlanStatus `json:"status,omitempty"`
}

// RedundantExperts is the number of redundant experts of the plan; 0 where the solver has not chosen it yet.
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

// PlacementPlanSpec is what to solve.
//
// +kubebuilder:validation:XValidation:rule="has(self.current) || !has(self.priorProfileRef)",message="priorProfileRef needs current: without it the plan is made from its own profile alone",fieldPath=".priorProfileRef"
// +kubebuilder:validation:XValidation:rule="!has(self.batchTokens) || !has(self.observedBatchTokens)",message="observedBatchTokens does not go with batchTokens: give one of them",fieldPath=".observedBatchTokens"
// +kubebuilder:validation:XValidation:rule="!has(self.tokenShuffle) || self.attention == 'TensorParallel'",message="tokenShuffle needs attention TensorParallel: elsewhere requests have ranks, and tokens follow them",fieldPath=".tokenShuffle"
// +kubebuilder:validation:XValidation:rule="!has(self.tokenShuffle) || self.tokenShuffle == 'Enabled' || !has(self.current)",message="tokenShuffle Disabled goes without current: traffic does not change a rate that hangs on the number of ranks alone",fieldPath=".tokenShuffle"
// +kubebuilder:validation:XValidation:rule="!has(self.hardwareDigest) || has(self.hardware) && has(self.hardware.configMap)",message="hardwareDigest needs hardware.configMap: it is the digest of its content",fieldPath=".hardwareDigest"
// +kubebuilder:validation:XValidation:rule="has(self.ranksPerNode) == (has(self.objective) && self.objective in ['NodeDedup', 'Hierarchical'])",message="ranksPerNode goes with objective NodeDedup or Hierarchical, which need it, and with no other",fieldPath=".ranksPerNode"
// +kubebuilder:validation:XValidation:rule="!has(self.ranksPerNode) || self.ranksPerNode < self.expertParallelSize && self.expertParallelSize % self.ranksPerNode == 0",message="ranksPerNode must divide expertParallelSize, and be smaller: with one node there is no other to send to",fieldPath=".ranksPerNode"
// +kubebuilder:validation:XValidation:rule="!has(self.objective) || self.objective != 'Activation' || !has(self.tokenShuffle) || self.tokenShuffle == 'Enabled'",message="objective Activation needs tokenShuffle Enabled: elsewhere it is the same under every placement; use RankDedup",fieldPath=".objective"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || type(self.redundantExperts) != int || self.redundantExperts % self.expertParallelSize == 0",message="redundantExperts must be a multiple of expertParallelSize: each rank has as many slots",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || self.realization != 'ReshuffledWeights' && self.engine != 'VLLM'",message="redundantExperts needs realization EngineMap, and an engine that reads a map (VLLM reads none): a permuted checkpoint has each expert once",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || !has(self.tokenShuffle) || self.tokenShuffle == 'Enabled'",message="redundantExperts Auto needs tokenShuffle Enabled: elsewhere copies are not chosen by time; give a number",fieldPath=".redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts != 'Auto' || !has(self.current)",message="redundantExperts Auto goes without current: a plan that replaces another one keeps the number of its copies; give that",fieldPath=".redundantExperts"
type PlacementPlanSpec struct {
	// profileRef names the AffinityProfile, in the same namespace, that the plan is made from.
	// +required
	ProfileRef ProfileReference `json:"profileRef"`

	// attention is how the engine spreads attention: requests have ranks (DataParallel), or tokens have (TensorParallel).
	// +optional
	// +kubebuilder:default=DataParallel
	Attention AttentionParallelism `json:"attention,omitempty"`

	// expertParallelSize is the number of ranks. It must divide the number of experts of the model.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	ExpertParallelSize int32 `json:"expertParallelSize"`

	// engine is the type of the engine whose expert map the ConfigMap holds.
	// +optional
	// +kubebuilder:default=SGLang
	Engine EngineType `json:"engine,omitempty"`

	// realization is how the plan is to reach the engine. With ReshuffledWeights the experts of a gate that first chooses among
	// groups of them stay within whole groups, since a permuted checkpoint computes the same only then. An EngineMap has no
	// such limit; for a gate without groups both give the same plan.
	// +optional
	// +kubebuilder:default=EngineMap
	// +kubebuilder:validation:Enum=EngineMap;ReshuffledWeights
	Realization Realization `json:"realization,omitempty"`

	// tokenShuffle tells whether the engine sends tokens to the ranks of the plan's tables. With Disabled it leaves them where attention
	// puts them: one activation in expertParallelSize is local under any plan, and the plan has the experts of a token on as few ranks
	// as possible instead. Default Enabled. It needs attention TensorParallel.
	// +optional
	TokenShuffle TokenShuffle `json:"tokenShuffle,omitempty"`

	LayoutSpec `json:",inline"`

	// ranksPerNode is how many ranks share a node, for the objectives NodeDedup and Hierarchical, which need it.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	RanksPerNode int32 `json:"ranksPerNode,omitempty"`

	// hardware names the profile of the machines that are to serve, which the plan carries: times are modelled by it. Without it the
	// operator's own profile h200-nvlink counts.
	// +optional
	Hardware *HardwareReference `json:"hardware,omitempty"`

	// hardwareDigest is the sha256, in hexadecimal, of the content of hardware.configMap that the plan is to be made with. Where the
	// ConfigMap holds anything else by then, the plan is not made. Without it any content will do.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	HardwareDigest string `json:"hardwareDigest,omitempty"`

	// current is the plan in service, for a plan that is to replace it: the search starts from it, and it is what the result
	// is compared with. New tables for its placement are made where they do nearly as well as a new placement.
	// +optional
	Current *CurrentPlan `json:"current,omitempty"`

	// priorProfileRef names the AffinityProfile that the current plan was made from: what its tokens activated counts for those
	// that the present profile has rarely, or never, seen. It needs current.
	// +optional
	PriorProfileRef *ProfileReference `json:"priorProfileRef,omitempty"`

	// minimumGainPercent is by how much a plan must lower the modelled time of an MoE layer to have the verdict Gain: against the current
	// plan, or without one against the default placement. Defaults to 2, and with current to 0.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=99
	MinimumGainPercent *int32 `json:"minimumGainPercent,omitempty"`

	// batchTokens is how many tokens a layer computes at a time, over all ranks of a replica: the plan is solved and judged for batches of
	// this size. The larger, the more locality pays. Without it and observedBatchTokens, 4096, 16384 and 65536 tokens are equally frequent.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	BatchTokens int32 `json:"batchTokens,omitempty"`

	// observedBatchTokens is the distribution of the tokens of a step, over all ranks of a replica, that engines had reported when the plan
	// was created: sizes of batches, each as frequent as the others. The plan is solved and judged for them.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=16777216
	ObservedBatchTokens []int32 `json:"observedBatchTokens,omitempty"`
}

// CurrentPlan names a plan in service, as it stands in the artifact store.
type CurrentPlan struct {
	// planDigest is the full digest of the plan that the pods were made for.
	// +required
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	PlanDigest string `json:"planDigest"`

	// tablesDigest is the full digest of the plan whose tables the request routers use, where that is another one.
	// +optional
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{64}$`
	TablesDigest string `json:"tablesDigest,omitempty"`

	// targetLARMilli is the local activation rate, in thousandths, with which new tables for its placement are good enough,
	// whatever a new placement would gain. Without it they must gain nearly as much as that.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	TargetLARMilli int32 `json:"targetLARMilli,omitempty"`
}

// Verdict is what a plan is worth.
//
// +kubebuilder:validation:Enum=Gain;NoGainExpected;LocalityDoesNotPay
type Verdict string

const (
	// VerdictGain is a plan that lowers the modelled time of an MoE layer by the minimum, on requests that it has not seen, and at no batch
	// size raises it; unless the minimum is 0, the 95% interval excludes that it saves nothing.
	VerdictGain Verdict = "Gain"
	// VerdictNoGainExpected is a plan that does not: it is not rolled out.
	VerdictNoGainExpected Verdict = "NoGainExpected"
	// VerdictLocalityDoesNotPay is a plan where the time of a layer is that of latencies: not even a rate of 100% would gain
	// what is asked for, and nothing is rolled out.
	VerdictLocalityDoesNotPay Verdict = "LocalityDoesNotPay"
)

// Tier is what changes under a plan that replaces another one.
//
// +kubebuilder:validation:Enum=Tables;Layout
type Tier string

const (
	// TierTables is new tables for the placement that serves: request routers swap them, and no pod is restarted.
	TierTables Tier = "Tables"
	// TierLayout is a new placement: it is rolled out.
	TierLayout Tier = "Layout"
)

// PlacementPlanStatus is what the operator last observed.
type PlacementPlanStatus struct {
	// conditions tell the state: Ready (the plan is published), Progressing, Degraded, Reconciling, Stalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation of the spec that this status is about.
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

	// configMap holds the placement and the engine's map.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ConfigMap string `json:"configMap,omitempty"`

	// stableConfigMap holds the same under a name that is known before the plan is solved: the plan's, followed by "-plan". It is
	// for workloads of yours, made where the plan belongs to no MoEDeployment, and never changed.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	StableConfigMap string `json:"stableConfigMap,omitempty"`

	// redundantExperts is how many copies of experts a layer of the plan has beyond one of each, over all ranks: the number of the spec, or
	// the one that was chosen for Auto.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RedundantExperts int32 `json:"redundantExperts,omitempty"`

	// verdict says whether the plan is worth rolling out.
	// +optional
	Verdict Verdict `json:"verdict,omitempty"`

	// forecast is the plan's score on the requests of the profile that it was not made from.
	// +optional
	Forecast *PlanForecast `json:"forecast,omitempty"`

	// tier is what a plan with spec.current changes; empty where it changes nothing.
	// +optional
	Tier Tier `json:"tier,omitempty"`

	// comparison is how a plan with spec.current compares with that one, on the same requests.
	// +optional
	Comparison *PlanComparison `json:"comparison,omitempty"`
}

// PlanComparison is how a plan compares with the one in service, on requests of its profile that it was not made from.
type PlanComparison struct {
	// currentLARMilli and candidateLARMilli are the local activation rates to expect, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CurrentLARMilli int32 `json:"currentLARMilli"`
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CandidateLARMilli int32 `json:"candidateLARMilli"`

	// currentNanos and candidateNanos are the modelled times of an MoE layer in nanoseconds: send, receive, and the GEMM of the
	// slowest rank. They are absent where the profile does not tell the sizes of the model.
	// +optional
	// +kubebuilder:validation:Minimum=0
	CurrentNanos int64 `json:"currentNanos,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	CandidateNanos int64 `json:"candidateNanos,omitempty"`

	// hardware is the name of the profile of hardware by which those times are modelled; absent where they are.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Hardware string `json:"hardware,omitempty"`

	// movedExperts is how many experts, summed over layers, lie on another rank than under the plan in service.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MovedExperts int32 `json:"movedExperts,omitempty"`

	// reason says why the tier was chosen, or none.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Reason string `json:"reason,omitempty"`

	// requests is the number of requests that were compared; 0 where only counts of tokens are known.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Requests int32 `json:"requests,omitempty"`
}

// PlanForecast is a plan's score on held-out requests, in thousandths.
type PlanForecast struct {
	// larMilli is the local activation rate to expect.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LARMilli int32 `json:"larMilli"`

	// baselineMilli is the local activation rate of the default placement with round-robin requests.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	BaselineMilli int32 `json:"baselineMilli"`

	// upperBoundMilli is a bound that no plan can exceed.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	UpperBoundMilli int32 `json:"upperBoundMilli,omitempty"`

	// layerNanos and baselineLayerNanos are the modelled times of an MoE layer, in nanoseconds, under the plan and in the default placement,
	// means over batchTokens: send, receive, and the GEMM of the slowest rank. hardware is the name of the profile of hardware
	// by which they are modelled. They are absent where the profile does not tell the sizes of the model, and for a plan with
	// spec.current, which is compared with that one.
	// +optional
	// +kubebuilder:validation:Minimum=0
	LayerNanos int64 `json:"layerNanos,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	BaselineLayerNanos int64 `json:"baselineLayerNanos,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Hardware string `json:"hardware,omitempty"`

	// batchTokens are the sizes of batches that the times are means over, in tokens over all ranks.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	BatchTokens []int32 `json:"batchTokens,omitempty"`

	// savedMilli is by how much layerNanos is below baselineLayerNanos, in thousandths; savedLowMilli and savedHighMilli are the ends of its
	// 95% interval. Negative values are a slower layer.
	// +optional
	SavedMilli int32 `json:"savedMilli,omitempty"`
	// +optional
	SavedLowMilli int32 `json:"savedLowMilli,omitempty"`
	// +optional
	SavedHighMilli int32 `json:"savedHighMilli,omitempty"`

	// reason says in one sentence why the plan has its verdict.
	// +optional
	// +kubebuilder:validation:MaxLength=250
	Reason string `json:"reason,omitempty"`

	// chosen names the point of the plan's front that was chosen: what the search started from, and its limit on the load of experts.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Chosen string `json:"chosen,omitempty"`

	// windowImbalanceMilli is the mean of the busiest rank's load over the mean load, over the last 128 requests.
	// +optional
	// +kubebuilder:validation:Minimum=0
	WindowImbalanceMilli int32 `json:"windowImbalanceMilli,omitempty"`

	// remoteRanksMilli and baselineRemoteRanksMilli are on how many other ranks than its own the experts of a token lie, under the plan
	// and in the default placement. They are told where tokens are not shuffled.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RemoteRanksMilli int32 `json:"remoteRanksMilli,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	BaselineRemoteRanksMilli int32 `json:"baselineRemoteRanksMilli,omitempty"`

	// larSummary and baselineSummary are the rates in percent, for printing only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	LARSummary string `json:"larSummary,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=16
	BaselineSummary string `json:"baselineSummary,omitempty"`
}
