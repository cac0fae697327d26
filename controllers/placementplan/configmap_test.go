// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/plan"
)

// TestConfigMapBehindTheCache checks a ConfigMap that exists but is not in the cache: the plan's own ConfigMap is used,
// one of another owner is a conflict, and a damaged one is deleted.
func TestConfigMapBehindTheCache(t *testing.T) {
	data := map[string]string{plan.ManifestFile: "{}", plan.PlacementFile: "{}"}
	digest := sha256.Sum256([]byte(data[plan.ManifestFile]))
	s := &solved{PlanDigest: hex.EncodeToString(digest[:])}
	p := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "uid"}}
	layout := func() (map[string]string, error) { return data, nil }
	for name, tc := range map[string]struct {
		change              func(*corev1.ConfigMap)
		published, conflict bool
		left                bool // the ConfigMap still exists
	}{
		"own":           {change: func(*corev1.ConfigMap) {}, published: true, left: true},
		"another owner": {change: func(c *corev1.ConfigMap) { c.Labels, c.OwnerReferences = nil, nil }, conflict: true, left: true},
		"own, damaged":  {change: func(c *corev1.ConfigMap) { c.Data = map[string]string{plan.ManifestFile: "{ }"} }},
		"owned by a workload, of this plan": {change: func(c *corev1.ConfigMap) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "m-r1", UID: "r1"}}
		}, published: true, left: true},
		"owned by a workload, of another plan": {change: func(c *corev1.ConfigMap) {
			c.Data = map[string]string{plan.ManifestFile: "{ }", plan.PlacementFile: "{}"}
			other := sha256.Sum256([]byte(c.Data[plan.ManifestFile]))
			digest := hex.EncodeToString(other[:])
			c.Annotations = map[string]string{semmoev1.AnnotationPlanDigest: digest, semmoev1.AnnotationReport: `{"planDigest":"` + digest + `"}`}
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "m-r1", UID: "r1"}}
		}, conflict: true, left: true},
		"of another UID": {change: func(c *corev1.ConfigMap) { c.OwnerReferences[0].UID = "before" }, left: true},
	} {
		t.Run(name, func(t *testing.T) {
			there, err := configMap(p, configMapName(p, s.PlanDigest), s, data)
			if err != nil {
				t.Fatal(err)
			}
			tc.change(there)
			c := fake.NewClientBuilder().WithScheme(newScheme()).WithObjects(there).Build()
			r := &Reconciler{Client: c, Live: c}
			published, err := r.ensureConfigMap(t.Context(), p, there.Name, nil, s, layout)
			var conflict *conflictError
			if published != tc.published || errors.As(err, &conflict) != tc.conflict || err != nil && !tc.conflict {
				t.Errorf("published = %v, error %v", published, err)
			}
			err = c.Get(t.Context(), client.ObjectKeyFromObject(there), &corev1.ConfigMap{})
			if left := err == nil; left != tc.left || client.IgnoreNotFound(err) != nil {
				t.Errorf("ConfigMap exists = %v, error %v", left, err)
			}
		})
	}
}
