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
)

const (
	// nodeRank and leaderAddress are variables that LeaderWorkerSet sets in every container, as a command line names them.
	nodeRank      = "$(" + leaderworkersetv1.LwsWorkerIndex + ")"
	leaderAddress = "$(" + leaderworkersetv1.LwsLeaderAddress + ")"
)

// ReasonNoGroups is why replicas of several pods are not served.
const ReasonNoGroups = "LeaderWorkerSetMissing"

// groupVariables are those that LeaderWorkerSet sets, whatever the spec says of them.
var groupVariables = []string{leaderworkersetv1.LwsLeaderAddress, leaderworkersetv1.LwsGroupSize, leaderworkersetv1.LwsWorkerIndex}

// component is the part that a pod plays whose engine is launched like that.
func component(launched engine.Launch) string {
	if launched.Worker {
		return semmoev1.ComponentWorker
	}
	return semmoev1.ComponentEngine
}

// groupsOf makes the workload of a revision whose replicas are groups of pods. A group is one engine: it comes and goes as a whole.
func groupsOf(moed *semmoev1.MoEDeployment, of metav1.ObjectMeta, leader, worker *corev1.PodTemplateSpec) *Workload {
	return LeaderWorkerSet(&leaderworkersetv1.LeaderWorkerSet{
		ObjectMeta: of,
		Spec: leaderworkersetv1.LeaderWorkerSetSpec{
			Replicas: ptr.To[int32](0),
			LeaderWorkerTemplate: leaderworkersetv1.LeaderWorkerTemplate{
				LeaderTemplate: leader, WorkerTemplate: *worker,
				Size: ptr.To(desired.PodsPerReplica(moed)), RestartPolicy: leaderworkersetv1.RecreateGroupOnPodRestart,
			},
			// A leader becomes ready only when its workers have joined it: they must not wait for that.
			StartupPolicy: leaderworkersetv1.LeaderCreatedStartupPolicy,
			// The template is never updated, so that nothing is ever rolled by this.
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
