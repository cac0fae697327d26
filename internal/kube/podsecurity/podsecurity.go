// SPDX-License-Identifier: Apache-2.0

// Package podsecurity returns security contexts that satisfy the restricted pod security standard. They name no user
// and no group: containers run as the numeric user of their image, or as the user that the cluster assigns to the
// namespace (OpenShift), which rejects any other.
package podsecurity

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// User is the user ID of the operator's image.
const User = 65532

// Pod returns the security context of a pod with only the operator's containers.
func Pod() *corev1.PodSecurityContext {
	return &corev1.PodSecurityContext{
		RunAsNonRoot:   ptr.To(true),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

// Container returns the security context of each container of such a pod.
func Container() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr.To(false),
		ReadOnlyRootFilesystem:   ptr.To(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// Isolated returns the security context of an operator-managed container that shares no files with the user-provided
// containers of its pod: it never runs as root. It sets a user only if the pod runs as root.
func Isolated(pod *corev1.PodSecurityContext) *corev1.SecurityContext {
	container, ours := Container(), Pod()
	container.RunAsNonRoot, container.SeccompProfile = ours.RunAsNonRoot, ours.SeccompProfile
	if pod != nil && ptr.Deref(pod.RunAsUser, User) == 0 {
		container.RunAsUser = ptr.To[int64](User)
	}
	return container
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
