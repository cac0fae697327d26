// SPDX-License-Identifier: Apache-2.0

// Package writes contains the writes that controllers decide on, as values. Package apply executes them.
package writes

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/semmoe/operator/internal/kube/result"
)

// Write is one write that a decision wants: one of the types below, or a type of one controller. A decision lists its
// writes in the order in which they must happen, so that a manager that stops between two of them loses nothing.
type Write any

// Object is an API object. It has the methods of client.Object, which decisions do not import.
type Object interface {
	metav1.Object
	runtime.Object
}

// Create creates an object. Names follow from the inputs, so an object that exists already is left as it is.
type Create struct {
	Object Object
	// Event is recorded if the object was created; nil for none.
	Event *Event
}

// Delete deletes an object by its UID, with its dependents.
type Delete struct {
	Object Object
	// Unchanged limits the deletion to an object that has not changed since it was read.
	Unchanged bool
}

// Annotate sets annotations of an object.
type Annotate struct {
	Object      Object
	Annotations map[string]string
	// Required reports that later writes would lose information without the annotations: they must not happen if this
	// write fails for any reason.
	Required bool
}

// Event is an event of the object that is reconciled.
type Event struct {
	// Name is the reason of the event.
	Name, Action, Message string
	// Related is the second object of the event; nil for none.
	Related runtime.Object
}

// RefusedError reports that the API server rejects a write (by an admission rule or a quota), or that an object of
// another owner has the same name. A retry does not fix it.
type RefusedError struct{ error }

func (e *RefusedError) Unwrap() error { return e.error }

// Refusable wraps an error as a RefusedError if a retry does not fix it.
func Refusable(err error) error {
	if result.PermanentErrorText(err) == "" {
		return err
	}
	return &RefusedError{err}
}

// Foreign returns a RefusedError for an object of another owner that has the name of a child.
func Foreign(format string, args ...any) error {
	return &RefusedError{&result.ForeignError{Message: fmt.Sprintf(format, args...)}}
}

// IsRefused reports whether an error is or wraps a RefusedError.
func IsRefused(err error) bool {
	var refused *RefusedError
	return errors.As(err, &refused)
}
