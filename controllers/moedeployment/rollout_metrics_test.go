package moedeployment

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

func TestRolloutMetrics(t *testing.T) {
	key := types.NamespacedName{Namespace: "ns", Name: "measured"}
	const phaseHead, startHead = `# HELP semmoe_rollout_phase 1 for how far a new plan of a MoEDeployment has come (None, Canary, Promoting, RollingBack), else 0.
# TYPE semmoe_rollout_phase gauge
`, `# HELP semmoe_rollout_phase_start_time_seconds When that phase began, in seconds since 1970; absent where no plan is on its way.
# TYPE semmoe_rollout_phase_start_time_seconds gauge
`
	phases := func(of string) string {
		text := phaseHead
		for _, phase := range []string{"Canary", "None", "Promoting", "RollingBack"} {
			value := "0"
			if phase == of {
				value = "1"
			}
			text += `semmoe_rollout_phase{name="measured",namespace="ns",phase="` + phase + `"} ` + value + "\n"
		}
		return text
	}
	check := func(collector prometheus.Collector, want string) {
		t.Helper()
		if err := testutil.CollectAndCompare(collector, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
		if problems, err := testutil.CollectAndLint(collector); err != nil || len(problems) != 0 {
			t.Errorf("problems %v, error %v", problems, err)
		}
	}
	measureRollout(key, &semmoev1.RolloutStatus{Phase: semmoev1.RolloutPhaseCanary, Since: metav1.NewTime(start)})
	check(rolloutPhase, phases("Canary"))
	check(rolloutStart, startHead+`semmoe_rollout_phase_start_time_seconds{name="measured",namespace="ns"} 1.7723664e+09`+"\n")
	measureRollout(key, nil)
	check(rolloutPhase, phases("None"))
	check(rolloutStart, "")
	forgetRollout(key)
	check(rolloutPhase, "")
}
