package childobjects

import (
	"context"
	"fmt"
	"reflect"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
)

// Writer executes the writes of decisions. It logs one line for each write that changed something.
type Writer struct {
	client.Client
	// Live bypasses the cache, which may be out of date.
	Live client.Reader
	// Recorder records the events of writes.
	Recorder events.EventRecorder
}

// Write executes one write. An error that a retry does not fix is a desired.RefusedError.
func (w Writer) Write(ctx context.Context, moed *semmoev1.MoEDeployment, write desired.Write) error {
	switch write := write.(type) {
	case desired.Create:
		return w.create(ctx, moed, write)
	case desired.Delete:
		return w.delete(ctx, moed, write)
	case desired.Annotate:
		return w.annotate(ctx, write)
	case desired.ApplyConfigMap:
		return w.applyConfigMap(ctx, moed, write)
	case revisions.ChangeWorkload:
		return w.changeWorkload(ctx, moed, write)
	case revisions.KeepPlan:
		return keepPlan(ctx, w.Client, write.Workload)
	}
	return fmt.Errorf("unknown write %T", write)
}

func (w Writer) create(ctx context.Context, moed *semmoev1.MoEDeployment, write desired.Create) error {
	object := write.Object.(client.Object)
	err := w.Create(ctx, object, client.FieldOwner(desired.Manager))
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil // the cache does not contain it yet
	case err != nil:
		return desired.Refusable(fmt.Errorf("failed to create %s %s: %w", kindOf(object), object.GetName(), err))
	}
	LogWrite(ctx, 0, "Created an object", object)
	w.record(moed, write.Event)
	return nil
}

// delete deletes this version of an object.
func (w Writer) delete(ctx context.Context, moed *semmoev1.MoEDeployment, write desired.Delete) error {
	object := write.Object.(client.Object)
	if object.GetDeletionTimestamp() != nil {
		return nil
	}
	only := client.Preconditions{UID: new(object.GetUID())}
	if write.Unchanged {
		if changed, err := SpecChanged(ctx, w.Live, moed); err != nil || changed {
			return err
		}
		only.ResourceVersion = new(object.GetResourceVersion())
	}
	err := w.Delete(ctx, object, only, client.PropagationPolicy(metav1.DeletePropagationBackground))
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return desired.Refusable(fmt.Errorf("failed to delete %s %s: %w", kindOf(object), object.GetName(), err))
	}
	LogWrite(ctx, 0, "Deleted an object", object)
	return nil
}

func (w Writer) annotate(ctx context.Context, write desired.Annotate) error {
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
	err := w.Patch(ctx, object, client.MergeFrom(base), client.FieldOwner(desired.Manager))
	switch {
	case apierrors.IsNotFound(err) && !write.Required:
		return nil
	case err != nil && write.Required:
		return fmt.Errorf("failed to annotate %s %s: %w", kindOf(object), object.GetName(), err)
	case err != nil:
		return desired.Refusable(fmt.Errorf("failed to annotate %s %s: %w", kindOf(object), object.GetName(), err))
	}
	level := 1
	if write.Required {
		level = 0
	}
	LogWrite(ctx, level, "Annotated an object", object, "annotations", write.Annotations)
	return nil
}

func (w Writer) applyConfigMap(ctx context.Context, moed *semmoev1.MoEDeployment, write desired.ApplyConfigMap) error {
	if err := Ensure(ctx, w.Client, w.Live, moed, &corev1.ConfigMap{}, write.Intent, coreac.ExtractConfigMap); err != nil {
		return desired.Refusable(fmt.Errorf("failed to reconcile ConfigMap %s: %w", *write.Intent.Name, err))
	}
	w.record(moed, write.Event)
	return nil
}

// record records the event of a write, if it has one.
func (w Writer) record(moed *semmoev1.MoEDeployment, event *desired.Event) {
	if event != nil {
		w.Recorder.Eventf(moed, event.Related, corev1.EventTypeNormal, event.Name, event.Action, "%s", event.Message)
	}
}

// kindOf returns the kind of a typed object.
func kindOf(object any) string { return reflect.TypeOf(object).Elem().Name() }

// LogWrite logs a write. Level 0 is for writes that change what serves or what is planned, level 1 for records.
func LogWrite(ctx context.Context, level int, message string, object desired.Object, more ...any) {
	logr.FromContextOrDiscard(ctx).V(level).Info(message,
		append([]any{"objectKind", kindOf(object), "objectNamespace", object.GetNamespace(), "objectName", object.GetName()}, more...)...)
}
