package desired

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/apply"
	"github.com/semmoe/operator/internal/outcome"
	"github.com/semmoe/operator/internal/owned"
)

// named is an apply configuration of a namespaced object.
type named interface {
	runtime.ApplyConfiguration
	GetName() *string
	GetNamespace() *string
}

// Ensure reads the object into live and brings it to intent. One of somebody else's is left as it is: that is an outcome.ForeignError.
// latest reads past the cache, and is asked where that has nothing.
func Ensure[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error)) error {
	return ensure(ctx, c, latest, moed, live, intent, extract, func() (bool, error) { return false, nil })
}

// EnsureLatest is Ensure that makes what is missing by the latest spec alone: the cache may show that an object is gone before it shows the
// spec that does not want it.
func EnsureLatest[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error)) error {
	return ensure(ctx, c, latest, moed, live, intent, extract, func() (bool, error) { return SpecChanged(ctx, latest, moed) })
}

// ensure is Ensure that leaves out what is missing where unwanted says so.
func ensure[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error), unwanted func() (bool, error)) error {
	key := client.ObjectKey{Namespace: *intent.GetNamespace(), Name: *intent.GetName()}
	err := c.Get(ctx, key, live)
	switch {
	case apierrors.IsNotFound(err):
		if skip, err := unwanted(); err != nil || skip {
			return err
		}
		err = checkUnseen(ctx, c, latest, moed, live, key)
		live = nil
	case err == nil:
		err = CheckOwn(c, moed, live)
	}
	if err != nil {
		return err
	}
	_, err = apply.Ensure(ctx, c, Manager, live, intent, extract)
	return err
}

// checkUnseen is CheckOwn of the object of a key, of the kind of like, that the cache does not show: it has the operator's own alone.
func checkUnseen(ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, like client.Object, key client.ObjectKey) error {
	kind, err := c.GroupVersionKindFor(like)
	if err != nil {
		return err
	}
	list := &metav1.PartialObjectMetadataList{} // the operator may list them, and needs no other right
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := latest.List(ctx, list, client.InNamespace(key.Namespace), client.MatchingFields{"metadata.name": key.Name}); err != nil {
		return fmt.Errorf("look for %s %s: %w", kind.Kind, key.Name, err)
	}
	for i := range list.Items {
		list.Items[i].SetGroupVersionKind(kind)
		if err := CheckOwn(c, moed, &list.Items[i]); err != nil {
			return err
		}
	}
	return nil
}

// CheckOwn fails with an outcome.ForeignError where an object that a child of the MoEDeployment is to be is somebody else's: the operator
// has not made it, and the MoEDeployment does not control it, or the operator has made it for another MoEDeployment, as the router's objects
// of "a" and those of "a-router" have one name. What was restored from a backup has lost its owner, or names it by the identity that it had.
func CheckOwn(c client.Client, moed *semmoev1.MoEDeployment, object client.Object) error {
	owner := metav1.GetControllerOf(object)
	ofAnother := owner != nil && owner.Kind == "MoEDeployment" && owner.Name != moed.Name
	if !ofAnother && (owned.Made(object) || metav1.IsControlledBy(object, moed)) {
		return nil
	}
	kind, err := c.GroupVersionKindFor(object)
	if err != nil {
		return err
	}
	if ofAnother { // which would make it again
		return &outcome.ForeignError{Message: fmt.Sprintf("%s %s exists and belongs to MoEDeployment %s: make one of the two MoEDeployments under another name",
			kind.Kind, object.GetName(), owner.Name)}
	}
	return &outcome.ForeignError{Message: fmt.Sprintf("%s %s exists and belongs to somebody else: delete it", kind.Kind, object.GetName())}
}
