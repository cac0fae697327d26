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

// A ConfigMap that the cache does not show is what it is: one that a manager before this one has made is the plan's, and no fault; one
// of somebody else is a conflict; one that is damaged goes.
func TestConfigMapBehindTheCache(t *testing.T) {
	data := map[string]string{plan.ManifestFile: "{}", plan.PlacementFile: "{}"}
	digest := sha256.Sum256([]byte(data[plan.ManifestFile]))
	s := &solved{PlanDigest: hex.EncodeToString(digest[:])}
	p := &semmoev1.PlacementPlan{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "uid"}}
	layout := func() (map[string]string, error) { return data, nil }
	for name, tc := range map[string]struct {
		change              func(*corev1.ConfigMap)
		published, conflict bool
		left                bool // the ConfigMap that was there
	}{
		"ours":          {change: func(*corev1.ConfigMap) {}, published: true, left: true},
		"somebody's":    {change: func(c *corev1.ConfigMap) { c.Labels, c.OwnerReferences = nil, nil }, conflict: true, left: true},
		"ours, damaged": {change: func(c *corev1.ConfigMap) { c.Data = map[string]string{plan.ManifestFile: "{ }"} }},
		"kept by a workload, of this plan": {change: func(c *corev1.ConfigMap) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "m-r1", UID: "r1"}}
		}, published: true, left: true},
		"kept by a workload, of another plan": {change: func(c *corev1.ConfigMap) {
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
				t.Errorf("published is %v, with error %v", published, err)
			}
			err = c.Get(t.Context(), client.ObjectKeyFromObject(there), &corev1.ConfigMap{})
			if left := err == nil; left != tc.left || client.IgnoreNotFound(err) != nil {
				t.Errorf("the ConfigMap is left: %v, with error %v", left, err)
			}
		})
	}
}
