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
	"github.com/semmoe/operator/internal/kube/writes"
)

// createWorkload creates a workload unless the spec or its plans have changed since they were read. The error of a change
// prevents later writes, which expect the workload; the reconciliation is repeated.
func (w Writer) createWorkload(ctx context.Context, moed *semmoev1.MoEDeployment, write revisions.CreateWorkload) error {
	for _, plan := range write.Plans {
		if err := w.checkPlan(ctx, plan); err != nil {
			return fmt.Errorf("failed to create workload %s: %w", write.Workload.Name, err)
		}
	}
	return w.Write(ctx, moed, writes.Create{Object: write.Workload.Object, Event: write.Event})
}

// checkPlan returns an error if a plan has changed since it was read. A deleted plan holds no record of a failure.
func (w Writer) checkPlan(ctx context.Context, plan *semmoev1.PlacementPlan) error {
	var list semmoev1.PlacementPlanList // RBAC allows list; get is not needed
	if err := w.Live.List(ctx, &list, client.InNamespace(plan.Namespace), client.MatchingFields{"metadata.name": plan.Name}); err != nil {
		return fmt.Errorf("failed to check plan %s: %w", plan.Name, err)
	}
	for i := range list.Items {
		if list.Items[i].ResourceVersion != plan.ResourceVersion {
			return changedSinceRead("placementplans", plan.Name)
		}
	}
	return nil
}

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
