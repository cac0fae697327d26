// Package restricted writes security contexts that satisfy the restricted pod security standard.
package restricted

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// user is that of our image.
const user = 65532

// Pod is for a pod whose containers are all ours.
func Pod() *corev1.PodSecurityContext {
	return &corev1.PodSecurityContext{
		RunAsNonRoot:   ptr.To(true),
		RunAsUser:      ptr.To[int64](user),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

// Container is for each container of such a pod; it names no user, since the pod does.
func Container() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr.To(false),
		ReadOnlyRootFilesystem:   ptr.To(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
}

// Beside is for a container of ours beside one of the user's, whose pod need not keep to the standard: what the user says for the whole
// pod holds for ours too. It names no user, since the volumes may be for the one that the pod names. A pod of root's is not
// contradicted: the kubelet would refuse to start the container, and such a pod is not admitted where the standard is enforced.
func Beside(pod *corev1.PodSecurityContext) *corev1.SecurityContext {
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
