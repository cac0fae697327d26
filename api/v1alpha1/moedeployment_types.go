package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MoEDeployment serves one Mixture-of-Experts model with expert parallelism.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:resource:shortName=moed,categories=semmoe
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Replicas",type=string,JSONPath=`.status.summary`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Plan",type=string,JSONPath=`.status.planDigest`
// +kubebuilder:printcolumn:name="LAR",type=string,JSONPath=`.status.lar.summary`
// +kubebuilder:printcolumn:name="Baseline",type=string,JSONPath=`.status.lar.baselineSummary`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Model",type=string,priority=1,JSONPath=`.status.model.family`
// +kubebuilder:printcolumn:name="Revision",type=string,priority=1,JSONPath=`.status.revision`
// +kubebuilder:printcolumn:name="Endpoint",type=string,priority=1,JSONPath=`.status.endpoint`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",message="metadata.name must be at most 40 characters: lower-case letters, digits and '-', starting with a letter and ending with a letter or digit"
// +kubebuilder:validation:XValidation:rule="!has(self.spec.parallelism.podsPerReplica) || self.spec.parallelism.podsPerReplica == 1 || size(self.metadata.name) <= 36",message="metadata.name must be at most 36 characters where spec.parallelism.podsPerReplica is above 1: a label of the pods is longer than their workload's name"
type MoEDeployment struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata. The name has at most 40 characters, since the names of pods and
	// workloads are derived from it.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the user asks for.
	// +required
	Spec MoEDeploymentSpec `json:"spec"`

	// status is what the operator last observed.
	// +optional
	Status MoEDeploymentStatus `json:"status,omitempty"`
}

// MoEDeploymentList is a list of MoEDeployments.
//
// +kubebuilder:object:root=true
type MoEDeploymentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []MoEDeployment `json:"items"`
}

// MoEDeploymentSpec is what a user asks for.
//
// +kubebuilder:validation:XValidation:rule="!has(self.routing.samplePercent) || self.routing.samplePercent == 0 || (self.routing.mode != 'None' && self.parallelism.attention == 'DataParallel')",message="samplePercent needs routing.mode Router or EndpointPicker, and parallelism.attention DataParallel: elsewhere requests have no rank to compare with",fieldPath=".routing.samplePercent"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.holdMilliseconds) || (self.parallelism.attention == 'DataParallel' && self.engine.type != 'TensorRTLLM')",message="holdMilliseconds needs attention DataParallel, and an engine that takes requests for a rank, which TensorRTLLM does not: elsewhere there is no rank to wait for",fieldPath=".routing.holdMilliseconds"
// +kubebuilder:validation:XValidation:rule="self.routing.mode != 'EndpointPicker' || self.engine.type != 'TensorRTLLM'",message="mode EndpointPicker needs an engine that takes requests for a rank, and TensorRTLLM takes none: use Router or None",fieldPath=".routing.mode"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.weights) || !has(self.routing.weights.affinityPercent) || self.routing.weights.affinityPercent == 0 || (self.parallelism.attention == 'DataParallel' && self.engine.type != 'TensorRTLLM')",message="affinityPercent needs parallelism.attention DataParallel and an engine that takes requests for a rank (TensorRTLLM takes none): elsewhere requests have no rank; use 0, or remove it",fieldPath=".routing.weights.affinityPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.parallelism.podsPerReplica) || self.parallelism.podsPerReplica == 1 || !has(self.profiling) || !has(self.profiling.target) || self.profiling.target != 'Dedicated'",message="target Dedicated needs parallelism.podsPerReplica 1: a profiling Job has one pod; use Serving",fieldPath=".profiling.target"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.tokenShuffle) || self.placement.tokenShuffle == 'Disabled' || (self.parallelism.attention == 'TensorParallel' && self.engine.type == 'SGLang')",message="tokenShuffle Enabled needs parallelism.attention TensorParallel and engine.type SGLang: with DataParallel tokens follow their request, and other engines have no all-to-all with TensorParallel",fieldPath=".placement.tokenShuffle"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.objective) || !(self.placement.objective in ['NodeDedup', 'Hierarchical']) || (has(self.parallelism.podsPerReplica) && self.parallelism.podsPerReplica > 1)",message="objectives NodeDedup and Hierarchical need parallelism.podsPerReplica above 1: the ranks of a pod share a node, and there is no other to send to",fieldPath=".placement.objective"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.objective) || self.placement.objective != 'Activation' || self.parallelism.attention == 'DataParallel' || (has(self.placement.tokenShuffle) && self.placement.tokenShuffle == 'Enabled')",message="objective Activation needs parallelism.attention DataParallel, or tokenShuffle Enabled: elsewhere it is the same under every placement; use RankDedup",fieldPath=".placement.objective"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.redundantExperts) || type(self.placement.redundantExperts) != int || self.placement.redundantExperts % self.parallelism.expertParallelSize == 0",message="redundantExperts must be a multiple of parallelism.expertParallelSize: each rank has as many slots",fieldPath=".placement.redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.redundantExperts) || self.placement.redundantExperts == 0 || self.engine.type != 'VLLM'",message="redundantExperts needs an engine that reads an expert map, and VLLM reads none: a permuted checkpoint has each expert once",fieldPath=".placement.redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.redundantExperts) || self.placement.redundantExperts != 'Auto' || self.parallelism.attention == 'DataParallel' || (has(self.placement.tokenShuffle) && self.placement.tokenShuffle == 'Enabled')",message="redundantExperts Auto needs parallelism.attention DataParallel, or tokenShuffle Enabled: elsewhere copies are not chosen by time; give a number",fieldPath=".placement.redundantExperts"
type MoEDeploymentSpec struct {
	// model names the checkpoint to serve.
	// +required
	Model ModelSpec `json:"model"`

	// engine is the inference engine that serves the model.
	// +required
	Engine EngineSpec `json:"engine"`

	// parallelism says how one replica spreads the model over its devices.
	// +required
	Parallelism ParallelismSpec `json:"parallelism"`

	// replicas is the number of serving replicas. Leave it out where an autoscaler sets it.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	Replicas *int32 `json:"replicas,omitempty"`

	// template is merged over the pod template that the operator makes for the engine (strategic merge): node selector,
	// tolerations, security context, resources, further containers and volumes. A container named "engine" is merged
	// into the engine's own. Labels and annotations under semmoe.io/ are reserved.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`

	// profiling asks for a profile of the model, and for a placement plan made from it. Without it the model is served with
	// the engine's own placement.
	// +optional
	Profiling *ProfilingSpec `json:"profiling,omitempty"`

	// placement says how plans are made and when they are rolled out.
	// +optional
	// +kubebuilder:default={}
	Placement PlacementSpec `json:"placement,omitempty"`

	// routing is how requests reach the ranks.
	// +optional
	// +kubebuilder:default={}
	Routing RoutingSpec `json:"routing,omitempty"`

	// drift says how it is found out that requests have moved away from what the plan in service was made for, and how often a
	// new plan may be made for that.
	// +optional
	// +kubebuilder:default={}
	Drift DriftSpec `json:"drift,omitempty"`

	// rollout bounds what may be out of service, or additional, while replicas move from one revision to the next.
	// +optional
	// +kubebuilder:default={}
	Rollout RolloutSpec `json:"rollout,omitempty"`

	// reconciliation is Active, or Paused to stop roll-outs: what serves goes on serving at the asked number of replicas
	// and is repaired, but nothing new is rolled out.
	// +optional
	// +kubebuilder:default=Active
	Reconciliation ReconciliationMode `json:"reconciliation,omitempty"`
}

// ReconciliationMode says whether the operator rolls out changes.
//
// +kubebuilder:validation:Enum=Active;Paused
type ReconciliationMode string

const (
	// ReconciliationActive lets the operator do all its work.
	ReconciliationActive ReconciliationMode = "Active"
	// ReconciliationPaused leaves repair and serving only.
	ReconciliationPaused ReconciliationMode = "Paused"
)

// ModelSpec names a Hugging Face checkpoint.
//
// +kubebuilder:validation:XValidation:rule="self.path == '/models' || (self.path.startsWith('/models/') && !self.path.contains('/../') && !self.path.endsWith('/..'))",message="path must be /models, or a directory below it without '..': spec.model.volume is mounted at /models",fieldPath=".path"
type ModelSpec struct {
	// name is the model name that clients send. Defaults to the name of the MoEDeployment.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// path is the directory of the checkpoint (config.json and *.safetensors) as containers see it: /models, where
	// volume is mounted, or a directory below it.
	// +optional
	// +kubebuilder:default=/models
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path,omitempty"`

	// volume holds the checkpoint; it is mounted read-only at /models in every pod that reads it. Any source of a
	// Kubernetes volume that several pods can mount at once: persistentVolumeClaim, nfs, csi, hostPath, image, ...
	// +required
	Volume corev1.VolumeSource `json:"volume"`
}

// EngineType is an inference engine that the operator knows.
//
// +kubebuilder:validation:Enum=SGLang;VLLM;VLLMAscend;TensorRTLLM
type EngineType string

const (
	// EngineSGLang is SGLang, and every engine that speaks the same flags and routes.
	EngineSGLang EngineType = "SGLang"
	// EngineVLLM is vLLM. It reads no expert map: plans reach it by permuted checkpoints alone.
	EngineVLLM EngineType = "VLLM"
	// EngineVLLMAscend is vLLM with the vllm-ascend plugin.
	EngineVLLMAscend EngineType = "VLLMAscend"
	// EngineTensorRTLLM is TensorRT-LLM (trtllm-serve). It reads an expert map, but neither takes requests for a rank nor tells
	// which experts they activated: profiling needs profileRef, and the local activation rate stays unknown.
	EngineTensorRTLLM EngineType = "TensorRTLLM"
)

// EngineSpec is the inference engine of a replica.
type EngineSpec struct {
	// type is the engine whose flags and routes are spoken: SGLang, VLLM, VLLMAscend or TensorRTLLM.
	// +optional
	// +kubebuilder:default=SGLang
	Type EngineType `json:"type,omitempty"`

	// image is the engine's container image.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Image string `json:"image"`

	// command replaces the command that starts the engine (SGLang: python3 -m sglang.launch_server; VLLM and VLLMAscend: vllm
	// serve; TensorRTLLM: trtllm-serve). The operator's flags follow it.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=4096
	Command []string `json:"command,omitempty"`

	// args are further flags of the engine. A flag that the operator sets itself (model path, host, port, parallel sizes,
	// served model name) is refused.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=32768
	Args []string `json:"args,omitempty"`

	// options are members of the engine's options file, as YAML, where the engine has one: TensorRTLLM, which reads it as
	// --extra_llm_api_options. The operator adds attention data parallelism and a plan's map. A member that another field decides is refused.
	// +optional
	// +kubebuilder:validation:MaxLength=16384
	Options string `json:"options,omitempty"`

	// env are further environment variables of the engine.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=256
	Env []corev1.EnvVar `json:"env,omitempty"`

	// overlap lets the exchange of some tokens go on beside the computation of others, as far as the engine has flags for it. Without
	// it nothing of the kind is set. SGLang and VLLM alone have any, with an all-to-all backend in args.
	// +optional
	Overlap *OverlapSpec `json:"overlap,omitempty"`

	// port is the engine's HTTP port.
	// +optional
	// +kubebuilder:default=30000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
}

// OverlapSpec is what engines offer to have exchange and computation go on beside each other. What is not given is not set.
//
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || has(self.communicationSMs)",message="give microBatches, communicationSMs, or both"
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || !has(self.decodeThresholdTokens)",message="decodeThresholdTokens needs microBatches: it says which steps are cut",fieldPath=".decodeThresholdTokens"
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || !has(self.prefillThresholdTokens)",message="prefillThresholdTokens needs microBatches: it says which steps are cut",fieldPath=".prefillThresholdTokens"
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || !has(self.distributionThresholdPercent)",message="distributionThresholdPercent needs microBatches: it says how steps are cut",fieldPath=".distributionThresholdPercent"
type OverlapSpec struct {
	// microBatches is into how many parts the engine cuts the tokens of a step, to exchange those of one while it computes another:
	// exactly 2 with SGLang (--enable-two-batch-overlap), 2 (--enable-dbo) or more (--ubatch-size) with VLLM, which needs attention
	// DataParallel.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=16
	MicroBatches int32 `json:"microBatches,omitempty"`

	// decodeThresholdTokens is the least number of tokens of a step of decoding alone that VLLM cuts (--dbo-decode-token-threshold).
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	DecodeThresholdTokens int32 `json:"decodeThresholdTokens,omitempty"`

	// prefillThresholdTokens is the same of a step with prompts (--dbo-prefill-token-threshold).
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	PrefillThresholdTokens int32 `json:"prefillThresholdTokens,omitempty"`

	// distributionThresholdPercent is the least share of a step's tokens that SGLang wants in either part; below it, it cuts within a
	// request instead of between two (--tbo-token-distribution-threshold). 0 never does.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=50
	DistributionThresholdPercent *int32 `json:"distributionThresholdPercent,omitempty"`

	// communicationSMs is how many of a GPU's streaming multiprocessors exchange tokens in the place of computing, of SGLang with
	// DeepEP in its mode normal (num_sms of --deepep-config). DeepEP takes even numbers alone.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=128
	// +kubebuilder:validation:MultipleOf=2
	CommunicationSMs int32 `json:"communicationSMs,omitempty"`
}

// AttentionParallelism is how attention is spread over the devices of a replica.
//
// +kubebuilder:validation:Enum=DataParallel;TensorParallel
type AttentionParallelism string

const (
	// AttentionDataParallel computes the attention of a request on one rank: requests are sent to ranks.
	AttentionDataParallel AttentionParallelism = "DataParallel"
	// AttentionTensorParallel splits the attention of every request over all ranks: requests have no rank.
	AttentionTensorParallel AttentionParallelism = "TensorParallel"
)

// ParallelismSpec says how one replica spreads the model over its devices.
//
// +kubebuilder:validation:XValidation:rule="!has(self.podsPerReplica) || self.expertParallelSize % self.podsPerReplica == 0",message="podsPerReplica must divide expertParallelSize: every pod has as many ranks",fieldPath=".podsPerReplica"
type ParallelismSpec struct {
	// attention is DataParallel (each request lives on one rank; the number of data-parallel ranks equals
	// expertParallelSize), or TensorParallel.
	// +optional
	// +kubebuilder:default=DataParallel
	Attention AttentionParallelism `json:"attention,omitempty"`

	// expertParallelSize is the number of ranks, and devices, over which the experts of one replica are spread. It must
	// divide the number of experts of the model.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	ExpertParallelSize int32 `json:"expertParallelSize"`

	// podsPerReplica is the number of pods that the ranks of one replica are spread over, in order and evenly, where a replica
	// needs more devices than a node has. Default 1. More need the kind LeaderWorkerSet in the cluster
	// (leaderworkerset.x-k8s.io/v1), and an engine that flags can spread: SGLang, or VLLM and VLLMAscend with attention
	// DataParallel. The first pod answers requests for all.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=256
	PodsPerReplica *int32 `json:"podsPerReplica,omitempty"`

	// resourceName is the extended resource of a device: each pod asks for expertParallelSize of it, divided by
	// podsPerReplica.
	// +optional
	// +kubebuilder:default=nvidia.com/gpu
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	ResourceName string `json:"resourceName,omitempty"`
}

// ApprovalMode says what a new plan waits for.
//
// +kubebuilder:validation:Enum=Automatic;Manual;Advisory
type ApprovalMode string

const (
	// ApprovalAutomatic rolls a plan out that promises a gain. Where a roll-out would leave nothing in service (one replica,
	// and no surge), it waits for the annotation semmoe.io/approve, as Manual does.
	ApprovalAutomatic ApprovalMode = "Automatic"
	// ApprovalManual rolls a plan out once the annotation semmoe.io/approve of the MoEDeployment names its short digest.
	ApprovalManual ApprovalMode = "Manual"
	// ApprovalAdvisory makes plans and reports what they promise, and never rolls one out.
	ApprovalAdvisory ApprovalMode = "Advisory"
)

// Realization is how a plan reaches the engine.
type Realization string

const (
	// RealizationAuto takes EngineMap where the engine can carry it, else ReshuffledWeights.
	RealizationAuto Realization = "Auto"
	// RealizationEngineMap starts the engine with its own option for an expert map.
	RealizationEngineMap Realization = "EngineMap"
	// RealizationReshuffledWeights starts the engine on a copy of the checkpoint in which experts and the rows of the gates
	// stand in the plan's order: an engine that spreads experts in order serves the plan without knowing of it.
	RealizationReshuffledWeights Realization = "ReshuffledWeights"
)

// TokenShuffle says whether an engine with attention TensorParallel sends tokens to the ranks of a plan's tables.
//
// +kubebuilder:validation:Enum=Disabled;Enabled
type TokenShuffle string

const (
	// TokenShuffleDisabled leaves tokens where attention puts them.
	TokenShuffleDisabled TokenShuffle = "Disabled"
	// TokenShuffleEnabled sends each token to the rank that is most likely to hold its experts.
	TokenShuffleEnabled TokenShuffle = "Enabled"
)

// PlacementSpec says how plans are made and when they are rolled out.
//
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || self.realization != 'ReshuffledWeights'",message="redundantExperts needs realization EngineMap or Auto: a permuted checkpoint has each expert once",fieldPath=".redundantExperts"
type PlacementSpec struct {
	// realization is how a plan reaches the engine: EngineMap (the engine's own expert map), ReshuffledWeights (a copy of the
	// checkpoint with permuted experts and gates, made on the node before the engine starts), or Auto, which takes the first
	// that engine and model can carry and that does not change the model's answers. Condition RolledOut says which one is in
	// service.
	// +optional
	// +kubebuilder:default=Auto
	// +kubebuilder:validation:Enum=Auto;EngineMap;ReshuffledWeights
	Realization Realization `json:"realization,omitempty"`

	// tokenShuffle is Enabled where the engine's image has a consumer of the plan's tables (docs/integrations/torch, or another one that
	// reads the same variables): tokens are sent, inside the collective after attention, to the rank that most likely holds their
	// experts, and engine pods are given the tables. No engine does that by itself. It needs parallelism.attention TensorParallel
	// and engine SGLang. With Disabled, the default, and TensorParallel one activation in expertParallelSize is local under any
	// plan: plans have the experts of a token on as few ranks as possible instead.
	// +optional
	TokenShuffle TokenShuffle `json:"tokenShuffle,omitempty"`

	// cache is where copies of the checkpoint are kept with ReshuffledWeights. Without it each pod makes its own, in an
	// emptyDir for which it requests ephemeral storage of the size of the checkpoint.
	// +optional
	Cache *CacheSpec `json:"cache,omitempty"`

	LayoutSpec `json:",inline"`

	// hardware names the profile of the machines that serve, by which the time of a layer is modelled: whether a new plan pays, what the
	// request router weighs locality against, and the times in reports. Another profile, or other content, makes another plan. Without it
	// the operator's own profile h200-nvlink counts.
	// +optional
	Hardware *HardwareReference `json:"hardware,omitempty"`

	// approval is what a plan waits for before it is rolled out: Automatic (nothing), Manual (the annotation
	// semmoe.io/approve with the plan's short digest), or Advisory (it is never rolled out). New tables for the placement in
	// service wait alike.
	// +optional
	// +kubebuilder:default=Automatic
	Approval ApprovalMode `json:"approval,omitempty"`

	// planRef pins a plan: the one that is named serves, whatever others promise, and no drift replaces it. It needs no other
	// approval, but must promise a gain, and approval Advisory holds it all the same. Naming an older plan rolls back to it.
	// +optional
	PlanRef *PlanReference `json:"planRef,omitempty"`
}

// PlanReference names a PlacementPlan.
type PlanReference struct {
	// name of the PlacementPlan, in the same namespace. It must be of the model that is served, and for spec.parallelism and
	// spec.engine.type; the MoEDeployment need not be its owner.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// CacheSpec is a volume for copies of the checkpoint. Pods that share it share the copies: a pod that is restarted, and a
// second replica that mounts the same volume, find theirs.
type CacheSpec struct {
	// volume is mounted read-write, at /var/cache/semmoe, in the containers that make the copies, and read-only in the engine's.
	// It may be the volume of the model: on a file system with reflinks a copy then takes seconds, and next to no space.
	// +required
	Volume corev1.VolumeSource `json:"volume"`

	// sizeBytes bounds what the copies may take. To make room for another one, those are removed that no pod uses, the least
	// recently used first. Without it nothing is removed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	SizeBytes *int64 `json:"sizeBytes,omitempty"`
}

// DriftSource is where the local activation rate of what is served is read.
//
// +kubebuilder:validation:Enum=Router;Prometheus
type DriftSource string

const (
	// DriftSourceRouter is the sample of the request routers: a sequential test of each sampled request against what the plan
	// makes expect of it.
	DriftSourceRouter DriftSource = "Router"
	// DriftSourcePrometheus is the answer of a Prometheus server to a query.
	DriftSourcePrometheus DriftSource = "Prometheus"
)

// DriftSpec says when requests count as drifted away from a plan. A source that is away, or that tells nothing, is never drift:
// condition LocalityOnTarget is then Unknown, and says why.
//
// +kubebuilder:validation:XValidation:rule="(has(self.source) && self.source == 'Prometheus') == has(self.prometheus)",message="prometheus is required with source Prometheus, and goes with no other",fieldPath=".prometheus"
type DriftSpec struct {
	// source is Router (the requests that request routers sample; needs routing.samplePercent above 0), or Prometheus (the
	// answer to prometheus.query).
	// +optional
	// +kubebuilder:default=Router
	Source DriftSource `json:"source,omitempty"`

	// prometheus is the server that is asked with source Prometheus.
	// +optional
	Prometheus *PrometheusSource `json:"prometheus,omitempty"`

	// thresholdPercent is the drop of the local activation rate that is to be found, relative to what the plan in service
	// promises. With source Router a smaller one takes more requests to find, about by the square; one of half of it
	// goes for chance. With source Prometheus every value of the query is compared with the promise less the threshold.
	// +optional
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=5
	// +kubebuilder:validation:Maximum=50
	ThresholdPercent int32 `json:"thresholdPercent,omitempty"`

	// windowSeconds is how far back what is observed counts. With source Router older samples are left out, and with none
	// in the window nothing is known. With source Prometheus the rate must be below the threshold for nine tenths of it, and
	// values must be there for three quarters of it.
	// +optional
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=60
	// +kubebuilder:validation:Maximum=86400
	WindowSeconds int32 `json:"windowSeconds,omitempty"`

	// cooldownSeconds is the least time between two plans: none is made for drift before the plan in service, and the last
	// one that was made for drift, are as old. Drift is told all the same.
	// +optional
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=604800
	CooldownSeconds *int32 `json:"cooldownSeconds,omitempty"`

	// maxReplansPerDay bounds the plans that are made for drift within 24 hours; with 0 drift is told, and nothing is planned.
	// +optional
	// +kubebuilder:default=4
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=96
	MaxReplansPerDay *int32 `json:"maxReplansPerDay,omitempty"`
}

// PrometheusSource is a query of a Prometheus server, or of one that speaks its HTTP API.
type PrometheusSource struct {
	// address is the server's base URL, as the operator reaches it: http:// or https://, host, optionally port and path. The host must be
	// a Service of this namespace that has a cluster IP (name.namespace.svc), or one that the operator lists (chart value
	// prometheus.allowedHosts).
	// The certificate of an https server must be valid for the certificate authorities of the operator's image, which are the
	// public ones, or those of the chart's caBundle. Redirections are not followed.
	// +required
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^https?://([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[-A-Za-z0-9._~/]*)?$`
	Address string `json:"address"`

	// query is a PromQL expression of one series with the local activation rate of what this MoEDeployment serves, from 0 to 1.
	// It is asked for once a minute, with values for two windows.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	Query string `json:"query"`

	// authSecret is the name of a Secret in this namespace whose key "token" is sent as a bearer token. The operator may read no
	// Secrets by itself: grant its ServiceAccount to get this one.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	AuthSecret string `json:"authSecret,omitempty"`
}

// RolloutSpec bounds a roll-out.
//
// +kubebuilder:validation:XValidation:rule="(has(self.maxUnavailable) ? self.maxUnavailable : 1) > 0 || (has(self.maxSurge) ? self.maxSurge : 0) > 0",message="maxUnavailable and maxSurge must not both be 0: no replica could ever be replaced",fieldPath=".maxUnavailable"
type RolloutSpec struct {
	// maxUnavailable is how many replicas may be out of service while revisions change. With one replica and
	// maxSurge 0, 1 means a gap in service during a change.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	MaxUnavailable *int32 `json:"maxUnavailable,omitempty"`

	// maxSurge is how many replicas may exist beyond spec.replicas while revisions change. It needs as many spare sets of
	// devices. Above 0, the last replica that serves stays until a new one does.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	MaxSurge *int32 `json:"maxSurge,omitempty"`

	// minimumGainPercent is by how much a plan must lower the modelled time of an MoE layer to be rolled out: the first plan against no plan,
	// a later one against the plan in service, at the traffic since the drift. The 95% interval of the gain must be above 0 as well, unless
	// this is 0. Where not even a local activation rate of 100% would gain as much, the plan's verdict is LocalityDoesNotPay.
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=99
	MinimumGainPercent *int32 `json:"minimumGainPercent,omitempty"`

	// batchTokens is how many tokens a layer computes at a time, over all ranks of a replica, where that gain is modelled: the
	// larger, the more locality pays. Without it a plan is made for the steps that the engines count, as status.batchTokens reports them; while
	// nothing is reported, for 4096, 16384 and 65536 tokens, equally frequent.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	BatchTokens int32 `json:"batchTokens,omitempty"`

	// canaryReplicas is on how many replicas a new plan serves until it has proven itself; at least one replica stays with the
	// plan that is in service, as long as there are two. Other changes have no canary.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	CanaryReplicas int32 `json:"canaryReplicas,omitempty"`

	// soakSeconds is how long they must serve before the plan may be promoted: counted from when they are ready. From
	// then on the plan is promoted once its times are proven not to be longer than those of the plan in service, and
	// its local activation rate to be higher (for a plan that promises fewer local activations: not below that promise)
	// or its time per token to be shorter. It is taken back at any time when that rate, failures or times are worse.
	// Below 240, no proof of times is asked for: they take whole minutes. With 0 nothing is compared: a plan is
	// promoted when its canary is ready.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	SoakSeconds *int32 `json:"soakSeconds,omitempty"`

	// rollback is Automatic, or Manual to leave a plan that has failed on its canary until somebody has looked at it.
	// +optional
	// +kubebuilder:default=Automatic
	Rollback RollbackMode `json:"rollback,omitempty"`
}

// RollbackMode says who takes back a plan that has failed.
//
// +kubebuilder:validation:Enum=Automatic;Manual
type RollbackMode string

const (
	// RollbackAutomatic lets the operator take it back at once.
	RollbackAutomatic RollbackMode = "Automatic"
	// RollbackManual leaves it on its canary. The annotation failed.semmoe.io/<revision> on the PlacementPlan takes it back.
	RollbackManual RollbackMode = "Manual"
)
