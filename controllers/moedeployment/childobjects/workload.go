package childobjects

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// ChangeWorkload applies f to the workload and patches the difference. The optimistic lock rejects decisions that are based on
// a stale cache.
func ChangeWorkload(ctx context.Context, c client.Client, w *revisions.Workload, what string, f func()) error {
	object := w.Object.(client.Object)
	base := object.DeepCopyObject().(client.Object)
	f()
	if err := c.Patch(ctx, object, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}), client.FieldOwner(desired.Manager)); err != nil {
		return fmt.Errorf("failed to %s workload %s: %w", what, w.Name, err)
	}
	level := 0
	if what == "annotate" {
		level = 1
	}
	LogWrite(ctx, level, "Changed a workload", object, "change", what, "replicas", *w.Replicas(), "rollout", w.Annotations[semmoev1.AnnotationRollout])
	return nil
}

// RecordRecreations records the recreations of replicas in annotations of the workloads.
func RecordRecreations(ctx context.Context, c client.Client, workloads []*revisions.Workload, leaders, workers []*corev1.Pod, now time.Time) error {
	for _, w := range workloads {
		counted := revisions.CountRecreations(w, leaders, workers, now)
		text, err := json.Marshal(counted) // in the order of the keys
		if err != nil {
			return err
		}
		before, has := w.Annotations[semmoev1.AnnotationRecreatedReplicas]
		switch {
		case len(counted) == 0 && !has, before == string(text):
			continue
		case len(counted) == 0:
			err = ChangeWorkload(ctx, c, w, "annotate", func() { delete(w.Annotations, semmoev1.AnnotationRecreatedReplicas) })
		default:
			err = ChangeWorkload(ctx, c, w, "annotate", func() { metav1.SetMetaDataAnnotation(w.ObjectMeta, semmoev1.AnnotationRecreatedReplicas, string(text)) })
		}
		if err != nil {
			return err
		}
	}
	return nil
}
