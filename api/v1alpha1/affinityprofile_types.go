// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AffinityProfile records which experts the tokens of a data set activate in a model. The result is stored in the
// artifact store under the digest of its inputs. Identical inputs are profiled once: a second profile reuses the stored
// result.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=aprof,categories=semmoe
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Progress",type=string,JSONPath=`.status.progress.summary`
// +kubebuilder:printcolumn:name="Tokens",type=integer,JSONPath=`.status.result.tokens`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Target",type=string,priority=1,JSONPath=`.spec.target`
// +kubebuilder:printcolumn:name="Inputs",type=string,priority=1,JSONPath=`.status.inputs`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 63 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",message="metadata.name must be at most 63 characters: lower-case letters, digits and '-'"
type AffinityProfile struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the desired profile. It is immutable: create another AffinityProfile instead.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the spec of an AffinityProfile cannot be changed: create another one"
	Spec AffinityProfileSpec `json:"spec"`

	// status is the most recently observed state.
	// +optional
	Status AffinityProfileStatus `json:"status,omitempty"`
}

// AffinityProfileList is a list of AffinityProfiles.
//
// +kubebuilder:object:root=true
type AffinityProfileList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []AffinityProfile `json:"items"`
}

// AffinityProfileSpec is the desired profile: model, engine, requests and target.
//
// +kubebuilder:validation:XValidation:rule="self.target == 'Dedicated' || has(self.deploymentRef)",message="targets Serving and Live need deploymentRef: the MoEDeployment that answers the requests",fieldPath=".deploymentRef"
// +kubebuilder:validation:XValidation:rule="(self.target == 'Live') != has(self.dataset)",message="targets Serving and Dedicated need dataset, and target Live does not allow it: it profiles the requests of clients",fieldPath=".dataset"
// +kubebuilder:validation:XValidation:rule="(self.target == 'Live') == has(self.live)",message="target Live needs live, and other targets do not allow it",fieldPath=".live"
// +kubebuilder:validation:XValidation:rule="!has(self.parallelism.podsPerReplica)",message="podsPerReplica is not allowed: a profiling Job has one pod, and the experts that a token activates do not depend on it",fieldPath=".parallelism.podsPerReplica"
// +kubebuilder:validation:XValidation:rule="!has(self.engine.overlap) || !has(self.engine.overlap.mode) || self.engine.overlap.mode != 'Auto'",message="mode Auto is not allowed: a profiling Job has no plan whose models could choose the settings",fieldPath=".engine.overlap.mode"
// +kubebuilder:validation:XValidation:rule="!has(self.engine.tls)",message="tls is not allowed: a profiling Job connects to the engine in its own pod, or to a request router",fieldPath=".engine.tls"
// +kubebuilder:validation:XValidation:rule="!has(self.model.source)",message="source is not allowed: set volume to the volume with the checkpoint. A MoEDeployment downloads checkpoints",fieldPath=".model.source"
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'Transformers' || self.target == 'Dedicated'",message="backend Transformers needs target Dedicated: the profiling Job computes the requests",fieldPath=".target"
// +kubebuilder:validation:XValidation:rule="!has(self.backend) || self.backend != 'Transformers' || !has(self.dataset) || !has(self.dataset.ownText)",message="dataset.ownText needs backend Engine: Transformers generates no text",fieldPath=".backend"
// +kubebuilder:validation:XValidation:rule="!has(self.backendImage) || (has(self.backend) && self.backend == 'Transformers')",message="backendImage needs backend Transformers",fieldPath=".backendImage"
type AffinityProfileSpec struct {
	// model is the checkpoint to profile.
	// +required
	Model ModelSpec `json:"model"`

	// engine is the engine that computes the requests. With target Serving it is the engine of the deployment; with
	// target Dedicated the profiling Job starts it.
	// +required
	Engine EngineSpec `json:"engine"`

	// parallelism configures how a dedicated engine distributes the model over its devices.
	// +required
	Parallelism ParallelismSpec `json:"parallelism"`

	// dataset contains the requests to send to the model. It is required with targets Serving and Dedicated, and not
	// allowed with target Live.
	// +optional
	Dataset *DatasetSpec `json:"dataset,omitempty"`

	// Sampling with target Live: the profile is complete once the routers have spec.tokens tokens, or 25,000 tokens if
	// spec.tokens is larger. With samples Counts it contains all tokens that the routers counted. With samples
	// Sequences it also waits for spec.requests requests, or 100 if spec.requests is larger. The fields tokens and
	// requests then bound the number that is taken, evenly from oldest to newest, and longer requests are truncated to
	// requestTokens.
	SamplingSpec `json:",inline"`

	// target is where the requests are computed: Serving (by the running MoEDeployment), Dedicated (by an engine that
	// the profiling Job starts) or Live (no requests are sent: the profile is made from the samples of the request
	// routers). Default Serving.
	// +optional
	// +kubebuilder:default=Serving
	// +kubebuilder:validation:Enum=Serving;Dedicated;Live
	Target ProfilingTarget `json:"target,omitempty"`

	BackendSpec `json:",inline"`

	// deploymentRef is the MoEDeployment, in the same namespace, that computes the requests with target Serving, and
	// whose request routers provide the samples with target Live. It is required with these targets.
	// +optional
	DeploymentRef *DeploymentReference `json:"deploymentRef,omitempty"`

	// live selects the samples that a profile with target Live is made from. It is required with target Live, and not
	// allowed with other targets. The profile is complete once the routers have spec.tokens tokens (25,000 if
	// spec.tokens is larger) and, with samples Sequences, spec.requests requests (100 if spec.requests is larger).
	// +optional
	Live *LiveSpec `json:"live,omitempty"`

	// template is merged over the pod template of the profiling Job: node selector, tolerations, resources. A container
	// named "engine" is merged into the engine container of target Dedicated, and a container named "profile" into the
	// container that sends the requests. Labels and annotations under semmoe.io/ are reserved.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`
}

// LiveSpec selects the samples of the request routers that a profile is made from.
type LiveSpec struct {
	// samples is Counts or Sequences. Default Counts. The routers must keep these samples: see
	// spec.profiling.liveSamples of the MoEDeployment.
	// +optional
	// +kubebuilder:default=Counts
	Samples LiveSamples `json:"samples,omitempty"`

	// since is the start of the period from which samples are used. Default: the creation time of the profile.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// priorProfileRef is a complete AffinityProfile of the same model, in the same namespace. It provides the
	// tokenizer, and the facts of the model that routers do not have.
	// +required
	PriorProfileRef ProfileReference `json:"priorProfileRef"`
}

// DeploymentReference identifies a MoEDeployment.
type DeploymentReference struct {
	// name is the name of the MoEDeployment, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	Name string `json:"name"`
}

// AffinityProfileStatus is the most recently observed state of an AffinityProfile.
type AffinityProfileStatus struct {
	// conditions are Ready (the result is in the artifact store), Progressing, Degraded, Reconciling and Stalled. Each
	// has a reason and a message.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation of the spec that this status describes.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// inputs is the short digest of model, data set and sampling. Profiles with the same inputs share one result.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Inputs string `json:"inputs,omitempty"`

	// model is the result of the inspection of the checkpoint.
	// +optional
	Model *ModelStatus `json:"model,omitempty"`

	// progress is the progress of the profiling Job while it runs. With target Live it is the number of sampled tokens
	// or requests.
	// +optional
	Progress *ProfileProgress `json:"progress,omitempty"`

	// result describes the profile. It is absent until the profile is in the artifact store.
	// +optional
	Result *ProfileResult `json:"result,omitempty"`
}

// ProfileProgress is the progress of a profile. It is updated at most every 10 seconds.
type ProfileProgress struct {
	// requestsDone is the number of completed requests. With target Live it is the number of tokens that the request
	// routers have sampled, and, once the tokens suffice, the number of sampled requests.
	// +required
	// +kubebuilder:validation:Minimum=0
	RequestsDone int32 `json:"requestsDone"`

	// requestsTotal is the number of requests to send. With target Live it is the number of tokens or requests to
	// sample.
	// +required
	// +kubebuilder:validation:Minimum=0
	RequestsTotal int32 `json:"requestsTotal"`

	// tokensPerSecond is the mean rate since the Job sent its first request.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TokensPerSecond int32 `json:"tokensPerSecond,omitempty"`

	// remainingSeconds is the estimated remaining time.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RemainingSeconds int32 `json:"remainingSeconds,omitempty"`

	// summary is "done/total", for printer columns only.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Summary string `json:"summary,omitempty"`
}

// ProfileResult describes a profile.
type ProfileResult struct {
	// digest identifies the profile in the artifact store: the sha256 of the list of its files.
	// +required
	// +kubebuilder:validation:MaxLength=71
	Digest string `json:"digest"`

	// requests is the number of requests in the routing trace.
	// +required
	// +kubebuilder:validation:Minimum=0
	Requests int32 `json:"requests"`

	// refused is the number of requests that the engine rejected.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Refused int32 `json:"refused,omitempty"`

	// tokens is the number of tokens that were counted.
	// +required
	// +kubebuilder:validation:Minimum=0
	Tokens int64 `json:"tokens"`

	// tracedTokens is the number of counted tokens that are in the routing trace.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TracedTokens int64 `json:"tracedTokens,omitempty"`

	// distinctTokens is the number of distinct token IDs.
	// +optional
	// +kubebuilder:validation:Minimum=0
	DistinctTokens int32 `json:"distinctTokens,omitempty"`

	// coverageMilli is the share of the vocabulary that distinctTokens covers, in thousandths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CoverageMilli int32 `json:"coverageMilli,omitempty"`

	// skewMilli is the load of the busiest expert of a layer divided by the mean load, in thousandths, averaged over
	// the layers.
	// +optional
	// +kubebuilder:validation:Minimum=0
	SkewMilli int32 `json:"skewMilli,omitempty"`

	// noEmbeddings is the reason why the profile has no token embeddings. Plans then score tokens that the profile lacks
	// like the mean of all tokens. It is empty if the profile has token embeddings, or if an earlier version recorded it.
	// +optional
	// +kubebuilder:validation:MaxLength=250
	NoEmbeddings string `json:"noEmbeddings,omitempty"`
}
