package moedeployment

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

func TestReshuffleStatus(t *testing.T) {
	told := func(message string, code int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "reshuffle-weights", State: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message},
			}}}
		}
	}
	pods := []*corev1.Pod{
		moedtest.Pod("a", "r1", told(`{"bytes":1000,"seconds":12.6}`, 0)), moedtest.Pod("b", "r1", told(`{"reused":true,"bytes":1000,"seconds":0.4}`, 0)),
		moedtest.Pod("c", "r1", told("no space", 1)), moedtest.Pod("d", "r1"), moedtest.Pod("e", "other", told(`{"bytes":1000,"seconds":99}`, 0)),
	}
	if diff := cmp.Diff(&semmoev1.ReshuffleStatus{Made: 1, Found: 1, Bytes: 1000, Seconds: 13}, reshuffleStatus(pods, "r1")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if reshuffleStatus(pods[2:], "r1") != nil {
		t.Error("what no pod has told is reported")
	}
}
