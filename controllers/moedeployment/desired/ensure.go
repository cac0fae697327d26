package desired

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/apply"
)

// named is an apply configuration of a namespaced object.
type named interface {
	runtime.ApplyConfiguration
	GetName() *string
	GetNamespace() *string
}

// Ensure reads the object into live and brings it to intent.
func Ensure[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, live P, intent A, extract func(*O, string) (A, error)) error {
	err := c.Get(ctx, client.ObjectKey{Namespace: *intent.GetNamespace(), Name: *intent.GetName()}, live)
	if apierrors.IsNotFound(err) {
		live, err = nil, nil
	}
	if err != nil {
		return err
	}
	_, err = apply.Ensure(ctx, c, Manager, live, intent, extract)
	return err
}

// EnsureLatest is Ensure that makes what is missing by the latest spec alone: the cache may show that an object is gone before it shows the
// spec that does not want it.
func EnsureLatest[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error)) error {
	err := c.Get(ctx, client.ObjectKey{Namespace: *intent.GetNamespace(), Name: *intent.GetName()}, live)
	if apierrors.IsNotFound(err) {
		if changed, err := SpecChanged(ctx, latest, moed); err != nil || changed {
			return err
		}
	}
	return Ensure(ctx, c, live, intent, extract)
}
