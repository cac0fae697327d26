package e2e

import (
	"testing"
	"time"
)

// In steady state nothing is written, also not by a manager that has just started.
func TestSteadyStateWritesNothing(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	waitComplete(t, moed)
	stop()

	counting := newCrashing(0)
	startManager(t, namespace, counting.newClient)
	// Reconciliations go on meanwhile: somebody touches children in fields that are not ours.
	quiet := 10 * time.Second
	for end := time.Now().Add(quiet); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		for _, pod := range listEnginePods(t, moed) {
			pod.Annotations["touched"] = time.Now().String()
			if err := api.Update(t.Context(), &pod); err != nil {
				t.Logf("touch: %v", err)
			}
		}
	}
	if writes := counting.count(); writes != 0 {
		t.Errorf("%d writes in %v of steady state, want none", writes, quiet)
	}
}
