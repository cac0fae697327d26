// SPDX-License-Identifier: Apache-2.0

package childobjects

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/apply"
	"github.com/semmoe/operator/internal/kube/writes"
)

// Writer executes the writes of decisions. It logs one line for each write that changed something.
type Writer struct {
	client.Client
	// Live bypasses the cache, which may be out of date.
	Live client.Reader
	// Recorder records the events of writes.
	Recorder events.EventRecorder
}

// Write executes one write. An error that a retry does not fix is a writes.RefusedError.
func (w Writer) Write(ctx context.Context, moed *semmoev1.MoEDeployment, write writes.Write) error {
	switch write := write.(type) {
	case desired.ApplyConfigMap:
		return w.applyConfigMap(ctx, moed, write)
	case revisions.CreateWorkload:
		return w.createWorkload(ctx, moed, write)
	case revisions.ChangeWorkload:
		return w.changeWorkload(ctx, moed, write)
	case revisions.KeepPlan:
		return keepPlan(ctx, w.Client, write.Workload)
	case writes.Create: // the latest spec may have removed the object
		if err := w.checkSpec(ctx, moed); err != nil {
			return err
		}
	case writes.Delete:
		if !write.Unchanged {
			break
		}
		if changed, err := SpecChanged(ctx, w.Live, moed); err != nil || changed {
			return err // the latest spec may need the object
		}
	}
	return w.shared().Write(ctx, moed, write)
}

// shared returns the writer of all controllers.
func (w Writer) shared() apply.Writer {
	return apply.Writer{Client: w.Client, Manager: desired.Manager, Recorder: w.Recorder}
}

func (w Writer) applyConfigMap(ctx context.Context, moed *semmoev1.MoEDeployment, write desired.ApplyConfigMap) error {
	if err := Ensure(ctx, w.Client, w.Live, moed, &corev1.ConfigMap{}, write.Intent, coreac.ExtractConfigMap); err != nil {
		return writes.Refusable(fmt.Errorf("failed to reconcile ConfigMap %s: %w", *write.Intent.Name, err))
	}
	w.shared().Record(moed, write.Event)
	return nil
}
