// SPDX-License-Identifier: Apache-2.0

package apply

import (
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/semmoe/operator/internal/kube/ownership"
)

// Adopt makes owner, of kind kind, the controller of an object that the operator created and that has no controller.
// This happens after a restore from a backup, because the new owner has another UID, or if the object was orphaned on
// purpose. Objects with a controller, or that the operator did not create, are left unchanged. It reports whether it
// wrote. The optimistic lock rejects decisions based on a stale cache.
func Adopt(ctx context.Context, c client.Client, manager string, owner metav1.Object, kind string, object client.Object) (bool, error) {
	if !ownership.IsOperatorManaged(object) || metav1.GetControllerOf(object) != nil || object.GetDeletionTimestamp() != nil {
		return false, nil
	}
	adopted := object.DeepCopyObject().(client.Object)
	adopted.SetOwnerReferences(slices.Concat(object.GetOwnerReferences(), ownership.ControllerReference(owner, kind)))
	if err := c.Patch(ctx, adopted, client.MergeFromWithOptions(object, client.MergeFromWithOptimisticLock{}), client.FieldOwner(manager)); err != nil {
		return false, fmt.Errorf("failed to adopt %T %s: %w", object, object.GetName(), err)
	}
	return true, nil
}
