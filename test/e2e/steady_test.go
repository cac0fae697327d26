package e2e

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/faults"
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

	counting := faults.New(faults.Schedule{})
	startManager(t, namespace, counting)
	quiet := 10 * time.Second
	touchPods(t, moed, quiet)
	if writes := counting.Writes(); writes != 0 {
		t.Errorf("%d writes in %v of steady state, want none", writes, quiet)
	}
}

// touchPods lets reconciliations go on: it changes the engine pods in fields that are not ours.
func touchPods(t *testing.T, moed *semmoev1.MoEDeployment, during time.Duration) {
	t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		for _, pod := range listEnginePods(t, moed) {
			pod.Annotations["touched"] = time.Now().String()
			if err := api.Update(t.Context(), &pod); err != nil {
				t.Logf("touch: %v", err)
			}
		}
	}
}

// With no operator at all, a lost engine pod and a lost router pod come back, and requests are served.
func TestServesWithoutOperator(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	url := reach(t, moed)
	stop()

	for _, component := range []string{semmoev1.ComponentEngine, semmoev1.ComponentRouter} {
		if err := api.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: component}); err != nil {
			t.Fatal(err)
		}
		eventually(t, patience, "served again after the loss of every "+component, func() error { return ask(t.Context(), url, "tiny") })
	}
}
