// SPDX-License-Identifier: Apache-2.0

// Package lookup reads objects that are in no cache, or not yet, and events.
package lookup

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Find reads an object that another object references, without the cache if the cache lacks it, and reports whether it
// exists. Caches of different kinds are not synchronized: an object may appear before the one that it references, even
// if that was created first.
func Find(ctx context.Context, cache, live client.Reader, key client.ObjectKey, into client.Object) (bool, error) {
	if err := cache.Get(ctx, key, into); !apierrors.IsNotFound(err) {
		return err == nil, err
	}
	return FindLive(ctx, live, key, into)
}

// FindLive is Find without a cache, for kinds of which the cache contains only the operator's objects. It returns false
// for an invalid name such as "a/b": the client rejects the request, and a retry would never succeed.
func FindLive(ctx context.Context, live client.Reader, key client.ObjectKey, into client.Object) (bool, error) {
	if len(content.IsPathSegmentName(key.Name)) > 0 {
		return false, nil
	}
	err := live.Get(ctx, key, into)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
