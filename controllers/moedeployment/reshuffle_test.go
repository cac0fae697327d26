// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

func TestReshuffleStatus(t *testing.T) {
	reported := func(message string, code int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "reshuffle-weights", State: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message},
			}}}
		}
	}
	pods := []*corev1.Pod{
		moedtest.Pod("a", "r1", reported(`{"bytes":1000,"seconds":12.6}`, 0)), moedtest.Pod("b", "r1", reported(`{"reused":true,"bytes":1000,"seconds":0.4}`, 0)),
		moedtest.Pod("c", "r1", reported("no space", 1)), moedtest.Pod("d", "r1"), moedtest.Pod("e", "other", reported(`{"bytes":1000,"seconds":99}`, 0)),
	}
	if diff := cmp.Diff(&semmoev1.ReshuffleStatus{Made: 1, Found: 1, Bytes: 1000, Seconds: 13}, reshuffleStatus(pods, "r1")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if reshuffleStatus(pods[2:], "r1") != nil {
		t.Error("a result without a report of a pod")
	}
}
