// SPDX-License-Identifier: Apache-2.0

// Package apply writes objects by server-side apply, and only if they differ.
//
// Invariant: whether to write depends only on the live object, through its fields owned by the operator's field
// manager. There is no memory, so a restarted operator writes nothing in steady state.
package apply

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Ensure applies the fields of intent, owned by the field manager, to the live object. live is nil if the object does
// not exist; extract is client-go's Extract function of the type. It reports whether it wrote.
//
// If another manager takes over a field, the field disappears from the owned fields, so the change is detected and
// reverted.
func Ensure[O any, A runtime.ApplyConfiguration](ctx context.Context, c client.Client, manager string, live *O, intent A, extract func(*O, string) (A, error)) (bool, error) {
	if live != nil {
		current, err := extract(live, manager)
		if err != nil {
			return false, fmt.Errorf("failed to read the fields owned by %s: %w", manager, err)
		}
		same, err := equal(current, intent)
		if err != nil || same {
			return false, err
		}
	}
	return true, c.Apply(ctx, intent, client.FieldOwner(manager), client.ForceOwnership)
}

func equal(a, b any) (bool, error) {
	left, err := json.Marshal(a)
	if err != nil {
		return false, err
	}
	right, err := json.Marshal(b)
	if err != nil {
		return false, err
	}
	return bytes.Equal(left, right), nil
}
