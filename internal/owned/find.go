package owned

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Find reads an object that another one names, past the cache where that does not have it, and tells whether it exists. Caches see each kind
// by itself: an object may be seen before the one that it names, although that was made first. A name that no object can have, such as "a/b",
// is of none: no request can be made for it, and its failure would be tried again for ever.
func Find(ctx context.Context, cache, live client.Reader, key client.ObjectKey, into client.Object) (bool, error) {
	err := cache.Get(ctx, key, into)
	if apierrors.IsNotFound(err) && len(content.IsPathSegmentName(key.Name)) == 0 {
		err = live.Get(ctx, key, into)
	}
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
