package owned

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Find reads an object that another one names, past the cache where that does not have it, and tells whether it exists. Caches see each kind
// by itself: an object may be seen before the one that it names, although that was made first.
func Find(ctx context.Context, cache, live client.Reader, key client.ObjectKey, into client.Object) (bool, error) {
	if err := cache.Get(ctx, key, into); !apierrors.IsNotFound(err) {
		return err == nil, err
	}
	return FindLive(ctx, live, key, into)
}

// FindLive is Find without a cache, for kinds of which the cache has the operator's own alone. A name that no object can have, such as "a/b",
// is of none: no request can be made for it, and its failure would be tried again for ever.
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
