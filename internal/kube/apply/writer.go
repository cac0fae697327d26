// SPDX-License-Identifier: Apache-2.0

package apply

import (
	"context"
	"fmt"
	"reflect"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/semmoe/operator/internal/kube/writes"
)

// Writer executes the writes of decisions. It logs one line for each write that changed something.
type Writer struct {
	client.Client
	// Manager is the field manager.
	Manager string
	// Recorder records the events of writes.
	Recorder events.EventRecorder
}

// WriteAll executes writes in order, until one fails.
func (w Writer) WriteAll(ctx context.Context, of client.Object, ordered []writes.Write) error {
	for _, write := range ordered {
		if err := w.Write(ctx, of, write); err != nil {
			return err
		}
	}
	return nil
}

// Write executes one write for an object that is reconciled. An error that a retry does not fix is a
// writes.RefusedError.
func (w Writer) Write(ctx context.Context, of client.Object, write writes.Write) error {
	switch write := write.(type) {
	case writes.Create:
		return w.create(ctx, of, write)
	case writes.Delete:
		return w.delete(ctx, write)
	case writes.Annotate:
		return w.annotate(ctx, write)
	}
	return fmt.Errorf("unknown write %T", write)
}

func (w Writer) create(ctx context.Context, of client.Object, write writes.Create) error {
	object := write.Object.(client.Object)
	err := w.Create(ctx, object, client.FieldOwner(w.Manager))
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil // the cache does not contain it yet
	case err != nil:
		return writes.Refusable(fmt.Errorf("failed to create %s %s: %w", kindOf(object), object.GetName(), err))
	}
	LogWrite(ctx, 0, "Created an object", object)
	w.Record(of, write.Event)
	return nil
}

// delete deletes this version of an object.
func (w Writer) delete(ctx context.Context, write writes.Delete) error {
	object := write.Object.(client.Object)
	if object.GetDeletionTimestamp() != nil {
		return nil
	}
	only := client.Preconditions{UID: new(object.GetUID())}
	if write.Unchanged {
		only.ResourceVersion = new(object.GetResourceVersion())
	}
	err := w.Delete(ctx, object, only, client.PropagationPolicy(metav1.DeletePropagationBackground))
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return writes.Refusable(fmt.Errorf("failed to delete %s %s: %w", kindOf(object), object.GetName(), err))
	}
	LogWrite(ctx, 0, "Deleted an object", object)
	return nil
}

func (w Writer) annotate(ctx context.Context, write writes.Annotate) error {
	object := write.Object.(client.Object)
	base := object.DeepCopyObject().(client.Object)
	annotations := object.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	for key, value := range write.Annotations {
		annotations[key] = value
	}
	object.SetAnnotations(annotations)
	err := w.Patch(ctx, object, client.MergeFrom(base), client.FieldOwner(w.Manager))
	switch {
	case apierrors.IsNotFound(err) && !write.Required:
		return nil
	case err != nil && write.Required:
		return fmt.Errorf("failed to annotate %s %s: %w", kindOf(object), object.GetName(), err)
	case err != nil:
		return writes.Refusable(fmt.Errorf("failed to annotate %s %s: %w", kindOf(object), object.GetName(), err))
	}
	level := 1
	if write.Required {
		level = 0
	}
	LogWrite(ctx, level, "Annotated an object", object, "annotations", write.Annotations)
	return nil
}

// Record records the event of a write, if it has one.
func (w Writer) Record(of client.Object, event *writes.Event) {
	if event != nil {
		w.Recorder.Eventf(of, event.Related, corev1.EventTypeNormal, event.Name, event.Action, "%s", event.Message)
	}
}

// kindOf returns the kind of a typed object.
func kindOf(object any) string { return reflect.TypeOf(object).Elem().Name() }

// LogWrite logs a write. Level 0 is for writes that change what serves or what is planned, level 1 for records.
func LogWrite(ctx context.Context, level int, message string, object writes.Object, more ...any) {
	logr.FromContextOrDiscard(ctx).V(level).Info(message,
		append([]any{"objectKind", kindOf(object), "objectNamespace", object.GetNamespace(), "objectName", object.GetName()}, more...)...)
}
