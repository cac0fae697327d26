// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
)

// TestReconciliations checks that log entries are counted with names and values, and if the next logger discards their
// level.
func TestReconciliations(t *testing.T) {
	injector := New(Schedule{})
	log := injector.Logger(funcr.New(func(_, _ string) {}, funcr.Options{}))
	log.V(reconcilingLevel).Info(reconciling)
	log.WithName("plans").WithValues("name", "a").V(reconcilingLevel).Info(reconciling)
	log.Info("Starting Controller")
	log.Error(errors.New("panic: x "+recovered), "Reconciler error")
	log.Error(errors.New("conflict"), "Reconciler error")
	inside := log.WithValues("reconcileID", "1").WithName("m")
	inside.Info("Changed a workload", "replicas", 2)
	inside.V(1).Info("Added an owner")
	inside.Error(errors.New("conflict"), "Reconciler error")
	if diff := cmp.Diff([]string{"Changed a workload[replicas 2]", "Reconciler error[error conflict]"}, injector.Logged()); diff != "" {
		t.Errorf("entries of reconciliations (-want +got):\n%s", diff)
	}
	if n := injector.Reconciliations(); n != 2 {
		t.Errorf("%d reconciliations, want 2", n)
	}
	if n := injector.Panics(); n != 1 {
		t.Errorf("%d panics, want 1", n)
	}
}
