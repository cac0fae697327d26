// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/kube/ownership"
)

const (
	// nodeRank and leaderAddress reference, in command lines, the variables that LeaderWorkerSet sets in every
	// container.
	nodeRank      = "$(" + leaderworkersetv1.LwsWorkerIndex + ")"
	leaderAddress = "$(" + leaderworkersetv1.LwsLeaderAddress + ")"
)

// ReasonNoGroups is the reason for not serving replicas of several pods.
const ReasonNoGroups = "LeaderWorkerSetMissing"

// groupVariables are the variables that LeaderWorkerSet always sets, overriding the spec.
var groupVariables = []string{leaderworkersetv1.LwsLeaderAddress, leaderworkersetv1.LwsGroupSize, leaderworkersetv1.LwsWorkerIndex}

// component returns the component of a pod with this launch.
func component(launched engine.Launch) string {
	if launched.Worker {
		return semmoev1.ComponentWorker
	}
	return semmoev1.ComponentEngine
}

// groupsOf returns the workload of a revision with groups of pods as replicas. A group is one engine: it is created
// and deleted as a whole. Kueue admits a group as a whole only if the labels of the queue are on the set, and not on its
// pods.
func groupsOf(moed *semmoev1.MoEDeployment, of metav1.ObjectMeta, leader, worker *corev1.PodTemplateSpec) *Workload {
	ownership.PassQueue(of.Labels, leader.Labels)
	for _, template := range []*corev1.PodTemplateSpec{leader, worker} {
		delete(template.Labels, semmoev1.LabelQueue)
		delete(template.Labels, semmoev1.LabelQueuePriority)
	}
	return LeaderWorkerSet(&leaderworkersetv1.LeaderWorkerSet{
		ObjectMeta: of,
		Spec: leaderworkersetv1.LeaderWorkerSetSpec{
			Replicas: ptr.To[int32](0),
			LeaderWorkerTemplate: leaderworkersetv1.LeaderWorkerTemplate{
				LeaderTemplate: leader, WorkerTemplate: *worker,
				Size: ptr.To(desired.PodsPerReplica(moed)), RestartPolicy: leaderworkersetv1.RecreateGroupOnPodRestart,
			},
			// A leader becomes ready only after its workers have joined, so workers must not wait for its readiness.
			StartupPolicy: leaderworkersetv1.LeaderCreatedStartupPolicy,
			// The template is never updated, so this strategy never restarts a pod.
			RolloutStrategy: leaderworkersetv1.RolloutStrategy{
				Type: leaderworkersetv1.RollingUpdateStrategyType,
				RollingUpdateConfiguration: &leaderworkersetv1.RollingUpdateConfiguration{
					MaxUnavailable: intstr.FromInt32(1), MaxSurge: intstr.FromInt32(0), Partition: ptr.To[int32](0),
				},
			},
			NetworkConfig: &leaderworkersetv1.NetworkConfig{SubdomainPolicy: ptr.To(leaderworkersetv1.SubdomainShared)},
		},
	})
}
