package revisions

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	"github.com/semmoe/operator/controllers/moedeployment/desired"
)

// Workload holds the replicas of one revision: a StatefulSet, or a LeaderWorkerSet where a replica has several pods.
type Workload struct {
	*metav1.ObjectMeta
	Object client.Object
}

// StatefulSet is a workload whose replicas have one pod each.
func StatefulSet(s *appsv1.StatefulSet) *Workload { return &Workload{&s.ObjectMeta, s} }

// LeaderWorkerSet is a workload whose replicas are groups of pods.
func LeaderWorkerSet(s *leaderworkersetv1.LeaderWorkerSet) *Workload {
	return &Workload{&s.ObjectMeta, s}
}

// Template is that of the pods that answer requests.
func (w *Workload) Template() *corev1.PodTemplateSpec {
	if set, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Spec.LeaderWorkerTemplate.LeaderTemplate
	}
	return &w.Object.(*appsv1.StatefulSet).Spec.Template
}

// Replicas is how many are asked for. It points into the object.
func (w *Workload) Replicas() *int32 {
	if set, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Spec.Replicas
	}
	return w.Object.(*appsv1.StatefulSet).Spec.Replicas
}

// Drained tells that no replica is left. Not every release of LeaderWorkerSet says which generation its status is of, so that no
// pod may be seen either.
func (w *Workload) Drained(pods []*corev1.Pod) bool {
	if set, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Status.Replicas == 0 && !slices.ContainsFunc(pods, w.Holds)
	}
	set := w.Object.(*appsv1.StatefulSet)
	return set.Status.Replicas == 0 && set.Status.ObservedGeneration == set.Generation
}

// Holds tells that a pod that answers requests is of the workload. Those of a LeaderWorkerSet belong to a StatefulSet of its own.
func (w *Workload) Holds(pod *corev1.Pod) bool {
	if _, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return pod.Labels[leaderworkersetv1.SetNameLabelKey] == w.Name && !pod.CreationTimestamp.Before(&w.CreationTimestamp)
	}
	return metav1.IsControlledBy(pod, w)
}

// Change patches what f changes of the workload. The lock refuses a decision that was made from a stale cache.
func (w *Workload) Change(ctx context.Context, c client.Client, what string, f func()) error {
	base := w.Object.DeepCopyObject().(client.Object)
	f()
	if err := c.Patch(ctx, w.Object, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}), client.FieldOwner(desired.Manager)); err != nil {
		return fmt.Errorf("%s workload %s: %w", what, w.Name, err)
	}
	return nil
}
