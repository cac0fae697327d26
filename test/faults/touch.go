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

// Touch annotates one object of the namespace after the other, one each interval, until the context ends: a writer that knows
// nothing of the operator, makes each version that it has read an old one, and wakes it all the time. It returns how many
// times it wrote.
func Touch(ctx context.Context, c client.Client, namespace string, kinds []client.ObjectList, interval time.Duration) int {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	touched := 0
	for ctx.Err() == nil {
		objects := all(ctx, c, namespace, kinds)
		for _, object := range append(objects, nil) { // at least one tick, however few objects
			select {
			case <-ctx.Done():
				return touched
			case <-ticker.C:
			}
			if object == nil {
				continue
			}
			patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d"}}}`, ForeignAnnotation, touched)
			if c.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch), client.FieldOwner("foreign")) == nil { // it may be gone
				touched++
			}
		}
	}
	return touched
}

// all are the objects of the kinds; those of a kind that cannot be listed now are left out.
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
