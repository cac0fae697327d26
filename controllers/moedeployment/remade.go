package moedeployment

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/podgroup"
	"github.com/semmoe/operator/internal/podhealth"
	"github.com/semmoe/operator/internal/rollout"
)

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
func remadeOf(w *workload) map[string]remade {
	told := map[string]remade{}
	if text := w.Annotations[semmoev1.AnnotationRemade]; text != "" && json.Unmarshal([]byte(text), &told) != nil {
		return map[string]remade{}
	}
	return told
}

// countRemade adds the leaders of a workload that are going, and leaves out replicas that are ready, or not wanted any more. Between
// two leaders a replica has none.
func countRemade(w *workload, leaders, workers []*corev1.Pod, now time.Time) map[string]remade {
	counted := remadeOf(w)
	for _, leader := range leaders {
		if !w.holds(leader) {
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
		return err != nil || ordinal >= int(*w.replicas())
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

// recordRemade keeps on the workloads which of their replicas are made anew.
func (r *Reconciler) recordRemade(ctx context.Context, observed children, now time.Time) error {
	for _, w := range observed.revisions {
		counted := countRemade(w, observed.enginePods, observed.workerPods, now)
		text, err := json.Marshal(counted) // in the order of the keys
		if err != nil {
			return err
		}
		before, has := w.Annotations[semmoev1.AnnotationRemade]
		switch {
		case len(counted) == 0 && !has, before == string(text):
			continue
		case len(counted) == 0:
			err = w.change(ctx, r.Client, "annotate", func() { delete(w.Annotations, semmoev1.AnnotationRemade) })
		default:
			err = w.change(ctx, r.Client, "annotate", func() { metav1.SetMetaDataAnnotation(w.ObjectMeta, semmoev1.AnnotationRemade, string(text)) })
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

// remadeProblem is that of the first replica that is made anew again and again; nil where none is.
func remadeProblem(workloads []*workload) *podhealth.Problem {
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
