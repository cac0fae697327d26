package moedeployment

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/podgroup"
	"github.com/semmoe/operator/internal/podhealth"
)

// +kubebuilder:rbac:groups=leaderworkerset.x-k8s.io,resources=leaderworkersets,verbs=list;watch;create;patch;delete

const (
	// nodeRank and leaderAddress are variables that LeaderWorkerSet sets in every container, as a command line names them.
	nodeRank      = "$(" + leaderworkersetv1.LwsWorkerIndex + ")"
	leaderAddress = "$(" + leaderworkersetv1.LwsLeaderAddress + ")"

	// groupKindPeriod is how long the kind LeaderWorkerSet can be there unnoticed.
	groupKindPeriod = 30 * time.Second
	// reasonNoGroups is why replicas of several pods are not served.
	reasonNoGroups = "LeaderWorkerSetMissing"
)

// groupVariables are those that LeaderWorkerSet sets, whatever the spec says of them.
var groupVariables = []string{leaderworkersetv1.LwsLeaderAddress, leaderworkersetv1.LwsGroupSize, leaderworkersetv1.LwsWorkerIndex}

// placedAs is the parallelism as far as profiles and plans know it, for which it makes no difference on which node a rank is.
func placedAs(moed *semmoev1.MoEDeployment) semmoev1.ParallelismSpec {
	parallelism := moed.Spec.Parallelism
	parallelism.PodsPerReplica = nil
	return parallelism
}

// component is the part that a pod plays whose engine is launched like that.
func component(launched engine.Launch) string {
	if launched.Worker {
		return semmoev1.ComponentWorker
	}
	return semmoev1.ComponentEngine
}

// groupsOf makes the workload of a revision whose replicas are groups of pods. A group is one engine: it comes and goes as a whole.
func groupsOf(moed *semmoev1.MoEDeployment, of metav1.ObjectMeta, leader, worker *corev1.PodTemplateSpec) *workload {
	return leaderWorkerSet(&leaderworkersetv1.LeaderWorkerSet{
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

// groupKind follows the kind LeaderWorkerSet, which a cluster may not have, or get later: a watch for a kind that is absent would
// keep the operator from starting.
type groupKind struct {
	// watch adds to what the controller watches.
	watch func(source.Source) error
	cache cache.Cache

	mu    sync.Mutex
	known bool
	// again is the earliest time to look for the kind; zero before the first time.
	again time.Time
}

// find tells whether the cluster has the kind, and watches it from the first time on that it does. It looks once, and while
// somebody wants the kind, every now and then.
func (k *groupKind) find(ctx context.Context, c client.Client, wanted bool, now time.Time) (known bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.known || now.Before(k.again) || !wanted && !k.again.IsZero() {
		return k.known, nil
	}
	gvk := leaderworkersetv1.GroupVersion.WithKind("LeaderWorkerSet")
	if _, err := c.RESTMapper().RESTMapping(gvk.GroupKind(), gvk.Version); meta.IsNoMatchError(err) {
		k.again = now.Add(groupKindPeriod)
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("look for the kind LeaderWorkerSet: %w", err)
	}
	if err := k.watch(source.Kind[client.Object](k.cache, &leaderworkersetv1.LeaderWorkerSet{},
		handler.EnqueueRequestForOwner(c.Scheme(), c.RESTMapper(), &semmoev1.MoEDeployment{}, handler.OnlyControllerOwner()))); err != nil {
		return false, fmt.Errorf("watch LeaderWorkerSets: %w", err)
	}
	logr.FromContextOrDiscard(ctx).Info("Watching LeaderWorkerSets")
	k.known = true
	return true, nil
}

// isKnown tells whether the kind is watched.
func (k *groupKind) isKnown() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.known
}

// listGroups lists the LeaderWorkerSets of a MoEDeployment, also those left from when its replicas had several pods, and tells
// whether the cluster has the kind.
func (r *Reconciler) listGroups(ctx context.Context, moed *semmoev1.MoEDeployment) (found []*workload, known bool, err error) {
	known, err = r.groups.find(ctx, r.Client, desired.PodsPerReplica(moed) > 1, r.Now())
	if err != nil || !known {
		return nil, false, err
	}
	var list leaderworkersetv1.LeaderWorkerSetList
	if err := r.List(ctx, &list, client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}); err != nil {
		return nil, false, fmt.Errorf("list LeaderWorkerSets: %w", err)
	}
	for i := range list.Items {
		if set := &list.Items[i]; metav1.IsControlledBy(set, moed) && set.DeletionTimestamp == nil {
			found = append(found, leaderWorkerSet(set))
		}
	}
	return found, true, nil
}

// wantingGroups are the StatefulSets of a LeaderWorkerSet's own that lack pods: that of the leaders has its name, that of the workers
// of a group the leader's.
func wantingGroups(w *workload, leaders, workers []*corev1.Pod) []string {
	if _, groups := w.object.(*leaderworkersetv1.LeaderWorkerSet); !groups {
		return nil
	}
	var names []string
	if state := stateOf(w, leaders); state.Existing < state.Replicas {
		names = append(names, w.Name)
	}
	for _, leader := range leaders {
		if w.holds(leader) && leader.DeletionTimestamp == nil && len(podgroup.Workers(leader, workers))+1 < podgroup.Size(leader) {
			names = append(names, leader.Name)
		}
	}
	return names
}

// vacant is as many of the replicas wanted of a workload as there are before one whose name the pods of an earlier one still have. What is
// left of a group may start its engine once more, and find the new leader by the address of the old one: the new group would take it
// for its own worker, and fall apart when it is stopped, up to its whole grace period later.
func vacant(w *workload, wanted int32, workers []*corev1.Pod) int32 {
	if _, groups := w.object.(*leaderworkersetv1.LeaderWorkerSet); !groups {
		return wanted
	}
	for _, worker := range workers {
		group, err := strconv.ParseInt(worker.Labels[leaderworkersetv1.GroupIndexLabelKey], 10, 32)
		if err == nil && worker.Labels[leaderworkersetv1.SetNameLabelKey] == w.Name && int32(group) >= *w.replicas() {
			wanted = min(wanted, int32(group))
		}
	}
	return wanted
}

// asReplica shows a leader as ready only while all pods of its replica are, and since when: the engine is all of them.
func asReplica(leader *corev1.Pod, pods []*corev1.Pod, now time.Time) *corev1.Pod {
	if !podhealth.Ready(leader) || podgroup.Size(leader) == 1 {
		return leader
	}
	status, since := corev1.ConditionTrue, readySince(leader)
	if !podgroup.Whole(leader, pods) {
		status = corev1.ConditionFalse
	}
	workers := podgroup.Workers(leader, pods)
	if len(workers)+1 < podgroup.Size(leader) {
		since = now // nothing tells since when one is missing
	}
	for _, worker := range workers {
		if changed := readySince(worker); changed.After(since) {
			since = changed
		}
	}
	shown := leader.DeepCopy()
	for i := range shown.Status.Conditions {
		if condition := &shown.Status.Conditions[i]; condition.Type == corev1.PodReady {
			condition.Status, condition.LastTransitionTime = status, metav1.NewTime(since)
		}
	}
	return shown
}
