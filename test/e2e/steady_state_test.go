// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/faults"
	"github.com/semmoe/operator/test/tier"
)

// TestSteadyStateWritesNothing checks that nothing is written, and nothing logged at default verbosity, in steady state,
// including by a manager that has just started.
func TestSteadyStateWritesNothing(t *testing.T) {
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny")
	create(t, moed)
	waitComplete(t, moed)
	waitReleases(t, moed)
	stop()

	counting := faults.New(faults.Schedule{})
	stop = startManager(t, namespace, counting)
	quiet := 10 * time.Second
	reconcileSteadily(t, counting, quiet, func() int { return touchPodsOnce(t, moed) })
	stop()
	if writes := counting.Writes(); writes != 0 {
		t.Errorf("%d writes in %v of steady state, want none:\n%s", writes, quiet, strings.Join(counting.LastWrites(), "\n"))
	}
	if logged := counting.Logged(); len(logged) != 0 {
		t.Errorf("reconciliations of the steady state logged:\n%s", strings.Join(logged, "\n"))
	}
}

// waitReleases waits for the only write that can follow after a MoEDeployment is complete: the operator records the
// engine's release when a pod answers. A pod that is too busy is asked again after a minute.
func waitReleases(t *testing.T, moed *semmoev1.MoEDeployment) {
	t.Helper()
	eventually(t, waitTimeout, "the engine's release is recorded", func() error {
		workloads := listWorkloads(t, moed)
		if len(workloads) == 0 {
			return errors.New("no workload exists")
		}
		for _, w := range workloads {
			if w.Annotations[semmoev1.AnnotationEngineRelease] == "" {
				return fmt.Errorf("workload %s has no release", w.Name)
			}
		}
		return nil
	})
}

// reconcileSteadily keeps reconciliations running for the given time: it calls touch and waits until the manager has
// reconciled, repeatedly. Without reconciliations, an absence of writes proves nothing. touch returns the number of
// touched objects.
func reconcileSteadily(t *testing.T, manager *faults.Injector, during time.Duration, touch func() int) {
	t.Helper()
	looked := func(before int) {
		t.Helper()
		eventually(t, waitTimeout, "the manager reconciles", func() error {
			if n := manager.Reconciliations(); n <= before {
				return fmt.Errorf("the number of reconciliations is still %d", n)
			}
			return nil
		})
	}
	looked(0)
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		before := manager.Reconciliations()
		if touch() == 0 {
			t.Fatal("no object was touched")
		}
		looked(before)
	}
}

// touchPods triggers reconciliations by changing fields of the engine pods that the operator does not manage.
func touchPods(t *testing.T, moed *semmoev1.MoEDeployment, during time.Duration) {
	t.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		touchPodsOnce(t, moed)
	}
}

// touchPodsOnce returns the number of touched pods.
func touchPodsOnce(t *testing.T, moed *semmoev1.MoEDeployment) (touched int) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"touched":%q}}}`, time.Now())
	for _, pod := range listEnginePods(t, moed) {
		if err := api.Patch(t.Context(), &pod, client.RawPatch(types.MergePatchType, patch)); err != nil {
			t.Logf("touch: %v", err)
			continue
		}
		touched++
	}
	return touched
}

// TestServesWithoutOperator checks that lost engine and router pods are recreated and requests are served while no
// operator runs.
func TestServesWithoutOperator(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	stop := startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Replicas = ptr.To[int32](2) })
	create(t, moed)
	waitComplete(t, moed)
	url := serviceURL(t, moed)
	stop()

	for _, component := range []string{semmoev1.ComponentEngine, semmoev1.ComponentRouter} {
		if err := api.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace(namespace), client.MatchingLabels{semmoev1.LabelComponent: component}); err != nil {
			t.Fatal(err)
		}
		eventually(t, waitTimeout, "requests are answered after the loss of every "+component, func() error { return sendRequest(t.Context(), url, "tiny") })
	}
}
