// SPDX-License-Identifier: Apache-2.0

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
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// manager is the field manager of all writes of this controller.
const manager = "semmoe-placementplan"

func configMapName(plan *semmoev1.PlacementPlan, planDigest string) string {
	return plan.Name + "-" + artifact.Digest(planDigest).Short()
}

// stableConfigMapName returns a name that is known before the plan is solved, for workloads that are created earlier.
// The content of this ConfigMap is never changed or replaced, even if the plan is lost and solved again with another
// result. If it changed, two pods of one engine could start with different expert maps.
func stableConfigMapName(plan *semmoev1.PlacementPlan) string { return plan.Name + "-plan" }

// isStandalone reports whether a plan belongs to no MoEDeployment, whose pods mount plans by digest. A plan that was
// made for a MoEDeployment and has no owner, for example after a restore, is not standalone: it is about to be adopted.
func isStandalone(plan *semmoev1.PlacementPlan) bool {
	return metav1.GetControllerOf(plan) == nil && !ownership.IsOperatorManaged(plan)
}

// dataOf returns the content of a plan's ConfigMap. It fails if the engine cannot use the plan.
func dataOf(a *plan.Artifact, engine semmoev1.EngineType) (map[string]string, error) {
	data, err := bundle.ConfigMapData(a, string(engine))
	if err != nil {
		return nil, invalidf("PlanUnusable", "%v", err)
	}
	return data, nil
}

// configMap returns the ConfigMap with the files of a plan that an engine reads. An annotation contains the evaluation
// of the plan.
func configMap(p *semmoev1.PlacementPlan, name string, s *solved, data map[string]string) (*corev1.ConfigMap, error) {
	report, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	labels := ownership.Labels(semmoev1.ComponentPlan, p.Name, semmoev1.LabelPlan, p.Name)
	if s.Inputs != "" {
		labels[semmoev1.LabelInputs] = s.Inputs
	}
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       p.Namespace,
			Name:            name,
			Labels:          labels,
			Annotations:     map[string]string{semmoev1.AnnotationPlanDigest: s.PlanDigest, semmoev1.AnnotationReport: string(report)},
			OwnerReferences: ownership.ControllerReference(p, "PlacementPlan"),
		},
		Immutable: ptr.To(true),
		Data:      data,
	}, nil
}

// solvedOf returns the plan in a ConfigMap. It returns nil if the ConfigMap differs from the result of configMap, which
// only happens if a user created or changed it.
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

// adopt adopts the ConfigMaps of a plan that have no owner, for example after a restore, and reports whether there were
// any. A ConfigMap that differs from the result of configMap is not adopted. A ConfigMap with workloads as owners has
// outlived a plan, and this plan may only have the same name: ensureConfigMap adopts it if it contains this plan.
func (r *Reconciler) adopt(ctx context.Context, p *semmoev1.PlacementPlan, configMaps map[string]*corev1.ConfigMap) (bool, error) {
	var adopted bool
	var failed error
	for _, name := range slices.Sorted(maps.Keys(configMaps)) {
		if solvedOf(configMaps[name]) == nil || len(configMaps[name].OwnerReferences) > 0 {
			continue
		}
		wrote, err := apply.Adopt(ctx, r.Client, manager, p, "PlacementPlan", configMaps[name])
		adopted, failed = adopted || wrote, errors.Join(failed, err)
	}
	return adopted, failed
}

// conflictError reports an object of another owner that has the name of a ConfigMap of the plan.
type conflictError struct{ message string }

func (e *conflictError) Error() string { return e.message }

// ensureConfigMap creates a ConfigMap of a plan. live is the existing object with the name, or nil. layout returns the
// content, and is only called if the object does not exist. The result is true if the ConfigMap exists.
func (r *Reconciler) ensureConfigMap(ctx context.Context, p *semmoev1.PlacementPlan, name string, live *corev1.ConfigMap, s *solved, layout func() (map[string]string, error)) (bool, error) {
	switch {
	case live != nil && live.DeletionTimestamp != nil:
		return false, nil // it is created after its deletion
	case live != nil && !metav1.IsControlledBy(live, p):
		owner := metav1.GetControllerOf(live)
		if owner != nil && owner.Kind == "PlacementPlan" && owner.Name == p.Name {
			return false, nil // it belongs to a deleted plan of this name, and is about to be deleted or to lose that owner
		}
		if found := solvedOf(live); found != nil && found.PlanDigest == s.PlanDigest {
			if adopted, err := apply.Adopt(ctx, r.Client, manager, p, "PlacementPlan", live); adopted || err != nil {
				return adopted, err
			}
		}
		return false, &conflictError{fmt.Sprintf("ConfigMap %s exists and belongs to another owner. Delete it", live.Name)}
	case live != nil && solvedOf(live) != nil:
		return true, nil
	case live != nil:
		err := r.Delete(ctx, live, client.Preconditions{UID: &live.UID})
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("failed to delete the damaged ConfigMap %s: %w", live.Name, err)
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
		return false, fmt.Errorf("failed to create ConfigMap %s: %w", made.Name, err)
	}
	return true, nil
}

// existing handles a ConfigMap that exists but is not in the cache. It is the plan's own ConfigMap, whose creation the
// cache has not observed yet, or an object of another owner without the operator's labels.
func (r *Reconciler) existing(ctx context.Context, p *semmoev1.PlacementPlan, name string, s *solved, layout func() (map[string]string, error)) (bool, error) {
	live := &corev1.ConfigMap{}
	if err := r.Live.Get(ctx, client.ObjectKey{Namespace: p.Namespace, Name: name}, live); err != nil {
		// If it was deleted in the meantime, the next reconciliation creates it.
		return false, client.IgnoreNotFound(err)
	}
	return r.ensureConfigMap(ctx, p, name, live, s, layout)
}
