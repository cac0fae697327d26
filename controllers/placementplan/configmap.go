package placementplan

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
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

// dataOf is what the ConfigMap of a plan holds. It fails where that cannot be.
func dataOf(a *plan.Artifact, engine semmoev1.EngineType) (map[string]string, error) {
	data, err := bundle.ConfigMapData(a, string(engine))
	if err != nil {
		return nil, invalidf("PlanUnusable", "%v", err)
	}
	return data, nil
}

// configMap holds what an engine reads of a plan, and tells what the plan is worth.
func configMap(p *semmoev1.PlacementPlan, s *solved, data map[string]string) (*corev1.ConfigMap, error) {
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
			Name:            configMapName(p, s.PlanDigest),
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

// conflictError is an object of somebody else under the name of one of ours.
type conflictError struct{ message string }

func (e *conflictError) Error() string { return e.message }

// ensureConfigMap brings the ConfigMap of a plan into being. layout reads what it holds, and is called only where it is
// missing. It reports whether the ConfigMap is there.
func (r *Reconciler) ensureConfigMap(ctx context.Context, p *semmoev1.PlacementPlan, live *corev1.ConfigMap, s *solved, layout func() (map[string]string, error)) (bool, error) {
	switch {
	case live != nil && live.DeletionTimestamp != nil:
		return false, nil // it comes back when it has gone
	case live != nil && !metav1.IsControlledBy(live, p):
		owner := metav1.GetControllerOf(live)
		if owner != nil && owner.Kind == "PlacementPlan" && owner.Name == p.Name {
			return false, nil // of a plan of this name that was deleted: it is about to go with it
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
	made, err := configMap(p, s, data)
	if err != nil {
		return false, err
	}
	if err := r.Create(ctx, made, client.FieldOwner(manager)); err != nil {
		return false, fmt.Errorf("create ConfigMap %s: %w", made.Name, err)
	}
	return true, nil
}
