// SPDX-License-Identifier: Apache-2.0

package podsecurity

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// A container that shares no files is never root, and gets a user only in a pod of root.
func TestIsolated(t *testing.T) {
	for name, tc := range map[string]struct {
		pod  *corev1.PodSecurityContext
		user *int64
	}{
		"nothing":    {nil, nil},
		"a user":     {&corev1.PodSecurityContext{RunAsUser: ptr.To[int64](1000)}, nil},
		"root":       {&corev1.PodSecurityContext{RunAsUser: ptr.To[int64](0)}, ptr.To[int64](User)},
		"maybe root": {&corev1.PodSecurityContext{RunAsNonRoot: ptr.To(false)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			want := Container()
			want.RunAsNonRoot, want.RunAsUser = ptr.To(true), tc.user
			want.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
			if diff := cmp.Diff(want, Isolated(tc.pod)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Missing settings of a pod are added; existing settings are neither repeated nor contradicted.
func TestAddsMissingSettings(t *testing.T) {
	localhost := &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost, LocalhostProfile: ptr.To("engine.json")}
	for name, tc := range map[string]struct {
		pod              *corev1.PodSecurityContext
		nonRoot, seccomp bool
	}{
		"nothing":         {nil, true, true},
		"a group":         {&corev1.PodSecurityContext{FSGroup: ptr.To[int64](1000)}, true, true},
		"a user":          {&corev1.PodSecurityContext{RunAsUser: ptr.To[int64](1000)}, true, true},
		"root":            {&corev1.PodSecurityContext{RunAsUser: ptr.To[int64](0)}, false, true},
		"maybe root":      {&corev1.PodSecurityContext{RunAsNonRoot: ptr.To(false)}, false, true},
		"never root":      {&corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true)}, false, true},
		"its own profile": {&corev1.PodSecurityContext{SeccompProfile: localhost}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, want := Sidecar(tc.pod), Container()
			if tc.nonRoot {
				want.RunAsNonRoot = ptr.To(true)
			}
			if tc.seccomp {
				want.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
