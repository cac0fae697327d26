package moedeployment

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

// workload holds the replicas of one revision: a StatefulSet, or a LeaderWorkerSet where a replica has several pods.
type workload struct {
	*metav1.ObjectMeta
	object client.Object
}

// statefulSet is a workload whose replicas have one pod each.
func statefulSet(s *appsv1.StatefulSet) *workload { return &workload{&s.ObjectMeta, s} }

// leaderWorkerSet is a workload whose replicas are groups of pods.
func leaderWorkerSet(s *leaderworkersetv1.LeaderWorkerSet) *workload {
	return &workload{&s.ObjectMeta, s}
}

// template is that of the pods that answer requests.
func (w *workload) template() *corev1.PodTemplateSpec {
	if set, groups := w.object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Spec.LeaderWorkerTemplate.LeaderTemplate
	}
	return &w.object.(*appsv1.StatefulSet).Spec.Template
}

// replicas is how many are asked for. It points into the object.
func (w *workload) replicas() *int32 {
	if set, groups := w.object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Spec.Replicas
	}
	return w.object.(*appsv1.StatefulSet).Spec.Replicas
}

// drained tells that no replica is left. Not every release of LeaderWorkerSet says which generation its status is of, so that no
// pod may be seen either.
func (w *workload) drained(pods []*corev1.Pod) bool {
	if set, groups := w.object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Status.Replicas == 0 && !slices.ContainsFunc(pods, w.holds)
	}
	set := w.object.(*appsv1.StatefulSet)
	return set.Status.Replicas == 0 && set.Status.ObservedGeneration == set.Generation
}

// holds tells that a pod that answers requests is of the workload. Those of a LeaderWorkerSet belong to a StatefulSet of its own.
func (w *workload) holds(pod *corev1.Pod) bool {
	if _, groups := w.object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return pod.Labels[leaderworkersetv1.SetNameLabelKey] == w.Name && !pod.CreationTimestamp.Before(&w.CreationTimestamp)
	}
	return metav1.IsControlledBy(pod, w)
}

// change patches what f changes of the workload. The lock refuses a decision that was made from a stale cache.
func (w *workload) change(ctx context.Context, c client.Client, what string, f func()) error {
	base := w.object.DeepCopyObject().(client.Object)
	f()
	if err := c.Patch(ctx, w.object, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}), client.FieldOwner(desired.Manager)); err != nil {
		return fmt.Errorf("%s workload %s: %w", what, w.Name, err)
	}
	return nil
}
