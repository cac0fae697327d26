// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
)

// Figures are the values of the metrics of one MoEDeployment. Unknown values are NaN (zero for times) and have no
// series.
type Figures struct {
	Statistic, Threshold, Observed, Promised, Baseline float64
	// PredictedOverMeasured is the saved time that the plan of the last canary predicts over the measured saving, with
	// the bounds of its 95% interval.
	PredictedOverMeasured, PredictedOverMeasuredLow, PredictedOverMeasuredHigh float64
	PlanCreated                                                                time.Time
	Replans                                                                    int
	// Rollout is the state of the rollout of a new plan, or nil.
	Rollout *semmoev1.RolloutStatus
	// Soak is how long the canary must serve.
	Soak time.Duration
}

// figuresOf returns the figures of an observation.
func figuresOf(o observation, replans int, rollout *semmoev1.RolloutStatus, soak time.Duration) Figures {
	unknown := math.NaN()
	f := Figures{
		Statistic: unknown, Threshold: unknown, Observed: unknown, Promised: unknown, Baseline: unknown, Replans: replans, Rollout: rollout, Soak: soak,
		PredictedOverMeasured: unknown, PredictedOverMeasuredLow: unknown, PredictedOverMeasuredHigh: unknown,
	}
	gain := o.Rollout.Measured
	if gain == nil {
		gain = decision.RecordedGain(o.Planning.Plan, o.ServingPlanning().Promise)
	}
	if gain != nil {
		f.PredictedOverMeasured, f.PredictedOverMeasuredLow, f.PredictedOverMeasuredHigh = gain.Ratios()
	}
	if o.Drift.Tested {
		f.Statistic, f.Threshold = o.Drift.Statistic, o.Drift.Threshold
	}
	if observed, _, enough := o.Observed.Activations(); enough {
		f.Observed = observed.Rate()
	}
	if plan := o.Drift.Plan; plan != nil && o.ServingPlanning().Serving != nil {
		f.PlanCreated = plan.CreationTimestamp.Time
	}
	if o.Drift.Promise.LARMilli > 0 {
		f.Promised = float64(o.Drift.Promise.LARMilli) / 1000
	}
	if forecast := o.forecast(); forecast != nil {
		f.Baseline = float64(forecast.BaselineMilli) / 1000
	}
	return f
}

// Metrics exports the state of MoEDeployments, one series each, while the object exists. Only the leading manager has
// series.
type Metrics struct {
	now func() time.Time

	mu sync.Mutex
	of map[types.NamespacedName]Figures
}

// NewMetrics returns metrics to be registered by the caller.
func NewMetrics(now func() time.Time) *Metrics {
	return &Metrics{now: now, of: map[types.NamespacedName]Figures{}}
}

// Set replaces the figures of an object.
func (m *Metrics) Set(key types.NamespacedName, f Figures) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.of[key] = f
}

// forget removes the series of a deleted object.
func (m *Metrics) forget(key types.NamespacedName) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.of, key)
}

func describe(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, append([]string{"namespace", "name"}, more...), nil)
}

// phases are all values of the label phase.
var phases = []semmoev1.RolloutPhase{
	semmoev1.RolloutPhaseNone, semmoev1.RolloutPhaseCanary, semmoev1.RolloutPhasePromoting, semmoev1.RolloutPhaseRollingBack,
}

var (
	statisticDesc = describe("semmoe_drift_statistic", "Value of the drift test; absent while it is unknown.")
	thresholdDesc = describe("semmoe_drift_threshold", "Value of semmoe_drift_statistic above which the traffic has drifted from the plan.")
	observedDesc  = describe("semmoe_lar_observed_ratio", "Local activation rate of the revision in service, observed by request routers or counted by engines; absent with too few samples.")
	promisedDesc  = describe("semmoe_lar_promised_ratio", "Local activation rate that the plan in use predicts; absent without a plan.")
	baselineDesc  = describe("semmoe_lar_baseline_ratio", "Local activation rate of the default placement with round-robin requests, according to the plan in use, or to the newest plan if none is in use; absent without a plan.")
	ageDesc       = describe("semmoe_plan_age_seconds", "Age of the plan in use; absent without a plan.")
	replansDesc   = describe("semmoe_replans_last_day", "Plans made for drift within the last 24 hours.")
	predictedDesc = describe("semmoe_plan_predicted_over_measured",
		"Modelled saving of the plan of the last canary, in time per engine step, divided by the measured saving in time per output token; +Inf if the measured saving is zero, absent until both are known.")
	predictedLowDesc  = describe("semmoe_plan_predicted_over_measured_low", "Lower end of the 95% interval of semmoe_plan_predicted_over_measured.")
	predictedHighDesc = describe("semmoe_plan_predicted_over_measured_high", "Upper end of the 95% interval of semmoe_plan_predicted_over_measured.")
	phaseDesc         = describe("semmoe_rollout_phase", "1 for the current rollout phase of a MoEDeployment (None, Canary, Promoting, RollingBack), 0 for the other phases.", "phase")
	startDesc         = describe("semmoe_rollout_phase_start_time_seconds", "Start of the rollout phase, in seconds since 1970; absent if no plan is being rolled out.")
	soakDesc          = describe("semmoe_rollout_soak_seconds", "Time that a new plan must serve on its canary before it may be promoted; absent if no plan is being rolled out.")
)

// Describe sends the descriptions of all metrics.
func (m *Metrics) Describe(descriptions chan<- *prometheus.Desc) {
	for _, description := range []*prometheus.Desc{statisticDesc, thresholdDesc, observedDesc, promisedDesc, baselineDesc, ageDesc, replansDesc, predictedDesc, predictedLowDesc, predictedHighDesc, phaseDesc, startDesc, soakDesc} {
		descriptions <- description
	}
}

// Collect sends the metrics of all objects.
func (m *Metrics) Collect(metrics chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, f := range m.of {
		gauge := func(description *prometheus.Desc, value float64, more ...string) {
			if !math.IsNaN(value) {
				metrics <- prometheus.MustNewConstMetric(description, prometheus.GaugeValue, value, append([]string{key.Namespace, key.Name}, more...)...)
			}
		}
		phase := semmoev1.RolloutPhaseNone
		if f.Rollout != nil {
			phase = f.Rollout.Phase
			gauge(startDesc, float64(f.Rollout.Since.Unix()))
			gauge(soakDesc, f.Soak.Seconds())
		}
		for _, p := range phases {
			value := 0.0
			if p == phase {
				value = 1
			}
			gauge(phaseDesc, value, string(p))
		}
		gauge(statisticDesc, f.Statistic)
		gauge(thresholdDesc, f.Threshold)
		gauge(observedDesc, f.Observed)
		gauge(promisedDesc, f.Promised)
		gauge(baselineDesc, f.Baseline)
		gauge(replansDesc, float64(f.Replans))
		gauge(predictedDesc, f.PredictedOverMeasured)
		gauge(predictedLowDesc, f.PredictedOverMeasuredLow)
		gauge(predictedHighDesc, f.PredictedOverMeasuredHigh)
		if !f.PlanCreated.IsZero() {
			gauge(ageDesc, m.now().Sub(f.PlanCreated).Seconds())
		}
	}
}
