// SPDX-License-Identifier: Apache-2.0

// Package podsecurity returns security contexts that satisfy the restricted pod security standard.
package podsecurity

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// user is the user ID of the operator's image.
const user = 65532

// Pod returns the security context of a pod with only the operator's containers.
func Pod() *corev1.PodSecurityContext {
	return &corev1.PodSecurityContext{
		RunAsNonRoot:   ptr.To(true),
		RunAsUser:      ptr.To[int64](user),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

// Container returns the security context of each container of such a pod. It sets no user, because the pod does.
func Container() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr.To(false),
		ReadOnlyRootFilesystem:   ptr.To(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// Sidecar returns the security context of an operator-managed container next to user-provided ones, whose pod need not
// satisfy the standard: the user's settings for the pod apply to it too. It sets no user, because the volumes may
// belong to the user that the pod sets. For a pod that runs as root it does not set runAsNonRoot: the kubelet would
// refuse to start the container, and such a pod is not admitted under the standard anyway.
func Sidecar(pod *corev1.PodSecurityContext) *corev1.SecurityContext {
	container, ours := Container(), Pod()
	if pod == nil {
		pod = &corev1.PodSecurityContext{}
	}
	if pod.RunAsNonRoot == nil && ptr.Deref(pod.RunAsUser, 1) != 0 {
		container.RunAsNonRoot = ours.RunAsNonRoot
	}
	if pod.SeccompProfile == nil {
		container.SeccompProfile = ours.SeccompProfile
	}
	return container
}
