// SPDX-License-Identifier: Apache-2.0

package front

import (
	"encoding/json"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

// stored returns an InferencePool as the API server stores it: as JSON, with defaults and fields of other owners.
func stored(t *testing.T, moed *semmoev1.MoEDeployment, change func(pool *unstructured.Unstructured)) *unstructured.Unstructured {
	t.Helper()
	data, err := json.Marshal(inferencePoolOf(moed, 30000))
	if err != nil {
		t.Fatal(err)
	}
	pool := &unstructured.Unstructured{}
	if err := pool.UnmarshalJSON(data); err != nil {
		t.Fatal(err)
	}
	change(pool)
	return pool
}

// The InferencePool is written only if a field of the operator differs.
func TestPoolHas(t *testing.T) {
	set := func(value any, fields ...string) func(*unstructured.Unstructured) {
		return func(pool *unstructured.Unstructured) {
			if err := unstructured.SetNestedField(pool.Object, value, fields...); err != nil {
				t.Fatal(err)
			}
		}
	}
	cases := map[string]struct {
		change func(*unstructured.Unstructured)
		want   bool
	}{
		"as written":             {func(*unstructured.Unstructured) {}, true},
		"a default":              {set("http", "spec", "appProtocol"), true},
		"a Gateway's status":     {set("Accepted", "status", "parents"), true},
		"label of another owner": {set("b", "metadata", "labels", "a"), true},
		"another picker":         {set("other", "spec", "endpointPickerRef", "name"), false},
		"another port":           {set(int64(9), "spec", "endpointPickerRef", "port", "number"), false},
		"closed on failure":      {set("FailClose", "spec", "endpointPickerRef", "failureMode"), false},
		"another engine port":    {set([]any{map[string]any{"number": int64(1)}}, "spec", "targetPorts"), false},
		"other pods":             {set("other", "spec", "selector", "matchLabels", semmoev1.LabelDeployment), false},
		"label removed":          {func(p *unstructured.Unstructured) { p.SetLabels(nil) }, false},
		"owner removed":          {func(p *unstructured.Unstructured) { p.SetOwnerReferences(nil) }, false},
		"spec removed":           {func(p *unstructured.Unstructured) { delete(p.Object, "spec") }, false},
		"picker removed": {func(p *unstructured.Unstructured) {
			unstructured.RemoveNestedField(p.Object, "spec", "endpointPickerRef")
		}, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment()
			if got := poolHas(stored(t, moed, tc.change), inferencePoolOf(moed, 30000)); got != tc.want {
				t.Errorf("it has all fields: %v, want %v", got, tc.want)
			}
		})
	}
}
