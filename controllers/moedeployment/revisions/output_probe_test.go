// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

func TestChangedOutputs(t *testing.T) {
	ended := func(code int32) *corev1.ContainerStateTerminated {
		return &corev1.ContainerStateTerminated{ExitCode: code, Message: "other answers\n"}
	}
	probe := func(now, last *corev1.ContainerStateTerminated) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "verify-plan", State: corev1.ContainerState{Terminated: ended(0)}}, {
				Name: "prove-lossless", State: corev1.ContainerState{Terminated: now}, LastTerminationState: corev1.ContainerState{Terminated: last},
			}}
		}
	}
	got := ChangedOutputs([]*corev1.Pod{
		moedtest.Pod("a", "now", moedtest.Unready, probe(ended(3), nil)), moedtest.Pod("b", "last", moedtest.Unready, probe(nil, ended(3))), moedtest.Pod("c", "killed", moedtest.Unready, probe(ended(137), nil)),
		moedtest.Pod("d", "passed", probe(nil, ended(3))), moedtest.Pod("e", "starting", moedtest.Unready),
	})
	if diff := cmp.Diff(map[string]string{"now": "other answers", "last": "other answers"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Only a pod without a plan, or a verified one, produces the baseline outputs.
func TestBaselinePod(t *testing.T) {
	engine := func(p *corev1.Pod) {
		p.Status.PodIP = "10.0.0.1"
		p.Annotations = map[string]string{semmoev1.AnnotationModelDigest: moedtest.Model}
	}
	planned := func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationPlanDigest] = "d" }
	proven := func(p *corev1.Pod) { p.Spec.InitContainers = []corev1.Container{{Name: "prove-lossless"}} }
	otherModel := func(p *corev1.Pod) { p.Annotations[semmoev1.AnnotationModelDigest] = "sha256:other" }
	cases := map[string]struct {
		pods []*corev1.Pod
		want string
	}{
		"none":            {},
		"not ready":       {pods: []*corev1.Pod{moedtest.Pod("a", "r", engine, moedtest.Unready)}},
		"another model":   {pods: []*corev1.Pod{moedtest.Pod("a", "r", engine, otherModel)}},
		"not proven":      {pods: []*corev1.Pod{moedtest.Pod("a", "r", engine, planned)}},
		"proven":          {pods: []*corev1.Pod{moedtest.Pod("a", "r", engine, planned), moedtest.Pod("b", "r", engine, planned, proven)}, want: "b"},
		"without a plan":  {pods: []*corev1.Pod{moedtest.Pod("b", "r", engine, planned, proven), moedtest.Pod("a", "s", engine)}, want: "a"},
		"without address": {pods: []*corev1.Pod{moedtest.Pod("a", "r", engine, func(p *corev1.Pod) { p.Status.PodIP = "" })}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := ""
			if found := BaselinePod(tc.pods, moedtest.Model); found != nil {
				got = found.Name
			}
			if got != tc.want {
				t.Errorf("%q answers, want %q", got, tc.want)
			}
		})
	}
}
