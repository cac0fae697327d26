// SPDX-License-Identifier: Apache-2.0

package apply

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/semmoe/operator/internal/kube/ownership"
)

// Only objects that the operator created and that have no controller are adopted. They keep their other owners.
func TestAdopt(t *testing.T) {
	owner := &metav1.ObjectMeta{Name: "m", UID: "new"}
	mine := ownership.ControllerReference(owner, "MoEDeployment")
	other := []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "other", UID: "other"}}
	former := ownership.ControllerReference(&metav1.ObjectMeta{Name: "m", UID: "old"}, "MoEDeployment")
	now := metav1.Now()
	cases := map[string]struct {
		labels  map[string]string
		owners  []metav1.OwnerReference
		going   bool
		adopted bool
		want    []metav1.OwnerReference
	}{
		"restored":                 {labels: ownership.Labels("plan", "m"), adopted: true, want: mine},
		"restored, with an owner":  {labels: ownership.Labels("plan", "m"), owners: other, adopted: true, want: append(other, mine...)},
		"ours":                     {labels: ownership.Labels("plan", "m"), owners: mine, want: mine},
		"of a deleted owner":       {labels: ownership.Labels("plan", "m"), owners: former, want: former}, // left to the garbage collector
		"another owner":            {},
		"made by another operator": {labels: map[string]string{"app.kubernetes.io/managed-by": "helm"}},
		"being deleted":            {labels: ownership.Labels("plan", "m"), going: true},
		"only the name label":      {labels: map[string]string{"app.kubernetes.io/name": "semmoe"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", Labels: tc.labels, OwnerReferences: tc.owners}}
			if tc.going {
				object.DeletionTimestamp, object.Finalizers = &now, []string{"somebody/else"}
			}
			c := fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithObjects(object).Build()
			seen := &corev1.ConfigMap{}
			if err := c.Get(context.Background(), client.ObjectKeyFromObject(object), seen); err != nil {
				t.Fatal(err)
			}
			adopted, err := Adopt(context.Background(), c, "test", owner, "MoEDeployment", seen)
			if err != nil || adopted != tc.adopted {
				t.Errorf("adopted is %t, want %t: %v", adopted, tc.adopted, err)
			}
			found := &corev1.ConfigMap{}
			if err := c.Get(context.Background(), client.ObjectKeyFromObject(object), found); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, found.OwnerReferences); diff != "" {
				t.Errorf("owners (-want +got):\n%s", diff)
			}
			if adopted { // seen is outdated now
				if _, err := Adopt(context.Background(), c, "test", owner, "MoEDeployment", seen); !apierrors.IsConflict(err) {
					t.Errorf("a stale view overwrites the object: %v", err)
				}
			}
		})
	}
}
