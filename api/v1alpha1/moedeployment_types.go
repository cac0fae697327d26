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
// +kubebuilder:validation:XValidation:rule="self.routing.mode != 'EndpointPicker' || self.engine.type != 'TensorRTLLM'",message="mode EndpointPicker needs an engine that takes requests for a rank, and TensorRTLLM takes none: use Router or None",fieldPath=".routing.mode"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.weights) || !has(self.routing.weights.affinityPercent) || self.routing.weights.affinityPercent == 0 || (self.parallelism.attention == 'DataParallel' && self.engine.type != 'TensorRTLLM')",message="affinityPercent needs parallelism.attention DataParallel and an engine that takes requests for a rank (TensorRTLLM takes none): elsewhere requests have no rank; use 0, or remove it",fieldPath=".routing.weights.affinityPercent"
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

	// env are further environment variables of the engine.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=256
	Env []corev1.EnvVar `json:"env,omitempty"`

	// port is the engine's HTTP port.
	// +optional
	// +kubebuilder:default=30000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
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

	// resourceName is the extended resource of a device: each pod asks for expertParallelSize of it.
	// +optional
	// +kubebuilder:default=nvidia.com/gpu
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	ResourceName string `json:"resourceName,omitempty"`
}

// RoutingMode is who sends requests to ranks.
//
// +kubebuilder:validation:Enum=Router;EndpointPicker;None
type RoutingMode string

const (
	// RoutingModeRouter puts the operator's request router in front of the ranks.
	RoutingModeRouter RoutingMode = "Router"
	// RoutingModeEndpointPicker leaves the proxying to a Gateway, which asks the request router for the pod and the rank of each
	// request: the endpoint picker protocol of the Gateway API Inference Extension.
	RoutingModeEndpointPicker RoutingMode = "EndpointPicker"
	// RoutingModeNone leaves it to the Service, which spreads connections over ready pods; the engine picks the rank.
	RoutingModeNone RoutingMode = "None"
)

// NetworkPolicyMode says whether the operator makes NetworkPolicies.
//
// +kubebuilder:validation:Enum=Managed;None
type NetworkPolicyMode string

const (
	// NetworkPolicyManaged lets the operator make them.
	NetworkPolicyManaged NetworkPolicyMode = "Managed"
	// NetworkPolicyNone leaves them to others.
	NetworkPolicyNone NetworkPolicyMode = "None"
)

// RoutingSpec is how requests reach the ranks.
//
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.weights)",message="weights need mode Router or EndpointPicker: with None the engine picks the rank, and weighs nothing",fieldPath=".weights"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.pendingLimitPerRank)",message="pendingLimitPerRank needs mode Router or EndpointPicker: with None nobody counts requests",fieldPath=".pendingLimitPerRank"
type RoutingSpec struct {
	// mode is Router; EndpointPicker for a Gateway that asks the request router by way of an InferencePool of the
	// MoEDeployment's name, while the Service leads to the engine's pods; or None for a plain Service in front of the engine's
	// pods.
	// +optional
	// +kubebuilder:default=Router
	Mode RoutingMode `json:"mode,omitempty"`

	// replicas is the number of request router pods.
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	Replicas int32 `json:"replicas,omitempty"`

	// weights says how much each of the reasons to choose a rank counts. They are estimates in one unit, time saved, so
	// that 100 for each is right wherever the estimates are.
	// +optional
	Weights *RoutingWeights `json:"weights,omitempty"`

	// pendingLimitPerRank is how many requests may be outstanding on a rank (on a pod, where requests have no rank). Where
	// all ranks have as many, requests are answered with 429 and Retry-After. Without it there is no limit: engines queue, and
	// bound their queues themselves, and only their owner knows from which length on clients are better sent away.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	PendingLimitPerRank *int32 `json:"pendingLimitPerRank,omitempty"`

	// samplePercent is the share of requests of which the router asks the engine for the experts that their tokens
	// activated, to observe the local activation rate. Clients never see it. Engines pay for the capture (reports go from a few
	// percent of throughput to much more), so the default is 5 where spec.profiling is given and requests have ranks, and 0
	// (nothing is observed) elsewhere. A change between 0 and more starts the engines anew. VLLM and VLLMAscend tell the
	// experts of unstreamed requests alone; TensorRTLLM tells none.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	SamplePercent *int32 `json:"samplePercent,omitempty"`

	// networkPolicy is Managed, or None. Managed keeps others than the request routers, the operator and monitoring away from
	// the engines' serving port (mode Router), and others than the operator and monitoring from the routers' metrics and
	// observations; everything else stays open. Monitoring is every namespace with the label semmoe.io/monitoring.
	// +optional
	// +kubebuilder:default=Managed
	NetworkPolicy NetworkPolicyMode `json:"networkPolicy,omitempty"`
}

// RoutingWeights weigh the reasons to choose a rank, in percent: 100 counts a reason as it is estimated, 0 not at all.
//
// +kubebuilder:validation:XValidation:rule="(has(self.affinityPercent) ? self.affinityPercent : 100) + (has(self.prefixPercent) ? self.prefixPercent : 100) + (has(self.loadPercent) ? self.loadPercent : 100) > 0",message="at least one of affinityPercent, prefixPercent and loadPercent must be above 0: else nothing tells ranks apart"
type RoutingWeights struct {
	// affinityPercent weighs the communication that is saved where a request's experts lie on the rank, by the plan's forecast;
	// default 100. It needs requests that have a rank.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	AffinityPercent *int32 `json:"affinityPercent,omitempty"`

	// prefixPercent weighs the computation that is saved where the rank still has the beginning of the prompt in its cache;
	// default 100.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	PrefixPercent *int32 `json:"prefixPercent,omitempty"`

	// loadPercent weighs the wait behind what is outstanding on the rank; default 100.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LoadPercent *int32 `json:"loadPercent,omitempty"`
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

// PlacementSpec says how plans are made and when they are rolled out.
type PlacementSpec struct {
	// realization is how a plan reaches the engine: EngineMap (the engine's own expert map), ReshuffledWeights (a copy of the
	// checkpoint with permuted experts and gates, made on the node before the engine starts), or Auto, which takes the first
	// that engine and model can carry and that does not change the model's answers. Condition RolledOut says which one is in
	// service.
	// +optional
	// +kubebuilder:default=Auto
	// +kubebuilder:validation:Enum=Auto;EngineMap;ReshuffledWeights
	Realization Realization `json:"realization,omitempty"`

	// cache is where copies of the checkpoint are kept with ReshuffledWeights. Without it each pod makes its own, in an
	// emptyDir for which it requests ephemeral storage of the size of the checkpoint.
	// +optional
	Cache *CacheSpec `json:"cache,omitempty"`

	// solver says how a plan is searched for.
	// +optional
	// +kubebuilder:default={}
	Solver SolverSpec `json:"solver,omitempty"`

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
	// address is the server's base URL, as the operator reaches it: http:// or https://, host, optionally port and path.
	// The certificate of an https server must be valid for the certificate authorities of the operator's image. Redirections
	// are not followed.
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

	// minimumGainPercent is by how much a plan that is to replace the one in service must lower the modelled time of an MoE
	// layer, at the traffic since the drift. Where not even a local activation rate of 100% would, the plan's verdict is
	// LocalityDoesNotPay.
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=99
	MinimumGainPercent *int32 `json:"minimumGainPercent,omitempty"`

	// canaryReplicas is on how many replicas a new plan serves until it has proven itself; at least one replica stays with the
	// plan that is in service, as long as there are two. Other changes have no canary.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	CanaryReplicas int32 `json:"canaryReplicas,omitempty"`

	// soakSeconds is how long they must serve before the plan may be promoted: counted from when they are ready. From then on it
	// is promoted once its local activation rate is seen to be higher than that of the plan in service, and taken back at any
	// time when that rate, failures or latencies are worse. With 0 nothing is compared: a plan is promoted when its canary is
	// ready.
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

	// endpoint is the address, inside the cluster, that clients send their requests to.
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

	// planDigest is the short digest of the plan that the revision serves under; empty without one.
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

	// reshuffle tells what the copies of the checkpoint have cost that the pods of the revision serve.
	// +optional
	Reshuffle *ReshuffleStatus `json:"reshuffle,omitempty"`

	// model is what the inspection found in the checkpoint.
	// +optional
	Model *ModelStatus `json:"model,omitempty"`
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

	// observedMilli is the observed rate; absent where too few requests were sampled.
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

	// summary and baselineSummary are the observed rate and the baseline in percent, for printing only.
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Summary string `json:"summary,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=16
	BaselineSummary string `json:"baselineSummary,omitempty"`
}

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
