package revisions

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
)

// KeepPlan makes a workload an owner of the ConfigMap of the plan that its pods mount, beside the plan: pods that are made after that was
// deleted find it still. The garbage collector takes out the owners that are gone, and deletes the ConfigMap with the last of them.
func KeepPlan(ctx context.Context, c client.Client, w *Workload) error {
	name := planConfigMap(w)
	if name == "" || w.UID == "" {
		return nil
	}
	live := &corev1.ConfigMap{}
	// It may be large, and is only looked at.
	if err := c.Get(ctx, client.ObjectKey{Namespace: w.Namespace, Name: name}, live, client.UnsafeDisableDeepCopy); err != nil {
		return client.IgnoreNotFound(err)
	}
	owns := func(owner metav1.OwnerReference) bool { return owner.UID == w.UID }
	// One without any owner was restored, and its plan is about to take it back.
	if live.DeletionTimestamp != nil || len(live.OwnerReferences) == 0 || slices.ContainsFunc(live.OwnerReferences, owns) {
		return nil
	}
	kind, err := c.GroupVersionKindFor(w.Object)
	if err != nil {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":             live.UID, // never one of the same name that has come since
		"ownerReferences": []metav1.OwnerReference{{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Name: w.Name, UID: w.UID}},
	}})
	if err != nil {
		return err
	}
	// Such a patch adds one owner, whoever the others are by now. What is applied would take out those that other workloads have added.
	kept := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: name}}
	err = c.Patch(ctx, kept, client.RawPatch(types.StrategicMergePatchType, patch), client.FieldOwner(desired.Manager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("make workload %s an owner of ConfigMap %s: %w", w.Name, name, err)
	}
	return nil
}

// planConfigMap is the ConfigMap of the plan that a workload's pods mount; empty where they have none.
func planConfigMap(w *Workload) string {
	for _, volume := range w.Template().Spec.Volumes {
		if volume.Name == semmoev1.PlanVolume && volume.ConfigMap != nil {
			return volume.ConfigMap.Name
		}
	}
	return ""
}
