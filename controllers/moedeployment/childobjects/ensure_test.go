// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/result"
)

// An object that the operator created belongs to a MoEDeployment unless another MoEDeployment, identified by name,
// controls it: UIDs change when objects are restored.
func TestCheckOwn(t *testing.T) {
	moed := &semmoev1.MoEDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "uid"}}
	by := func(name string, uid types.UID) []metav1.OwnerReference {
		return ownership.ControllerReference(&metav1.ObjectMeta{Name: name, UID: uid}, "MoEDeployment")
	}
	const another = "Service a-router exists and belongs to MoEDeployment a-router: recreate one of the two MoEDeployments under another name"
	const foreign = "Service a-router exists and belongs to another owner: delete it"
	for name, tc := range map[string]struct {
		labels map[string]string
		owners []metav1.OwnerReference
		want   string
	}{
		"its own":                                  {ownership.OperatorLabels(), by("a", "uid"), ""},
		"its own, without labels":                  {nil, by("a", "uid"), ""},
		"restored without an owner":                {ownership.OperatorLabels(), nil, ""},
		"restored with the old owner UID":          {ownership.OperatorLabels(), by("a", "before"), ""},
		"of another MoEDeployment":                 {ownership.OperatorLabels(), by("a-router", "other"), another},
		"of another MoEDeployment, without labels": {nil, by("a-router", "other"), another},
		"foreign":               {nil, nil, foreign},
		"foreign with its name": {nil, by("a", "before"), foreign},
	} {
		service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a-router", Labels: tc.labels, OwnerReferences: tc.owners}}
		err := CheckOwn(fake.NewClientBuilder().Build(), moed, service)
		var foreign *result.ForeignError
		if got := errors.As(err, &foreign); got != (tc.want != "") || got && foreign.Message != tc.want {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}
