package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
)

// DatasetSpec names a data set: requests as JSONL, one per line: {"prompt": "..."}, {"messages": [...]} or ShareGPT's
// {"conversations": [...]}, each with an optional "domain".
//
// +kubebuilder:validation:XValidation:rule="(has(self.configMap) ? 1 : 0) + (has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.path) ? 1 : 0) == 1",message="name the data set in exactly one of configMap, persistentVolumeClaim and path"
// +kubebuilder:validation:XValidation:rule="!has(self.path) || (self.path.startsWith('/models/') && !self.path.contains('/../') && !self.path.endsWith('/..'))",message="path must be a file below /models, without '..': spec.model.volume is mounted there",fieldPath=".path"
type DatasetSpec struct {
	// configMap holds the data set under one of its keys.
	// +optional
	ConfigMap *DatasetConfigMap `json:"configMap,omitempty"`

	// persistentVolumeClaim holds the data set as a file.
	// +optional
	PersistentVolumeClaim *DatasetClaim `json:"persistentVolumeClaim,omitempty"`

	// path is a file below /models, where spec.model.volume is mounted.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path,omitempty"`
}

// DatasetConfigMap is a key of a ConfigMap.
type DatasetConfigMap struct {
	// name of the ConfigMap, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// key under which the data set stands.
	// +optional
	// +kubebuilder:default="dataset.jsonl"
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[-._a-zA-Z0-9]+$`
	Key string `json:"key,omitempty"`
}

// DatasetClaim is a file on a volume.
//
// +kubebuilder:validation:XValidation:rule="!self.path.startsWith('/') && !('/' + self.path + '/').contains('/../')",message="path is relative to the root of the volume, without '..'",fieldPath=".path"
type DatasetClaim struct {
	// claimName is the PersistentVolumeClaim, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	ClaimName string `json:"claimName"`

	// path of the file, relative to the root of the volume.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path"`
}

// ProfilingTarget is where a profile is taken.
type ProfilingTarget string

const (
	// ProfilingTargetServing sends the requests of the data set to the running deployment: no further device is needed.
	ProfilingTargetServing ProfilingTarget = "Serving"
	// ProfilingTargetDedicated starts an engine of its own for the time of the profile.
	ProfilingTargetDedicated ProfilingTarget = "Dedicated"
	// ProfilingTargetLive takes what the request routers keep of the requests that they sample: nothing is sent, and no
	// device is needed. It is for AffinityProfiles alone.
	ProfilingTargetLive ProfilingTarget = "Live"
)

// RefreshMode is how the model is profiled again when the traffic has drifted away from the plan.
//
// +kubebuilder:validation:Enum=Job;Live
type RefreshMode string

const (
	// RefreshLive profiles what the routers sample of the traffic.
	RefreshLive RefreshMode = "Live"
	// RefreshJob sends the data set again, if its content has changed since.
	RefreshJob RefreshMode = "Job"
)

// LiveSamples is what request routers keep of the tokens of sampled requests.
//
// +kubebuilder:validation:Enum=Counts;Sequences
type LiveSamples string

const (
	// LiveSamplesCounts keeps how often token ids activated experts.
	LiveSamplesCounts LiveSamples = "Counts"
	// LiveSamplesSequences also keeps whole sequences of token ids: prompts and answers.
	LiveSamplesSequences LiveSamples = "Sequences"
)

// SamplingSpec says how much of a data set is recorded.
type SamplingSpec struct {
	// requests is how many requests are sent at most: a uniform sample of the data set.
	// +optional
	// +kubebuilder:default=2000
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=1000000
	Requests int32 `json:"requests,omitempty"`

	// tokens is how many tokens are recorded at most.
	// +optional
	// +kubebuilder:default=200000
	// +kubebuilder:validation:Minimum=1000
	// +kubebuilder:validation:Maximum=100000000
	Tokens int32 `json:"tokens,omitempty"`

	// requestTokens is how many tokens of a prompt are sent at most.
	// +optional
	// +kubebuilder:default=512
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=131072
	RequestTokens int32 `json:"requestTokens,omitempty"`
}

// ProfilingSpec asks for a profile of the model, and a placement plan made from it.
//
// +kubebuilder:validation:XValidation:rule="(has(self.dataset) ? 1 : 0) + (has(self.profileRef) ? 1 : 0) == 1",message="give either dataset or profileRef"
// +kubebuilder:validation:XValidation:rule="!has(self.refresh) || self.refresh != 'Job' || has(self.dataset)",message="refresh Job needs dataset: there is nothing to send again; use Live",fieldPath=".refresh"
type ProfilingSpec struct {
	// dataset is what is sent to the model to see which experts its tokens activate.
	// +optional
	Dataset *DatasetSpec `json:"dataset,omitempty"`

	// profileRef names an AffinityProfile of the same namespace, of the same model, instead of a data set.
	// +optional
	ProfileRef *ProfileReference `json:"profileRef,omitempty"`

	SamplingSpec `json:",inline"`

	// target is Serving (the running deployment answers the requests of the data set, beside its other traffic) or
	// Dedicated (a Job with an engine of its own, in a pod like the serving ones, which needs devices for its time).
	// +optional
	// +kubebuilder:default=Serving
	// +kubebuilder:validation:Enum=Serving;Dedicated
	Target ProfilingTarget `json:"target,omitempty"`

	// template is merged over the pod template of the profiling Job, as spec.template of an AffinityProfile is: node selector, tolerations,
	// resources of the container "profile", and of "engine" with target Dedicated. Where it is given, spec.template does not count for
	// that Job; without it the Job has what spec.template says of scheduling, and with target Dedicated all of it.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`

	// refresh is how the model is profiled again when the traffic has drifted: Live (from what the request routers keep of
	// sampled requests: no device is used) or Job (by the data set again; where its content is still the same, no Job is
	// started, and no plan made).
	// +optional
	// +kubebuilder:default=Live
	Refresh RefreshMode `json:"refresh,omitempty"`

	// liveSamples is what the request routers keep, in memory, of the tokens of sampled requests: Counts (how often token ids
	// activated experts and followed one another: no text can be read from them; with attention DataParallel they renew the
	// tables of a plan, never its placement) or Sequences (also whole requests and answers as token ids: they are PROMPTS OF
	// USERS, and a live profile stores a sample of them in the artifact store).
	// +optional
	// +kubebuilder:default=Counts
	LiveSamples LiveSamples `json:"liveSamples,omitempty"`
}

// ProfileReference names an AffinityProfile.
type ProfileReference struct {
	// name of the AffinityProfile, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}
