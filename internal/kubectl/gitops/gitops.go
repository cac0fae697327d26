// Package gitops tells which tool keeps an object as a repository declares it: what is changed beside it will be changed back.
package gitops

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Owner is who declares an object.
type Owner struct {
	// Tool is Argo CD or Flux.
	Tool string `json:"tool"`
	// Name is its Application, Kustomization or HelmRelease.
	Name string `json:"name"`
}

const (
	argo = "Argo CD"
	flux = "Flux"

	// argoTracking is the annotation by which Argo CD knows its objects, "application:group/kind:namespace/name", argoLabel and
	// instanceLabel are the labels that other settings of application.resourceTrackingMethod use. Everybody sets the last one.
	argoTracking  = "argocd.argoproj.io/tracking-id"
	argoLabel     = "argocd.argoproj.io/instance"
	instanceLabel = "app.kubernetes.io/instance"
	argoManager   = "argocd-"
)

// fluxLabels are what Flux's controllers put on the objects that they apply.
var fluxLabels = []string{"kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name"}

// OwnerOf is who declares an object; nil where nobody is known to.
func OwnerOf(object metav1.Object) *Owner {
	annotations, labels := object.GetAnnotations(), object.GetLabels()
	if id := annotations[argoTracking]; id != "" {
		application, _, _ := strings.Cut(id, ":")
		return &Owner{argo, application}
	}
	if name := labels[argoLabel]; name != "" {
		return &Owner{argo, name}
	}
	if name := labels[instanceLabel]; name != "" && appliedBy(object, argoManager) {
		return &Owner{argo, name}
	}
	for _, label := range fluxLabels {
		if name := labels[label]; name != "" {
			return &Owner{flux, name}
		}
	}
	return nil
}

// appliedBy tells that a field manager whose name begins so has written the object.
func appliedBy(object metav1.Object, prefix string) bool {
	for _, entry := range object.GetManagedFields() {
		if strings.HasPrefix(entry.Manager, prefix) {
			return true
		}
	}
	return false
}

// Warning says what becomes of a change beside the repository, and what to change there instead.
func (o Owner) Warning(kind, name, instead string) string {
	return fmt.Sprintf("%s (%s) owns %s %s, and may change this back. To make it last, commit %s to its repository", o.Tool, o.Name, kind, name, instead)
}
