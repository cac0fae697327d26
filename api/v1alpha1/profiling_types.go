// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
)

// DatasetSpec identifies a data set: a JSONL file with one request per line, or text that the model writes itself. A
// request is {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]} (the format of ShareGPT), each with an
// optional member "domain".
//
// +kubebuilder:validation:XValidation:rule="(has(self.configMap) ? 1 : 0) + (has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.path) ? 1 : 0) + (has(self.ownText) ? 1 : 0) == 1",message="name the data set in exactly one of configMap, persistentVolumeClaim, path and ownText"
// +kubebuilder:validation:XValidation:rule="!has(self.path) || (self.path.startsWith('/models/') && !self.path.contains('/../') && !self.path.endsWith('/..'))",message="path must be a file below /models, without '..': spec.model.volume is mounted there",fieldPath=".path"
type DatasetSpec struct {
	// configMap contains the data set in one of its keys.
	// +optional
	ConfigMap *DatasetConfigMap `json:"configMap,omitempty"`

	// persistentVolumeClaim contains the data set as a file.
	// +optional
	PersistentVolumeClaim *DatasetClaim `json:"persistentVolumeClaim,omitempty"`

	// path is the absolute path of a file below /models, where spec.model.volume is mounted.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path,omitempty"`

	// ownText is {} for no data set: the model writes the text that is profiled. Each request continues a random token
	// at temperature 1, up to requestTokens tokens. A plan from it is a start: live samples replace it after drift.
	// +optional
	OwnText *OwnText `json:"ownText,omitempty"`
}

// OwnText is a data set that the model writes itself.
type OwnText struct{}

// DatasetConfigMap identifies a key of a ConfigMap.
type DatasetConfigMap struct {
	// name is the name of the ConfigMap, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// key is the key of the data set. Default dataset.jsonl.
	// +optional
	// +kubebuilder:default="dataset.jsonl"
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	Key string `json:"key,omitempty"`
}

// DatasetClaim identifies a file on a persistent volume.
//
// +kubebuilder:validation:XValidation:rule="!self.path.startsWith('/') && !('/' + self.path + '/').contains('/../')",message="path is relative to the root of the volume, without '..'",fieldPath=".path"
type DatasetClaim struct {
	// claimName is the name of the PersistentVolumeClaim, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ClaimName string `json:"claimName"`

	// path is the path of the file, relative to the root of the volume.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path"`
}

// ProfilingTarget is where the requests of a profile are computed.
type ProfilingTarget string

const (
	// ProfilingTargetServing sends the requests of the data set to the running deployment. No additional device is
	// needed.
	ProfilingTargetServing ProfilingTarget = "Serving"
	// ProfilingTargetDedicated starts a separate engine for the duration of the profile.
	ProfilingTargetDedicated ProfilingTarget = "Dedicated"
	// ProfilingTargetLive uses the samples that request routers keep of client requests. No request is sent, and no
	// device is needed. Only AffinityProfiles support it.
	ProfilingTargetLive ProfilingTarget = "Live"
)

// ProfilingBackend is the program that computes the requests of a profile.
//
// +kubebuilder:validation:Enum=Engine;Transformers
type ProfilingBackend string

const (
	// ProfilingBackendEngine is the engine that serves the model.
	ProfilingBackendEngine ProfilingBackend = "Engine"
	// ProfilingBackendTransformers is a program that loads the checkpoint with Hugging Face transformers.
	ProfilingBackendTransformers ProfilingBackend = "Transformers"
)

// BackendSpec selects the program that computes the requests of a profile.
type BackendSpec struct {
	// backend is Engine or Transformers. Default Engine. With Transformers, which needs target Dedicated, the profiling
	// Job loads the checkpoint with PyTorch and Hugging Face transformers on one device, one layer after the other. The
	// engine does not run, so the engine need not return the experts of a request, and the model need not fit the device.
	// +optional
	// +kubebuilder:default=Engine
	Backend ProfilingBackend `json:"backend,omitempty"`

	// backendImage is the image of backend Transformers. It must contain Python 3 as python3, PyTorch, transformers 5.0
	// or later and, for checkpoints that exceed the memory of the node, accelerate. Default engine.image.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	BackendImage string `json:"backendImage,omitempty"`
}

// RefreshMode is how the model is profiled again after drift.
//
// +kubebuilder:validation:Enum=Job;Live
type RefreshMode string

const (
	// RefreshLive profiles the samples that the routers keep of the traffic.
	RefreshLive RefreshMode = "Live"
	// RefreshJob sends the data set again, if its content has changed.
	RefreshJob RefreshMode = "Job"
)

// LiveSamples is the data that request routers keep of the tokens of sampled requests.
//
// +kubebuilder:validation:Enum=Counts;Sequences
type LiveSamples string

const (
	// LiveSamplesCounts keeps how often each token ID activated each expert.
	LiveSamplesCounts LiveSamples = "Counts"
	// LiveSamplesSequences additionally keeps whole sequences of token IDs: prompts and responses.
	LiveSamplesSequences LiveSamples = "Sequences"
)

// SamplingSpec limits how much of a data set is recorded.
type SamplingSpec struct {
	// requests is the maximum number of requests to send: a uniform sample of the data set. Default 2000.
	// +optional
	// +kubebuilder:default=2000
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=1000000
	Requests int32 `json:"requests,omitempty"`

	// tokens is the maximum number of tokens to record. Default 200000.
	// +optional
	// +kubebuilder:default=200000
	// +kubebuilder:validation:Minimum=1000
	// +kubebuilder:validation:Maximum=100000000
	Tokens int32 `json:"tokens,omitempty"`

	// requestTokens is the maximum number of tokens of a prompt. Default 512. Longer prompts are truncated.
	// +optional
	// +kubebuilder:default=512
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=131072
	RequestTokens int32 `json:"requestTokens,omitempty"`
}

// ProfilingSpec requests a profile of the model, and a placement plan that is made from the profile.
//
// +kubebuilder:validation:XValidation:rule="(has(self.dataset) ? 1 : 0) + (has(self.profileRef) ? 1 : 0) == 1",message="set either dataset or profileRef"
// +kubebuilder:validation:XValidation:rule="!has(self.refresh) || self.refresh != 'Job' || has(self.dataset)",message="refresh Job needs dataset: set it, or use Live",fieldPath=".refresh"
// +kubebuilder:validation:XValidation:rule="!has(self.refresh) || self.refresh != 'Job' || !has(self.dataset) || !has(self.dataset.ownText)",message="refresh Job needs a data set that can change: ownText is always the same, use Live",fieldPath=".refresh"
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'Transformers' || !has(self.dataset) || !has(self.dataset.ownText)",message="dataset.ownText needs backend Engine: Transformers generates no text",fieldPath=".backend"
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'Transformers' || self.target == 'Dedicated'",message="backend Transformers needs target Dedicated: the profiling Job computes the requests",fieldPath=".target"
// +kubebuilder:validation:XValidation:rule="!has(self.backendImage) || (has(self.backend) && self.backend == 'Transformers')",message="backendImage needs backend Transformers",fieldPath=".backendImage"
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'Transformers' || has(self.dataset)",message="backend Transformers needs dataset",fieldPath=".backend"
type ProfilingSpec struct {
	// dataset contains the requests that are sent to the model to record which experts its tokens activate. Set either
	// dataset or profileRef.
	// +optional
	Dataset *DatasetSpec `json:"dataset,omitempty"`

	// profileRef is an existing AffinityProfile of the same model, in the same namespace, to use instead of a data set.
	// +optional
	ProfileRef *ProfileReference `json:"profileRef,omitempty"`

	SamplingSpec `json:",inline"`

	// target is Serving or Dedicated. Default Serving. With Serving the running deployment computes the requests of the
	// data set in addition to its other traffic. With Dedicated a Job starts a separate engine in a pod like the
	// serving pods, and needs its devices for the duration of the profile.
	// +optional
	// +kubebuilder:default=Serving
	// +kubebuilder:validation:Enum=Serving;Dedicated
	Target ProfilingTarget `json:"target,omitempty"`

	BackendSpec `json:",inline"`

	// template is merged over the pod template of the profiling Job, like spec.template of an AffinityProfile: node
	// selector, tolerations, and resources of the containers "profile" and, with target Dedicated, "engine". If
	// template is set, the Job ignores spec.template of the MoEDeployment. Without it the Job takes the scheduling
	// fields of spec.template, and with target Dedicated all of spec.template.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`

	// refresh is how the model is profiled again after drift: Live (from the samples that request routers keep; no
	// device is used) or Job (with the data set again). Default Live. With Job no Job is started and no plan is made
	// while the content of the data set is unchanged.
	// +optional
	// +kubebuilder:default=Live
	Refresh RefreshMode `json:"refresh,omitempty"`

	// liveSamples is the data that request routers keep, in memory, of the tokens of sampled requests: Counts or
	// Sequences. Default Counts. Counts records how often token IDs activated experts and followed one another. No text
	// can be reconstructed from them, and with attention DataParallel they renew the tables of a plan, but never its
	// placement. Sequences additionally keeps whole requests and responses as token IDs. Sequences are PROMPTS OF
	// USERS, and a live profile stores a sample of them in the artifact store.
	// +optional
	// +kubebuilder:default=Counts
	LiveSamples LiveSamples `json:"liveSamples,omitempty"`
}

// ProfileReference identifies an AffinityProfile.
type ProfileReference struct {
	// name is the name of the AffinityProfile, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}
