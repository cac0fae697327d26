// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/replicagroup"
	"github.com/semmoe/operator/internal/observation/lar"
)

// annotationActivePorts lists the active ports of a pod; without it, all ports are active. The Gateway API defines it
// for pods of an InferencePool.
const annotationActivePorts = "inference.networking.k8s.io/active-ports"

// MaxRanks is the maximum number of ranks of a pod. A pod that declares more serves without ranks.
const MaxRanks = 4096

// NoRank is the rank of requests that are not pinned to a rank.
const NoRank = -1

// Backend is a ready engine pod.
type Backend struct {
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// Address is host:port of the engine.
	Address string `json:"address"`
	// TLS is true if the engine serves TLS.
	TLS bool `json:"tls,omitempty"`
	// Ranks is the number of ranks that requests can be pinned to; 0 if the engine accepts no rank.
	Ranks int `json:"ranks"`
	// Width is the number of ranks of a pod that accepts no rank. It determines the capacity of the pod relative to
	// others; 0 if it is not known.
	Width int `json:"width,omitempty"`
	// RankAddresses is host:port of each rank if each rank has its own port, and empty for an inactive rank. It is nil
	// if all ranks share Address and a header selects the rank.
	RankAddresses []string `json:"rankAddresses,omitempty"`
	// Engine is the type of the engine; empty if the pod does not name it.
	Engine string `json:"engine,omitempty"`
	// Revision is the revision of the serving workload that the pod belongs to.
	Revision string `json:"revision"`
	// PlanDigest is the full digest of the plan that the pod serves under; empty if there is none.
	PlanDigest string `json:"planDigest,omitempty"`
	// ModelDigest identifies the checkpoint that the pod serves; empty if it is not known.
	ModelDigest string `json:"modelDigest,omitempty"`
	// Permuted is true if the experts of the checkpoint are in the order of the plan's slots. The pod then reports
	// experts by these permuted ids.
	Permuted bool `json:"permuted,omitempty"`
	// Shape is the shape of the model; nil if it is not known.
	Shape *lar.Shape `json:"shape,omitempty"`
}

// adapters contains the adapters of all engines, by type.
var adapters = func() map[string]*engine.Adapter {
	known := map[string]*engine.Adapter{}
	for _, adapter := range registry.All() {
		known[adapter.Type] = &adapter
	}
	return known
}()

// Adapter returns the adapter of the pod's engine, or other if the pod does not name its engine. Pods of two engines
// serve together while one engine replaces the other.
func (b Backend) Adapter(other *engine.Adapter) *engine.Adapter {
	if own := adapters[b.Engine]; own != nil {
		return own
	}
	return other
}

// Endpoint returns host:port of a rank, or of the pod for NoRank. It is empty if the rank is not active.
func (b Backend) Endpoint(rank int) string {
	if rank < 0 || rank >= len(b.RankAddresses) {
		return b.Address
	}
	return b.RankAddresses[rank]
}

// Scheme returns the URL scheme of the engine.
func (b Backend) Scheme() string {
	if b.TLS {
		return "https"
	}
	return "http"
}

// URL returns the URL of a route of the engine.
func (b Backend) URL(route string) string { return b.Scheme() + "://" + b.Address + route }

// PinsByHeader reports whether a header must name the rank, because ranks share an endpoint.
func (b Backend) PinsByHeader(rank int) bool { return rank != NoRank && len(b.RankAddresses) == 0 }

// Equal reports whether two backends are the same.
func (b Backend) Equal(other Backend) bool { return reflect.DeepEqual(b, other) }

// Backends returns the engine pods that may get new requests, ordered by name.
func Backends(pods []*corev1.Pod) []Backend {
	var backends []Backend
	replicas := replicagroup.ByReplica(pods)
	for _, pod := range pods {
		if backend, ok := backendOf(pod); ok && replicagroup.AllReady(pod, replicas(pod)) {
			backends = append(backends, backend)
		}
	}
	slices.SortFunc(backends, func(a, b Backend) int { return cmp.Compare(a.Pod, b.Pod) })
	return backends
}

// Pinnable returns the backends, without ranks and plans where the engine accepts no rank: plans only distinguish
// ranks. other is the engine of backends that do not name theirs.
func Pinnable(backends []Backend, other *engine.Adapter) []Backend {
	pinnable := slices.Clone(backends)
	for i := range pinnable {
		if b := &pinnable[i]; !b.Adapter(other).CanPinRank() {
			b.Width, b.Ranks, b.RankAddresses, b.PlanDigest = max(b.Width, b.Ranks), 0, nil, ""
			b.Permuted = b.Permuted && b.Adapter(other).ReportsRoutedExperts() // the order of the experts shows only in reported experts
		}
	}
	return pinnable
}

// WithDefaultPlan returns the backends, with this plan where they name none.
func WithDefaultPlan(backends []Backend, digest string) []Backend {
	planned := slices.Clone(backends)
	for i := range planned {
		planned[i].PlanDigest = cmp.Or(planned[i].PlanDigest, digest)
	}
	return planned
}

// WithTLS returns the backends as engines that serve TLS.
func WithTLS(backends []Backend) []Backend {
	secured := slices.Clone(backends)
	for i := range secured {
		secured[i].TLS = true
	}
	return secured
}

func backendOf(pod *corev1.Pod) (Backend, bool) {
	port, err := strconv.ParseUint(pod.Annotations[semmoev1.AnnotationPort], 10, 16)
	if err != nil || port == 0 || pod.Status.PodIP == "" || pod.DeletionTimestamp != nil || !ready(pod) {
		return Backend{}, false
	}
	addresses, ranks, live := rankAddresses(pod, int(port), ranksOf(pod))
	scheme := pod.Annotations[semmoev1.AnnotationScheme]
	if !live || !validScheme(scheme) {
		return Backend{}, false
	}
	return Backend{
		Shape:         shapeOf(pod.Annotations[semmoev1.AnnotationModelShape]),
		Engine:        pod.Annotations[semmoev1.AnnotationEngine],
		Pod:           pod.Name,
		Address:       net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(port))),
		TLS:           scheme == semmoev1.SchemeHTTPS,
		Ranks:         ranks,
		RankAddresses: addresses,
		Revision:      pod.Labels[semmoev1.LabelRevision],
		PlanDigest:    pod.Annotations[semmoev1.AnnotationPlanDigest],
		ModelDigest:   pod.Annotations[semmoev1.AnnotationModelDigest],
		Permuted:      semmoev1.Realization(pod.Annotations[semmoev1.AnnotationRealization]) == semmoev1.RealizationReshuffledWeights,
	}, true
}

// validScheme reports whether an annotation names a scheme, or is absent.
func validScheme(scheme string) bool {
	return scheme == "" || scheme == "http" || scheme == semmoev1.SchemeHTTPS
}

// ranksOf returns the number of ranks that a pod declares; 0 if the number is invalid.
func ranksOf(pod *corev1.Pod) int {
	ranks, err := strconv.Atoi(pod.Annotations[semmoev1.AnnotationRanks])
	if err != nil || ranks < 0 || ranks > MaxRanks {
		return 0
	}
	return ranks
}

// Problem describes an invalid annotation of a pod. A pod with an invalid port or scheme gets no requests; other invalid
// annotations are ignored. It is empty if all annotations are valid.
func Problem(pod *corev1.Pod) string {
	invalid := func(name, allowed string) string {
		return fmt.Sprintf("annotation %s: %.40q is invalid: %s", name, pod.Annotations[name], allowed)
	}
	ranks, port := pod.Annotations[semmoev1.AnnotationRanks], pod.Annotations[semmoev1.AnnotationPort]
	ports, listed := pod.Annotations[semmoev1.AnnotationRankPorts]
	switch number, err := strconv.ParseUint(port, 10, 16); {
	case port != "" && (err != nil || number == 0):
		return invalid(semmoev1.AnnotationPort, "1 to 65535 is allowed")
	case !validScheme(pod.Annotations[semmoev1.AnnotationScheme]):
		return invalid(semmoev1.AnnotationScheme, "http or https is allowed")
	case ranks != "" && ranks != "0" && ranksOf(pod) == 0:
		return invalid(semmoev1.AnnotationRanks, fmt.Sprintf("0 to %d is allowed", MaxRanks))
	case listed && !fit(ports, ranksOf(pod)):
		return invalid(semmoev1.AnnotationRankPorts, "one port for each rank is allowed")
	}
	if text := pod.Annotations[semmoev1.AnnotationModelShape]; text != "" && shapeOf(text) == nil {
		return invalid(semmoev1.AnnotationModelShape, "the shape of a model is allowed")
	}
	if text := pod.Annotations[semmoev1.AnnotationPlanDigest]; text != "" {
		if _, err := artifact.ParseDigest(text); err != nil {
			return invalid(semmoev1.AnnotationPlanDigest, "64 hexadecimal digits are allowed")
		}
	}
	return ""
}

// fit reports whether a text lists one port per rank.
func fit(text string, ranks int) bool {
	ports := portsOf(text)
	return len(ports) == ranks && !slices.Contains(ports, 0)
}

// shapeOf parses the shape of a model; nil if it is invalid.
func shapeOf(text string) *lar.Shape {
	shape := &lar.Shape{}
	if json.Unmarshal([]byte(text), shape) != nil || shape.Validate() != nil {
		return nil
	}
	return shape
}

// rankAddresses returns the endpoints of the ranks of a pod; nil if they share the port of the pod. If the number of
// ports differs from the number of ranks, the pod counts as a pod without ranks. live is false if no endpoint is
// active.
func rankAddresses(pod *corev1.Pod, port, ranks int) (addresses []string, pinned int, live bool) {
	active, limited := pod.Annotations[annotationActivePorts]
	activePorts := map[int]bool{}
	for _, port := range portsOf(active) {
		activePorts[port] = true
	}
	isActive := func(port int) bool { return !limited || activePorts[port] }
	text, found := pod.Annotations[semmoev1.AnnotationRankPorts]
	if !found {
		return nil, ranks, isActive(port)
	}
	if !fit(text, ranks) {
		return nil, 0, isActive(port)
	}
	for _, port := range portsOf(text) {
		address := ""
		if isActive(port) {
			address, live = net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port)), true
		}
		addresses = append(addresses, address)
	}
	return addresses, ranks, live
}

// portsOf parses a comma-separated list of port numbers. Invalid elements become 0.
func portsOf(text string) []int {
	var ports []int
	for part := range strings.SplitSeq(text, ",") {
		port, err := strconv.ParseUint(strings.TrimSpace(part), 10, 16)
		if err != nil {
			port = 0
		}
		ports = append(ports, int(port))
	}
	return ports
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
