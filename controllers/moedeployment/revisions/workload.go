// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	"github.com/semmoe/operator/internal/kube/writes"
)

// Workload wraps the workload of one revision: a StatefulSet, or a LeaderWorkerSet if a replica has several pods.
type Workload struct {
	*metav1.ObjectMeta
	Object writes.Object
}

// StatefulSet returns a workload with one pod per replica.
func StatefulSet(s *appsv1.StatefulSet) *Workload { return &Workload{&s.ObjectMeta, s} }

// LeaderWorkerSet returns a workload with groups of pods as replicas.
func LeaderWorkerSet(s *leaderworkersetv1.LeaderWorkerSet) *Workload {
	return &Workload{&s.ObjectMeta, s}
}

// Template returns the template of the pods that serve requests.
func (w *Workload) Template() *corev1.PodTemplateSpec {
	if set, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Spec.LeaderWorkerTemplate.LeaderTemplate
	}
	return &w.Object.(*appsv1.StatefulSet).Spec.Template
}

// Replicas returns a pointer to the desired replicas in the object.
func (w *Workload) Replicas() *int32 {
	if set, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Spec.Replicas
	}
	return w.Object.(*appsv1.StatefulSet).Spec.Replicas
}

// Drained reports whether no replica is left. Some releases of LeaderWorkerSet do not report the observed generation of
// their status, so Drained also checks that no pod exists.
func (w *Workload) Drained(pods []*corev1.Pod) bool {
	if set, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return set.Status.Replicas == 0 && !slices.ContainsFunc(pods, w.Holds)
	}
	set := w.Object.(*appsv1.StatefulSet)
	return set.Status.Replicas == 0 && set.Status.ObservedGeneration == set.Generation
}

// Holds reports whether a serving pod belongs to the workload. Pods of a LeaderWorkerSet belong to a StatefulSet that
// it owns.
func (w *Workload) Holds(pod *corev1.Pod) bool {
	if _, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); groups {
		return pod.Labels[leaderworkersetv1.SetNameLabelKey] == w.Name && !pod.CreationTimestamp.Before(&w.CreationTimestamp)
	}
	return metav1.IsControlledBy(pod, w)
}
