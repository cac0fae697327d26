// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// A problem with the hardware profile is reported in a condition. The model serves anyway.
func TestHardwareProblemIsReported(t *testing.T) {
	moed := moedtest.Deployment(moedtest.OnHardware(moedtest.Hardware("gpus")), func(m *semmoev1.MoEDeployment) {
		m.Spec.Profiling = &semmoev1.ProfilingSpec{ProfileRef: &semmoev1.ProfileReference{Name: "q"}}
	})
	found := moedtest.Report()
	o := observation{Inspection: inspection.State{Report: &found}}
	o.Planning.Profile = moedtest.ProfiledBy("q", "r1", time.Unix(0, 0))
	o.Planning.Hardware.Fault = desired.Finding{Reason: machines.NotFound, Message: "spec.placement.hardware.configMap: there is no ConfigMap"}
	status := statusOf(moed, o, time.Unix(0, 0))
	for kind, want := range map[string]metav1.ConditionStatus{semmoev1.ConditionPlanned: metav1.ConditionFalse, semmoev1.ConditionDegraded: metav1.ConditionTrue} {
		if c := meta.FindStatusCondition(status.Conditions, kind); c.Status != want || c.Reason != machines.NotFound || !strings.Contains(c.Message, "spec.placement.hardware") {
			t.Errorf("%s: %+v", kind, c)
		}
	}
	if c := meta.FindStatusCondition(status.Conditions, semmoev1.ConditionStalled); c.Status != metav1.ConditionFalse {
		t.Errorf("%+v", c)
	}
	if again := pollDelay(moed, o); again == 0 || again > planner.HardwarePeriod {
		t.Errorf("the ConfigMap is polled after %v", again)
	}
}
