package placementplan

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/owned"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// manager is the field manager of everything that this controller writes.
const manager = "semmoe-placementplan"

func configMapName(plan *semmoev1.PlacementPlan, planDigest string) string {
	return plan.Name + "-" + artifact.Digest(planDigest).Short()
}

// stableConfigMapName is known before the plan is solved, for workloads that are written before it is. What the ConfigMap of that name
// holds is never changed or replaced, also where the plan was lost and solved again as another one: two pods of one engine could start
// with two maps.
func stableConfigMapName(plan *semmoev1.PlacementPlan) string { return plan.Name + "-plan" }

// standsAlone tells that a plan belongs to no MoEDeployment, whose pods mount plans by their digests. One that was made for a
// MoEDeployment and has lost it, as a restored one has at first, is about to be taken back.
func standsAlone(plan *semmoev1.PlacementPlan) bool {
	return metav1.GetControllerOf(plan) == nil && !owned.Made(plan)
}

// dataOf is what the ConfigMap of a plan holds. It fails where that cannot be.
func dataOf(a *plan.Artifact, engine semmoev1.EngineType) (map[string]string, error) {
	data, err := bundle.ConfigMapData(a, string(engine))
	if err != nil {
		return nil, invalidf("PlanUnusable", "%v", err)
	}
	return data, nil
}

// configMap holds what an engine reads of a plan, and tells what the plan is worth.
func configMap(p *semmoev1.PlacementPlan, name string, s *solved, data map[string]string) (*corev1.ConfigMap, error) {
	report, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	labels := owned.Labels(semmoev1.ComponentPlan, p.Name, semmoev1.LabelPlan, p.Name)
	if s.Inputs != "" {
		labels[semmoev1.LabelInputs] = s.Inputs
	}
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       p.Namespace,
			Name:            name,
			Labels:          labels,
			Annotations:     map[string]string{semmoev1.AnnotationPlanDigest: s.PlanDigest, semmoev1.AnnotationReport: string(report)},
			OwnerReferences: owned.ControllerReference(p, "PlacementPlan"),
		},
		Immutable: ptr.To(true),
		Data:      data,
	}, nil
}

// solvedOf is the plan that a ConfigMap holds; nil where it is not as configMap makes it, which only somebody who has made
// or changed it by hand brings about.
func solvedOf(live *corev1.ConfigMap) *solved {
	s := &solved{}
	if json.Unmarshal([]byte(live.Annotations[semmoev1.AnnotationReport]), s) != nil {
		return nil
	}
	manifest, _, err := artifact.DigestOf(strings.NewReader(live.Data[plan.ManifestFile]))
	if err != nil || string(manifest) != s.PlanDigest || live.Annotations[semmoev1.AnnotationPlanDigest] != s.PlanDigest ||
		!ptr.Deref(live.Immutable, false) || live.Data[plan.PlacementFile] == "" {
		return nil
	}
	return s
}

// adopt takes back the ConfigMaps of a plan that have lost it, as restored ones have, and reports whether there were any. One that is
// not as configMap makes it stays somebody else's. One that workloads own has outlived its plan, of which this one may have no more than
// the name: it is taken back where it is found to hold this one.
func (r *Reconciler) adopt(ctx context.Context, p *semmoev1.PlacementPlan, configMaps map[string]*corev1.ConfigMap) (bool, error) {
	var adopted bool
	var failed error
	for _, name := range slices.Sorted(maps.Keys(configMaps)) {
		if solvedOf(configMaps[name]) == nil || len(configMaps[name].OwnerReferences) > 0 {
			continue
		}
		wrote, err := owned.Adopt(ctx, r.Client, manager, p, "PlacementPlan", configMaps[name])
		adopted, failed = adopted || wrote, errors.Join(failed, err)
	}
	return adopted, failed
}

// conflictError is an object of somebody else under the name of one of ours.
type conflictError struct{ message string }

func (e *conflictError) Error() string { return e.message }

// ensureConfigMap brings a ConfigMap of a plan into being. live is what there is of the name; layout reads what it holds, and is called
// only where it is missing. It reports whether the ConfigMap is there.
func (r *Reconciler) ensureConfigMap(ctx context.Context, p *semmoev1.PlacementPlan, name string, live *corev1.ConfigMap, s *solved, layout func() (map[string]string, error)) (bool, error) {
	switch {
	case live != nil && live.DeletionTimestamp != nil:
		return false, nil // it comes back when it has gone
	case live != nil && !metav1.IsControlledBy(live, p):
		owner := metav1.GetControllerOf(live)
		if owner != nil && owner.Kind == "PlacementPlan" && owner.Name == p.Name {
			return false, nil // of a plan of this name that was deleted: it is about to go with it, or to lose it
		}
		if held := solvedOf(live); held != nil && held.PlanDigest == s.PlanDigest {
			if adopted, err := owned.Adopt(ctx, r.Client, manager, p, "PlacementPlan", live); adopted || err != nil {
				return adopted, err
			}
		}
		return false, &conflictError{fmt.Sprintf("ConfigMap %s is not this plan's: delete it", live.Name)}
	case live != nil && solvedOf(live) != nil:
		return true, nil
	case live != nil:
		err := r.Delete(ctx, live, client.Preconditions{UID: &live.UID})
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("delete the damaged ConfigMap %s: %w", live.Name, err)
		}
		return false, nil
	}
	data, err := layout()
	if err != nil {
		return false, err
	}
	made, err := configMap(p, name, s, data)
	if err != nil {
		return false, err
	}
	err = r.Create(ctx, made, client.FieldOwner(manager))
	if apierrors.IsAlreadyExists(err) {
		return r.existing(ctx, p, made.Name, s, layout)
	}
	if err != nil {
		return false, fmt.Errorf("create ConfigMap %s: %w", made.Name, err)
	}
	return true, nil
}

// existing takes a ConfigMap that the cache does not show for what it is: the plan's own, which a manager has made whose writes the
// cache has not seen yet, or somebody else's, which has none of our labels.
func (r *Reconciler) existing(ctx context.Context, p *semmoev1.PlacementPlan, name string, s *solved, layout func() (map[string]string, error)) (bool, error) {
	live := &corev1.ConfigMap{}
	if err := r.Live.Get(ctx, client.ObjectKey{Namespace: p.Namespace, Name: name}, live); err != nil {
		// One that has gone meanwhile is made at the next look.
		return false, client.IgnoreNotFound(err)
	}
	return r.ensureConfigMap(ctx, p, name, live, s, layout)
}
