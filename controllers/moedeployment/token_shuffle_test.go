// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

func TestShuffleText(t *testing.T) {
	fetched := func(message string, code int32) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "fetch-tables", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Message: message}}}}
		}
	}
	o := observation{Decision: decision.Decision{Revision: "r"}, Pods: []*corev1.Pod{
		moedtest.Pod("a", "r", fetched("", 0)), moedtest.Pod("b", "r", fetched("the store is away\n", 0)), moedtest.Pod("c", "r", moedtest.Unready), moedtest.Pod("d", "r", fetched("x", 1)), moedtest.Pod("e", "old", fetched("", 0)),
	}, Workers: []*corev1.Pod{moedtest.Pod("f", "r", fetched("", 0))}}
	const want = ". 2 of 5 pods received the tables for shuffling tokens; pod b: the store is away"
	if got := shuffleText(moedtest.Deployment(moedtest.Shuffled), o); got != want {
		t.Errorf("%q", got)
	}
	if got := shuffleText(moedtest.Deployment(moedtest.Tokens), o); got != "" {
		t.Errorf("without shuffling: %q", got)
	}
}
