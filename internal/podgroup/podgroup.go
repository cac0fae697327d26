// Package podgroup tells which pods are one replica, where a LeaderWorkerSet makes a replica of several.
//
// Invariant: a pod that does not say that its replica has more is a replica by itself.
package podgroup

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/podhealth"
)

// Size is the number of pods of a leader's replica.
func Size(leader *corev1.Pod) int {
	size, err := strconv.Atoi(leader.Annotations[semmoev1.AnnotationPodsPerReplica])
	if err != nil {
		return 1
	}
	return size
}

// Members are the further pods of a leader's replica, also those that are being deleted. pods may be of any replica, and the leader
// among them.
func Members(leader *corev1.Pod, pods []*corev1.Pod) []*corev1.Pod {
	var members []*corev1.Pod
	for _, pod := range pods {
		if pod.Name != leader.Name && sameReplica(leader, pod) {
			members = append(members, pod)
		}
	}
	return members
}

// Workers are the members that are not being deleted.
func Workers(leader *corev1.Pod, pods []*corev1.Pod) []*corev1.Pod {
	return slices.DeleteFunc(Members(leader, pods), func(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil })
}

// Whole tells that all further pods of a leader's replica are ready. pods are as those of Members.
func Whole(leader *corev1.Pod, pods []*corev1.Pod) bool {
	size := Size(leader)
	if size == 1 {
		return true
	}
	workers := Workers(leader, pods)
	return len(workers)+1 >= size && !slices.ContainsFunc(workers, func(pod *corev1.Pod) bool { return !podhealth.Ready(pod) })
}

// ByReplica returns a function that returns, of these pods, those of a pod's replica. It takes time in proportion to the pods.
func ByReplica(pods []*corev1.Pod) func(*corev1.Pod) []*corev1.Pod {
	type replica struct{ namespace, set, group string }
	of := func(pod *corev1.Pod) replica {
		return replica{pod.Namespace, pod.Labels[leaderworkersetv1.SetNameLabelKey], pod.Labels[leaderworkersetv1.GroupIndexLabelKey]}
	}
	all := map[replica][]*corev1.Pod{}
	for _, pod := range pods {
		all[of(pod)] = append(all[of(pod)], pod)
	}
	return func(pod *corev1.Pod) []*corev1.Pod { return all[of(pod)] }
}

func sameReplica(a, b *corev1.Pod) bool {
	for _, label := range []string{leaderworkersetv1.SetNameLabelKey, leaderworkersetv1.GroupIndexLabelKey} {
		if a.Labels[label] != b.Labels[label] {
			return false
		}
	}
	return a.Namespace == b.Namespace
}
