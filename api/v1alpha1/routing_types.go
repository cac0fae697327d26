package v1alpha1

import corev1 "k8s.io/api/core/v1"

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
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.template)",message="template needs mode Router or EndpointPicker: with None there are no request router pods",fieldPath=".template"
// +kubebuilder:validation:XValidation:rule="!has(self.gatewayNamespaces) || self.mode == 'EndpointPicker' && self.networkPolicy != 'None'",message="gatewayNamespaces needs mode EndpointPicker and networkPolicy Managed: otherwise no policy names Gateways",fieldPath=".gatewayNamespaces"
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

	// template is merged over the pod template of the request router, in modes Router and EndpointPicker. Its field paths are those
	// of a pod template. Router pods inherit the imagePullSecrets of spec.template and nothing else from it: they need no devices, and
	// a toleration for device nodes would let them occupy such a node.
	// +optional
	Template *RouterTemplate `json:"template,omitempty"`

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

	// networkPolicy is Managed, or None. With Managed, only the request routers, the operator and monitoring reach the engines'
	// serving port (mode Router). Only the operator and monitoring reach the routers' metrics, and only the operator reaches their
	// observations. All other ports stay open. Monitoring is every namespace with the label semmoe.io/monitoring.
	// +optional
	// +kubebuilder:default=Managed
	NetworkPolicy NetworkPolicyMode `json:"networkPolicy,omitempty"`

	// gatewayNamespaces names the namespaces of the Gateways that use the endpoint picker. With networkPolicy Managed, pods of other
	// namespaces cannot connect to it. Without gatewayNamespaces, every pod of the cluster can. It needs mode EndpointPicker.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	GatewayNamespaces []string `json:"gatewayNamespaces,omitempty"`
}

// RouterTemplate is the part of a pod template that users set for request router pods.
type RouterTemplate struct {
	// metadata adds labels and annotations to the pods.
	// +optional
	Metadata RouterTemplateMetadata `json:"metadata,omitzero"`

	// spec sets the scheduling and the resources of the pods.
	// +optional
	Spec RouterTemplateSpec `json:"spec,omitzero"`
}

// RouterTemplateMetadata is the metadata that users set for request router pods. Keys under semmoe.io/ are reserved.
type RouterTemplateMetadata struct {
	// labels are added to the labels of the pods.
	// +optional
	Labels map[string]string `json:"labels,omitempty"`

	// annotations are added to the annotations of the pods.
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
}

// RouterTemplateSpec is the part of a pod spec that users set for request router pods.
type RouterTemplateSpec struct {
	// nodeSelector contains the labels of the nodes that the pods run on.
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`

	// tolerations are the taints that the pods tolerate.
	// +optional
	// +listType=atomic
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`

	// affinity contains the scheduling constraints of the pods.
	// +optional
	Affinity *corev1.Affinity `json:"affinity,omitempty"`

	// topologySpreadConstraints replace the operator's constraint, which spreads the pods over nodes where possible. A constraint
	// without a labelSelector counts the request router pods of this MoEDeployment.
	// +optional
	// +listType=atomic
	TopologySpreadConstraints []corev1.TopologySpreadConstraint `json:"topologySpreadConstraints,omitempty"`

	// priorityClassName is the name of the PriorityClass of the pods.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	PriorityClassName string `json:"priorityClassName,omitempty"`

	// containers sets the resources of the container "router". No other container can be set.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=1
	Containers []RouterContainer `json:"containers,omitempty"`
}

// RouterContainer is the part of a container that users set for the request router.
type RouterContainer struct {
	// name is "router".
	// +required
	// +kubebuilder:validation:Enum=router
	Name string `json:"name"`

	// resources are merged over the requests and limits of the container. The memory limit bounds the heap of the router.
	// +optional
	Resources RouterResources `json:"resources,omitzero"`
}

// RouterResources are the resources of a request router.
type RouterResources struct {
	// limits are the maximum amounts of resources.
	// +optional
	Limits corev1.ResourceList `json:"limits,omitempty"`

	// requests are the amounts of resources that the scheduler reserves.
	// +optional
	Requests corev1.ResourceList `json:"requests,omitempty"`
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
