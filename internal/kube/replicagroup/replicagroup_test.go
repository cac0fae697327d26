// SPDX-License-Identifier: Apache-2.0

package replicagroup

import (
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

var pods int

func pod(set, group string, ready corev1.ConditionStatus) *corev1.Pod {
	pods++
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: strconv.Itoa(pods), Labels: map[string]string{"leaderworkerset.sigs.k8s.io/name": set, "leaderworkerset.sigs.k8s.io/group-index": group}},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}},
	}
}

func TestWhole(t *testing.T) {
	yes, no := corev1.ConditionTrue, corev1.ConditionFalse
	going := pod("a", "0", yes)
	going.DeletionTimestamp = &metav1.Time{}
	for name, test := range map[string]struct {
		size    string
		workers []*corev1.Pod
		want    bool
	}{
		"one pod":                 {"", nil, true},
		"complete":                {"3", []*corev1.Pod{pod("a", "0", yes), pod("a", "0", yes)}, true},
		"no worker":               {"2", nil, false},
		"one is not ready":        {"3", []*corev1.Pod{pod("a", "0", yes), pod("a", "0", no)}, false},
		"one is terminating":      {"2", []*corev1.Pod{going}, false},
		"those of another group":  {"2", []*corev1.Pod{pod("a", "1", yes)}, false},
		"those of another object": {"2", []*corev1.Pod{pod("b", "0", yes)}, false},
	} {
		leader := pod("a", "0", yes)
		if test.size != "" {
			leader.Annotations = map[string]string{semmoev1.AnnotationPodsPerReplica: test.size}
		}
		if got := AllReady(leader, append(test.workers, leader)); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
