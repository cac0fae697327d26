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
	return ensure(ctx, c, live, intent, extract, func() (bool, error) { return false, nil })
}

// EnsureLatest is Ensure that makes what is missing by the latest spec alone: the cache may show that an object is gone before it shows the
// spec that does not want it.
func EnsureLatest[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error)) error {
	return ensure(ctx, c, live, intent, extract, func() (bool, error) { return SpecChanged(ctx, latest, moed) })
}

// ensure is Ensure that leaves out what is missing where unwanted says so.
func ensure[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, live P, intent A, extract func(*O, string) (A, error), unwanted func() (bool, error)) error {
	err := c.Get(ctx, client.ObjectKey{Namespace: *intent.GetNamespace(), Name: *intent.GetName()}, live)
	if apierrors.IsNotFound(err) {
		if skip, err := unwanted(); err != nil || skip {
			return err
		}
		live, err = nil, nil
	}
	if err != nil {
		return err
	}
	_, err = apply.Ensure(ctx, c, Manager, live, intent, extract)
	return err
}
