package inspection

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// Reconcile records a result, starts the next attempt, and deletes obsolete Jobs. It returns the delay of the next
// reconciliation. If newJob is nil, no attempt is started.
func Reconcile(ctx context.Context, c client.Client, manager string, state State, newJob func(attempt int) *batchv1.Job, now time.Time) (time.Duration, error) {
	if job := state.Unrecorded; job != nil {
		report, err := json.Marshal(Report{*state.Report, state.Dataset})
		if err != nil {
			return 0, err
		}
		base := job.DeepCopy()
		metav1.SetMetaDataAnnotation(&job.ObjectMeta, semmoev1.AnnotationReport, string(report))
		if err := c.Patch(ctx, job, client.MergeFrom(base), client.FieldOwner(manager)); err != nil {
			return 0, fmt.Errorf("failed to record the result of the inspection: %w", err)
		}
	}
	for _, job := range state.Obsolete {
		if err := c.Delete(ctx, job, client.Preconditions{UID: new(job.UID)}, client.PropagationPolicy(metav1.DeletePropagationBackground)); client.IgnoreNotFound(err) != nil {
			return 0, fmt.Errorf("failed to delete inspection Job %s: %w", job.Name, err)
		}
	}
	if state.NextAttempt == 0 || newJob == nil {
		return 0, nil
	}
	if wait := state.NextAt.Sub(now); wait > 0 {
		return wait, nil
	}
	err := c.Create(ctx, newJob(state.NextAttempt), client.FieldOwner(manager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return 0, fmt.Errorf("failed to create the inspection Job: %w", err)
	}
	return 0, nil
}
