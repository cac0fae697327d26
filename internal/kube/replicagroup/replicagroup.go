// SPDX-License-Identifier: Apache-2.0

// Package replicagroup determines which pods form one replica of a LeaderWorkerSet.
//
// Invariant: a pod without the annotation for pods per replica is a replica by itself.
package replicagroup

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
)

// Size returns the number of pods of a leader's replica.
func Size(leader *corev1.Pod) int {
	size, err := strconv.Atoi(leader.Annotations[semmoev1.AnnotationPodsPerReplica])
	if err != nil {
		return 1
	}
	return size
}

// Members returns the other pods of a leader's replica, including terminating ones. pods may belong to any replica, and
// may contain the leader.
func Members(leader *corev1.Pod, pods []*corev1.Pod) []*corev1.Pod {
	var members []*corev1.Pod
	for _, pod := range pods {
		if pod.Name != leader.Name && sameReplica(leader, pod) {
			members = append(members, pod)
		}
	}
	return members
}

// Workers returns the members that are not terminating.
func Workers(leader *corev1.Pod, pods []*corev1.Pod) []*corev1.Pod {
	return slices.DeleteFunc(Members(leader, pods), func(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil })
}

// AllReady reports whether all other pods of a leader's replica are ready. pods has the same meaning as in Members.
func AllReady(leader *corev1.Pod, pods []*corev1.Pod) bool {
	size := Size(leader)
	if size == 1 {
		return true
	}
	workers := Workers(leader, pods)
	return len(workers)+1 >= size && !slices.ContainsFunc(workers, func(pod *corev1.Pod) bool { return !podhealth.Ready(pod) })
}

// ByReplica returns a function that returns the pods of a pod's replica. It takes time linear in the number of pods.
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
