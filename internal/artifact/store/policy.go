// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
)

// Verb is the operation of a request on a scope.
type Verb string

// The verbs. Read includes listing. Only the manager is allowed to delete, and to list all scopes.
const (
	Read   Verb = "read"
	Write  Verb = "write"
	Delete Verb = "delete"
)

// Authorize returns an error if a pod is not allowed to perform an operation on a scope. The package documentation
// contains the table of permissions.
func Authorize(pod *corev1.Pod, verb Verb, scope artifact.Scope) error {
	if pod.Namespace != scope.Namespace {
		return fmt.Errorf("pod %s/%s is not allowed to %s artifacts of namespace %s, only of its own namespace", pod.Namespace, pod.Name, verb, scope.Namespace)
	}
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return fmt.Errorf("pod %s/%s is not allowed to %s artifacts: the pod has ended", pod.Namespace, pod.Name, verb)
	}
	switch {
	case scope.Kind == artifact.Profile && (verb == Read || verb == Write) && profiles(pod, scope.ID):
		return nil
	case scope.Kind == artifact.Plan && verb == Read && (isRouter(pod) || followsTables(pod) || serves(pod, scope.ID)):
		return nil
	}
	return fmt.Errorf("pod %s/%s is not allowed to %s %s: the pod has component %q, inputs %q, plan %q", pod.Namespace, pod.Name, verb, scope,
		pod.Labels[semmoev1.LabelComponent], pod.Labels[semmoev1.LabelInputs], pod.Annotations[semmoev1.AnnotationPlanDigest])
}

// profiles reports whether the pod belongs to a Job that creates the profile.
func profiles(pod *corev1.Pod, id string) bool {
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "Job" &&
		pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentProfile && pod.Labels[semmoev1.LabelInputs] == id
}

// serves reports whether the pod serves with the plan.
func serves(pod *corev1.Pod, id string) bool {
	digest, err := artifact.ParseDigest(pod.Annotations[semmoev1.AnnotationPlanDigest])
	return err == nil && digest.Short() == id
}

// followsTables reports whether the pod serves with a plan, and receives the tables of later plans for its placement.
func followsTables(pod *corev1.Pod) bool {
	_, err := artifact.ParseDigest(pod.Annotations[semmoev1.AnnotationPlanDigest])
	return err == nil && pod.Annotations[semmoev1.AnnotationFollowTables] != ""
}

func isRouter(pod *corev1.Pod) bool {
	return pod.Labels[semmoev1.LabelComponent] == semmoev1.ComponentRouter
}
