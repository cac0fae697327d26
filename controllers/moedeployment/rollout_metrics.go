package moedeployment

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

var (
	rolloutPhase = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "semmoe_rollout_phase", Help: "1 for how far a new plan of a MoEDeployment has come (None, Canary, Promoting, RollingBack), else 0.",
	}, []string{"namespace", "name", "phase"})
	rolloutStart = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "semmoe_rollout_phase_start_time_seconds", Help: "When that phase began, in seconds since 1970; absent where no plan is on its way.",
	}, []string{"namespace", "name"})
)

func init() { metrics.Registry.MustRegister(rolloutPhase, rolloutStart) }

// measureRollout tells how far a new plan has come. Phases are few, and series end with the object.
func measureRollout(key types.NamespacedName, status *semmoev1.RolloutStatus) {
	phase := semmoev1.RolloutPhaseNone
	if status == nil {
		rolloutStart.DeleteLabelValues(key.Namespace, key.Name)
	} else {
		phase = status.Phase
		rolloutStart.WithLabelValues(key.Namespace, key.Name).Set(float64(status.Since.Unix()))
	}
	for _, p := range []semmoev1.RolloutPhase{semmoev1.RolloutPhaseNone, semmoev1.RolloutPhaseCanary, semmoev1.RolloutPhasePromoting, semmoev1.RolloutPhaseRollingBack} {
		value := 0.0
		if p == phase {
			value = 1
		}
		rolloutPhase.WithLabelValues(key.Namespace, key.Name, string(p)).Set(value)
	}
}

// forgetRollout removes the series of an object that is gone.
func forgetRollout(key types.NamespacedName) {
	rolloutStart.DeleteLabelValues(key.Namespace, key.Name)
	rolloutPhase.DeletePartialMatch(prometheus.Labels{"namespace": key.Namespace, "name": key.Name})
}
