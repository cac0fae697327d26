package router

import (
	"cmp"
	"encoding/json"
	"net"
	"reflect"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"

	"github.com/semmoe/operator/internal/lar"
)

// Backend is an engine pod that serves.
type Backend struct {
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// Address is host:port of the engine.
	Address string `json:"address"`
	// Ranks is the number of ranks that requests can be pinned to; 0 where the engine takes no rank.
	Ranks int `json:"ranks"`
	// Revision is the revision of the serving workload that the pod belongs to.
	Revision string `json:"revision"`
	// PlanDigest is the full digest of the plan that the pod serves under; empty where it has none.
	PlanDigest string `json:"planDigest,omitempty"`
	// Permuted tells that the pod serves a checkpoint whose experts are in the order of the plan's slots, and reports them
	// by their numbers there.
	Permuted bool `json:"permuted,omitempty"`
	// Shape is the model's; nil where it is not known.
	Shape *lar.Shape `json:"shape,omitempty"`
}

// equal reports whether two backends are the same.
func (b Backend) equal(other Backend) bool { return reflect.DeepEqual(b, other) }

// Backends returns the engine pods that may get new requests, ordered by name.
func Backends(pods []*corev1.Pod) []Backend {
	var backends []Backend
	for _, pod := range pods {
		if backend, ok := backendOf(pod); ok {
			backends = append(backends, backend)
		}
	}
	slices.SortFunc(backends, func(a, b Backend) int { return cmp.Compare(a.Pod, b.Pod) })
	return backends
}

// withoutRanks are the backends of an engine whose requests cannot be pinned: of no use to them are ranks, and plans that
// tell ranks apart.
func withoutRanks(backends []Backend) []Backend {
	plain := slices.Clone(backends)
	for i := range plain {
		plain[i].Ranks, plain[i].PlanDigest = 0, ""
	}
	return plain
}

func backendOf(pod *corev1.Pod) (Backend, bool) {
	port, err := strconv.Atoi(pod.Annotations[semmoev1.AnnotationPort])
	if err != nil || pod.Status.PodIP == "" || pod.DeletionTimestamp != nil || !ready(pod) {
		return Backend{}, false
	}
	ranks, err := strconv.Atoi(pod.Annotations[semmoev1.AnnotationRanks])
	if err != nil || ranks < 0 {
		ranks = 0
	}
	var shape *lar.Shape
	if text := pod.Annotations[semmoev1.AnnotationModelShape]; text != "" {
		parsed := &lar.Shape{}
		if json.Unmarshal([]byte(text), parsed) == nil && parsed.Validate() == nil {
			shape = parsed
		}
	}
	return Backend{
		Shape:      shape,
		Pod:        pod.Name,
		Address:    net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(port)),
		Ranks:      ranks,
		Revision:   pod.Labels[semmoev1.LabelRevision],
		PlanDigest: pod.Annotations[semmoev1.AnnotationPlanDigest],
		Permuted:   semmoev1.Realization(pod.Annotations[semmoev1.AnnotationRealization]) == semmoev1.RealizationReshuffledWeights,
	}, true
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}
