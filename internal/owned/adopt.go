package owned

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Ours are the labels of every object of the operator.
func Ours() map[string]string {
	return map[string]string{managedByLabel: managedBy}
}

// Made tells that the operator has made an object.
func Made(object metav1.Object) bool { return object.GetLabels()[managedByLabel] == managedBy }

// Adopt makes owner, of a kind of ours, the controller of an object that the operator has made and nobody controls any more: one that
// was restored from a backup, which cannot know the identities of owners that are made anew, or was left behind on purpose. Other
// objects are left alone: they belong to somebody, or somebody else has made them. It reports whether it wrote. The lock refuses what
// was decided on a stale view.
func Adopt(ctx context.Context, c client.Client, manager string, owner metav1.Object, kind string, object client.Object) (bool, error) {
	if !Made(object) || metav1.GetControllerOf(object) != nil || object.GetDeletionTimestamp() != nil {
		return false, nil
	}
	adopted := object.DeepCopyObject().(client.Object)
	adopted.SetOwnerReferences(slices.Concat(object.GetOwnerReferences(), ControllerReference(owner, kind)))
	if err := c.Patch(ctx, adopted, client.MergeFromWithOptions(object, client.MergeFromWithOptimisticLock{}), client.FieldOwner(manager)); err != nil {
		return false, fmt.Errorf("adopt %T %s: %w", object, object.GetName(), err)
	}
	return true, nil
}
