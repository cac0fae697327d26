// SPDX-License-Identifier: Apache-2.0

package decision

import (
	"encoding/json"
	"math"
	"slices"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/rollout"
)

// MeasuredGain is the time that a plan saves per engine step: the prediction of its hardware profile, and the
// measurement of its canary against the revision in service, with the bounds of the 95% interval. Negative times are
// losses.
type MeasuredGain struct {
	PredictedMicros float64 `json:"predictedMicros"`
	SavedMicros     float64 `json:"savedMicros"`
	SavedLowMicros  float64 `json:"savedLowMicros"`
	SavedHighMicros float64 `json:"savedHighMicros"`
}

// maxBatchRatio is the maximum factor between the batch sizes in service and the modelled batch sizes for a comparison
// of prediction and measurement. Within this factor, the saved time is assumed to be proportional to the batch size.
const maxBatchRatio = 2

// gainOf compares the prediction of the candidate's plan with the measurement of its canary. It returns nil if either
// is unknown. The forecast of a plan covers one MoE layer; the measurement is the time per output token, which is one
// engine step. The time saved per step is attributed to the MoE layers: the rest of a step takes the same time under
// either plan.
func gainOf(s *Snapshot, d *Decision, c rollout.Comparison) *MeasuredGain {
	replicas := 0
	for _, pod := range s.Pods {
		if pod.Labels[semmoev1.LabelRevision] == d.Revision && podhealth.Ready(pod) {
			replicas++
		}
	}
	report := s.Report
	if c.Token == nil || c.StepTokens == 0 || replicas == 0 || report == nil {
		return nil
	}
	nanos, ok := predictedLayerNanos(d.Planning, c.StepTokens/float64(replicas))
	if !ok {
		return nil
	}
	micros := 1e6 * c.Token.Stable
	return &MeasuredGain{
		PredictedMicros: float64(len(report.MoELayers)) * nanos / 1000,
		SavedMicros:     -c.Token.Relative * micros,
		SavedLowMicros:  -c.Token.High * micros, SavedHighMicros: -c.Token.Low * micros,
	}
}

// predictedLayerNanos returns the modelled time, in nanoseconds, that the candidate's plan saves per MoE layer and step
// over the plan in service, at stepTokens tokens per step of a replica. It returns false if the plan was modelled for
// other batch sizes, or if the two plans were modelled differently.
func predictedLayerNanos(p planner.Planning, stepTokens float64) (float64, bool) {
	plan := p.Plan
	if plan == nil || p.Candidate == nil || plan.Status.PlanDigest != p.Candidate.Digest {
		return 0, false
	}
	forecast, comparison := plan.Status.Forecast, plan.Status.Comparison
	sizes := []int32{plan.Spec.BatchTokens}
	if forecast != nil && len(forecast.BatchTokens) > 0 {
		sizes = forecast.BatchTokens
	}
	var saved int64
	switch {
	case comparison != nil:
		saved = comparison.CurrentNanos - comparison.CandidateNanos
	case forecast == nil || forecast.LayerNanos == 0:
		return 0, false
	case p.Serving == nil:
		saved = forecast.BaselineLayerNanos - forecast.LayerNanos
	default:
		if p.Promise == nil || p.Promise.Status.Forecast == nil {
			return 0, false
		}
		serving := p.Promise.Status.Forecast
		alike := serving.Hardware == forecast.Hardware && slices.Equal(serving.BatchTokens, forecast.BatchTokens)
		if serving.LayerNanos == 0 || !alike {
			return 0, false
		}
		saved = serving.LayerNanos - forecast.LayerNanos
	}
	smallest, largest := float64(slices.Min(sizes)), float64(slices.Max(sizes))
	if saved <= 0 || stepTokens*maxBatchRatio < smallest || stepTokens > maxBatchRatio*largest {
		return 0, false
	}
	var sum float64
	for _, tokens := range sizes {
		sum += float64(tokens)
	}
	return float64(saved) * stepTokens * float64(len(sizes)) / sum, true
}

// Ratios returns predicted over measured saved time, with the bounds of its interval. A ratio is +Inf if the measured
// saving is not positive.
func (g *MeasuredGain) Ratios() (ratio, low, high float64) {
	over := func(saved float64) float64 {
		if saved <= 0 {
			return math.Inf(1)
		}
		return g.PredictedMicros / saved
	}
	return over(g.SavedMicros), over(g.SavedHighMicros), over(g.SavedLowMicros)
}

// text returns the value of semmoev1.AnnotationMeasured, or "" if the gain is unknown or not finite.
func (g *MeasuredGain) text() string {
	if g == nil {
		return ""
	}
	rounded := func(micros float64) float64 { return math.Round(10*micros) / 10 }
	data, err := json.Marshal(MeasuredGain{
		rounded(g.PredictedMicros), rounded(g.SavedMicros), rounded(g.SavedLowMicros), rounded(g.SavedHighMicros),
	})
	if err != nil {
		return ""
	}
	return string(data)
}

// RecordedGain returns the measured gain of the first of the given plans whose canary recorded one, or nil. It ignores
// invalid values, because any user can write the annotation.
func RecordedGain(plans ...*semmoev1.PlacementPlan) *MeasuredGain {
	for _, plan := range plans {
		if plan == nil {
			continue
		}
		var gain MeasuredGain
		err := json.Unmarshal([]byte(plan.Annotations[semmoev1.AnnotationMeasured]), &gain)
		if err == nil && gain.PredictedMicros > 0 {
			return &gain
		}
	}
	return nil
}
