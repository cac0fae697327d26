package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MoEDeploymentStatus is what the operator last observed.
type MoEDeploymentStatus struct {
	// conditions tell the state: Ready, Progressing, Degraded, Profiled, Planned, RolledOut, LocalityOnTarget,
	// Reconciling, Stalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation of the spec that this status is about.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// replicas is the number of serving pods of all revisions.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Replicas int32 `json:"replicas"`

	// readyReplicas is the number of serving pods that are ready.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ReadyReplicas int32 `json:"readyReplicas"`

	// updatedReplicas is the number of ready pods of the revision that the spec asks for.
	// +optional
	// +kubebuilder:validation:Minimum=0
	UpdatedReplicas int32 `json:"updatedReplicas"`

	// summary is "ready/asked" replicas, for printing only.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Summary string `json:"summary,omitempty"`

	// selector selects the serving pods, for autoscalers.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Selector string `json:"selector,omitempty"`

	// revision is the revision that the spec asks for, once the model has been inspected.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Revision string `json:"revision,omitempty"`

	// serving is the revision that answers requests. It differs from revision until a replica of that is ready, for example while a
	// change of the spec is rolled out or cannot be realised. planDigest, lar, routing and reshuffle describe it.
	// +optional
	Serving *ServingStatus `json:"serving,omitempty"`

	// endpoint is the address, inside the cluster, that clients send their requests to. It is empty while the Service of that name is not ours.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Endpoint string `json:"endpoint,omitempty"`

	// profile is the AffinityProfile that plans are made from, plan the PlacementPlan made from it.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Profile string `json:"profile,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Plan string `json:"plan,omitempty"`

	// planDigest is the short digest of the plan that serving.revision serves under; empty without one.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	PlanDigest string `json:"planDigest,omitempty"`

	// rollout tells how a new plan comes into service; absent where none does.
	// +optional
	Rollout *RolloutStatus `json:"rollout,omitempty"`

	// lar is the local activation rate: the share of activations of routed experts whose expert lies on the rank
	// that serves the token. What is observed moves on a change of 20 milli or more, and at most once a minute; exact
	// figures are metrics.
	// +optional
	LAR *LARStatus `json:"lar,omitempty"`

	// drift tells how near what is served is to count as drifted away from the plan in service; absent while that is not
	// known. Like lar, it moves by steps, at most once a minute.
	// +optional
	Drift *DriftStatus `json:"drift,omitempty"`

	// routing tells how requests are spread over the ranks. Like lar, it moves on a change of 20 milli or more, and at most
	// once a minute.
	// +optional
	Routing *RoutingStatus `json:"routing,omitempty"`

	// batchTokens describes how many tokens a layer computes at a time, over all ranks of a replica: for which sizes the plan was made, and
	// which ones the engines report now. It is absent without plans.
	// +optional
	BatchTokens *BatchTokensStatus `json:"batchTokens,omitempty"`

	// reshuffle contains the cost of the copies of the checkpoint that the pods of serving.revision serve.
	// +optional
	Reshuffle *ReshuffleStatus `json:"reshuffle,omitempty"`

	// model is what the inspection found in the checkpoint.
	// +optional
	Model *ModelStatus `json:"model,omitempty"`
}

// ServingStatus is the revision that answers requests.
type ServingStatus struct {
	// revision is its name.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Revision string `json:"revision"`

	// ranks is the number of ranks that requests are sent to; absent where requests have no rank.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	Ranks int32 `json:"ranks,omitempty"`

	// engineRelease is the release that the engine of this revision reports, such as 0.5.17. It is absent until a pod is ready, and for an
	// engine that reports none.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	EngineRelease string `json:"engineRelease,omitempty"`
}

// RolloutPhase is how far a new plan has come.
//
// +kubebuilder:validation:Enum=None;Canary;Promoting;RollingBack
type RolloutPhase string

const (
	// RolloutPhaseNone: no plan is on its way. It is a phase of metrics alone.
	RolloutPhaseNone RolloutPhase = "None"
	// RolloutPhaseCanary: a few replicas serve under it, and it is compared with what is in service.
	RolloutPhaseCanary RolloutPhase = "Canary"
	// RolloutPhasePromoting: it has proven itself, and replicas move to it.
	RolloutPhasePromoting RolloutPhase = "Promoting"
	// RolloutPhaseRollingBack: it has failed, and its replicas go back.
	RolloutPhaseRollingBack RolloutPhase = "RollingBack"
)

// RolloutStatus is how a new plan comes into service.
type RolloutStatus struct {
	// phase is Canary, Promoting or RollingBack.
	// +required
	Phase RolloutPhase `json:"phase"`

	// since is when the phase began.
	// +required
	Since metav1.Time `json:"since"`

	// stableRevision is the revision that is in service, candidateRevision that of the new plan.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	StableRevision string `json:"stableRevision,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=63
	CandidateRevision string `json:"candidateRevision,omitempty"`

	// candidatePlan is the short digest of the new plan.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	CandidatePlan string `json:"candidatePlan,omitempty"`

	// message says what it waits for, or why it has failed.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// RoutingStatus is how the requests that the routers sampled last are spread over the ranks.
type RoutingStatus struct {
	// ranks has every rank's share of the tokens, those that got nothing too.
	// +optional
	// +listType=map
	// +listMapKey=rank
	// +kubebuilder:validation:MaxItems=1024
	Ranks []RankShare `json:"ranks,omitempty"`

	// observedTime is when they were read, observedRevision the revision that they were read of.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ObservedRevision string `json:"observedRevision,omitempty"`

	// captureCostMilli is by how much longer requests take, per token, of which the engine is asked for the routed experts than
	// others on the same pods, in thousandths: 50 is 5%. It is absent until 100 of either have been compared, and with engines
	// that tell the experts unasked.
	// +optional
	// +kubebuilder:validation:Minimum=-1000
	CaptureCostMilli *int32 `json:"captureCostMilli,omitempty"`

	// captureCostTime is when that was read.
	// +optional
	CaptureCostTime *metav1.Time `json:"captureCostTime,omitempty"`
}

// BatchTokensSource is where batch sizes come from.
//
// +kubebuilder:validation:Enum=Spec;Observed;Default
type BatchTokensSource string

const (
	// BatchTokensSpec is spec.rollout.batchTokens.
	BatchTokensSpec BatchTokensSource = "Spec"
	// BatchTokensObserved is the distribution that the engines had reported when the plan was created.
	BatchTokensObserved BatchTokensSource = "Observed"
	// BatchTokensDefault is the default distribution.
	BatchTokensDefault BatchTokensSource = "Default"
)

// BatchTokensStatus describes the sizes of batches.
type BatchTokensStatus struct {
	// source is where sizes come from: Spec, Observed or Default.
	// +required
	Source BatchTokensSource `json:"source"`

	// sizes are those for which the plan in status.plan was made, or the next plan is made while there is none. Each is as frequent as the
	// others.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Sizes []int32 `json:"sizes,omitempty"`

	// observed are the sizes of the steps of the engines in the last hours: the mean of the smallest eighth of the steps, of the next eighth, and
	// so on. They move once their median or mean doubles or halves, and at most once a minute. They are absent while the engines report too little.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Observed []int32 `json:"observed,omitempty"`

	// prefillMilli is the part of these steps that computed prompts, in thousandths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	PrefillMilli *int32 `json:"prefillMilli,omitempty"`

	// observedTime is when both were read.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// reason is why observed is absent, or why no plan is made for it although it differs much from sizes; message says what to do.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Reason string `json:"reason,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message,omitempty"`
}

// RankShare is what one rank gets, summed over all pods of the revision.
type RankShare struct {
	// rank is the rank's number, from 0.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1023
	Rank int32 `json:"rank"`

	// shareMilli is the rank's share of the tokens of the sampled requests, in thousandths: 1000 divided by the number of
	// ranks where they are spread evenly. The shares sum to 1000.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	ShareMilli int32 `json:"shareMilli"`
}

// ReshuffleStatus is what the permuted copies of the checkpoint have cost, summed over the present pods of the revision.
type ReshuffleStatus struct {
	// made is the number of pods that have made a copy, found the number of those that have found one in the cache.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Made int32 `json:"made"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	Found int32 `json:"found"`

	// bytes is the size of all copies that were made.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Bytes int64 `json:"bytes"`

	// seconds is how long the slowest pod has taken.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Seconds int64 `json:"seconds"`
}

// ModelStatus is what the inspection found in the checkpoint.
type ModelStatus struct {
	// digest identifies the checkpoint: sha256 of its config, index and the header and size of each shard.
	// +required
	// +kubebuilder:validation:MaxLength=71
	Digest string `json:"digest"`

	// family is the model family (config.json's model_type).
	// +required
	// +kubebuilder:validation:MaxLength=63
	Family string `json:"family"`

	// layers is the number of hidden layers, dense ones included.
	// +required
	// +kubebuilder:validation:Minimum=0
	Layers int32 `json:"layers"`

	// moeLayers is the number of layers with routed experts.
	// +required
	// +kubebuilder:validation:Minimum=0
	MoELayers int32 `json:"moeLayers"`

	// experts is the number of routed experts of an MoE layer.
	// +required
	// +kubebuilder:validation:Minimum=0
	Experts int32 `json:"experts"`

	// expertsPerToken is how many experts each token is sent to.
	// +required
	// +kubebuilder:validation:Minimum=0
	ExpertsPerToken int32 `json:"expertsPerToken"`
}

// LARStatus is the local activation rate: what the default placement has, what the plan promises, and what is observed
// under the revision that the spec asks for, over the requests that the routers sampled last.
type LARStatus struct {
	// baselineMilli is the rate of the default placement with round-robin requests, on the held-out part of the profile, in
	// thousandths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	BaselineMilli *int32 `json:"baselineMilli,omitempty"`

	// predictedMilli is the rate that the plan in service promises.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	PredictedMilli *int32 `json:"predictedMilli,omitempty"`

	// observedMilli is the observed rate; absent where too few requests were observed.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	ObservedMilli *int32 `json:"observedMilli,omitempty"`

	// observedTime is when it was read, observedRevision the revision that it was read of.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ObservedRevision string `json:"observedRevision,omitempty"`

	// source is where the observed rate comes from: Engine, the engines' own counters of all requests, where they count local
	// activations, and else Router, the requests that the request routers sample.
	// +optional
	Source LARSource `json:"source,omitempty"`

	// summary and baselineSummary are the observed rate and the baseline in percent, for printing only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Summary string `json:"summary,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=16
	BaselineSummary string `json:"baselineSummary,omitempty"`
}

// LARSource is where an observed local activation rate comes from.
// +kubebuilder:validation:Enum=Engine;Router
type LARSource string

const (
	LARSourceEngine LARSource = "Engine"
	LARSourceRouter LARSource = "Router"
)

// DriftStatus is the state of the test for drift.
type DriftStatus struct {
	// statisticMilli is the value of the test, and thresholdMilli the value above which requests have drifted, both in
	// thousandths. With source Router it is what the sampled requests lacked in local share beyond half of the drop that is to
	// be found, summed up; with source Prometheus the part of the window in which the rate was too low. It moves by a quarter
	// of the threshold, or of itself.
	// +required
	// +kubebuilder:validation:Minimum=0
	StatisticMilli int32 `json:"statisticMilli"`
	// +required
	// +kubebuilder:validation:Minimum=0
	ThresholdMilli int32 `json:"thresholdMilli"`

	// since is when requests began to count as drifted; absent while they do not.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// causes tell where the drop comes from, while requests count as drifted and the routers' sample tells.
	// +optional
	Causes *DriftCauses `json:"causes,omitempty"`

	// observedTime is when the above was read.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`
}

// DriftCauses are shares of the drop of the local activation rate, in thousandths. What they lack to 1000 has none of these
// causes: the same tokens activate other experts than they did.
type DriftCauses struct {
	// newTokensMilli is the share of tokens that the plan's tables have not seen.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	NewTokensMilli int32 `json:"newTokensMilli"`

	// changedMixMilli is the share of another mix of kinds of requests.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	ChangedMixMilli int32 `json:"changedMixMilli"`

	// loadBalancingMilli is the share of requests that were sent to other ranks than their best ones, to spread load.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LoadBalancingMilli int32 `json:"loadBalancingMilli"`
}
