// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// ForeignAnnotation is the annotation that Touch writes.
const ForeignAnnotation = "foreign.example.com/touched"

// Touch annotates the objects of the namespace one after the other, one per interval, until the context ends. It
// simulates another controller: each write makes the operator's cached version stale and triggers a reconciliation.
// Touch returns the number of its writes.
func Touch(ctx context.Context, c client.Client, namespace string, kinds []client.ObjectList, interval time.Duration) int {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	touched := 0
	for ctx.Err() == nil {
		objects := all(ctx, c, namespace, kinds)
		for _, object := range append(objects, nil) { // wait for at least one tick, even without objects
			select {
			case <-ctx.Done():
				return touched
			case <-ticker.C:
			}
			if object == nil {
				continue
			}
			patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d"}}}`, ForeignAnnotation, touched)
			if c.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch), client.FieldOwner("foreign")) == nil { // the object may be deleted
				touched++
			}
		}
	}
	return touched
}

// all lists the objects of the kinds. It skips kinds that cannot be listed.
func all(ctx context.Context, c client.Client, namespace string, kinds []client.ObjectList) []client.Object {
	var objects []client.Object
	for _, list := range kinds {
		fresh := list.DeepCopyObject().(client.ObjectList)
		if c.List(ctx, fresh, client.InNamespace(namespace)) != nil {
			continue
		}
		_ = meta.EachListItem(fresh, func(item runtime.Object) error { // the function returns no error
			objects = append(objects, item.(client.Object))
			return nil
		})
	}
	return objects
}
