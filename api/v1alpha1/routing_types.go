package v1alpha1

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
// +kubebuilder:validation:XValidation:rule="self.mode == 'Router' || !has(self.holdMilliseconds)",message="holdMilliseconds needs mode Router: a Gateway waits for no request, and with None nobody chooses a rank",fieldPath=".holdMilliseconds"
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

	// holdMilliseconds is how long a request may wait in a request router for the rank of its experts, while that has had more than its share
	// of the last 128 requests. More is local then, the more the more ranks there are (at 16 a fifth), and answers of those that wait, half
	// of them there, begin later. No request waits where fewer come in that time than there are ranks. Without it none ever does.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	HoldMilliseconds *int32 `json:"holdMilliseconds,omitempty"`

	// samplePercent is the share of requests of which the router asks the engine for the experts that their tokens
	// activated, to observe the local activation rate. Clients never see it. Engines pay for the capture (reports go from a few
	// percent of throughput to much more), so the default is 5 where spec.profiling or spec.placement.planRef is given and requests
	// have ranks, and 0 (nothing is observed) elsewhere. A change between 0 and more starts the engines anew. VLLM and VLLMAscend tell the
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
// +kubebuilder:validation:XValidation:rule="(has(self.affinityPercent) ? self.affinityPercent : 100) + (has(self.prefixPercent) ? self.prefixPercent : 100) + (has(self.loadPercent) ? self.loadPercent : 100) + (has(self.waitPercent) ? self.waitPercent : 100) > 0",message="at least one of affinityPercent, prefixPercent, loadPercent and waitPercent must be above 0: else nothing tells ranks apart"
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

	// waitPercent weighs the time by which prompts on one rank make the next step of all ranks longer: under load requests go to ranks
	// whose next step has none yet; default 100. Then fewer activations are local than the plan promises, and requests are answered
	// sooner. Only answers that are streamed tell when they begin.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	WaitPercent *int32 `json:"waitPercent,omitempty"`
}
