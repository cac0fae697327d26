// SPDX-License-Identifier: Apache-2.0

// Package gitops finds the GitOps tool that applies an object from a repository. Such a tool reverts changes that are
// not in the repository.
package gitops

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Owner identifies the GitOps tool of an object.
type Owner struct {
	// Tool is "Argo CD" or "Flux".
	Tool string `json:"tool"`
	// Name is the name of the Application, Kustomization or HelmRelease.
	Name string `json:"name"`
}

const (
	argo = "Argo CD"
	flux = "Flux"

	// argoTracking is the annotation with which Argo CD tracks its objects: "application:group/kind:namespace/name".
	// argoLabel and instanceLabel are the labels of other settings of application.resourceTrackingMethod. Other tools
	// set instanceLabel, too.
	argoTracking  = "argocd.argoproj.io/tracking-id"
	argoLabel     = "argocd.argoproj.io/instance"
	instanceLabel = "app.kubernetes.io/instance"
	argoManager   = "argocd-"
)

// fluxLabels are the labels that the Flux controllers set on objects that they apply.
var fluxLabels = []string{"kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name"}

// OwnerOf returns the GitOps tool of an object, or nil if none is detected.
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

// appliedBy reports whether a field manager with the name prefix has written the object.
func appliedBy(object metav1.Object, prefix string) bool {
	for _, entry := range object.GetManagedFields() {
		if strings.HasPrefix(entry.Manager, prefix) {
			return true
		}
	}
	return false
}

// Warning returns a message that the tool may revert a change, and what to commit to the repository instead.
func (o Owner) Warning(kind, name, instead string) string {
	return fmt.Sprintf("%s (%s) manages %s %s and may revert this change. To keep the change, commit %s to its repository", o.Tool, o.Name, kind, name, instead)
}
