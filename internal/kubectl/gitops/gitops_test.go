// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestOwnerOf(t *testing.T) {
	applied := []metav1.ManagedFieldsEntry{{Manager: "kubectl"}, {Manager: "argocd-controller"}}
	for name, test := range map[string]struct {
		meta metav1.ObjectMeta
		want *Owner
	}{
		"no tool":           {metav1.ObjectMeta{}, nil},
		"tracking id":       {metav1.ObjectMeta{Annotations: map[string]string{argoTracking: "models:semmoe.io/MoEDeployment:llm/qwen"}}, &Owner{argo, "models"}},
		"label of Argo CD":  {metav1.ObjectMeta{Labels: map[string]string{argoLabel: "models"}}, &Owner{argo, "models"}},
		"label and manager": {metav1.ObjectMeta{Labels: map[string]string{instanceLabel: "models"}, ManagedFields: applied}, &Owner{argo, "models"}},
		"label of a Helm chart": {metav1.ObjectMeta{
			Labels: map[string]string{instanceLabel: "models"}, ManagedFields: applied[:1],
		}, nil},
		"Flux": {metav1.ObjectMeta{Labels: map[string]string{"kustomize.toolkit.fluxcd.io/name": "apps"}}, &Owner{flux, "apps"}},
	} {
		if diff := cmp.Diff(test.want, OwnerOf(&test.meta)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
