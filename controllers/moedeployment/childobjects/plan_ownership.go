// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/apply"
)

// keepPlan adds a workload to the owners of its plan's ConfigMap. The garbage collector removes deleted owners, and
// deletes the ConfigMap with its last owner.
func keepPlan(ctx context.Context, c client.Client, w *revisions.Workload) error {
	name := planConfigMap(w)
	if name == "" || w.UID == "" {
		return nil
	}
	live := &corev1.ConfigMap{}
	// The ConfigMap may be large, and is only read.
	if err := c.Get(ctx, client.ObjectKey{Namespace: w.Namespace, Name: name}, live, client.UnsafeDisableDeepCopy); err != nil {
		return client.IgnoreNotFound(err)
	}
	owns := func(owner metav1.OwnerReference) bool { return owner.UID == w.UID }
	// A ConfigMap without an owner was restored from a backup, and its plan is about to adopt it.
	if live.DeletionTimestamp != nil || len(live.OwnerReferences) == 0 || slices.ContainsFunc(live.OwnerReferences, owns) {
		return nil
	}
	kind, err := c.GroupVersionKindFor(w.Object)
	if err != nil {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":             live.UID, // never a newer ConfigMap of the same name
		"ownerReferences": []metav1.OwnerReference{{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Name: w.Name, UID: w.UID}},
	}})
	if err != nil {
		return err
	}
	// This patch adds one owner, regardless of the other owners. Server-side apply would remove owners that other
	// workloads added.
	kept := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: name}}
	err = c.Patch(ctx, kept, client.RawPatch(types.StrategicMergePatchType, patch), client.FieldOwner(desired.Manager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("failed to make workload %s an owner of ConfigMap %s: %w", w.Name, name, err)
	}
	if err == nil {
		apply.LogWrite(ctx, 1, "Added an owner", kept, "owner", w.Name)
	}
	return nil
}

// planConfigMap returns the name of the plan's ConfigMap that a workload's pods mount, or "".
func planConfigMap(w *revisions.Workload) string {
	for _, volume := range w.Template().Spec.Volumes {
		if volume.Name == semmoev1.PlanVolume && volume.ConfigMap != nil {
			return volume.ConfigMap.Name
		}
	}
	return ""
}
