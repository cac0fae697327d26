package walk

import (
	"context"
	"fmt"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// kind is one whose spec cannot be changed: each value is tried on an object of its own.
type kind struct {
	name, plural string
	spec         reflect.Type
	situations   []situation
	// prepare makes what specs name.
	prepare func(ctx context.Context, namespace string) error
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

var immutable = []kind{
	{
		name: "AffinityProfile", plural: "affinityprofiles", spec: reflect.TypeFor[semmoev1.AffinityProfileSpec](),
		situations: []situation{
			{name: "an engine of its own", spec: dedicated},
			{name: "a data set in a claim", spec: profiling + `
dataset: {persistentVolumeClaim: {claimName: texts, path: dataset.jsonl}}
target: Dedicated
`},
			{name: "a data set beside the model", spec: profiling + `
dataset: {path: /models/dataset.jsonl}
target: Serving
deploymentRef: {name: other}
`},
		},
		prepare: func(context.Context, string) error { return nil },
	},
	{
		name: "PlacementPlan", plural: "placementplans", spec: reflect.TypeFor[semmoev1.PlacementPlanSpec](),
		situations: []situation{{name: "a plan of a profile", spec: `{profileRef: {name: shared}, expertParallelSize: 4}`}},
		prepare: func(ctx context.Context, namespace string) error {
			profile := objectNamed("AffinityProfile", namespace, "shared", specOf(dedicated))
			if err := api.Create(ctx, profile); err != nil {
				return err
			}
			_, err := settled(ctx, profile)
			return err
		},
	},
}

// checkImmutable makes objects that differ in one field each, until something else follows than without.
func checkImmutable(t *testing.T, k kind) {
	root := specSchema(t, k.plural)
	showEffects(t, k.name, k.situations, fieldsOf(t, nil, root, k.spec), func(in situation, queue <-chan field, without func(field)) {
		base, err := k.follows(t, specOf(in.spec))
		if err != nil {
			t.Error(err)
			return
		}
		for f := range queue {
			acts, err := k.hasEffect(t, base, root, specOf(in.spec), f)
			if err != nil {
				t.Errorf("%s: %v: %v", in.name, f, err)
			}
			if !acts {
				without(f)
			}
		}
	})
}

// follows is the state that a spec leads to.
func (k kind) follows(t *testing.T, s spec) (map[string]string, error) {
	namespace := newNamespace(t)
	if err := k.prepare(t.Context(), namespace); err != nil {
		return nil, err
	}
	object := objectNamed(k.name, namespace, "m", s)
	if err := api.Create(t.Context(), object); err != nil {
		return nil, err
	}
	state, err := settled(t.Context(), object)
	if err == nil {
		err = faultNamed(t.Context(), object)
	}
	return state, err
}

// hasEffect tries one value of a field after the other.
func (k kind) hasEffect(t *testing.T, base map[string]string, root schema, start spec, f field) (bool, error) {
	tried := 0
	for _, value := range f.candidates(start.get(f.path)) {
		changed := start.with(root, f.path, value)
		if reflect.DeepEqual(start.get(f.path), value) || tried == maxCandidates {
			continue
		}
		err := api.Create(t.Context(), objectNamed(k.name, "default", "m", changed), client.DryRunAll)
		if refused(err) {
			continue
		}
		if err != nil {
			return false, err
		}
		tried++
		state, err := k.follows(t, changed)
		if err != nil {
			return false, fmt.Errorf("= %v: %w", value, err)
		}
		if !cmp.Equal(effects(base), effects(state)) {
			return true, nil
		}
	}
	return false, nil
}
