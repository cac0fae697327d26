// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MoEDeploymentStatus is the most recently observed state of a MoEDeployment.
type MoEDeploymentStatus struct {
	// conditions are Ready, Progressing, Degraded, Profiled, Planned, RolledOut, LocalityOnTarget, Reconciling and
	// Stalled. Each has a reason and a message.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation of the spec that this status describes.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// replicas is the number of serving replicas of all revisions.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Replicas int32 `json:"replicas"`

	// readyReplicas is the number of serving replicas that are ready.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ReadyReplicas int32 `json:"readyReplicas"`

	// updatedReplicas is the number of ready replicas of the desired revision (revision).
	// +optional
	// +kubebuilder:validation:Minimum=0
	UpdatedReplicas int32 `json:"updatedReplicas"`

	// summary is "ready/desired" replicas, for printer columns only.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Summary string `json:"summary,omitempty"`

	// selector is the label selector of the serving pods, for autoscalers.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Selector string `json:"selector,omitempty"`

	// revision is the desired revision: the one that the spec results in. It is empty until the model is inspected.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Revision string `json:"revision,omitempty"`

	// serving is the revision that receives requests. It differs from revision until a replica of the desired revision
	// is ready, for example during a roll-out, or where a change of the spec cannot be realized. The fields planDigest,
	// lar, routing and reshuffle describe the serving revision.
	// +optional
	Serving *ServingStatus `json:"serving,omitempty"`

	// endpoint is the address, inside the cluster, to which clients send requests. It is empty while a Service of that
	// name exists that another owner controls.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Endpoint string `json:"endpoint,omitempty"`

	// profile is the name of the AffinityProfile that plans are made from.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Profile string `json:"profile,omitempty"`

	// plan is the name of the PlacementPlan that was made from the profile.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Plan string `json:"plan,omitempty"`

	// planDigest is the short digest of the plan of the serving revision. It is empty without a plan.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	PlanDigest string `json:"planDigest,omitempty"`

	// pendingPlan is the short digest of the plan that waits for approval: the value that the annotation semmoe.io/approve
	// needs. For another change whose canary proves nothing it is the revision. It is absent while nothing waits.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	PendingPlan string `json:"pendingPlan,omitempty"`

	// rollout is the progress of the roll-out of a new plan. It is absent while no plan is rolled out.
	// +optional
	Rollout *RolloutStatus `json:"rollout,omitempty"`

	// lar is the local activation rate: the share of the activations of routed experts whose expert is on the rank that
	// serves the token. The observed rate is updated when it changes by 20 thousandths or more, and at most once a
	// minute. Metrics have the exact values.
	// +optional
	LAR *LARStatus `json:"lar,omitempty"`

	// drift is the state of the drift test: how close the traffic is to counting as drifted from the plan in service.
	// It is absent while the state is unknown. It is updated in steps, at most once a minute.
	// +optional
	Drift *DriftStatus `json:"drift,omitempty"`

	// routing is the distribution of requests over the ranks. It is updated when a share changes by 20 thousandths or
	// more, and at most once a minute.
	// +optional
	Routing *RoutingStatus `json:"routing,omitempty"`

	// batchTokens contains the numbers of tokens per step, over all ranks of a replica: the sizes that the plan was
	// made for, and the sizes that the engines report now. It is absent without plans.
	// +optional
	BatchTokens *BatchTokensStatus `json:"batchTokens,omitempty"`

	// overlap is the result of spec.engine.overlap with mode Auto. It is absent with mode Manual.
	// +optional
	Overlap *OverlapStatus `json:"overlap,omitempty"`

	// reshuffle contains the cost of the permuted copies of the checkpoint that the pods of serving.revision use.
	// +optional
	Reshuffle *ReshuffleStatus `json:"reshuffle,omitempty"`

	// model is the result of the inspection of the checkpoint.
	// +optional
	Model *ModelStatus `json:"model,omitempty"`

	// download is the state of the download of the checkpoint. It is absent without spec.model.source.huggingFace, and until
	// the download Job reports progress.
	// +optional
	Download *DownloadStatus `json:"download,omitempty"`
}

// ServingStatus is the revision that receives requests.
type ServingStatus struct {
	// revision is the name of the revision.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Revision string `json:"revision"`

	// ranks is the number of ranks that requests are routed to. It is absent where requests have no rank.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	Ranks int32 `json:"ranks,omitempty"`

	// engineRelease is the release that the engine of this revision reports, such as 0.5.17. It is absent until a pod
	// is ready, and for an engine that reports no release.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	EngineRelease string `json:"engineRelease,omitempty"`
}

// RolloutPhase is the phase of the roll-out of a new plan.
//
// +kubebuilder:validation:Enum=None;Canary;Promoting;RollingBack
type RolloutPhase string

const (
	// RolloutPhaseNone means that no plan is being rolled out. Only metrics use this phase.
	RolloutPhaseNone RolloutPhase = "None"
	// RolloutPhaseCanary means that the canary replicas serve the new plan and are compared with the stable revision.
	RolloutPhaseCanary RolloutPhase = "Canary"
	// RolloutPhasePromoting means that the new plan passed the comparison, and the remaining replicas move to it.
	RolloutPhasePromoting RolloutPhase = "Promoting"
	// RolloutPhaseRollingBack means that the new plan failed, and its replicas return to the stable revision.
	RolloutPhaseRollingBack RolloutPhase = "RollingBack"
)

// RolloutStatus is the progress of the roll-out of a new plan, or of another change that is compared on a canary.
type RolloutStatus struct {
	// phase is Canary, Promoting or RollingBack.
	// +required
	Phase RolloutPhase `json:"phase"`

	// since is the start time of the phase.
	// +required
	Since metav1.Time `json:"since"`

	// stableRevision is the revision in service before the roll-out.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	StableRevision string `json:"stableRevision,omitempty"`

	// candidateRevision is the revision of the new plan or change.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	CandidateRevision string `json:"candidateRevision,omitempty"`

	// candidatePlan is the short digest of the new plan; empty for a change without one.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	CandidatePlan string `json:"candidatePlan,omitempty"`

	// message is what the roll-out waits for, or why it failed.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// RoutingStatus is the distribution over the ranks of the requests that the routers sampled most recently.
type RoutingStatus struct {
	// ranks contains the share of every rank, including ranks without tokens.
	// +optional
	// +listType=map
	// +listMapKey=rank
	// +kubebuilder:validation:MaxItems=1024
	Ranks []RankShare `json:"ranks,omitempty"`

	// observedTime is the time of the observation.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// observedRevision is the revision that was observed.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ObservedRevision string `json:"observedRevision,omitempty"`

	// captureCostMilli is the relative increase of the time per token of requests for which the engine is asked to
	// return the routed experts, in thousandths: 50 is 5%. The comparison is with other requests on the same pods. It
	// is absent until 100 requests of each kind are compared, and with engines that always return the experts.
	// +optional
	// +kubebuilder:validation:Minimum=-1000
	CaptureCostMilli *int32 `json:"captureCostMilli,omitempty"`

	// captureCostTime is the time at which captureCostMilli was read.
	// +optional
	CaptureCostTime *metav1.Time `json:"captureCostTime,omitempty"`
}

// BatchTokensSource is the source of batch sizes.
//
// +kubebuilder:validation:Enum=Spec;Observed;Default
type BatchTokensSource string

const (
	// BatchTokensSpec means the size in spec.rollout.batchTokens.
	BatchTokensSpec BatchTokensSource = "Spec"
	// BatchTokensObserved means the distribution that the engines reported when the plan was created.
	BatchTokensObserved BatchTokensSource = "Observed"
	// BatchTokensDefault means the default distribution: 4096, 16384 and 65536 tokens with equal weights.
	BatchTokensDefault BatchTokensSource = "Default"
)

// BatchTokensStatus contains numbers of tokens per step, over all ranks of a replica.
type BatchTokensStatus struct {
	// source is the source of sizes: Spec, Observed or Default.
	// +required
	Source BatchTokensSource `json:"source"`

	// sizes are the batch sizes, in tokens, that the plan in status.plan was made for. Without a plan, they are the
	// sizes that the next plan will be made for. All sizes have equal weights.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Sizes []int32 `json:"sizes,omitempty"`

	// observed is the distribution of the step sizes of the engines in the last hours, in tokens: the mean of the
	// smallest eighth of the steps, of the next eighth, and so on. It is updated when its median or mean doubles or
	// halves, and at most once a minute. It is absent while the engines report too few steps, and where the spec sets the
	// batch size and tokens are not shuffled.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Observed []int32 `json:"observed,omitempty"`

	// prefillMilli is the share of the observed steps that contained prefill, in thousandths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	PrefillMilli *int32 `json:"prefillMilli,omitempty"`

	// observedTime is the time at which observed and prefillMilli were read.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// reason is why observed is absent, or why no plan is made for observed although it differs considerably from
	// sizes.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Reason string `json:"reason,omitempty"`

	// message explains reason, and names the action to take.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message,omitempty"`
}

// OverlapStatus is what the operator chose for spec.engine.overlap. The settings are those of the serving revision.
type OverlapStatus struct {
	// microBatches is the number of micro-batches; absent if steps are not split.
	// +optional
	MicroBatches int32 `json:"microBatches,omitempty"`

	// thresholdTokens is the minimum number of tokens of a rank in a step that is split; absent if the engine has no flag
	// for it, or if its default is used.
	// +optional
	ThresholdTokens int32 `json:"thresholdTokens,omitempty"`

	// communicationSMs is the number of multiprocessors for exchanges; absent for the engine's default.
	// +optional
	CommunicationSMs int32 `json:"communicationSMs,omitempty"`

	// batchTokens are the batch sizes, in tokens over all ranks, for which the settings were chosen.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	BatchTokens []int32 `json:"batchTokens,omitempty"`

	// layerNanos is the modelled time of an MoE layer with the settings, in nanoseconds: dispatch, routed experts and
	// combine, the mean over batchTokens.
	// +optional
	// +kubebuilder:validation:Minimum=0
	LayerNanos int64 `json:"layerNanos,omitempty"`

	// unsplitNanos is the modelled time without micro-batches.
	// +optional
	// +kubebuilder:validation:Minimum=0
	UnsplitNanos int64 `json:"unsplitNanos,omitempty"`

	// reason is Overlapping, NoGainExpected, or why no settings are chosen or the newest ones are not used.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Reason string `json:"reason"`

	// message explains reason, and names the action to take.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message,omitempty"`
}

// RankShare is the share of one rank, summed over all pods of the revision.
type RankShare struct {
	// rank is the 0-based number of the rank.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1023
	Rank int32 `json:"rank"`

	// shareMilli is the share of this rank in the tokens of the sampled requests, in thousandths. The shares of all
	// ranks sum to 1000.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	ShareMilli int32 `json:"shareMilli"`
}

// ReshuffleStatus is the cost of the permuted copies of the checkpoint, summed over the existing pods of the revision.
type ReshuffleStatus struct {
	// made is the number of pods that made a copy.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Made int32 `json:"made"`

	// found is the number of pods that found a copy in the cache.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Found int32 `json:"found"`

	// bytes is the total size of the copies that were made.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Bytes int64 `json:"bytes"`

	// seconds is the duration of the slowest copy.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Seconds int64 `json:"seconds"`
}

// DownloadStatus is the state of the download of the checkpoint. It is updated every ten seconds while the Job runs.
type DownloadStatus struct {
	// commit is the commit that the revision was when it was downloaded; empty until the download is complete.
	// +optional
	// +kubebuilder:validation:MaxLength=40
	Commit string `json:"commit,omitempty"`

	// bytes is the number of bytes on the volume, of totalBytes.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Bytes int64 `json:"bytes"`

	// totalBytes is the size of all files.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TotalBytes int64 `json:"totalBytes"`

	// files is the number of complete files, of totalFiles.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Files int32 `json:"files"`

	// totalFiles is the number of files.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TotalFiles int32 `json:"totalFiles"`
}

// ModelStatus is the result of the inspection of the checkpoint.
type ModelStatus struct {
	// digest identifies the checkpoint: the sha256 of its config, its index, and the header and size of each shard.
	// +required
	// +kubebuilder:validation:MaxLength=71
	Digest string `json:"digest"`

	// family is the model family: model_type in config.json, or unknown.
	// +required
	// +kubebuilder:validation:MaxLength=63
	Family string `json:"family"`

	// layers is the number of hidden layers, including dense layers.
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

	// expertsPerToken is the number of routed experts that each token activates in an MoE layer.
	// +required
	// +kubebuilder:validation:Minimum=0
	ExpertsPerToken int32 `json:"expertsPerToken"`

	// unprofilable is the reason why the model cannot be profiled, so that no plan can be made for it.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Unprofilable string `json:"unprofilable,omitempty"`

	// unmappable is the reason why the model cannot be served with an expert map.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Unmappable string `json:"unmappable,omitempty"`

	// unpermutable is the reason why the experts of the checkpoint cannot be permuted.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Unpermutable string `json:"unpermutable,omitempty"`
}

// LARStatus contains the local activation rate: of the default placement, as predicted by the plan, and as observed on
// the serving revision.
type LARStatus struct {
	// baselineMilli is the rate of the default placement with round-robin requests, in thousandths, on the held-out
	// requests of the profile.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	BaselineMilli *int32 `json:"baselineMilli,omitempty"`

	// predictedMilli is the rate that the plan in service predicts, in thousandths. With attention TensorParallel it is for
	// the batch sizes in batchTokens.observed, once these are known.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	PredictedMilli *int32 `json:"predictedMilli,omitempty"`

	// observedMilli is the observed rate, in thousandths. It is absent while too few requests are observed.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	ObservedMilli *int32 `json:"observedMilli,omitempty"`

	// observedTime is the time of the observation.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`

	// observedRevision is the revision that was observed.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	ObservedRevision string `json:"observedRevision,omitempty"`

	// source is the source of the observed rate: Engine (the counters of the engines, over all requests) where the
	// engines count local activations, and Router (the requests that the request routers sample) elsewhere.
	// +optional
	Source LARSource `json:"source,omitempty"`

	// summary is the observed rate in percent, for printer columns only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Summary string `json:"summary,omitempty"`

	// baselineSummary is the baseline in percent, for printer columns only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	BaselineSummary string `json:"baselineSummary,omitempty"`
}

// LARSource is the source of an observed local activation rate.
// +kubebuilder:validation:Enum=Engine;Router
type LARSource string

const (
	// LARSourceEngine means the counters of the engines, over all requests.
	LARSourceEngine LARSource = "Engine"

	// LARSourceRouter means the requests that the request routers sample.
	LARSourceRouter LARSource = "Router"
)

// DriftStatus is the state of the drift test.
type DriftStatus struct {
	// statisticMilli is the value of the test statistic, in thousandths. With source Router it is the CUSUM statistic
	// of the sampled requests: the accumulated shortfall of their local share beyond half of the drop to detect. With
	// source Prometheus it is the share of the window in which the rate was too low. It is updated when it changes by a
	// quarter of the threshold, or by a quarter of its value.
	// +required
	// +kubebuilder:validation:Minimum=0
	StatisticMilli int32 `json:"statisticMilli"`

	// thresholdMilli is the value of statisticMilli above which the traffic counts as drifted, in thousandths.
	// +required
	// +kubebuilder:validation:Minimum=0
	ThresholdMilli int32 `json:"thresholdMilli"`

	// since is the time at which the traffic started to count as drifted. It is absent without drift.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// causes attributes the drop of the rate to causes. It is absent without drift, and where the sample of the routers
	// does not identify the causes.
	// +optional
	Causes *DriftCauses `json:"causes,omitempty"`

	// observedTime is the time of the observation.
	// +optional
	ObservedTime *metav1.Time `json:"observedTime,omitempty"`
}

// DriftCauses contains shares of the drop of the local activation rate, in thousandths. The remainder to 1000 has none
// of these causes: the same tokens activate different experts than before.
type DriftCauses struct {
	// newTokensMilli is the share that is caused by tokens that are not in the tables of the plan.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	NewTokensMilli int32 `json:"newTokensMilli"`

	// changedMixMilli is the share that is caused by a change of the mix of request domains.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	ChangedMixMilli int32 `json:"changedMixMilli"`

	// loadBalancingMilli is the share that is caused by requests that were routed to other ranks than their best one to
	// balance load.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LoadBalancingMilli int32 `json:"loadBalancingMilli"`
}
