// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/test/tier"
)

// TestHardwareProfile serves with a plan that contains a user-provided hardware profile. Loss of its ConfigMap is
// reported and has no other effect. Other content leads to another plan.
func TestHardwareProfile(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	storedProfile(t, namespace)
	profiles := func(name string) *corev1.ConfigMap {
		machines := *hardware.DefaultProfile()
		machines.Name, machines.AllToAll.PerMicrosecond = name, 1e4
		text, err := json.Marshal(machines)
		if err != nil {
			t.Fatal(err)
		}
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "gpus"}, Data: map[string]string{"hardware.json": string(text)}}
	}
	moed := storyDeployment(namespace, func(m *semmoev1.MoEDeployment) {
		m.Spec.Placement.Hardware = &semmoev1.HardwareReference{ConfigMap: &semmoev1.HardwareConfigMap{Name: "gpus"}}
	})
	nudge := nudger(t, namespace)
	wait := func(kind string, status metav1.ConditionStatus, reason string, parts ...string) {
		t.Helper()
		eventually(t, waitTimeout, kind+" is "+string(status)+" "+reason, func() error {
			nudge() // without waiting for the periodic poll
			current := get(t, moed)
			return conditionIs(current.Status.Conditions, current.Generation, kind, status, reason, parts...)
		})
	}
	create(t, moed)
	wait(semmoev1.ConditionPlanned, metav1.ConditionFalse, "HardwareProfileNotFound", `there is no ConfigMap "gpus"`)
	gpus := profiles("mine")
	create(t, gpus)
	wait(semmoev1.ConditionPlanned, metav1.ConditionTrue, "Planned")
	carries := func(name string) {
		t.Helper()
		status := get(t, moed).Status
		if text := getConfigMap(t, namespace, status.Plan+"-"+status.PlanDigest).Data[plan.HardwareFile]; !strings.Contains(text, `"name":"`+name+`"`) {
			t.Errorf("the serving plan has the hardware profile %.60q, want %s", text, name)
		}
	}
	planned := waitPlanned(t, moed)
	carries("mine")

	pods := podUIDs(t, moed)
	deleteAndWait(t, gpus)
	wait(semmoev1.ConditionDegraded, metav1.ConditionTrue, "HardwareProfileNotFound", "spec.placement.hardware")
	wait(semmoev1.ConditionReady, metav1.ConditionTrue, "Serving")
	create(t, profiles("mine"))
	wait(semmoev1.ConditionDegraded, metav1.ConditionFalse, "AsExpected")
	if after := get(t, moed); after.Status.PlanDigest != planned.Status.PlanDigest || after.Status.Plan != planned.Status.Plan {
		t.Errorf("the serving plan changed from %s (%s) to %s (%s)", planned.Status.Plan, planned.Status.PlanDigest, after.Status.Plan, after.Status.PlanDigest)
	}
	if diff := cmp.Diff(pods, podUIDs(t, moed)); diff != "" {
		t.Errorf("pods were replaced:\n%s", diff)
	}

	first := &semmoev1.PlacementPlan{}
	if err := api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: planned.Status.Plan}, first); err != nil {
		t.Fatal(err)
	}
	before := first.Spec.HardwareDigest
	changed := getConfigMap(t, namespace, "gpus")
	changed.Data = profiles("newer").Data
	if err := api.Update(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	waitOtherPlan(t, moed, planned.Status.PlanDigest, nudge)
	carries("newer")

	// A new plan that needs the previous content of the ConfigMap waits for that content.
	late := newPlan(namespace, "late", 2) // the store has no such plan
	late.Spec.Hardware, late.Spec.HardwareDigest = moed.Spec.Placement.Hardware, before
	create(t, late)
	waitPlan(t, late, semmoev1.ConditionReady, "HardwareProfileChanged", "spec.hardwareDigest")
}
