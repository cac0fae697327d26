package moedeployment

import (
	"encoding/json"
	"math"
	"slices"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/internal/podhealth"
	"github.com/semmoe/operator/internal/rollout"
)

// measuredGain is the time that a plan saves per step of the engine: as its hardware profile predicts it, and as its
// canary has measured it against what was in service, with the ends of the 95% interval. Negative times are lost.
type measuredGain struct {
	PredictedMicros float64 `json:"predictedMicros"`
	SavedMicros     float64 `json:"savedMicros"`
	SavedLowMicros  float64 `json:"savedLowMicros"`
	SavedHighMicros float64 `json:"savedHighMicros"`
}

// batchReach is the factor by which the batches in service may differ from those that a plan is modelled at for the two
// to be compared: within it, the saved time is taken to be proportional to the batch.
const batchReach = 2

// gainOf compares what the candidate's plan predicts with what its canary has measured; nil where one of the two is not
// known. The plan's forecast is of one MoE layer, the measurement of the time per output token, which is a step of the
// engine. The saved time of a step is that of its MoE layers: what else a step does takes as long under either plan.
func gainOf(o observation, c rollout.Comparison) *measuredGain {
	replicas := 0
	for _, pod := range o.Pods {
		if pod.Labels[semmoev1.LabelRevision] == o.Revision && podhealth.Ready(pod) {
			replicas++
		}
	}
	report := o.Inspection.Report
	if c.Token == nil || c.StepTokens == 0 || replicas == 0 || report == nil {
		return nil
	}
	nanos, ok := predictedLayerNanos(o.Planning, c.StepTokens/float64(replicas))
	if !ok {
		return nil
	}
	micros := 1e6 * c.Token.Stable
	return &measuredGain{
		PredictedMicros: float64(len(report.MoELayers)) * nanos / 1000,
		SavedMicros:     -c.Token.Relative * micros,
		SavedLowMicros:  -c.Token.High * micros, SavedHighMicros: -c.Token.Low * micros,
	}
}

// predictedLayerNanos is the modelled time that the candidate's plan saves per MoE layer and step against what is in
// service, with a number of tokens per step of a replica. It returns false where the plan was modelled with other
// batches, or where the two plans were modelled differently.
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
	if saved <= 0 || stepTokens*batchReach < smallest || stepTokens > batchReach*largest {
		return 0, false
	}
	var sum float64
	for _, tokens := range sizes {
		sum += float64(tokens)
	}
	return float64(saved) * stepTokens * float64(len(sizes)) / sum, true
}

// ratios are the predicted over the measured saved time, and the ends of its interval. They are infinite where the
// measured time may not be saved at all.
func (g *measuredGain) ratios() (ratio, low, high float64) {
	over := func(saved float64) float64 {
		if saved <= 0 {
			return math.Inf(1)
		}
		return g.PredictedMicros / saved
	}
	return over(g.SavedMicros), over(g.SavedHighMicros), over(g.SavedLowMicros)
}

// text is the value of semmoev1.AnnotationMeasured.
func (g *measuredGain) text() (string, error) {
	rounded := func(micros float64) float64 { return math.Round(10*micros) / 10 }
	data, err := json.Marshal(measuredGain{
		rounded(g.PredictedMicros), rounded(g.SavedMicros), rounded(g.SavedLowMicros), rounded(g.SavedHighMicros),
	})
	return string(data), err
}

// recordedGain is what was measured on the canary of the newest of some plans that has had one; nil where none has. Any
// user may write an annotation: what is no measurement is none.
func recordedGain(plans ...*semmoev1.PlacementPlan) *measuredGain {
	for _, plan := range plans {
		if plan == nil {
			continue
		}
		var gain measuredGain
		err := json.Unmarshal([]byte(plan.Annotations[semmoev1.AnnotationMeasured]), &gain)
		if err == nil && gain.PredictedMicros > 0 {
			return &gain
		}
	}
	return nil
}
