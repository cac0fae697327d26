// SPDX-License-Identifier: Apache-2.0

package podtemplate

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestMerge(t *testing.T) {
	ours := &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "1"}},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "engine", Image: "e"}},
			Containers:     []corev1.Container{{Name: "profile", Image: "p", Env: []corev1.EnvVar{{Name: "X", Value: "1"}}}},
		},
	}
	before := ours.DeepCopy()
	users := &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"b": "2"}},
		Spec: corev1.PodSpec{
			NodeSelector:   map[string]string{"disk": "ssd"},
			InitContainers: []corev1.Container{{Name: "engine", WorkingDir: "/w"}, {Name: "more", Image: "m"}},
		},
	}
	got, err := Merge(ours, users)
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "1", "b": "2"}},
		Spec: corev1.PodSpec{
			NodeSelector:   map[string]string{"disk": "ssd"},
			InitContainers: []corev1.Container{{Name: "engine", Image: "e", WorkingDir: "/w"}, {Name: "more", Image: "m"}},
			Containers:     ours.Spec.Containers,
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, ours); diff != "" {
		t.Errorf("ours was changed:\n%s", diff)
	}
	if got, err := Merge(ours, nil); err != nil || !cmp.Equal(got, ours) {
		t.Errorf("without a template: %v, %v", got, err)
	}
}
