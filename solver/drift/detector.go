// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"fmt"
	"math"
	"slices"
)

// Sample is the observation of one sampled request. Unknown numbers are NaN.
type Sample struct {
	// Best is the rank with the highest forecast for the request, Rank the rank that served the request. Both are 0
	// with attention tensor parallelism, where requests have no rank.
	Best, Rank int
	// Highest is the forecast local share on the best rank, Predicted the forecast on the serving rank, Local the
	// observed share on the serving rank.
	Highest, Predicted, Local float64
	// Known and Pairs are the shares of the scored tokens, and of the pairs of successive tokens, that the plan's
	// tables have seen.
	Known, Pairs float64
	// Text is the text term (Text.Of) under the calibration that evaluates the sample. It is ignored if the calibration
	// has no Text.
	Text float64
}

// novelty returns the share of unseen content in the request: the mean of the shares of new tokens and new pairs.
func (s *Sample) novelty() float64 { return 1 - (s.Known+s.Pairs)/2 }

// Calibration contains the parameters of the charts of one plan. It is the content of the plan's drift.json.
type Calibration struct {
	// Ranks is the number of ranks; 1 if requests have no rank.
	Ranks int `json:"ranks"`
	// Requests is the number of held-out requests of the calibration. FalseAlarms is the target rate of false alarms
	// per sampled request, over all charts.
	Requests    int     `json:"requests"`
	FalseAlarms float64 `json:"false_alarms"`
	// Highest and Predicted are the mean forecasts on the best rank and on the serving rank, Local is the mean observed
	// local share, each indexed [best rank × serving rank]. The means correct forecasts from small tables, which are
	// too low on good ranks and too high on bad ranks, by an amount that depends on the kind of request.
	Highest   []float64 `json:"highest"`
	Predicted []float64 `json:"predicted"`
	Local     []float64 `json:"local"`
	// Known are the mean shares of known tokens and pairs; nil if requests have ranks, and in calibrations of earlier
	// versions.
	Known *Known `json:"known,omitempty"`
	// Text is the text model of requests without ranks, set if it reduces the detection delay. It is nil in all other
	// cases, also in calibrations of earlier versions.
	Text *Text `json:"text,omitempty"`
	// Slopes are the coefficients of deviations from these means in the expected local share. Offset is added to every
	// expected share.
	Slopes Slopes  `json:"slopes"`
	Offset float64 `json:"offset"`
	// Chance is the local share of tokens that the tables do not know.
	Chance float64 `json:"chance"`
	// Usual are the in-control means.
	Usual Usual `json:"usual"`
	// Residual tests observed against expected local shares. It detects a plan that no longer fits its requests.
	Residual Chart `json:"residual"`
	// Level tests the local share on the best rank against the in-control mean. It detects requests for which the plan
	// always expected a low share, and ignores load balancing. Kinds of requests differ in this share, so the chart
	// needs more requests than Residual for the same drop.
	Level Chart `json:"level"`
	// Novelty tests the share of unseen content in requests. It detects other kinds of text within a few requests.
	Novelty Chart `json:"novelty"`
}

// Known are the shares of tokens, and of pairs of successive tokens, that the plan's tables have seen.
type Known struct {
	Tokens float64 `json:"tokens"`
	Pairs  float64 `json:"pairs"`
}

// Usual are the in-control means: means over baseline traffic in random order, which is also the order that plans are
// scored with. Best is the lower of the means of the random order and of runs of one kind.
type Usual struct {
	// Served is the local share on the serving ranks, Best the local share that the best ranks would have given, Known
	// the share of known tokens.
	Served float64 `json:"served"`
	Best   float64 `json:"best"`
	Known  float64 `json:"known"`
}

// Chart contains the parameters of one CUSUM chart.
type Chart struct {
	// Reference is the reference value k: evidence at this value moves the chart neither up nor down. Unit: a relative
	// drop for Residual and Level, a share of unseen content for Novelty.
	Reference float64 `json:"reference"`
	// Threshold is the decision interval h, in requests times share. A value above it is an alarm.
	Threshold float64 `json:"threshold"`
}

// Statistic contains the chart values. The zero value is the start of a test.
type Statistic struct {
	Residual float64 `json:"residual"`
	Level    float64 `json:"level"`
	Novelty  float64 `json:"novelty"`
}

// Expected returns the expected local share of a request, or NaN for ranks that the plan does not have.
func (c *Calibration) Expected(s Sample) float64 {
	if s.Best < 0 || s.Best >= c.Ranks || s.Rank < 0 || s.Rank >= c.Ranks {
		return math.NaN()
	}
	expected, above := c.Local[s.Best*c.Ranks+s.Rank]+c.Offset, c.aboveMeans(s)
	for i, slope := range c.Slopes.vector() {
		expected += slope * above[i]
	}
	return expected
}

// aboveMeans returns the deviations of a request from the means of its best and serving ranks, in the order of Slopes.
// Deviations of unknown Known and Pairs are 0.
func (c *Calibration) aboveMeans(s Sample) (above [regressors]float64) {
	cell := s.Best*c.Ranks + s.Rank
	if s.Best == s.Rank {
		above[0] = s.Predicted - c.Predicted[cell]
	} else {
		above[1], above[2] = s.Predicted-c.Predicted[cell], s.Highest-c.Highest[cell]
	}
	if c.Known != nil && finite(s.Known, s.Pairs) {
		above[3], above[4] = s.Known-c.Known.Tokens, s.Pairs-c.Known.Pairs
	}
	if c.Text != nil {
		above[5] = s.Text
	}
	return above
}

// expectedOnBest returns the expected local share of a request on its best rank.
func (c *Calibration) expectedOnBest(s Sample) float64 {
	s.Rank, s.Predicted = s.Best, s.Highest
	return c.Expected(s)
}

// onBest returns the local share that a request would have had on its best rank.
func (c *Calibration) onBest(s Sample) float64 { return s.Local - c.Expected(s) + c.expectedOnBest(s) }

// charts returns the charts in the order of the chart constants.
func (c *Calibration) charts() [charts]*Chart {
	return [charts]*Chart{&c.Residual, &c.Level, &c.Novelty}
}

// evidence returns the increment of each chart: positive values are evidence of drift. It is NaN or infinite if an
// input is unknown.
func (c *Calibration) evidence(s Sample) [charts]float64 {
	return [charts]float64{
		(1-c.Residual.Reference)*c.Expected(s) - s.Local, (1-c.Level.Reference)*c.Usual.Best - c.onBest(s), s.novelty() - c.Novelty.Reference,
	}
}

// Next returns the statistic after one more sample.
func (c *Calibration) Next(statistic Statistic, s Sample) Statistic {
	evidence := c.evidence(s)
	return Statistic{
		Residual: cusum(statistic.Residual, evidence[residualChart]),
		Level:    cusum(statistic.Level, evidence[levelChart]),
		Novelty:  cusum(statistic.Novelty, evidence[noveltyChart]),
	}
}

// cusum returns the chart value after one increment: max(0, value + evidence). NaN and infinite evidence is ignored.
func cusum(value, evidence float64) float64 {
	if math.IsNaN(evidence) || math.IsInf(evidence, 0) {
		return value
	}
	return max(0, value+evidence)
}

// Ratio returns the highest of the chart values, each divided by its decision interval.
func (c *Calibration) Ratio(s Statistic) float64 {
	r := c.ratios(s)
	return max(r[0], r[1], r[2])
}

func (c *Calibration) ratios(s Statistic) [3]float64 {
	return [3]float64{s.Residual / c.Residual.Threshold, s.Level / c.Level.Threshold, s.Novelty / c.Novelty.Threshold}
}

// Drifted reports whether the statistic is an alarm: its ratio is above 1.
func (c *Calibration) Drifted(s Statistic) bool { return c.Ratio(s) > 1 }

// ForDrop returns a copy of the calibration that is designed for the given relative drop, instead of twice the reference
// values of DefaultOptions.
func (c *Calibration) ForDrop(drop float64) *Calibration {
	made, scaled := DefaultOptions(), *c
	scale := drop / (2 * made.Residual)
	scaled.Residual = c.Residual.scaled(made.Residual, scale, 1)
	// A request loses at most the share that it has beyond chance. Half of that share is the largest useful reference
	// value.
	scaled.Level = c.Level.scaled(made.Level, scale, (1-c.Chance/max(c.Usual.Best, 1e-9))/2)
	return &scaled
}

// scaled returns a chart of local shares for another drop. Made is the reference value of the original design, scale
// the ratio of the drops, maxReference the maximum reference value.
//
// A larger drop raises the reference value, up to maxReference but never below the chart's own. Every chart value then
// gets smaller and the decision interval stays, so false alarms become rarer. A smaller drop lowers the reference value
// and raises the decision interval in inverse proportion, because the peaks of a random walk with negative drift have
// an exponential tail with rate 2·drift/variance. A chart with a reference value widened because of few requests
// keeps its values for a smaller drop.
func (c Chart) scaled(made, scale, maxReference float64) Chart {
	switch {
	case scale > 1:
		c.Reference = max(c.Reference, min(made*scale, maxReference))
	case c.Reference <= made*raisedReference:
		c.Reference *= scale
		c.Threshold /= scale
	}
	return c
}

// maxRanks bounds the ranks of a calibration that is read from a file; the size of a calibration is quadratic in the
// ranks.
const maxRanks = 4096

// Validate returns an error if no held-out requests can lead to these values. Calibrations are read from files.
func (c *Calibration) Validate() error {
	switch {
	case c.Ranks < 1 || c.Ranks > maxRanks:
		return fmt.Errorf("ranks is %d; allowed is 1 to %d", c.Ranks, maxRanks)
	case c.Requests < MinRequests:
		return fmt.Errorf("requests is %d; at least %d are needed", c.Requests, MinRequests)
	case !(c.FalseAlarms > 0 && c.FalseAlarms < 1):
		return fmt.Errorf("false_alarms is %v; it must be between 0 and 1", c.FalseAlarms)
	}
	for name, cells := range map[string][]float64{"highest": c.Highest, "predicted": c.Predicted, "local": c.Local} {
		if len(cells) != c.Ranks*c.Ranks {
			return fmt.Errorf("%s has %d entries; %d ranks need %d", name, len(cells), c.Ranks, c.Ranks*c.Ranks)
		}
	}
	slopes := c.Slopes.vector()
	for _, value := range slices.Concat(c.Highest, c.Predicted, c.Local, slopes[:], []float64{c.Offset}) {
		if !finite(value) {
			return fmt.Errorf("highest, predicted, local, slopes and offset must be numbers; one is %v", value)
		}
	}
	for _, chart := range []struct {
		name string
		Chart
	}{{"residual", c.Residual}, {"level", c.Level}, {"novelty", c.Novelty}} {
		if !share(chart.Reference) {
			return fmt.Errorf("%s.reference is %v; it must be a share from 0 to 1", chart.name, chart.Reference)
		}
		if !(chart.Threshold > 0) || math.IsInf(chart.Threshold, 0) {
			return fmt.Errorf("%s.threshold is %v; it must be a number above 0", chart.name, chart.Threshold)
		}
	}
	if c.Known != nil && !(share(c.Known.Tokens) && share(c.Known.Pairs)) {
		return fmt.Errorf("known is %v; it must be shares from 0 to 1", *c.Known)
	}
	if c.Text != nil {
		if c.Ranks > 1 {
			return fmt.Errorf("text is for requests that have no rank; ranks is %d", c.Ranks)
		}
		if err := c.Text.validate(); err != nil {
			return err
		}
	}
	if !share(c.Chance) {
		return fmt.Errorf("chance is %v; it must be a share from 0 to 1", c.Chance)
	}
	if !share(c.Usual.Served) || !share(c.Usual.Best) || !share(c.Usual.Known) {
		return fmt.Errorf("usual is %v; it must be shares from 0 to 1", c.Usual)
	}
	return nil
}

func share(x float64) bool { return x >= 0 && x <= 1 }
