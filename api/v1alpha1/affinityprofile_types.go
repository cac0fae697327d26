package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AffinityProfile records, once, which experts the tokens of a data set activate in a model. Its result is kept in the
// artifact store under the digest of its inputs: the same inputs are never profiled twice while the result lives.
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

	// spec is what to profile. It cannot be changed: make another profile instead.
	// +required
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the spec of an AffinityProfile cannot be changed: create another one"
	Spec AffinityProfileSpec `json:"spec"`

	// status is what the operator last observed.
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

// AffinityProfileSpec is what to profile, and where.
//
// +kubebuilder:validation:XValidation:rule="self.target == 'Dedicated' || has(self.deploymentRef)",message="targets Serving and Live need deploymentRef: the MoEDeployment that answers the requests",fieldPath=".deploymentRef"
// +kubebuilder:validation:XValidation:rule="(self.target == 'Live') != has(self.dataset)",message="targets Serving and Dedicated need dataset, and target Live takes none: it profiles the requests of the deployment's clients",fieldPath=".dataset"
// +kubebuilder:validation:XValidation:rule="(self.target == 'Live') == has(self.live)",message="target Live needs live, and no other target takes it",fieldPath=".live"
// +kubebuilder:validation:XValidation:rule="!has(self.parallelism.podsPerReplica)",message="podsPerReplica is a MoEDeployment's: which experts a token activates does not depend on it, and a profiling Job has one pod: remove it",fieldPath=".parallelism.podsPerReplica"
type AffinityProfileSpec struct {
	// model names the checkpoint.
	// +required
	Model ModelSpec `json:"model"`

	// engine is the engine that answers the requests: the deployment's, or with target Dedicated the one to start.
	// +required
	Engine EngineSpec `json:"engine"`

	// parallelism is how a dedicated engine spreads the model over devices.
	// +required
	Parallelism ParallelismSpec `json:"parallelism"`

	// dataset is what is sent to the model, with targets Serving and Dedicated.
	// +optional
	Dataset *DatasetSpec `json:"dataset,omitempty"`

	// With target Live, the profile is complete once the routers have as many tokens, or 25,000 if that is less. With samples
	// Counts, it holds all that they have counted. With samples Sequences, requests counts alike, with 100; tokens and requests
	// bound how many are taken, newest and oldest alike, and longer ones than requestTokens are cut.
	SamplingSpec `json:",inline"`

	// target is Serving, Dedicated, or Live.
	// +optional
	// +kubebuilder:default=Serving
	// +kubebuilder:validation:Enum=Serving;Dedicated;Live
	Target ProfilingTarget `json:"target,omitempty"`

	// deploymentRef is the MoEDeployment, in the same namespace, that answers the requests with target Serving, and whose
	// routers hold the samples with target Live.
	// +optional
	DeploymentRef *DeploymentReference `json:"deploymentRef,omitempty"`

	// live says which samples a profile of target Live is made from.
	// +optional
	Live *LiveSpec `json:"live,omitempty"`

	// template is merged over the pod template of the profiling Job: node selector, tolerations, resources. A container
	// named "engine" is merged into the engine of target Dedicated, one named "profile" into the container that sends the
	// requests. Labels and annotations under semmoe.io/ are reserved.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`
}

// LiveSpec says which samples of request routers a profile is made from.
type LiveSpec struct {
	// samples is Counts or Sequences. The routers must keep them: see spec.profiling.liveSamples of the MoEDeployment.
	// +optional
	// +kubebuilder:default=Counts
	Samples LiveSamples `json:"samples,omitempty"`

	// since is from when on samples count. Defaults to the creation of the profile.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`

	// priorProfileRef names a complete AffinityProfile of the same model, in the same namespace: what routers do not know of
	// the model, and its tokenizer, are taken from there.
	// +required
	PriorProfileRef ProfileReference `json:"priorProfileRef"`
}

// DeploymentReference names a MoEDeployment.
type DeploymentReference struct {
	// name of the MoEDeployment, in the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=40
	Name string `json:"name"`
}

// AffinityProfileStatus is what the operator last observed.
type AffinityProfileStatus struct {
	// conditions tell the state: Ready (the result is in the store), Progressing, Degraded, Reconciling, Stalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// observedGeneration is the generation of the spec that this status is about.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// inputs is the short digest of model, data set and sampling: profiles of the same inputs share one result.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Inputs string `json:"inputs,omitempty"`

	// model is what the inspection found in the checkpoint.
	// +optional
	Model *ModelStatus `json:"model,omitempty"`

	// progress is how far the profiling Job is, while it runs, or how much the request routers have sampled.
	// +optional
	Progress *ProfileProgress `json:"progress,omitempty"`

	// result describes the profile, once it is in the store.
	// +optional
	Result *ProfileResult `json:"result,omitempty"`
}

// ProfileProgress is how far a profiling Job is; it moves every 10 seconds at most.
type ProfileProgress struct {
	// requestsDone of requestsTotal have been answered. With target Live it is tokens first, and requests once they suffice, that
	// the request routers have sampled.
	// +required
	// +kubebuilder:validation:Minimum=0
	RequestsDone int32 `json:"requestsDone"`

	// requestsTotal is the number of requests to send.
	// +required
	// +kubebuilder:validation:Minimum=0
	RequestsTotal int32 `json:"requestsTotal"`

	// tokensPerSecond is the rate since the Job began to send.
	// +optional
	// +kubebuilder:validation:Minimum=0
	TokensPerSecond int32 `json:"tokensPerSecond,omitempty"`

	// remainingSeconds estimates how long the rest takes.
	// +optional
	// +kubebuilder:validation:Minimum=0
	RemainingSeconds int32 `json:"remainingSeconds,omitempty"`

	// summary is "done/total", for printing only.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Summary string `json:"summary,omitempty"`
}

// ProfileResult describes a profile.
type ProfileResult struct {
	// digest names the profile in the artifact store: the sha256 of the list of its files.
	// +required
	// +kubebuilder:validation:MaxLength=71
	Digest string `json:"digest"`

	// requests is the number of requests in the routing trace, refused those that the engine would not take.
	// +required
	// +kubebuilder:validation:Minimum=0
	Requests int32 `json:"requests"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	Refused int32 `json:"refused,omitempty"`

	// tokens is the number of tokens that were counted, tracedTokens how many of them are in the routing trace.
	// +required
	// +kubebuilder:validation:Minimum=0
	Tokens int64 `json:"tokens"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	TracedTokens int64 `json:"tracedTokens,omitempty"`

	// distinctTokens is the number of different token ids, coverageMilli their share of the vocabulary in thousandths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	DistinctTokens int32 `json:"distinctTokens,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CoverageMilli int32 `json:"coverageMilli,omitempty"`

	// skewMilli is the load of a layer's busiest expert over the mean, in thousandths, averaged over layers.
	// +optional
	// +kubebuilder:validation:Minimum=0
	SkewMilli int32 `json:"skewMilli,omitempty"`
}
