// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import corev1 "k8s.io/api/core/v1"

// RoutingMode is the component that assigns requests to ranks.
//
// +kubebuilder:validation:Enum=Router;EndpointPicker;None
type RoutingMode string

const (
	// RoutingModeRouter places the operator's request router in front of the ranks.
	RoutingModeRouter RoutingMode = "Router"
	// RoutingModeEndpointPicker leaves proxying to a Gateway. The Gateway asks the request router for the pod and the
	// rank of each request, with the endpoint picker protocol of the Gateway API Inference Extension.
	RoutingModeEndpointPicker RoutingMode = "EndpointPicker"
	// RoutingModeNone uses only the Service, which distributes connections over ready pods. The engine chooses the
	// rank.
	RoutingModeNone RoutingMode = "None"
)

// NetworkPolicyMode controls whether the operator creates NetworkPolicies.
//
// +kubebuilder:validation:Enum=Managed;None
type NetworkPolicyMode string

const (
	// NetworkPolicyManaged makes the operator create and maintain NetworkPolicies.
	NetworkPolicyManaged NetworkPolicyMode = "Managed"
	// NetworkPolicyNone makes the operator create no NetworkPolicy.
	NetworkPolicyNone NetworkPolicyMode = "None"
)

// RoutingSpec configures how requests reach the ranks.
//
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.weights)",message="weights need mode Router or EndpointPicker: with None the engine chooses the rank",fieldPath=".weights"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.pendingLimitPerRank)",message="pendingLimitPerRank needs mode Router or EndpointPicker: with None there is no request router",fieldPath=".pendingLimitPerRank"
// +kubebuilder:validation:XValidation:rule="self.mode == 'Router' || !has(self.holdMilliseconds)",message="holdMilliseconds needs mode Router: in the other modes no request router can delay a request",fieldPath=".holdMilliseconds"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.template)",message="template needs mode Router or EndpointPicker: with None there are no request router pods",fieldPath=".template"
// +kubebuilder:validation:XValidation:rule="!has(self.gatewayNamespaces) || self.mode == 'EndpointPicker' && self.networkPolicy != 'None'",message="gatewayNamespaces needs mode EndpointPicker and networkPolicy Managed: only that NetworkPolicy names Gateways",fieldPath=".gatewayNamespaces"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.passThrough)",message="passThrough needs mode Router or EndpointPicker: with None there is no request router",fieldPath=".passThrough"
// +kubebuilder:validation:XValidation:rule="!has(self.tls) || self.mode == 'Router'",message="tls needs mode Router: in the other modes no client connects to a request router",fieldPath=".tls"
// +kubebuilder:validation:XValidation:rule="!has(self.auth) || self.mode == 'Router'",message="auth needs mode Router: in the other modes no client connects to a request router",fieldPath=".auth"
// +kubebuilder:validation:XValidation:rule="!has(self.queue) || self.mode == 'Router' && has(self.pendingLimitPerRank)",message="queue needs mode Router and pendingLimitPerRank: requests wait in a request router while all ranks are at that limit",fieldPath=".queue"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.circuitBreaker)",message="circuitBreaker needs mode Router or EndpointPicker: with None there is no request router",fieldPath=".circuitBreaker"
// +kubebuilder:validation:XValidation:rule="self.mode == 'Router' || !has(self.maxAttempts)",message="maxAttempts needs mode Router: in the other modes no request router sends a request",fieldPath=".maxAttempts"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.tracing)",message="tracing needs mode Router or EndpointPicker: with None there is no request router",fieldPath=".tracing"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.accessLogPercent)",message="accessLogPercent needs mode Router or EndpointPicker: with None there is no request router",fieldPath=".accessLogPercent"
// +kubebuilder:validation:XValidation:rule="self.mode != 'None' || !has(self.kvEvents)",message="kvEvents needs mode Router or EndpointPicker: with None there is no request router",fieldPath=".kvEvents"
type RoutingSpec struct {
	// mode is Router, EndpointPicker or None. Default Router. With Router clients connect to the operator's request
	// router. With EndpointPicker a Gateway asks the request router for the rank of each request, through an
	// InferencePool with the name of the MoEDeployment, and the Service selects the engine pods. With None a Service
	// selects the engine pods, and there is no request router.
	// +optional
	// +kubebuilder:default=Router
	Mode RoutingMode `json:"mode,omitempty"`

	// replicas is the number of request router pods. Default 2.
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	Replicas int32 `json:"replicas,omitempty"`

	// template is merged over the pod template of the request router, in modes Router and EndpointPicker. Its field
	// paths are those of a pod template. Router pods inherit only imagePullSecrets from spec.template: they need no
	// devices, and with a toleration for device nodes they could occupy such a node.
	// +optional
	Template *RouterTemplate `json:"template,omitempty"`

	// weights weigh the four terms of the score of a rank. All terms estimate saved time in the same unit, so the
	// default of 100 for each is right where the estimates are accurate.
	// +optional
	Weights *RoutingWeights `json:"weights,omitempty"`

	// pendingLimitPerRank is the maximum number of outstanding requests of a rank (of a pod, where requests have no
	// rank). When all ranks are at the limit, requests are rejected with status 429 and a Retry-After header. Default:
	// no limit, because engines queue requests and limit their queues.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	PendingLimitPerRank *int32 `json:"pendingLimitPerRank,omitempty"`

	// queue makes requests wait in a request router while all ranks are at pendingLimitPerRank. Default: they are
	// rejected with status 429. It requires mode Router.
	// +optional
	Queue *RoutingQueue `json:"queue,omitempty"`

	// circuitBreaker configures when a failing engine pod gets no requests. Default: after two consecutive 5xx
	// responses, a 503 or a broken connection, for one to eight seconds.
	// +optional
	CircuitBreaker *RoutingCircuitBreaker `json:"circuitBreaker,omitempty"`

	// maxAttempts is the maximum number of pods that receive a request if each of them breaks the connection before its
	// response. 1 sends no request again that a pod may have received. Pods that cannot be reached or answer 503 do not
	// count: other pods are tried. Default 3. It requires mode Router.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	MaxAttempts *int32 `json:"maxAttempts,omitempty"`

	// holdMilliseconds is the maximum time that a request waits in a request router for the rank with its experts,
	// while that rank has received more than its share of the last 128 requests. Default: requests do not wait. Waiting
	// increases the local share, more with more ranks (by a fifth at 16 ranks, where half of the requests wait), and
	// delays the responses of the waiting requests. No request waits while fewer requests than ranks arrive in that
	// time.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	HoldMilliseconds *int32 `json:"holdMilliseconds,omitempty"`

	// samplePercent is the percentage of requests for which the router asks the engine to return the experts that their
	// tokens activated, to observe the local activation rate. Clients never see this data. Engines pay for the capture:
	// reports range from a few percent of throughput to much more. Default 5 where spec.profiling or
	// spec.placement.planRef is set and requests have ranks, and 0 (the rate is not observed) elsewhere. A change from
	// 0 to a positive value, or back, restarts the engines. VLLM and VLLMAscend return the experts only for requests
	// without streaming; TensorRTLLM never returns them.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	SamplePercent *int32 `json:"samplePercent,omitempty"`

	// networkPolicy is Managed or None. Default Managed. With Managed, only the request routers, the operator and
	// monitoring can connect to the serving port of the engines (mode Router). Only the operator and monitoring can
	// connect to the metrics of the routers, and only the operator to their observations. All other ports stay open.
	// Monitoring is every namespace with the label semmoe.io/monitoring.
	// +optional
	// +kubebuilder:default=Managed
	NetworkPolicy NetworkPolicyMode `json:"networkPolicy,omitempty"`

	// gatewayNamespaces are the namespaces of the Gateways that use the endpoint picker. With networkPolicy Managed,
	// pods of other namespaces cannot connect to it. Default: every pod of the cluster can connect. It requires mode
	// EndpointPicker.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=63
	// +kubebuilder:validation:items:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	GatewayNamespaces []string `json:"gatewayNamespaces,omitempty"`

	// passThrough lists further routes of the engine that clients may use, for example of a plug-in: absolute paths
	// without a trailing slash, for all methods. Requests are balanced by load. The request router already passes on all
	// routes for inference that the supported engines have. Administrative routes of any engine are rejected.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=128
	// +kubebuilder:validation:items:Pattern=`^(/[A-Za-z0-9._~-]+)+$`
	PassThrough []string `json:"passThrough,omitempty"`

	// kvEvents makes the engines publish the changes of their prefix caches to the request routers, which then know what
	// each rank has cached. Default: request routers estimate it from the requests that they have sent. A change restarts
	// the engines. It requires SGLang, VLLM or VLLMAscend, and podsPerReplica 1.
	// +optional
	KVEvents *RoutingKVEvents `json:"kvEvents,omitempty"`

	// tls makes the request routers serve clients by TLS. Default: plain text. It requires mode Router.
	// +optional
	TLS *RoutingTLS `json:"tls,omitempty"`

	// auth makes the request routers reject requests without a valid API key with status 401. Default: every client is
	// served. It requires mode Router.
	// +optional
	Auth *RoutingAuth `json:"auth,omitempty"`

	// tracing sends an OpenTelemetry span of each traced request to a collector. Default: no spans.
	// +optional
	Tracing *RoutingTracing `json:"tracing,omitempty"`

	// accessLogPercent is the percentage of the requests that request routers log to standard output, one JSON object a
	// line. Lines contain no prompt, no answer and no key. Default: none.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	AccessLogPercent *int32 `json:"accessLogPercent,omitempty"`
}

// RoutingKVEvents configures the KV events of the engines (ZeroMQ). They contain the token IDs of prompts in plain text:
// with networkPolicy Managed and mode Router, only the request routers can connect to their ports.
type RoutingKVEvents struct {
	// port is the first of two ports for each rank of a pod: the ports of the ranks, then those of their replays. Default
	// 5557.
	// +optional
	// +kubebuilder:default=5557
	// +kubebuilder:validation:Minimum=1024
	// +kubebuilder:validation:Maximum=65534
	Port int32 `json:"port,omitempty"`
}

// RoutingTracing configures the spans of request routers. A collector that cannot be reached delays no request.
type RoutingTracing struct {
	// endpoint is the URL of an OpenTelemetry collector (OTLP over HTTP), such as http://collector.observability:4318.
	// The path /v1/traces is added to a URL without a path.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHost() != '' && !self.contains('@')",message="endpoint must be an http or https URL with a host and without credentials, such as http://collector.observability:4318: credentials belong into headersSecretName"
	Endpoint string `json:"endpoint"`

	// samplePercent is the percentage of the requests without a traceparent header that get a span. Requests with the
	// header keep its decision. Default 100.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	SamplePercent *int32 `json:"samplePercent,omitempty"`

	// headersSecretName is the name of a Secret with the key headers: the HTTP headers of the export, such as
	// "Authorization=Bearer%20token", separated by commas. It becomes a variable of the pods; the operator does not read
	// it. Default: no further headers.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`
	HeadersSecretName string `json:"headersSecretName,omitempty"`

	// caSecretName is the name of a Secret with the key ca.crt: the authorities of the collector's certificate. Default:
	// those of the system.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`
	CASecretName string `json:"caSecretName,omitempty"`
}

// RoutingQueue configures the queue of a request router. Requests of a higher priority are first; requests of one
// priority are served with equal shares of work for the clients of spec.routing.auth.
type RoutingQueue struct {
	// size is the maximum number of waiting requests at each request router. In a full queue, the last request in the
	// order is rejected with status 429.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	Size int32 `json:"size"`

	// timeoutSeconds is the maximum time that a request waits; then it is rejected with status 429. Default 30.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=600
	TimeoutSeconds *int32 `json:"timeoutSeconds,omitempty"`

	// maxPriority is the highest priority that a client can request with the header X-Semmoe-Priority (-100 to 100).
	// Default 0: clients can only lower the priority of their requests.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	MaxPriority *int32 `json:"maxPriority,omitempty"`
}

// RoutingCircuitBreaker configures the ejection of engine pods. An ejected pod gets no request while other pods can take
// it.
//
// +kubebuilder:validation:XValidation:rule="(has(self.ejectionSeconds) ? self.ejectionSeconds : 1) <= (has(self.maxEjectionSeconds) ? self.maxEjectionSeconds : 8)",message="ejectionSeconds (default 1) must be at most maxEjectionSeconds (default 8)",fieldPath=".ejectionSeconds"
type RoutingCircuitBreaker struct {
	// consecutiveFailures is the number of consecutive responses with a 5xx status other than 503 that eject a pod.
	// Default 2.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	ConsecutiveFailures *int32 `json:"consecutiveFailures,omitempty"`

	// failurePercent ejects a pod that fails this percentage of at least 20 requests in 10 seconds: broken connections
	// and responses with a 5xx status, 503 included. Default: the percentage is not limited.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	FailurePercent *int32 `json:"failurePercent,omitempty"`

	// ejectionSeconds is the time of the first ejection. It doubles with each further ejection in a row. Default 1.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	EjectionSeconds *int32 `json:"ejectionSeconds,omitempty"`

	// maxEjectionSeconds is the maximum time of an ejection. Default 8. A failing canary needs requests for its
	// evaluation: a long ejection delays its rollback.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	MaxEjectionSeconds *int32 `json:"maxEjectionSeconds,omitempty"`

	// halfOpenRequests is the maximum number of concurrent requests to a pod after an ejection, until the pod serves
	// one of them. Default: no limit.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	HalfOpenRequests *int32 `json:"halfOpenRequests,omitempty"`
}

// RoutingTLS configures TLS between clients and request routers. Renewed Secrets need no restart.
type RoutingTLS struct {
	// secretName is the name of a Secret with the keys tls.crt and tls.key, in the namespace of the MoEDeployment: the
	// certificate that request routers present. It is mounted into their pods; the operator does not read it.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`
	SecretName string `json:"secretName"`

	// clientCASecretName is the name of a Secret with the key ca.crt: the authorities of client certificates. Default:
	// clients need no certificate.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`
	ClientCASecretName string `json:"clientCASecretName,omitempty"`
}

// RoutingAuth configures the API keys of clients, and the limits of each client.
type RoutingAuth struct {
	// requestsPerMinute is the maximum rate of requests of a client at each request router; a tenth of it may arrive at
	// once. Requests above it get status 429. Default: no limit.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000000
	RequestsPerMinute *int32 `json:"requestsPerMinute,omitempty"`

	// pendingLimit is the maximum number of concurrent requests of a client at each request router. Requests above it
	// get status 429. Default: no limit.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	PendingLimit *int32 `json:"pendingLimit,omitempty"`

	// secretName is the name of a Secret in the namespace of the MoEDeployment. Each of its keys is the name of a
	// client, and the value is the API key of this client: 16 to 4,096 printable ASCII characters. It is mounted into
	// the pods of the request routers; the operator does not read it. A changed Secret needs no restart.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$`
	SecretName string `json:"secretName"`
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

// RoutingWeights weigh the terms of the score of a rank, in percent: 100 uses the estimate of a term, 0 ignores the
// term.
//
// +kubebuilder:validation:XValidation:rule="(has(self.affinityPercent) ? self.affinityPercent : 100) + (has(self.prefixPercent) ? self.prefixPercent : 100) + (has(self.loadPercent) ? self.loadPercent : 100) + (has(self.waitPercent) ? self.waitPercent : 100) > 0",message="at least one of affinityPercent, prefixPercent, loadPercent and waitPercent must be above 0: with all 0 every rank has the same score"
type RoutingWeights struct {
	// affinityPercent weighs the saved communication where the experts of the request are on the rank, according to the
	// forecast of the plan. Default 100. It requires requests that have a rank.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	AffinityPercent *int32 `json:"affinityPercent,omitempty"`

	// prefixPercent weighs the saved computation where the rank has the prefix of the prompt in its cache. Default 100.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	PrefixPercent *int32 `json:"prefixPercent,omitempty"`

	// loadPercent weighs the waiting time behind the outstanding requests of the rank. Default 100.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	LoadPercent *int32 `json:"loadPercent,omitempty"`

	// waitPercent weighs the time by which prefill on one rank extends the next step of all ranks. Default 100. Under
	// load it sends requests to ranks whose next step has no prefill yet: fewer activations are local than the plan
	// predicts, and responses start earlier. Only streamed responses show when they start.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	WaitPercent *int32 `json:"waitPercent,omitempty"`
}
