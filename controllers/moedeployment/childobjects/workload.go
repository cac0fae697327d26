// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/apply"
)

// changeWorkload patches a workload. The optimistic lock rejects decisions that are based on a stale cache.
func (w Writer) changeWorkload(ctx context.Context, moed *semmoev1.MoEDeployment, write revisions.ChangeWorkload) error {
	object := write.Workload.Object.(client.Object)
	base := object.DeepCopyObject().(client.Object)
	write.Apply()
	if err := w.Patch(ctx, object, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}), client.FieldOwner(desired.Manager)); err != nil {
		return fmt.Errorf("failed to change workload %s: %w", object.GetName(), err)
	}
	level := 1
	if _, step := write.Annotations[semmoev1.AnnotationRollout]; step || write.Replicas != nil {
		level = 0
	}
	apply.LogWrite(ctx, level, "Changed a workload", object, "replicas", *write.Workload.Replicas(), "annotations", write.Annotations)
	w.shared().Record(moed, write.Event)
	return nil
}
