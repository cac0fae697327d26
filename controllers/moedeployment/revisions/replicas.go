package revisions

import (
	"cmp"
	"context"
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
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/podgroup"
	"github.com/semmoe/operator/internal/podhealth"
	"github.com/semmoe/operator/internal/rollout"
)

// OnTrial tells that a workload has not proven itself.
func OnTrial(workload *Workload) bool {
	return workload.Annotations[semmoev1.AnnotationRollout] != ""
}

// Proven are the workloads that have proven themselves.
func Proven(workloads []*Workload) []*Workload {
	return slices.DeleteFunc(slices.Clone(workloads), OnTrial)
}

// Serving returns the workload that answers requests: that of the wanted revision once one of its replicas is ready, else the proven one with
// the most ready replicas. While no replica is ready it is the workload of the revision that served last, if that still exists, else the
// wanted one. The result is nil where there is no such workload.
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

// Ranks is the number of ranks that requests of a workload are sent to; 0 where requests have no rank.
func Ranks(workload *Workload) int32 {
	ranks, err := strconv.ParseInt(workload.Template().Annotations[semmoev1.AnnotationRanks], 10, 32)
	if err != nil {
		return 0
	}
	return int32(ranks)
}

// ServesSince is since when a workload that was on trial has served alone, or when it was made: not all have been, and earlier versions did
// not tell.
func ServesSince(workload *Workload) time.Time {
	if proven, err := time.Parse(time.RFC3339, workload.Annotations[semmoev1.AnnotationProven]); err == nil {
		return proven
	}
	return workload.CreationTimestamp.Time
}

func replicaOf(pod *corev1.Pod) rollout.Replica {
	replica := rollout.Replica{Name: pod.Name, Ready: podhealth.Ready(pod), Since: readySince(pod)}
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		replica.Restarts = max(replica.Restarts, status.RestartCount)
	}
	return replica
}

// readySince is when a pod became ready, or ceased to be, or began.
func readySince(pod *corev1.Pod) time.Time {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady && !condition.LastTransitionTime.IsZero() {
			return condition.LastTransitionTime.Time
		}
	}
	return pod.CreationTimestamp.Time
}

// WantingGroups are the StatefulSets of a LeaderWorkerSet's own that lack pods: that of the leaders has its name, that of the workers
// of a group the leader's.
func WantingGroups(w *Workload, leaders, workers []*corev1.Pod) []string {
	if _, groups := w.Object.(*leaderworkersetv1.LeaderWorkerSet); !groups {
		return nil
	}
	var names []string
	if state := StateOf(w, leaders, workers); state.Existing < state.Replicas {
		names = append(names, w.Name)
	}
	for _, leader := range leaders {
		if w.Holds(leader) && leader.DeletionTimestamp == nil && len(podgroup.Workers(leader, workers))+1 < podgroup.Size(leader) {
			names = append(names, leader.Name)
		}
	}
	return names
}

// Vacant is as many of the replicas wanted of a workload as there are before one whose name the pods of an earlier one still have. What is
// left of a group may start its engine once more, and find the new leader by the address of the old one: the new group would take it
// for its own worker, and fall apart when it is stopped, up to its whole grace period later.
func Vacant(w *Workload, wanted int32, workers []*corev1.Pod) int32 {
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

// AsReplica shows a leader as ready only while all pods of its replica are, and since when: the engine is all of them. Its containers then
// are not ready either: a pod that lacks readiness alone is on a node that is silent.
func AsReplica(leader *corev1.Pod, pods []*corev1.Pod, now time.Time) *corev1.Pod {
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
		switch condition := &shown.Status.Conditions[i]; condition.Type {
		case corev1.PodReady:
			condition.Status, condition.LastTransitionTime = status, metav1.NewTime(since)
		case corev1.ContainersReady:
			condition.Status = status
		}
	}
	return shown
}

// remadeOften is how often a replica is made anew, and does not become ready, before that is called a problem: the loss of a node
// is one time.
const remadeOften = 2

// remade is what is known of a replica of several pods that was made anew. A container that ends takes all of its pods with it, so
// that none of those that are there tells how often that was.
type remade struct {
	// Leader is the last one that went.
	Leader types.UID `json:"leader"`
	// Times is how often that was since the replica was last ready, Since when it ceased to be.
	Times int32     `json:"times"`
	Since time.Time `json:"since"`
	// End is how a container of its pods ended; empty where that is not known.
	End string `json:"end,omitempty"`
}

// remadeOf reads what a workload's annotation tells, by the name of the leader. One that cannot be read tells nothing.
func remadeOf(w *Workload) map[string]remade {
	told := map[string]remade{}
	if text := w.Annotations[semmoev1.AnnotationRemade]; text != "" && json.Unmarshal([]byte(text), &told) != nil {
		return map[string]remade{}
	}
	return told
}

// countRemade adds the leaders of a workload that are going, and leaves out replicas that are ready, or not wanted any more. Between
// two leaders a replica has none.
func countRemade(w *Workload, leaders, workers []*corev1.Pod, now time.Time) map[string]remade {
	counted := remadeOf(w)
	for _, leader := range leaders {
		if !w.Holds(leader) {
			continue
		}
		entry, known := counted[leader.Name]
		switch {
		case podhealth.Ready(leader):
			delete(counted, leader.Name)
		case leader.DeletionTimestamp != nil && entry.Leader != leader.UID:
			if !known {
				entry.Since = unreadySince(leader, now)
			}
			end := podhealth.FirstEnd(append(podgroup.Members(leader, workers), leader))
			counted[leader.Name] = remade{Leader: leader.UID, Times: entry.Times + 1, Since: entry.Since, End: cmp.Or(end, entry.End)}
		}
	}
	maps.DeleteFunc(counted, func(name string, _ remade) bool {
		ordinal, err := ordinalOf(name)
		return err != nil || ordinal >= int(*w.Replicas())
	})
	return counted
}

// unreadySince is since when a leader that is going does not serve: the API server says when it will be gone, not since when it is
// going.
func unreadySince(leader *corev1.Pod, now time.Time) time.Time {
	for _, condition := range leader.Status.Conditions {
		if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
			return now
		}
	}
	return readySince(leader)
}

// RecordRemade keeps on the workloads which of their replicas are made anew.
func RecordRemade(ctx context.Context, c client.Client, workloads []*Workload, leaders, workers []*corev1.Pod, now time.Time) error {
	for _, w := range workloads {
		counted := countRemade(w, leaders, workers, now)
		text, err := json.Marshal(counted) // in the order of the keys
		if err != nil {
			return err
		}
		before, has := w.Annotations[semmoev1.AnnotationRemade]
		switch {
		case len(counted) == 0 && !has, before == string(text):
			continue
		case len(counted) == 0:
			err = w.Change(ctx, c, "annotate", func() { delete(w.Annotations, semmoev1.AnnotationRemade) })
		default:
			err = w.Change(ctx, c, "annotate", func() { metav1.SetMetaDataAnnotation(w.ObjectMeta, semmoev1.AnnotationRemade, string(text)) })
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// withRemade shows a replica as one that has been there, and ended, all the while.
func withRemade(replica rollout.Replica, told map[string]remade) rollout.Replica {
	entry, known := told[replica.Name]
	if !known || replica.Ready {
		return replica
	}
	replica.Restarts = max(replica.Restarts, entry.Times)
	if entry.Since.Before(replica.Since) {
		replica.Since = entry.Since
	}
	return replica
}

// ReplicaIn shows a pod of a workload as the replica that it is, or leads.
func ReplicaIn(w *Workload, pod *corev1.Pod) rollout.Replica {
	return withRemade(replicaOf(pod), remadeOf(w))
}

// RemadeProblem is that of the first replica that is made anew again and again; nil where none is.
func RemadeProblem(workloads []*Workload) *podhealth.Problem {
	for _, w := range workloads {
		told := remadeOf(w)
		for _, name := range slices.Sorted(maps.Keys(told)) {
			if entry := told[name]; entry.Times >= remadeOften {
				return &podhealth.Problem{Reason: "ContainerCrashing", Message: fmt.Sprintf("The replica of pod %s is made anew again and again%s: all of its pods go when a container of one ends", name, endText(entry.End))}
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

// StateOf is a roll-out's view of a workload, of its pods that answer requests, and of the further pods of their replicas.
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

// homeless tells that no pod of a replica is on a node, but those that are leaving it.
func homeless(leader *corev1.Pod, workers []*corev1.Pod) bool {
	return !slices.ContainsFunc(append(podgroup.Workers(leader, workers), leader), func(pod *corev1.Pod) bool {
		return pod.DeletionTimestamp == nil && !podhealth.Unscheduled(pod)
	})
}

// ordinalOf is the number of a replica among those of its workload, by the name of its pod.
func ordinalOf(pod string) (int, error) { return strconv.Atoi(pod[strings.LastIndexByte(pod, '-')+1:]) }
