package api

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const minimalProfile = `
apiVersion: semmoe.io/v1alpha1
kind: AffinityProfile
metadata: {name: NAME, namespace: default}
spec:
  model: {volume: {hostPath: {path: /srv/m}}}
  engine: {image: "engine:1"}
  parallelism: {expertParallelSize: 4}
  dataset: {configMap: {name: d}}
  target: Dedicated
`

const minimalPlan = `
apiVersion: semmoe.io/v1alpha1
kind: PlacementPlan
metadata: {name: NAME, namespace: default}
spec:
  profileRef: {name: p}
  expertParallelSize: 4
`

// Profiles and plans are records of what was asked for: what they say cannot be changed afterwards.
func TestProfileAndPlanAreImmutable(t *testing.T) {
	cases := map[string]struct {
		text   string
		fields []string
		value  any
		kind   string
	}{
		"profile":                  {minimalProfile, []string{"spec", "tokens"}, int64(5000), "AffinityProfile"},
		"profile's data set":       {minimalProfile, []string{"spec", "dataset", "configMap", "name"}, "e", "AffinityProfile"},
		"plan":                     {minimalPlan, []string{"spec", "expertParallelSize"}, int64(8), "PlacementPlan"},
		"plan's way to be solved":  {minimalPlan, []string{"spec", "solver", "seed"}, int64(2), "PlacementPlan"},
		"plan's choice of profile": {minimalPlan, []string{"spec", "profileRef", "name"}, "q", "PlacementPlan"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			u := object(t, strings.Replace(tc.text, "NAME", strings.NewReplacer(" ", "-", "'", "").Replace(name), 1))
			if err := api.Create(t.Context(), u); err != nil {
				t.Fatal(err)
			}
			changed := u.DeepCopy()
			if err := unstructured.SetNestedField(changed.Object, tc.value, tc.fields...); err != nil {
				t.Fatal(err)
			}
			err := api.Patch(t.Context(), changed, client.MergeFrom(u))
			if err == nil || !strings.Contains(err.Error(), "the spec of "+article(tc.kind)+" cannot be changed: create another one") {
				t.Errorf("error %v, want one that says so", err)
			}
		})
	}
}

func article(kind string) string {
	if strings.HasPrefix(kind, "A") {
		return "an " + kind
	}
	return "a " + kind
}

// A profile that is taken through a deployment must name it.
func TestServingProfileNeedsADeployment(t *testing.T) {
	serving := strings.NewReplacer("NAME", "serving", "target: Dedicated", "target: Serving").Replace(minimalProfile)
	err := api.Create(t.Context(), object(t, serving))
	if err == nil || !strings.Contains(err.Error(), "target Serving needs deploymentRef") {
		t.Errorf("error %v, want one that names deploymentRef", err)
	}
	if err := api.Create(t.Context(), object(t, serving+"  deploymentRef: {name: m}\n")); err != nil {
		t.Error(err)
	}
}
