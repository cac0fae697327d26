// SPDX-License-Identifier: Apache-2.0

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

// TestProfileAndPlanAreImmutable checks that the specs of profiles and plans are immutable, because they record a
// request.
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
				t.Errorf("error %v, want one that reports an immutable spec", err)
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

// TestProfilePodsPerReplicaRefused checks that a profile refuses podsPerReplica, which has an effect only in a
// MoEDeployment.
func TestProfilePodsPerReplicaRefused(t *testing.T) {
	spread := strings.NewReplacer("NAME", "spread", "expertParallelSize: 4", "expertParallelSize: 4, podsPerReplica: 1").Replace(minimalProfile)
	refusedWith(t, api.Create(t.Context(), object(t, spread)), []string{"spec.parallelism.podsPerReplica", "do not depend on it"})
}

// TestProfileOverlapAutoRefused checks that a profile, which has no plan, cannot have its overlap settings chosen.
func TestProfileOverlapAutoRefused(t *testing.T) {
	auto := strings.NewReplacer("NAME", "chosen", "image: ", "overlap: {mode: Auto}, image: ").Replace(minimalProfile)
	if !strings.Contains(auto, "mode: Auto") {
		t.Fatalf("profile:\n%s", auto)
	}
	refusedWith(t, api.Create(t.Context(), object(t, auto)), []string{"spec.engine.overlap.mode", "a profiling Job has no plan"})
}

// TestTransformersBackend checks that the backend Transformers needs a profiling Job, and that only it has an image.
func TestTransformersBackend(t *testing.T) {
	for name, tc := range map[string]struct {
		fields string
		want   []string
	}{
		"transformers":         {"  backend: Transformers\n  backendImage: torch:1\n", nil},
		"transformers-live":    {"  backend: Transformers\n  deploymentRef: {name: m}\n", []string{"backend Transformers needs target Dedicated"}},
		"image-without-effect": {"  backendImage: torch:1\n", []string{"backendImage needs backend Transformers"}},
		"unknown-backend":      {"  backend: Jax\n", []string{"spec.backend"}},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(minimalProfile, "NAME", name, 1) + tc.fields
			if strings.Contains(tc.fields, "deploymentRef") {
				text = strings.Replace(text, "target: Dedicated", "target: Serving", 1)
			}
			refusedWith(t, api.Create(t.Context(), object(t, text)), tc.want)
		})
	}
	ownText := strings.NewReplacer("NAME", "own-text-by-torch", "{configMap: {name: d}}", "{ownText: {}}").Replace(minimalProfile)
	refusedWith(t, api.Create(t.Context(), object(t, ownText+"  backend: Transformers\n")), []string{"dataset.ownText needs backend Engine"})
	for name, tc := range map[string]struct {
		profiling string
		want      []string
	}{
		"by-transformers":      {"{dataset: {configMap: {name: d}}, target: Dedicated, backend: Transformers, backendImage: 'torch:1'}", nil},
		"by-the-engine":        {"{dataset: {configMap: {name: d}}, backend: Transformers}", []string{"backend Transformers needs target Dedicated"}},
		"without-data":         {"{profileRef: {name: p}, target: Dedicated, backend: Transformers}", []string{"backend Transformers needs dataset"}},
		"own-text-by-torch":    {"{dataset: {ownText: {}}, target: Dedicated, backend: Transformers}", []string{"dataset.ownText needs backend Engine"}},
		"image-of-the-default": {"{dataset: {configMap: {name: d}}, backendImage: 'torch:1'}", []string{"backendImage needs backend Transformers"}},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(minimal, "NAME", name, 1) + "  profiling: " + tc.profiling + "\n"
			refusedWith(t, api.Create(t.Context(), object(t, text)), tc.want)
		})
	}
}

// TestServingProfileNeedsADeployment checks that a profile of a running deployment must reference the deployment.
func TestServingProfileNeedsADeployment(t *testing.T) {
	serving := strings.NewReplacer("NAME", "serving", "target: Dedicated", "target: Serving").Replace(minimalProfile)
	err := api.Create(t.Context(), object(t, serving))
	if err == nil || !strings.Contains(err.Error(), "targets Serving and Live need deploymentRef") {
		t.Errorf("error %v, want one that names deploymentRef", err)
	}
	if err := api.Create(t.Context(), object(t, serving+"  deploymentRef: {name: m}\n")); err != nil {
		t.Error(err)
	}
}

// TestLiveProfile checks that a live profile specifies its samples and has no data set, and that other profiles have a
// data set.
func TestLiveProfile(t *testing.T) {
	live := strings.NewReplacer("target: Dedicated", "target: Live\n  deploymentRef: {name: m}\n  live: {priorProfileRef: {name: p}}", "  dataset: {configMap: {name: d}}\n", "").Replace(minimalProfile)
	for name, tc := range map[string]struct{ text, want string }{
		"live":                      {live, ""},
		"live-with-a-data-set":      {live + "  dataset: {configMap: {name: d}}\n", "target Live does not allow it"},
		"live-without-samples":      {strings.Replace(live, "  live: {priorProfileRef: {name: p}}\n", "", 1), "target Live needs live"},
		"live-without-a-deployment": {strings.Replace(live, "  deploymentRef: {name: m}\n", "", 1), "targets Serving and Live need deploymentRef"},
		"live-without-a-prior":      {strings.Replace(live, "{priorProfileRef: {name: p}}", "{samples: Counts}", 1), "priorProfileRef"},
		"dedicated-without-data":    {strings.Replace(minimalProfile, "  dataset: {configMap: {name: d}}\n", "", 1), "need dataset"},
		"dedicated-with-samples":    {minimalProfile + "  live: {priorProfileRef: {name: p}}\n", "other targets do not allow it"},
	} {
		err := api.Create(t.Context(), object(t, strings.Replace(tc.text, "NAME", name, 1)))
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}

// TestReplanNeedsCurrent checks that fields which refer to the plan in service require spec.current.
func TestReplanNeedsCurrent(t *testing.T) {
	digest := strings.Repeat("0a", 32)
	current := "  current: {planDigest: " + digest + "}\n"
	for name, tc := range map[string]struct{ more, want string }{
		"replan":        {current + "  priorProfileRef: {name: q}\n  minimumGainPercent: 2\n  batchTokens: 64\n", ""},
		"prior-alone":   {"  priorProfileRef: {name: q}\n", "priorProfileRef needs current"},
		"observed":      {"  observedBatchTokens: [64, 64, 4096]\n", ""},
		"two-sources":   {"  observedBatchTokens: [64]\n  batchTokens: 64\n", "observedBatchTokens"},
		"no-tokens":     {"  observedBatchTokens: [0]\n", "observedBatchTokens"},
		"first":         {"  minimumGainPercent: 2\n  batchTokens: 64\n", ""},
		"short-digest":  {"  current: {planDigest: abcd}\n", "planDigest"},
		"too-much-gain": {current + "  minimumGainPercent: 100\n", "minimumGainPercent"},
	} {
		err := api.Create(t.Context(), object(t, strings.Replace(minimalPlan, "NAME", name, 1)+tc.more))
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: error %v, want %q", name, err, tc.want)
		}
	}
}
