package faults

import (
	"errors"
	"testing"

	"github.com/go-logr/logr/funcr"
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
	if n := injector.Reconciliations(); n != 2 {
		t.Errorf("%d reconciliations, want 2", n)
	}
	if n := injector.Panics(); n != 1 {
		t.Errorf("%d panics, want 1", n)
	}
}
