// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/replicagroup"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/rollout"
)

// OnTrial reports whether a workload is not proven yet.
func OnTrial(workload *Workload) bool {
	return workload.Annotations[semmoev1.AnnotationRollout] != ""
}

// Proven returns the proven workloads.
func Proven(workloads []*Workload) []*Workload {
	return slices.DeleteFunc(slices.Clone(workloads), OnTrial)
}

// Serving returns the workload that serves requests: the workload of the wanted revision once one of its replicas is
// ready, else the proven workload with the most ready replicas. While no replica is ready, it returns the workload of
// the revision that served last, if it still exists, else the wanted one. The result is nil if there is no such
// workload.
func Serving(workloads []*Workload, pods []*corev1.Pod, wanted, last string) *Workload {
	ready := map[string]int{}
	for _, pod := range pods {
		if podhealth.Ready(pod) {
			ready[pod.Labels[semmoev1.LabelRevision]]++
		}
	}
	named := func(revision string) *Workload {
		at := slices.IndexFunc(workloads, func(w *Workload) bool { return revision != "" && w.Labels[semmoev1.LabelRevision] == revision })
		if at < 0 {
			return nil
		}
		return workloads[at]
	}
	if ready[wanted] > 0 && named(wanted) != nil {
		return named(wanted)
	}
	best := cmp.Or(named(last), named(wanted))
	for _, workload := range Proven(workloads) { // newest first
		revision := workload.Labels[semmoev1.LabelRevision]
		if n := ready[revision]; n > 0 && (best == nil || n > ready[best.Labels[semmoev1.LabelRevision]]) {
			best = workload
		}
	}
	return best
}

// Ranks returns the number of ranks that requests of a workload are sent to; 0 if requests have no rank.
func Ranks(workload *Workload) int32 {
	ranks, err := strconv.ParseInt(workload.Template().Annotations[semmoev1.AnnotationRanks], 10, 32)
	if err != nil {
		return 0
	}
	return int32(ranks)
}

// ServesSince returns when the trial of a workload ended, or its creation time. Not every workload had a trial, and
// earlier versions did not record the end.
func ServesSince(workload *Workload) time.Time {
	if proven, err := time.Parse(time.RFC3339, workload.Annotations[semmoev1.AnnotationProven]); err == nil {
		return proven
	}
	return workload.CreationTimestamp.Time
}

func replicaOf(pod *corev1.Pod) rollout.Replica {
	replica := rollout.Replica{Name: pod.Name, Ready: podhealth.Ready(pod), Queued: podhealth.Gate(pod) != "", Since: readySince(pod)}
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		replica.Restarts = max(replica.Restarts, status.RestartCount)
	}
	return replica
}

// readySince returns when a pod last changed its readiness, or its start time.
func readySince(pod *corev1.Pod) time.Time {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady && !condition.LastTransitionTime.IsZero() {
			return condition.LastTransitionTime.Time
		}
	}
	return pod.CreationTimestamp.Time
}

// GroupsLackingPods returns the StatefulSets of a LeaderWorkerSet that lack pods. The StatefulSet of the leaders has
// the name of the LeaderWorkerSet, and the StatefulSet of a group's workers has the name of its leader.
func GroupsLackingPods(w *Workload, leaders, workers []*corev1.Pod) []string {
	if _, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); !groups {
		return nil
	}
	var names []string
	if state := StateOf(w, leaders, workers); state.Existing < state.Replicas {
		names = append(names, w.Name)
	}
	for _, leader := range leaders {
		if w.Holds(leader) && leader.DeletionTimestamp == nil && len(replicagroup.Workers(leader, workers))+1 < replicagroup.Size(leader) {
			names = append(names, leader.Name)
		}
	}
	return names
}

// UsableReplicas limits the wanted replicas of a workload to those before the first replica whose name is still used by
// pods of an earlier replica. A remaining worker of the old group may restart its engine and find the new leader under
// the old address. The new group would accept it as its own worker, and fail when the old worker stops, up to its whole
// grace period later.
func UsableReplicas(w *Workload, wanted int32, workers []*corev1.Pod) int32 {
	if _, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); !groups {
		return wanted
	}
	for _, worker := range workers {
		group, err := strconv.ParseInt(worker.Labels[leaderworkersetv1.GroupIndexLabelKey], 10, 32)
		if err == nil && worker.Labels[leaderworkersetv1.SetNameLabelKey] == w.Name && int32(group) >= *w.Replicas() {
			wanted = min(wanted, int32(group))
		}
	}
	return wanted
}

// AsReplica returns a leader that is ready only while all pods of its replica are, and since when: the pods form one
// engine. If not, its containers are set unready too, because a pod that lacks only the Ready condition is on an
// unresponsive node.
func AsReplica(leader *corev1.Pod, pods []*corev1.Pod, now time.Time) *corev1.Pod {
	if !podhealth.Ready(leader) || replicagroup.Size(leader) == 1 {
		return leader
	}
	status, since := corev1.ConditionTrue, readySince(leader)
	if !replicagroup.AllReady(leader, pods) {
		status = corev1.ConditionFalse
	}
	workers := replicagroup.Workers(leader, pods)
	if len(workers)+1 < replicagroup.Size(leader) {
		since = now // the time at which a pod went missing is unknown
	}
	for _, worker := range workers {
		if changed := readySince(worker); changed.After(since) {
			since = changed
		}
	}
	shown := leader.DeepCopy()
	for i := range shown.Status.Conditions {
		switch condition := &shown.Status.Conditions[i]; condition.Type {
		case corev1.PodReady:
			condition.Status, condition.LastTransitionTime = status, metav1.NewTime(since)
		case corev1.ContainersReady:
			condition.Status = status
		}
	}
	return shown
}

// minRecreations is how many recreations without becoming ready make a replica a problem. The loss of a node recreates
// a replica once.
const minRecreations = 2

// recreations records the recreations of a replica with several pods. A container exit recreates all pods of the
// replica, so no existing pod contains the count.
type recreations struct {
	// Leader is the UID of the last deleted leader.
	Leader types.UID `json:"leader"`
	// Times is the number of recreations since the replica was last ready. Since is when it became unready.
	Times int32     `json:"times"`
	Since time.Time `json:"since"`
	// End describes how a container of its pods ended; empty if unknown.
	End string `json:"end,omitempty"`
}

// recreationsOf reads the recreations from a workload's annotation, by the name of the leader. An invalid annotation
// counts as empty.
func recreationsOf(w *Workload) map[string]recreations {
	recorded := map[string]recreations{}
	if text := w.Annotations[semmoev1.AnnotationRecreatedReplicas]; text != "" && json.Unmarshal([]byte(text), &recorded) != nil {
		return map[string]recreations{}
	}
	return recorded
}

// countRecreations adds the terminating leaders of a workload to the recorded recreations, and drops replicas that are
// ready, evicted by a queue, or no longer wanted. Between two leaders a replica has no leader pod.
func countRecreations(w *Workload, leaders, workers []*corev1.Pod, now time.Time) map[string]recreations {
	counted := recreationsOf(w)
	for _, leader := range leaders {
		if !w.Holds(leader) {
			continue
		}
		entry, known := counted[leader.Name]
		switch {
		case podhealth.Ready(leader), evictedByQueue(leader, workers):
			delete(counted, leader.Name)
		case leader.DeletionTimestamp != nil && entry.Leader != leader.UID:
			if !known {
				entry.Since = unreadySince(leader, now)
			}
			end := podhealth.FirstFailure(append(replicagroup.Members(leader, workers), leader))
			counted[leader.Name] = recreations{Leader: leader.UID, Times: entry.Times + 1, Since: entry.Since, End: cmp.Or(end, entry.End)}
		}
	}
	maps.DeleteFunc(counted, func(name string, _ recreations) bool {
		ordinal, err := ordinalOf(name)
		return err != nil || ordinal >= int(*w.Replicas())
	})
	return counted
}

// evictedByQueue reports whether a queue evicts a replica: Kueue sets the condition on each pod before it deletes the
// pod. The replica has not failed, and its successor may wait for longer than a canary may be unready.
func evictedByQueue(leader *corev1.Pod, workers []*corev1.Pod) bool {
	const terminationTarget = "TerminationTarget"
	return leader.DeletionTimestamp != nil && slices.ContainsFunc(append(replicagroup.Members(leader, workers), leader), func(pod *corev1.Pod) bool {
		return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == terminationTarget && c.Status == corev1.ConditionTrue
		})
	})
}

// RecordRecreations returns the writes that record the recreations of replicas in annotations of the workloads.
func RecordRecreations(workloads []*Workload, leaders, workers []*corev1.Pod, now time.Time) []writes.Write {
	var writes []writes.Write
	for _, w := range workloads {
		text := ""
		if counted := countRecreations(w, leaders, workers, now); len(counted) > 0 {
			data, err := json.Marshal(counted) // in the order of the keys
			if err != nil {
				continue
			}
			text = string(data)
		}
		if w.Annotations[semmoev1.AnnotationRecreatedReplicas] != text {
			writes = append(writes, ChangeWorkload{Workload: w, Annotations: map[string]string{semmoev1.AnnotationRecreatedReplicas: text}})
		}
	}
	return writes
}

// unreadySince returns since when a terminating leader does not serve. The API server records when the pod will be
// gone, not when the termination began.
func unreadySince(leader *corev1.Pod, now time.Time) time.Time {
	for _, condition := range leader.Status.Conditions {
		if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
			return now
		}
	}
	return readySince(leader)
}

// withRecreations returns the replica as if one pod had existed, and failed, all the time.
func withRecreations(replica rollout.Replica, recorded map[string]recreations) rollout.Replica {
	entry, known := recorded[replica.Name]
	if !known || replica.Ready {
		return replica
	}
	replica.Restarts = max(replica.Restarts, entry.Times)
	if entry.Since.Before(replica.Since) {
		replica.Since = entry.Since
	}
	return replica
}

// ReplicaIn converts a pod of a workload, or the leader of a group, to a replica.
func ReplicaIn(w *Workload, pod *corev1.Pod) rollout.Replica {
	return withRecreations(replicaOf(pod), recreationsOf(w))
}

// RecreationProblem returns the problem of the first replica that is recreated repeatedly, or nil.
func RecreationProblem(workloads []*Workload) *podhealth.Problem {
	for _, w := range workloads {
		recorded := recreationsOf(w)
		for _, name := range slices.Sorted(maps.Keys(recorded)) {
			if entry := recorded[name]; entry.Times >= minRecreations {
				return &podhealth.Problem{Reason: "ContainerCrashing", Message: fmt.Sprintf("The replica of pod %s is recreated repeatedly%s: all of its pods are recreated when a container exits", name, endText(entry.End))}
			}
		}
	}
	return nil
}

func endText(end string) string {
	if end == "" {
		return ""
	}
	return " (" + end + ")"
}

// StateOf returns the input of a rollout for a workload, from its pods that serve requests and the other pods of their
// replicas.
func StateOf(workload *Workload, pods, workers []*corev1.Pod) rollout.Revision {
	state := rollout.Revision{Replicas: *workload.Replicas(), Trial: OnTrial(workload)}
	if workload.UID == "" {
		return state
	}
	state.Ready, state.Homeless = make([]bool, state.Replicas), make([]bool, state.Replicas)
	for _, pod := range pods {
		if !workload.Holds(pod) {
			continue
		}
		ordinal, err := ordinalOf(pod.Name)
		asked := err == nil && ordinal < len(state.Ready)
		if asked {
			state.Homeless[ordinal] = homeless(pod, workers)
		}
		if pod.DeletionTimestamp != nil {
			continue
		}
		state.Existing++
		if asked {
			state.Ready[ordinal] = podhealth.Ready(pod)
		}
		if !homeless(pod, workers) {
			state.Placed++
		}
	}
	return state
}

// homeless reports whether no pod of a replica is on a node, not counting terminating pods.
func homeless(leader *corev1.Pod, workers []*corev1.Pod) bool {
	return !slices.ContainsFunc(append(replicagroup.Workers(leader, workers), leader), func(pod *corev1.Pod) bool {
		return pod.DeletionTimestamp == nil && !podhealth.Unscheduled(pod)
	})
}

// ordinalOf returns the ordinal of a replica in its workload, from the name of its pod.
func ordinalOf(pod string) (int, error) { return strconv.Atoi(pod[strings.LastIndexByte(pod, '-')+1:]) }
