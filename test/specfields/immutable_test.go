// SPDX-License-Identifier: Apache-2.0

package specfields

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/solver/cost/hardware"
)

// kind is a kind with an immutable spec. Each value is tried on a separate object.
type kind struct {
	name, plural string
	spec         reflect.Type
	situations   []situation
}

const profiling = `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {image: "engine:1"}
parallelism: {expertParallelSize: 4}
`

const dedicated = profiling + `
dataset: {configMap: {name: texts}}
target: Dedicated
`

const planned = `
profileRef: {name: shared}
expertParallelSize: 4
`

// unknownDigest is a placeholder for the digest of the plan in service. makePlan replaces it.
var unknownDigest = strings.Repeat("0", 64)

var immutable = []kind{
	{
		name: "AffinityProfile", plural: "affinityprofiles", spec: reflect.TypeFor[semmoev1.AffinityProfileSpec](),
		situations: []situation{
			{name: "a dedicated engine", spec: dedicated},
			{name: "a data set in a claim", spec: profiling + `
dataset: {persistentVolumeClaim: {claimName: texts, path: dataset.jsonl}}
target: Dedicated
`},
			{name: "a data set in the volume of the model", spec: profiling + `
dataset: {path: /models/dataset.jsonl}
target: Serving
deploymentRef: {name: other}
`},
			{name: "an engine with micro-batches of any size", spec: `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {type: VLLM, image: "engine:1", args: ["--all2all-backend", "deepep_low_latency"], overlap: {microBatches: 2}}
parallelism: {expertParallelSize: 4}
dataset: {configMap: {name: texts}}
target: Dedicated
`},
			{name: "an engine with micro-batches", spec: `
model: {volume: {hostPath: {path: /srv/model}}}
engine: {image: "engine:1", args: ["--moe-a2a-backend", "deepep"], overlap: {microBatches: 2, communicationSMs: 20}}
parallelism: {expertParallelSize: 4}
dataset: {configMap: {name: texts}}
target: Dedicated
`},
			{name: "live samples of routers", spec: profiling + `
target: Live
deploymentRef: {name: other}
live: {priorProfileRef: {name: shared}}
`, prepare: func(ctx context.Context, namespace string, _ spec) error {
				if err := makeProfile(ctx, namespace, nil); err != nil {
					return err
				}
				_, err := made(ctx, objectNamed("MoEDeployment", namespace, "other", specOf(serving)))
				return err
			}},
		},
	},
	{
		name: "PlacementPlan", plural: "placementplans", spec: reflect.TypeFor[semmoev1.PlacementPlanSpec](),
		situations: []situation{
			{name: "a plan of a profile", spec: planned, prepare: makeProfile},
			{name: "a plan of tokens", spec: planned + `
attention: TensorParallel
`, prepare: makeProfile},
			{name: "a plan with copies of experts", spec: planned + `
redundantExperts: 4
`, prepare: makeProfile},
			{name: "a plan with copies from memory", spec: planned + `
redundantExperts: Auto
redundantMemoryBytes: 2Gi
`, prepare: makeProfile},
			{name: "a plan for two nodes", spec: planned + `
objective: Hierarchical
ranksPerNode: 2
`, prepare: makeProfile},
			{name: "a plan with a user-provided hardware profile", spec: planned + `
hardware: {configMap: {name: machines}}
`, prepare: makeMachines},
			{name: "a plan that replaces another one", spec: planned + `
current: {planDigest: "` + unknownDigest + `"}
`, prepare: makePlan},
		},
	},
}

// made creates an object, waits until its namespace is settled, and returns the state.
func made(ctx context.Context, object *unstructured.Unstructured) (map[string]string, error) {
	if err := api.Create(ctx, object); err != nil {
		return nil, err
	}
	return settled(ctx, object)
}

// makeProfile creates the profile "shared".
func makeProfile(ctx context.Context, namespace string, _ spec) error {
	_, err := made(ctx, objectNamed("AffinityProfile", namespace, "shared", specOf(dedicated)))
	return err
}

// makeMachines creates the profile "shared" and a ConfigMap with a hardware profile.
func makeMachines(ctx context.Context, namespace string, _ spec) error {
	text, err := json.Marshal(hardware.DefaultProfile())
	if err != nil {
		return err
	}
	machines := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "machines"}, Data: map[string]string{"hardware.json": string(text)}}
	return errors.Join(api.Create(ctx, machines), makeProfile(ctx, namespace, nil))
}

// makePlan creates the plan in service from the profile "shared", and replaces unknownDigest in a spec by its digest.
func makePlan(ctx context.Context, namespace string, s spec) error {
	if err := makeProfile(ctx, namespace, nil); err != nil {
		return err
	}
	plan := objectNamed("PlacementPlan", namespace, "base", specOf(planned))
	if _, err := made(ctx, plan); err != nil {
		return err
	}
	if err := api.Get(ctx, client.ObjectKeyFromObject(plan), plan); err != nil {
		return err
	}
	digest, _, _ := unstructured.NestedString(plan.Object, "status", "planDigest")
	if digest == "" {
		return fmt.Errorf("PlacementPlan base has no digest: %v", plan.Object["status"])
	}
	if current, ok := s["current"].(map[string]any); ok && current["planDigest"] == unknownDigest {
		current["planDigest"] = digest
	}
	return nil
}

// checkImmutable creates objects that differ from a situation in one field each, until the resulting state differs.
func checkImmutable(t *testing.T, k kind, fields []field) {
	root := specSchema(t, k.plural)
	showEffects(t, k.name, k.situations, fields, func(in situation, queue <-chan field, without func(field)) {
		tryAlone(t, k.name, in, root, queue, without)
	})
}

// tryAlone takes fields from the queue, and tries each value on a separate object.
func tryAlone(t *testing.T, kind string, in situation, root schema, queue <-chan field, without func(field)) {
	base, err := follows(t, kind, in, specOf(in.spec))
	if err != nil {
		t.Errorf("%s: %v", in.name, err)
		return
	}
	for f := range queue {
		acts, err := hasEffectAlone(t, kind, in, base, root, f)
		if err != nil {
			t.Errorf("%s: %v: %v", in.name, f, err)
		}
		if !acts {
			without(f)
		}
	}
}

// follows returns the state that results from a spec.
func follows(t *testing.T, kind string, in situation, s spec) (map[string]string, error) {
	namespace := newNamespace(t)
	if err := in.prepared(t.Context(), namespace, s); err != nil {
		return nil, err
	}
	object := objectNamed(kind, namespace, "m", s)
	state, err := made(t.Context(), object)
	if err == nil {
		err = faultNamed(t.Context(), object)
	}
	return state, err
}

// hasEffectAlone reports whether a value of a field changes the resulting state. It tries at most maxCandidates values,
// each on a separate object.
func hasEffectAlone(t *testing.T, kind string, in situation, base map[string]string, root schema, f field) (bool, error) {
	tried, start := 0, specOf(in.spec)
	for _, value := range f.candidates(start.get(f.path)) {
		changed := start.with(root, f.path, value)
		if reflect.DeepEqual(start.get(f.path), value) || tried == maxCandidates {
			continue
		}
		err := api.Create(t.Context(), objectNamed(kind, "default", "m", changed), client.DryRunAll)
		if refused(err) {
			continue
		}
		if err != nil {
			return false, err
		}
		tried++
		state, err := follows(t, kind, in, changed)
		if err != nil {
			return false, fmt.Errorf("= %v: %w", value, err)
		}
		if !cmp.Equal(effects(base), effects(state)) {
			return true, nil
		}
	}
	return false, nil
}
