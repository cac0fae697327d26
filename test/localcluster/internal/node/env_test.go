// SPDX-License-Identifier: Apache-2.0

package node

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestExpand(t *testing.T) {
	values := map[string]string{"A": "1", "B": "$(A)"}
	for in, want := range map[string]string{
		"": "", "plain": "plain", "$(A)": "1", "x$(A)y$(A)": "x1y1", "$(B)": "$(A)", "$(C)": "$(C)",
		"$$(A)": "$(A)", "$$$(A)": "$1", "$": "$", "a$": "a$", "$A": "$A", "$(A": "$(A", "$()": "$()", "$$": "$",
	} {
		if got := expand(in, values); got != want {
			t.Errorf("expand(%q) = %q, want %q", in, got, want)
		}
	}
}

// FuzzExpand verifies that a text without a dollar sign stays unchanged, and that values are never expanded
// recursively.
func FuzzExpand(f *testing.F) {
	for _, s := range []string{"$(A)", "$$(A", "$($(A))", "a$"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := expand(s, map[string]string{"A": "$(A)"})
		if !strings.Contains(s, "$") && got != s {
			t.Errorf("expand(%q) = %q", s, got)
		}
		if len(got) > len(s) {
			t.Errorf("expand(%q) = %q is longer than the input, although the value is as long as its reference", s, got)
		}
	})
}

func TestResourceValue(t *testing.T) {
	c := corev1.Container{Name: "c", Resources: corev1.ResourceRequirements{
		Limits:   corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("100Mi")},
		Requests: corev1.ResourceList{"cpu": resource.MustParse("250m")},
	}}
	p := podContext{
		pod:         &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{c, {Name: "unlimited"}}}},
		allocatable: corev1.ResourceList{"cpu": resource.MustParse("64")},
	}
	for name, test := range map[string]struct {
		container, resource, divisor, want string
	}{
		"cpu is rounded up":          {"", "limits.cpu", "0", "2"},
		"millicores":                 {"", "requests.cpu", "1m", "250"},
		"memory in bytes":            {"", "limits.memory", "0", "104857600"},
		"memory in Mi":               {"", "limits.memory", "1Mi", "100"},
		"memory in Gi, rounded up":   {"", "limits.memory", "1Gi", "1"},
		"no limit: node allocatable": {"unlimited", "limits.cpu", "0", "64"},
		"no request":                 {"unlimited", "requests.cpu", "0", "0"},
		"explicit container name":    {"c", "requests.cpu", "1", "1"},
	} {
		got, err := resourceValue(p, &c, &corev1.ResourceFieldSelector{
			ContainerName: test.container, Resource: test.resource, Divisor: resource.MustParse(test.divisor),
		})
		if err != nil || got != test.want {
			t.Errorf("%s: got %q (%v), want %q", name, got, err, test.want)
		}
	}
	for name, ref := range map[string]*corev1.ResourceFieldSelector{
		"container": {ContainerName: "nobody", Resource: "limits.cpu"}, "resource": {Resource: "cpu"}, "kind": {Resource: "most.cpu"},
	} {
		if got, err := resourceValue(p, &c, ref); err == nil {
			t.Errorf("unknown %s: got %q, want an error", name, got)
		}
	}
}

func TestHostname(t *testing.T) {
	long := &corev1.Pod{}
	long.Name = strings.Repeat("a", 62) + "-bc"
	if got, want := hostname(long), strings.Repeat("a", 62); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
