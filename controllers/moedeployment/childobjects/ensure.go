// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"fmt"
	"reflect"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/result"
)

// named is an apply configuration of a namespaced object.
type named interface {
	runtime.ApplyConfiguration
	GetName() *string
	GetNamespace() *string
}

// Ensure reads the object into live and applies intent. An object of another owner is left unchanged and results in an
// result.ForeignError. latest bypasses the cache, and is queried if the cache lacks the object.
func Ensure[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error)) error {
	return ensure(ctx, c, latest, moed, live, intent, extract, func() (bool, error) { return false, nil })
}

// EnsureLatest is Ensure, but creates a missing object only if the latest spec needs it: the cache may show the
// deletion of an object before the spec that removed it.
func EnsureLatest[O any, P interface {
	*O
	client.Object
}, A named](ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, live P, intent A, extract func(*O, string) (A, error)) error {
	return ensure(ctx, c, latest, moed, live, intent, extract, func() (bool, error) { return SpecChanged(ctx, latest, moed) })
}

// ensure implements Ensure. It does not create a missing object if unwanted returns true.
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
	created := live == nil
	wrote, err := apply.Ensure(ctx, c, desired.Manager, live, intent, extract)
	if wrote && err == nil {
		logr.FromContextOrDiscard(ctx).V(1).Info("Applied an object",
			"objectKind", reflect.TypeFor[O]().Name(), "objectNamespace", key.Namespace, "objectName", key.Name, "created", created)
	}
	return err
}

// checkUnseen runs CheckOwn on an object that the cache does not contain, because the cache only holds the operator's
// objects.
func checkUnseen(ctx context.Context, c client.Client, latest client.Reader, moed *semmoev1.MoEDeployment, like client.Object, key client.ObjectKey) error {
	kind, err := c.GroupVersionKindFor(like)
	if err != nil {
		return err
	}
	list := &metav1.PartialObjectMetadataList{} // RBAC allows list; get is not needed
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	if err := latest.List(ctx, list, client.InNamespace(key.Namespace), client.MatchingFields{"metadata.name": key.Name}); err != nil {
		return fmt.Errorf("failed to check for %s %s: %w", kind.Kind, key.Name, err)
	}
	for i := range list.Items {
		list.Items[i].SetGroupVersionKind(kind)
		if err := CheckOwn(c, moed, &list.Items[i]); err != nil {
			return err
		}
	}
	return nil
}

// CheckOwn returns an result.ForeignError if an existing object with the name of a child has another owner: either the
// operator did not create it and the MoEDeployment does not control it, or the operator created it for another
// MoEDeployment (the router objects of "a" and the objects of "a-router" share names). A restored object has no owner,
// or an owner reference with the old UID, and is accepted.
func CheckOwn(c client.Client, moed *semmoev1.MoEDeployment, object client.Object) error {
	owner := metav1.GetControllerOf(object)
	ofAnother := owner != nil && owner.Kind == "MoEDeployment" && owner.Name != moed.Name
	if !ofAnother && (ownership.IsOperatorManaged(object) || metav1.IsControlledBy(object, moed)) {
		return nil
	}
	kind, err := c.GroupVersionKindFor(object)
	if err != nil {
		return err
	}
	if ofAnother { // the other MoEDeployment would recreate it
		return &result.ForeignError{Message: fmt.Sprintf("%s %s exists and belongs to MoEDeployment %s: recreate one of the two MoEDeployments under another name",
			kind.Kind, object.GetName(), owner.Name)}
	}
	return &result.ForeignError{Message: fmt.Sprintf("%s %s exists and belongs to another owner: delete it", kind.Kind, object.GetName())}
}
