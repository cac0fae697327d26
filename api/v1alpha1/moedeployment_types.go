// SPDX-License-Identifier: Apache-2.0

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
// +kubebuilder:validation:XValidation:rule="!has(self.spec.parallelism.podsPerReplica) || self.spec.parallelism.podsPerReplica == 1 || size(self.metadata.name) <= 36",message="metadata.name must be at most 36 characters where spec.parallelism.podsPerReplica is above 1: a label of the pods is longer than the name of their workload"
type MoEDeployment struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata. The name has at most 40 characters, or 36 where
	// spec.parallelism.podsPerReplica is above 1. The names of pods and workloads are derived from the name.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired state.
	// +required
	Spec MoEDeploymentSpec `json:"spec"`

	// status is the most recently observed state.
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

// MoEDeploymentSpec is the desired state of a MoEDeployment.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.routing.tls) || has(self.routing.auth)) || !has(self.profiling) || !has(self.profiling.dataset) || (has(self.profiling.target) && self.profiling.target != 'Serving')",message="target Serving needs a routing without tls and auth: the profiling Job has no API key, and does not know the authority of the certificate; use Dedicated",fieldPath=".profiling.target"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.samplePercent) || self.routing.samplePercent == 0 || (self.routing.mode != 'None' && self.parallelism.attention == 'DataParallel')",message="samplePercent needs routing.mode Router or EndpointPicker, and parallelism.attention DataParallel: other requests have no rank",fieldPath=".routing.samplePercent"
// +kubebuilder:validation:XValidation:rule="!has(self.rollout.compare) || self.rollout.compare != 'All' || self.routing.mode != 'None'",message="compare All needs routing.mode Router or EndpointPicker: revisions are compared by the times that routers measure",fieldPath=".rollout.compare"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.holdMilliseconds) || (self.parallelism.attention == 'DataParallel' && self.engine.type != 'TensorRTLLM')",message="holdMilliseconds needs attention DataParallel, and an engine that accepts a rank for each request (TensorRTLLM does not): other requests have no rank to wait for",fieldPath=".routing.holdMilliseconds"
// +kubebuilder:validation:XValidation:rule="self.routing.mode != 'EndpointPicker' || self.engine.type != 'TensorRTLLM'",message="mode EndpointPicker needs an engine that accepts a rank for each request (TensorRTLLM does not): use Router or None",fieldPath=".routing.mode"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.weights) || !has(self.routing.weights.affinityPercent) || self.routing.weights.affinityPercent == 0 || (self.parallelism.attention == 'DataParallel' && self.engine.type != 'TensorRTLLM')",message="affinityPercent needs parallelism.attention DataParallel and an engine that accepts a rank for each request (TensorRTLLM does not): use 0, or remove the field",fieldPath=".routing.weights.affinityPercent"
// +kubebuilder:validation:XValidation:rule="!has(self.routing.kvEvents) || (self.engine.type != 'TensorRTLLM' && (!has(self.parallelism.podsPerReplica) || self.parallelism.podsPerReplica == 1))",message="kvEvents needs an engine that publishes KV events by ZeroMQ (TensorRTLLM does not), and podsPerReplica 1: the request routers know the address of one pod of a replica",fieldPath=".routing.kvEvents"
// +kubebuilder:validation:XValidation:rule="!has(self.parallelism.podsPerReplica) || self.parallelism.podsPerReplica == 1 || !has(self.profiling) || !has(self.profiling.target) || self.profiling.target != 'Dedicated'",message="target Dedicated needs parallelism.podsPerReplica 1: a profiling Job has one pod; use Serving",fieldPath=".profiling.target"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.tokenShuffle) || self.placement.tokenShuffle == 'Disabled' || (self.parallelism.attention == 'TensorParallel' && self.engine.type == 'SGLang')",message="tokenShuffle Enabled needs parallelism.attention TensorParallel and engine.type SGLang: with DataParallel tokens follow their request, and other engines have no all-to-all with TensorParallel",fieldPath=".placement.tokenShuffle"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.objective) || !(self.placement.objective in ['NodeDedup', 'Hierarchical']) || (has(self.parallelism.podsPerReplica) && self.parallelism.podsPerReplica > 1)",message="objectives NodeDedup and Hierarchical need parallelism.podsPerReplica above 1: the ranks of a pod share a node, and with one pod there is no second node",fieldPath=".placement.objective"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.objective) || self.placement.objective != 'Activation' || self.parallelism.attention == 'DataParallel' || (has(self.placement.tokenShuffle) && self.placement.tokenShuffle == 'Enabled')",message="objective Activation needs parallelism.attention DataParallel, or tokenShuffle Enabled: without them the objective is the same for every placement; use RankDedup",fieldPath=".placement.objective"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.solver) || !has(self.placement.solver.forecast) || self.placement.solver.forecast in ['Auto', 'Table'] || (has(self.placement.tokenShuffle) && self.placement.tokenShuffle == 'Enabled')",message="forecast Transition, LookBack or LookAhead needs placement.tokenShuffle Enabled: no other engine assigns single tokens to ranks; use Auto or Table",fieldPath=".placement.solver.forecast"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.redundantExperts) || type(self.placement.redundantExperts) != int || self.placement.redundantExperts % self.parallelism.expertParallelSize == 0",message="redundantExperts must be a multiple of parallelism.expertParallelSize: all ranks have the same number of slots",fieldPath=".placement.redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.redundantExperts) || self.placement.redundantExperts == 0 || self.engine.type != 'VLLM'",message="redundantExperts needs an engine that reads an expert map (VLLM does not): a permuted checkpoint contains each expert once",fieldPath=".placement.redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.placement.redundantExperts) || self.placement.redundantExperts != 'Auto' || self.parallelism.attention == 'DataParallel' || (has(self.placement.tokenShuffle) && self.placement.tokenShuffle == 'Enabled')",message="redundantExperts Auto needs parallelism.attention DataParallel, or tokenShuffle Enabled: without them copies are not chosen by modelled time; set a number",fieldPath=".placement.redundantExperts"
// +kubebuilder:validation:XValidation:rule="!has(self.engine.overlap) || !has(self.engine.overlap.mode) || self.engine.overlap.mode != 'Auto' || has(self.profiling) || has(self.placement.planRef)",message="mode Auto needs a plan, whose models choose the settings: set spec.profiling or spec.placement.planRef",fieldPath=".engine.overlap.mode"
// +kubebuilder:validation:XValidation:rule="!has(self.engine.tls) || self.routing.mode == 'Router'",message="tls needs routing.mode Router: in the other modes clients or a Gateway connect to the engines, and do not know the authority of the certificate",fieldPath=".engine.tls"
type MoEDeploymentSpec struct {
	// model is the checkpoint to serve.
	// +required
	Model ModelSpec `json:"model"`

	// engine is the inference engine that serves the model.
	// +required
	Engine EngineSpec `json:"engine"`

	// parallelism configures how one replica distributes the model over its devices.
	// +required
	Parallelism ParallelismSpec `json:"parallelism"`

	// replicas is the number of serving replicas. Default 1. Omit it where an autoscaler sets it through the scale
	// subresource.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	Replicas *int32 `json:"replicas,omitempty"`

	// template is merged over the pod template that the operator generates for the engine (strategic merge). It can set
	// the node selector, tolerations, security context, resources, and additional containers and volumes. A container
	// named "engine" is merged into the engine container. Labels and annotations under semmoe.io/ are reserved.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`

	// profiling requests a profile of the model, and a placement plan that is made from the profile. Without profiling
	// the engine's default placement is served.
	// +optional
	Profiling *ProfilingSpec `json:"profiling,omitempty"`

	// placement configures how plans are made and when they are rolled out.
	// +optional
	// +kubebuilder:default={}
	Placement PlacementSpec `json:"placement,omitempty"`

	// routing configures how requests reach the ranks.
	// +optional
	// +kubebuilder:default={}
	Routing RoutingSpec `json:"routing,omitempty"`

	// drift configures how the operator detects that the traffic no longer matches the plan in service, and how often
	// it may re-plan.
	// +optional
	// +kubebuilder:default={}
	Drift DriftSpec `json:"drift,omitempty"`

	// rollout bounds the replicas that may be unavailable or additional during a roll-out, and configures the canary of
	// a new plan.
	// +optional
	// +kubebuilder:default={}
	Rollout RolloutSpec `json:"rollout,omitempty"`

	// reconciliation is Active or Paused. Default Active. With Paused the serving revision stays in service at the
	// requested number of replicas and is repaired, but nothing new is rolled out.
	// +optional
	// +kubebuilder:default=Active
	Reconciliation ReconciliationMode `json:"reconciliation,omitempty"`
}

// ReconciliationMode controls whether the operator rolls out changes.
//
// +kubebuilder:validation:Enum=Active;Paused
type ReconciliationMode string

const (
	// ReconciliationActive enables all work of the operator.
	ReconciliationActive ReconciliationMode = "Active"
	// ReconciliationPaused stops roll-outs. Scaling and repair continue.
	ReconciliationPaused ReconciliationMode = "Paused"
)

// ModelSpec identifies a checkpoint in the Hugging Face format.
//
// +kubebuilder:validation:XValidation:rule="has(self.volume) || (has(self.source) && has(self.source.oci))",message="volume is required, unless source.oci provides the checkpoint",reason="FieldValueRequired",fieldPath=".volume"
// +kubebuilder:validation:XValidation:rule="!has(self.volume) || !has(self.source) || !has(self.source.oci)",message="source.oci does not allow volume: pods mount the image",fieldPath=".volume"
// +kubebuilder:validation:XValidation:rule="!has(self.source) || !has(self.source.huggingFace) || !has(self.volume) || has(self.volume.persistentVolumeClaim)",message="source.huggingFace needs a persistentVolumeClaim: the download must outlive its pod, and reach the pods on all nodes",fieldPath=".volume"
// +kubebuilder:validation:XValidation:rule="!has(self.source) || !has(self.source.huggingFace) || (self.path.startsWith('/models/') && !self.path.endsWith('/'))",message="source.huggingFace needs a directory below /models, such as /models/my-model: the download creates it",fieldPath=".path"
// +kubebuilder:validation:XValidation:rule="self.path == '/models' || (self.path.startsWith('/models/') && !self.path.contains('/../') && !self.path.endsWith('/..'))",message="path must be /models, or a directory below it without '..': spec.model.volume is mounted at /models",fieldPath=".path"
type ModelSpec struct {
	// name is the model name that clients send in requests. Default: the name of the MoEDeployment.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name,omitempty"`

	// path is the directory of the checkpoint (config.json and *.safetensors) inside containers: /models, where volume
	// is mounted, or a directory below /models. Default /models.
	// +optional
	// +kubebuilder:default=/models
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path,omitempty"`

	// layoutAs is a known model type whose checkpoint layout the model has, such as qwen3_moe. Set it for a model of an
	// unknown type to make plans for it. The inspection checks that the layout describes every tensor; otherwise the model is
	// served without a plan. Default: model_type in config.json.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	LayoutAs string `json:"layoutAs,omitempty"`

	// volume contains the checkpoint. It is mounted read-only at /models in every pod that reads the checkpoint. Any
	// volume source is allowed that several pods can mount at the same time: persistentVolumeClaim, nfs, csi, hostPath,
	// image. It is required, and only a persistentVolumeClaim is allowed with source.huggingFace. With source.oci it is
	// not allowed.
	// +optional
	Volume corev1.VolumeSource `json:"volume,omitzero"`

	// source is where the checkpoint comes from. Without it, the checkpoint is on the volume already.
	// +optional
	Source *ModelSource `json:"source,omitempty"`
}

// ModelSource is where a checkpoint comes from: exactly one of its members.
//
// +kubebuilder:validation:XValidation:rule="has(self.huggingFace) != has(self.oci)",message="exactly one of huggingFace and oci is required"
type ModelSource struct {
	// huggingFace is a repository that a Job downloads to path on the volume, before the model is inspected. MoEDeployments
	// with the same claim, path, repo and revision share one download.
	// +optional
	HuggingFace *HuggingFaceSource `json:"huggingFace,omitempty"`

	// oci is an image that pods mount as a volume. It needs a cluster with image volumes: Kubernetes 1.35, or 1.33 with the
	// feature gate ImageVolume.
	// +optional
	OCI *OCISource `json:"oci,omitempty"`
}

// HuggingFaceSource is a repository of a server with the HTTP API of the Hugging Face hub.
type HuggingFaceSource struct {
	// repo is the name of the repository, such as Qwen/Qwen3-30B-A3B.
	// +required
	// +kubebuilder:validation:MaxLength=193
	// +kubebuilder:validation:Pattern=`^([A-Za-z0-9][A-Za-z0-9_.-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$`
	Repo string `json:"repo"`

	// revision is a branch, a tag or a commit. Default main. A branch that moves after the download is not followed; use a
	// commit to get the same files everywhere.
	// +optional
	// +kubebuilder:default=main
	// +kubebuilder:validation:MaxLength=255
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9][A-Za-z0-9_./+-]*$`
	Revision string `json:"revision,omitempty"`

	// endpoint is the address of the server. Default https://huggingface.co. Set it to use a mirror.
	// +optional
	// +kubebuilder:default="https://huggingface.co"
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^https?://[^/?#@\s]+(/[^?#@\s]*)?$`
	Endpoint string `json:"endpoint,omitempty"`

	// tokenSecretRef is the key of a Secret, in the same namespace, with an access token. Private and gated repositories
	// need it. The token is only in the environment of the download Job.
	// +optional
	TokenSecretRef *SecretKeyReference `json:"tokenSecretRef,omitempty"`
}

// SecretKeyReference is a key of a Secret in the same namespace.
type SecretKeyReference struct {
	// name is the name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// key is the key in the Secret. Default token.
	// +optional
	// +kubebuilder:default=token
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	Key string `json:"key,omitempty"`
}

// OCISource is an image whose files are the checkpoint.
type OCISource struct {
	// image is the reference of the image. Use a digest, or a tag that never moves.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Image string `json:"image"`

	// pullPolicy is Always, IfNotPresent or Never. Default: Always for the tag latest, otherwise IfNotPresent.
	// +optional
	// +kubebuilder:validation:Enum=Always;IfNotPresent;Never
	PullPolicy corev1.PullPolicy `json:"pullPolicy,omitempty"`
}

// ModelVolume returns the volume that pods mount at ModelMountPath.
func (m *ModelSpec) ModelVolume() corev1.VolumeSource {
	if m.Source != nil && m.Source.OCI != nil {
		return corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: m.Source.OCI.Image, PullPolicy: m.Source.OCI.PullPolicy}}
	}
	return m.Volume
}

// Mounted returns the checkpoint as pods see it: on its volume, without its source. A change of the source that mounts the
// same volume is no change for pods.
func (m *ModelSpec) Mounted() ModelSpec {
	mounted := *m
	mounted.Volume, mounted.Source = m.ModelVolume(), nil
	return mounted
}

// EngineType is a supported inference engine.
//
// +kubebuilder:validation:Enum=SGLang;VLLM;VLLMAscend;TensorRTLLM
type EngineType string

const (
	// EngineSGLang is SGLang, or an engine that is compatible with the flags and routes of SGLang.
	EngineSGLang EngineType = "SGLang"
	// EngineVLLM is vLLM. vLLM reads no expert map, so a plan can only be realized by a permuted checkpoint.
	EngineVLLM EngineType = "VLLM"
	// EngineVLLMAscend is vLLM with the vllm-ascend plugin.
	EngineVLLMAscend EngineType = "VLLMAscend"
	// EngineTensorRTLLM is TensorRT-LLM (trtllm-serve). It reads an expert map. It accepts no rank for a request, and
	// does not return which experts the tokens activated. Profiling therefore needs profileRef, and the local
	// activation rate stays unknown.
	EngineTensorRTLLM EngineType = "TensorRTLLM"
)

// EngineSpec configures the inference engine of a replica.
//
// +kubebuilder:validation:XValidation:rule="!has(self.tls) || self.type != 'TensorRTLLM'",message="tls needs an engine that serves TLS by flags (TensorRTLLM does not): use another engine, or remove the field",fieldPath=".tls"
type EngineSpec struct {
	// type is the engine whose flags and routes the operator uses: SGLang, VLLM, VLLMAscend or TensorRTLLM. Default
	// SGLang.
	// +optional
	// +kubebuilder:default=SGLang
	Type EngineType `json:"type,omitempty"`

	// image is the container image of the engine.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Image string `json:"image"`

	// command replaces the command that starts the engine. Default with SGLang: python3 -m sglang.launch_server; with
	// VLLM and VLLMAscend: vllm serve; with TensorRTLLM: trtllm-serve. The flags that the operator sets are appended.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=4096
	Command []string `json:"command,omitempty"`

	// args are additional flags of the engine. Flags that the operator sets (model path, host, port, parallel sizes,
	// served model name) are rejected.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=32768
	Args []string `json:"args,omitempty"`

	// options is YAML that is added to the options file of TensorRTLLM (--extra_llm_api_options). Other engines have no
	// options file. The operator adds attention data parallelism and the expert map of the plan. A member that another
	// field of the spec sets is rejected.
	// +optional
	// +kubebuilder:validation:MaxLength=16384
	Options string `json:"options,omitempty"`

	// env are additional environment variables of the engine.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=256
	Env []corev1.EnvVar `json:"env,omitempty"`

	// overlap configures the overlap of the token exchange with computation, with the flags that the engine has for it.
	// Without overlap the operator sets none of these flags. Only SGLang and VLLM support it, with an all-to-all
	// backend in args.
	// +optional
	Overlap *OverlapSpec `json:"overlap,omitempty"`

	// port is the HTTP port of the engine. Default 30000.
	// +optional
	// +kubebuilder:default=30000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`

	// tls makes the engine serve TLS, which request routers verify. Default: plain text. It requires routing.mode
	// Router, and SGLang, VLLM or VLLMAscend.
	// +optional
	TLS *EngineTLS `json:"tls,omitempty"`
}

// EngineTLS configures TLS between request routers and engines.
type EngineTLS struct {
	// secretName is the name of a Secret with the keys tls.crt, tls.key and ca.crt, in the namespace of the
	// MoEDeployment: the certificate that engines present, and the authorities with which request routers verify it. The
	// certificate needs the DNS name NAME-pods.NAMESPACE.svc of the MoEDeployment. The Secret is mounted into the pods;
	// the operator does not read it. Engines use a renewed certificate after a restart.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`
	SecretName string `json:"secretName"`
}

// OverlapMode is how the overlap settings are chosen.
//
// +kubebuilder:validation:Enum=Manual;Auto
type OverlapMode string

const (
	// OverlapManual uses the settings in the spec.
	OverlapManual OverlapMode = "Manual"
	// OverlapAuto chooses the settings by the models of the plan in service.
	OverlapAuto OverlapMode = "Auto"
)

// OverlapSpec configures the overlap of token exchange and computation. A field that is not set adds no flag.
//
// +kubebuilder:validation:XValidation:rule="(has(self.mode) && self.mode == 'Auto') || has(self.microBatches) || has(self.communicationSMs)",message="set microBatches, communicationSMs, or both; or mode Auto"
// +kubebuilder:validation:XValidation:rule="!has(self.mode) || self.mode != 'Auto' || !(has(self.microBatches) || has(self.decodeThresholdTokens) || has(self.prefillThresholdTokens) || has(self.distributionThresholdPercent) || has(self.communicationSMs))",message="mode Auto chooses all other members: remove them, or use mode Manual",fieldPath=".mode"
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || !has(self.decodeThresholdTokens)",message="decodeThresholdTokens needs microBatches: it selects the steps that are split",fieldPath=".decodeThresholdTokens"
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || !has(self.prefillThresholdTokens)",message="prefillThresholdTokens needs microBatches: it selects the steps that are split",fieldPath=".prefillThresholdTokens"
// +kubebuilder:validation:XValidation:rule="has(self.microBatches) || !has(self.distributionThresholdPercent)",message="distributionThresholdPercent needs microBatches: it configures how steps are split",fieldPath=".distributionThresholdPercent"
type OverlapSpec struct {
	// mode is Manual (the other members) or Auto. Default Manual. With Auto the operator chooses microBatches, the
	// thresholds and communicationSMs by the models of the plan in service, at the batch sizes that the newest plan was
	// made for, and sets no flag that gains less than rollout.minimumGainPercent. status.overlap contains the result.
	// Auto needs spec.profiling or spec.placement.planRef.
	// +optional
	Mode OverlapMode `json:"mode,omitempty"`

	// microBatches is the number of micro-batches into which the engine splits the tokens of a step. The engine
	// exchanges the tokens of one micro-batch while it computes another. SGLang: exactly 2
	// (--enable-two-batch-overlap). VLLM: 2 (--enable-dbo) or more (--ubatch-size), with attention DataParallel.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=16
	MicroBatches int32 `json:"microBatches,omitempty"`

	// decodeThresholdTokens is the minimum number of tokens of a decode-only step that VLLM splits
	// (--dbo-decode-token-threshold). It requires microBatches.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	DecodeThresholdTokens int32 `json:"decodeThresholdTokens,omitempty"`

	// prefillThresholdTokens is the minimum number of tokens of a step with prefill that VLLM splits
	// (--dbo-prefill-token-threshold). It requires microBatches.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	PrefillThresholdTokens int32 `json:"prefillThresholdTokens,omitempty"`

	// distributionThresholdPercent is the minimum share of the tokens of a step, in percent, that SGLang accepts in
	// each of the two micro-batches. Below it SGLang splits within a request instead of between two requests
	// (--tbo-token-distribution-threshold). With 0 it never splits within a request. It requires microBatches.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=50
	DistributionThresholdPercent *int32 `json:"distributionThresholdPercent,omitempty"`

	// communicationSMs is the number of streaming multiprocessors of a GPU that exchange tokens instead of computing.
	// It applies to SGLang with DeepEP in mode normal (num_sms of --deepep-config). DeepEP accepts even numbers only.
	// +optional
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=128
	// +kubebuilder:validation:MultipleOf=2
	CommunicationSMs int32 `json:"communicationSMs,omitempty"`
}

// Chosen reports whether the operator chooses the settings. It is false for nil.
func (o *OverlapSpec) Chosen() bool { return o != nil && o.Mode == OverlapAuto }

// ForProfile returns the engine of a profile, which has no plan whose models could choose settings. The recorder
// connects to an engine in its own pod without TLS.
func (e *EngineSpec) ForProfile() EngineSpec {
	profiled := *e
	profiled.TLS = nil
	if profiled.Overlap.Chosen() {
		profiled.Overlap = nil
	}
	return profiled
}

// Given returns the settings that the spec contains: none with mode Auto, and for nil.
func (o *OverlapSpec) Given() OverlapSpec {
	if o == nil || o.Chosen() {
		return OverlapSpec{}
	}
	given := *o
	given.Mode = ""
	return given
}

// AttentionParallelism is the distribution of attention over the devices of a replica.
//
// +kubebuilder:validation:Enum=DataParallel;TensorParallel
type AttentionParallelism string

const (
	// AttentionDataParallel computes the attention of a request on one rank. Each request has a rank.
	AttentionDataParallel AttentionParallelism = "DataParallel"
	// AttentionTensorParallel splits the attention of every request over all ranks. Requests have no rank.
	AttentionTensorParallel AttentionParallelism = "TensorParallel"
)

// ParallelismSpec configures how one replica distributes the model over its devices.
//
// +kubebuilder:validation:XValidation:rule="!has(self.podsPerReplica) || self.expertParallelSize % self.podsPerReplica == 0",message="podsPerReplica must divide expertParallelSize: all pods have the same number of ranks",fieldPath=".podsPerReplica"
type ParallelismSpec struct {
	// attention is DataParallel or TensorParallel. Default DataParallel. With DataParallel each request has one rank,
	// and the number of data-parallel ranks equals expertParallelSize. With TensorParallel the attention of every
	// request is split over all ranks.
	// +optional
	// +kubebuilder:default=DataParallel
	Attention AttentionParallelism `json:"attention,omitempty"`

	// expertParallelSize is the number of ranks of one replica, with one device per rank. The experts of each MoE layer
	// are distributed over the ranks. It must divide the number of experts of the model.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	ExpertParallelSize int32 `json:"expertParallelSize"`

	// podsPerReplica is the number of pods of one replica. Default 1. Use more pods where a replica needs more devices
	// than a node has: the ranks are distributed over the pods evenly and in order, and the first pod receives the
	// requests of the replica. More than 1 requires the kind LeaderWorkerSet in the cluster
	// (leaderworkerset.x-k8s.io/v1), and SGLang, or VLLM or VLLMAscend with attention DataParallel.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=256
	PodsPerReplica *int32 `json:"podsPerReplica,omitempty"`

	// resourceName is the extended resource of a device. Default nvidia.com/gpu. Each pod requests expertParallelSize /
	// podsPerReplica devices.
	// +optional
	// +kubebuilder:default=nvidia.com/gpu
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`
	ResourceName string `json:"resourceName,omitempty"`
}

// ApprovalMode is the condition under which a new plan is rolled out.
//
// +kubebuilder:validation:Enum=Automatic;Manual;Advisory
type ApprovalMode string

const (
	// ApprovalAutomatic rolls out every plan with verdict Gain. A roll-out that would interrupt service (one replica,
	// maxSurge 0) waits for the annotation semmoe.io/approve, as with Manual.
	ApprovalAutomatic ApprovalMode = "Automatic"
	// ApprovalManual rolls out a plan once the annotation semmoe.io/approve of the MoEDeployment contains the short
	// digest of the plan.
	ApprovalManual ApprovalMode = "Manual"
	// ApprovalAdvisory makes plans and reports their expected gain, but never rolls out a plan.
	ApprovalAdvisory ApprovalMode = "Advisory"
)

// Realization is the mechanism by which a plan reaches the engine.
type Realization string

const (
	// RealizationAuto uses EngineMap where engine and model support it, and ReshuffledWeights elsewhere.
	RealizationAuto Realization = "Auto"
	// RealizationEngineMap passes the placement to the engine by the engine's own option for an expert map.
	RealizationEngineMap Realization = "EngineMap"
	// RealizationReshuffledWeights starts the engine on a copy of the checkpoint in which the experts and the rows of
	// the gates are permuted into the order of the plan. An engine that distributes experts in order then serves the
	// plan without any option.
	RealizationReshuffledWeights Realization = "ReshuffledWeights"
)

// TokenShuffle controls whether an engine with attention TensorParallel sends tokens to the ranks of the plan's tables.
//
// +kubebuilder:validation:Enum=Disabled;Enabled
type TokenShuffle string

const (
	// TokenShuffleDisabled keeps tokens on the ranks that attention assigns.
	TokenShuffleDisabled TokenShuffle = "Disabled"
	// TokenShuffleEnabled sends each token to the rank that most likely holds its experts.
	TokenShuffleEnabled TokenShuffle = "Enabled"
)

// PlacementSpec configures how plans are made and when they are rolled out.
//
// +kubebuilder:validation:XValidation:rule="!has(self.redundantExperts) || self.redundantExperts == 0 || self.realization != 'ReshuffledWeights'",message="redundantExperts needs realization EngineMap or Auto: a permuted checkpoint contains each expert once",fieldPath=".redundantExperts"
type PlacementSpec struct {
	// realization is the mechanism by which a plan reaches the engine: EngineMap (the expert map option of the engine),
	// ReshuffledWeights (a copy of the checkpoint with permuted experts and gates, made on the node before the engine
	// starts), or Auto. Default Auto. Auto uses the first of the two that the engine and the model support and that
	// does not change the output of the model. Condition RolledOut reports which one is in service.
	// +optional
	// +kubebuilder:default=Auto
	// +kubebuilder:validation:Enum=Auto;EngineMap;ReshuffledWeights
	Realization Realization `json:"realization,omitempty"`

	// tokenShuffle is Enabled or Disabled. Default Disabled. Use Enabled only where the engine's image contains a
	// consumer of the plan's tables (docs/integrations/torch, or another consumer of the same environment variables);
	// no engine has one built in. Engine pods then receive the tables, and the collective after attention sends each
	// token to the rank that most likely holds its experts. Enabled requires parallelism.attention TensorParallel and
	// engine SGLang. With Disabled and TensorParallel, the share of local activations is 1/expertParallelSize under any
	// plan, so plans minimize the number of ranks that hold the experts of a token.
	// +optional
	TokenShuffle TokenShuffle `json:"tokenShuffle,omitempty"`

	// cache is the volume for copies of the checkpoint with ReshuffledWeights. Without cache each pod makes a copy in
	// an emptyDir, and requests ephemeral storage of the size of the checkpoint.
	// +optional
	Cache *CacheSpec `json:"cache,omitempty"`

	LayoutSpec `json:",inline"`

	// hardware is the hardware profile of the serving machines. The modelled time of an MoE layer depends on it:
	// whether a new plan pays, how request routers weigh locality, and the times in reports. A different profile, or a
	// change of its content, results in a new plan. Default: the built-in profile h200-nvlink.
	// +optional
	Hardware *HardwareReference `json:"hardware,omitempty"`

	// approval is the condition under which a new plan is rolled out: Automatic (no approval), Manual (the annotation
	// semmoe.io/approve with the short digest of the plan), or Advisory (never). Default Automatic. New tables for the
	// placement in service need the same approval.
	// +optional
	// +kubebuilder:default=Automatic
	Approval ApprovalMode `json:"approval,omitempty"`

	// planRef pins a plan. The named plan is served even if other plans predict a higher gain, and drift does not replace it. It
	// needs no approval, but it must have verdict Gain, and approval Advisory still prevents its roll-out. To roll
	// back, name an older plan.
	// +optional
	PlanRef *PlanReference `json:"planRef,omitempty"`
}

// PlanReference identifies a PlacementPlan.
type PlanReference struct {
	// name is the name of the PlacementPlan, in the same namespace. The plan must match the served model,
	// spec.parallelism and spec.engine.type. The MoEDeployment need not own it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// CacheSpec is a volume for copies of the checkpoint. Pods that mount the same volume share the copies: a restarted pod
// or a second replica reuses an existing copy.
type CacheSpec struct {
	// volume is mounted at /var/cache/semmoe: read-write in the containers that make the copies, and read-only in the
	// engine container. It may be the volume of the model: on a file system with reflinks a copy then takes seconds,
	// and almost no space.
	// +required
	Volume corev1.VolumeSource `json:"volume"`

	// sizeBytes is the maximum size of all copies, in bytes. When a new copy needs space, copies that no pod uses are
	// removed, the least recently used first. Without sizeBytes no copy is removed.
	// +optional
	// +kubebuilder:validation:Minimum=1
	SizeBytes *int64 `json:"sizeBytes,omitempty"`
}

// DriftSource is the source of the observed local activation rate.
//
// +kubebuilder:validation:Enum=Router;Prometheus
type DriftSource string

const (
	// DriftSourceRouter uses the requests that the request routers sample. A sequential test compares each sampled
	// request with the rate that the plan predicts for it.
	DriftSourceRouter DriftSource = "Router"
	// DriftSourcePrometheus queries a Prometheus server.
	DriftSourcePrometheus DriftSource = "Prometheus"
)

// DriftSpec configures the detection of drift: traffic that no longer matches the plan in service. A source that is
// unavailable or returns no data never counts as drift. Condition LocalityOnTarget is then Unknown, and its message
// contains the cause.
//
// +kubebuilder:validation:XValidation:rule="(has(self.source) && self.source == 'Prometheus') == has(self.prometheus)",message="prometheus is required with source Prometheus, and not allowed with other sources",fieldPath=".prometheus"
type DriftSpec struct {
	// source is Router (the requests that request routers sample; requires routing.samplePercent above 0) or Prometheus
	// (the result of prometheus.query). Default Router.
	// +optional
	// +kubebuilder:default=Router
	Source DriftSource `json:"source,omitempty"`

	// prometheus is the server that is queried. It is required with source Prometheus, and not allowed with source
	// Router.
	// +optional
	Prometheus *PrometheusSource `json:"prometheus,omitempty"`

	// thresholdPercent is the relative drop of the local activation rate to detect, in percent of the rate that the
	// plan in service predicts. Default 10. With source Router the number of requests that detection needs grows about
	// with the inverse square of the threshold, and a drop of half the threshold counts as chance. With source
	// Prometheus every value of the query is compared with the prediction minus the threshold.
	// +optional
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=5
	// +kubebuilder:validation:Maximum=50
	ThresholdPercent int32 `json:"thresholdPercent,omitempty"`

	// windowSeconds is the length of the observation window. Default 3600. With source Router older samples are
	// ignored, and an empty window gives no result. With source Prometheus drift requires values for 75% of the window,
	// and a rate below the threshold for 90% of it.
	// +optional
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=60
	// +kubebuilder:validation:Maximum=86400
	WindowSeconds int32 `json:"windowSeconds,omitempty"`

	// cooldownSeconds is the minimum time between two plans. Default 3600. The operator re-plans for drift only when
	// the plan in service, and the most recent plan that was made for drift, are at least this old. Drift is reported
	// during the cooldown, too.
	// +optional
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=604800
	CooldownSeconds *int32 `json:"cooldownSeconds,omitempty"`

	// maxReplansPerDay is the maximum number of plans that are made for drift within 24 hours. Default 4. With 0 drift
	// is reported, but no plan is made for it.
	// +optional
	// +kubebuilder:default=4
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=96
	MaxReplansPerDay *int32 `json:"maxReplansPerDay,omitempty"`
}

// PrometheusSource is a query to a Prometheus server, or to a server with the same HTTP API.
type PrometheusSource struct {
	// address is the base URL of the server, as the operator reaches it: http:// or https://, host, and optionally port
	// and path. The host must be a Service of this namespace with a cluster IP (name.namespace.svc), or a host that the
	// operator allows (chart value prometheus.allowedHosts). The certificate of an https server must be valid for the
	// certificate authorities of the operator's image (the public ones), or for those of the chart's caBundle.
	// Redirects are not followed.
	// +required
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^https?://([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[-A-Za-z0-9._~/]*)?$`
	Address string `json:"address"`

	// query is a PromQL expression that returns one series: the local activation rate of this MoEDeployment, from 0 to
	// 1. It is evaluated once a minute, as a range query over two windows.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=4096
	Query string `json:"query"`

	// authSecret is the name of a Secret in this namespace. The value of its key "token" is sent as a bearer token. The
	// operator has no permission to read Secrets by default: grant its ServiceAccount the verb get for this Secret.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	AuthSecret string `json:"authSecret,omitempty"`
}

// RolloutSpec bounds a roll-out, and configures the canary of a new plan.
//
// +kubebuilder:validation:XValidation:rule="(has(self.maxUnavailable) ? self.maxUnavailable : 1) > 0 || (has(self.maxSurge) ? self.maxSurge : 0) > 0",message="maxUnavailable and maxSurge must not both be 0: no replica could be replaced",fieldPath=".maxUnavailable"
type RolloutSpec struct {
	// maxUnavailable is the maximum number of replicas that may be unavailable during a roll-out. Default 1. With one
	// replica and maxSurge 0, a value of 1 interrupts service during a roll-out.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	MaxUnavailable *int32 `json:"maxUnavailable,omitempty"`

	// maxSurge is the maximum number of replicas above spec.replicas during a roll-out. Default 0. Each one needs spare
	// devices for a whole replica. Above 0, the last serving replica stays until a new one is ready.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	MaxSurge *int32 `json:"maxSurge,omitempty"`

	// minimumGainPercent is the minimum relative reduction of the modelled time of an MoE layer, in percent, for a plan
	// to be rolled out. Default 2. The first plan is compared with the default placement; a later plan is compared with
	// the plan in service, on the traffic since the drift. Unless the value is 0, the 95% confidence interval of the
	// gain must also be above 0. Where even a local activation rate of 100% would not gain as much, the verdict of the
	// plan is LocalityDoesNotPay.
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=99
	MinimumGainPercent *int32 `json:"minimumGainPercent,omitempty"`

	// batchTokens is the number of tokens of a step, over all ranks of a replica, for which the gain is modelled. The
	// larger the batch, the more locality pays. Without batchTokens the sizes that the engines report are used
	// (status.batchTokens), and 4096, 16384 and 65536 tokens with equal weights while the engines report nothing.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	BatchTokens int32 `json:"batchTokens,omitempty"`

	// canaryReplicas is the number of replicas that serve a new plan until it is promoted. Default 1. With two or more
	// replicas, at least one stays on the plan in service. Other changes of the spec have a canary with compare All.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	CanaryReplicas int32 `json:"canaryReplicas,omitempty"`

	// soakSeconds is the minimum time that the canary replicas must serve before the plan may be promoted, counted from
	// when they are ready. Default 300. After that the plan is promoted once two facts are proven: its times are not
	// longer than those of the plan in service, and its local activation rate is higher or its time per token is
	// shorter (for a plan that predicts a lower rate: its rate is not below that prediction). The plan is rolled back
	// at any time when its rate, failures or times are worse. Below 240 the times need no proof, because they are
	// measured in whole minutes. With 0 nothing is compared: the plan is promoted when its canary is ready.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	SoakSeconds *int32 `json:"soakSeconds,omitempty"`

	// rollback is Automatic or Manual. Default Automatic. With Manual a plan that failed on its canary stays there
	// until a user rolls it back.
	// +optional
	// +kubebuilder:default=Automatic
	Rollback RollbackMode `json:"rollback,omitempty"`

	// compare is Plans or All. Default Plans. With All, a change of the spec that replaces pods, such as another engine
	// image or argument, starts on a canary too. It is promoted once its times and failures are proven not to be worse
	// than those of the revision in service, and rolled back if they are worse. It is rolled out directly if there is
	// nothing to compare with: no replica is ready, or there is one replica and maxSurge is 0.
	// +optional
	// +kubebuilder:default=Plans
	Compare RolloutCompare `json:"compare,omitempty"`
}

// RolloutCompare is what starts on a canary.
//
// +kubebuilder:validation:Enum=Plans;All
type RolloutCompare string

const (
	// ComparePlans compares new plans only.
	ComparePlans RolloutCompare = "Plans"
	// CompareAll compares new plans, and all other changes that replace pods.
	CompareAll RolloutCompare = "All"
)

// RollbackMode controls who rolls back a failed plan.
//
// +kubebuilder:validation:Enum=Automatic;Manual
type RollbackMode string

const (
	// RollbackAutomatic rolls the plan back immediately.
	RollbackAutomatic RollbackMode = "Automatic"
	// RollbackManual leaves the plan on its canary. The annotation failed.semmoe.io/<revision> on the PlacementPlan
	// rolls it back.
	RollbackManual RollbackMode = "Manual"
)
