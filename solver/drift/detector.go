package drift

import (
	"fmt"
	"math"
	"slices"
)

// Sample is what one sampled request showed. A number that is not known is NaN.
type Sample struct {
	// Best is the rank with the highest forecast for the request, Rank the one that served it; both are 0 where requests have no
	// rank (attention tensor parallelism).
	Best, Rank int
	// Highest is the forecast local share on the best rank, Predicted on the one that served, Local the real one there.
	Highest, Predicted, Local float64
	// Known and Pairs are the shares of the scored tokens, and of pairs of successive ones, that the plan's tables have seen.
	Known, Pairs float64
	// Text is what the tokens say (Text.Of) by the calibration that judges the sample; it counts for nothing where that has no Text.
	Text float64
}

// novelty is the share of what is new in the request, tokens and pairs counting alike.
func (s *Sample) novelty() float64 { return 1 - (s.Known+s.Pairs)/2 }

// Calibration is what the samples of a plan's requests are judged by. It is the content of a plan's drift.json.
type Calibration struct {
	// Ranks is the number of ranks; 1 where requests have none.
	Ranks int `json:"ranks"`
	// Requests is the number of held-out requests that it was made from, FalseAlarms the rate per sampled request that the
	// thresholds aim at, over all charts.
	Requests    int     `json:"requests"`
	FalseAlarms float64 `json:"false_alarms"`
	// Highest, Predicted and Local are the mean forecasts on the best rank and on the serving one, and the mean real local share, [best
	// rank × serving rank]: forecasts from a table of few tokens say too little of good ranks and too much of bad ones, and not of all
	// kinds of requests alike.
	Highest   []float64 `json:"highest"`
	Predicted []float64 `json:"predicted"`
	Local     []float64 `json:"local"`
	// Known are the mean shares of what is known of requests; nil where they have a rank, and in calibrations of earlier versions.
	Known *Known `json:"known,omitempty"`
	// Text is what the tokens of requests say where they have no rank, and drops are found sooner by it; else nil, as in calibrations of
	// earlier versions.
	Text *Text `json:"text,omitempty"`
	// Slopes are what a request above these means adds to the expected local share, Offset what is added to all.
	Slopes Slopes  `json:"slopes"`
	Offset float64 `json:"offset"`
	// Chance is the local share of tokens of which nothing is known.
	Chance float64 `json:"chance"`
	// Usual is the mean of usual traffic.
	Usual Usual `json:"usual"`
	// Residual is the test of what requests show against what is expected of them: it finds a plan that no longer fits its requests.
	Residual Chart `json:"residual"`
	// Level is the test against the mean of what they would have shown on their best ranks: it finds requests of which the plan
	// never expected much, and takes no balancing of ranks for drift. Kinds of requests differ in it, so it needs more of them for
	// the same drop.
	Level Chart `json:"level"`
	// Novelty is the test of the share of what is new in requests: it finds other kinds of text within few of them.
	Novelty Chart `json:"novelty"`
}

// Known are shares of tokens, and of pairs of successive ones, that the plan's tables have seen.
type Known struct {
	Tokens float64 `json:"tokens"`
	Pairs  float64 `json:"pairs"`
}

// Usual are means over usual traffic in random order, by which plans are scored; that of Best is the lower one of both orders.
type Usual struct {
	// Served is the local share, Best what it would have been on the best ranks, Known the share of known tokens.
	Served float64 `json:"served"`
	Best   float64 `json:"best"`
	Known  float64 `json:"known"`
}

// Chart is one CUSUM: it sums the evidence since the sum was last zero.
type Chart struct {
	// Reference is what counts neither for nor against drift. Residual and Level: the relative drop; Novelty: the share of what
	// is new.
	Reference float64 `json:"reference"`
	// Threshold is the value above which traffic has drifted, in requests times share.
	Threshold float64 `json:"threshold"`
}

// Statistic are the values of the charts. The zero value is the beginning.
type Statistic struct {
	Residual float64 `json:"residual"`
	Level    float64 `json:"level"`
	Novelty  float64 `json:"novelty"`
}

// Expected is the local share to be expected of a request; NaN for ranks that the plan does not have.
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

// aboveMeans is by how much a request is above the means of its best rank and serving rank, in the order of slopes. What is known of
// its tokens is as usual where nobody says.
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

// expectedOnBest is the local share to be expected of a request on its best rank.
func (c *Calibration) expectedOnBest(s Sample) float64 {
	s.Rank, s.Predicted = s.Best, s.Highest
	return c.Expected(s)
}

// onBest is what a request would have shown on its best rank.
func (c *Calibration) onBest(s Sample) float64 { return s.Local - c.Expected(s) + c.expectedOnBest(s) }

// charts are those of the calibration.
func (c *Calibration) charts() [charts]*Chart {
	return [charts]*Chart{&c.Residual, &c.Level, &c.Novelty}
}

// evidence is what a sample adds to each chart that is above zero: NaN or infinite where something is not known.
func (c *Calibration) evidence(s Sample) [charts]float64 {
	return [charts]float64{
		(1-c.Residual.Reference)*c.Expected(s) - s.Local, (1-c.Level.Reference)*c.Usual.Best - c.onBest(s), s.novelty() - c.Novelty.Reference,
	}
}

// Next is the statistic after one more sample.
func (c *Calibration) Next(statistic Statistic, s Sample) Statistic {
	evidence := c.evidence(s)
	return Statistic{
		Residual: climb(statistic.Residual, evidence[residualChart]),
		Level:    climb(statistic.Level, evidence[levelChart]),
		Novelty:  climb(statistic.Novelty, evidence[noveltyChart]),
	}
}

// climb is a chart's value after more evidence; what is no number is none.
func climb(value, evidence float64) float64 {
	if math.IsNaN(evidence) || math.IsInf(evidence, 0) {
		return value
	}
	return max(0, value+evidence)
}

// Of is the statistic after a number of samples, the oldest first.
func (c *Calibration) Of(samples []Sample) Statistic {
	var statistic Statistic
	for _, s := range samples {
		statistic = c.Next(statistic, s)
	}
	return statistic
}

// Ratio is the highest of the charts' values, each as a multiple of its threshold.
func (c *Calibration) Ratio(s Statistic) float64 {
	r := c.ratios(s)
	return max(r[0], r[1], r[2])
}

func (c *Calibration) ratios(s Statistic) [3]float64 {
	return [3]float64{s.Residual / c.Residual.Threshold, s.Level / c.Level.Threshold, s.Novelty / c.Novelty.Threshold}
}

// Drifted reports whether a statistic is an alarm: its ratio is above 1.
func (c *Calibration) Drifted(s Statistic) bool { return c.Ratio(s) > 1 }

// For is the calibration that looks for another relative drop than the one that it was made for: twice the reference of DefaultOptions.
func (c *Calibration) For(drop float64) *Calibration {
	made, scaled := DefaultOptions(), *c
	scale := drop / (2 * made.Residual)
	scaled.Residual = c.Residual.scaled(made.Residual, scale, 1)
	// Usual requests lose no more than what they have beyond chance: half of that is the largest reference that finds anything.
	scaled.Level = c.Level.scaled(made.Level, scale, (1-c.Chance/max(c.Usual.Best, 1e-9))/2)
	return &scaled
}

// scaled is a chart of local shares made for a drop of twice a reference, for one that is as many times as large. A larger one makes
// every value smaller, and the threshold stays: there are fewer false alarms. The reference is then at most the one given, but never
// below the chart's own. A smaller one lets chance climb higher, in inverse proportion (the peaks of a random walk with negative drift
// fall off exponentially, by twice the drift over the variance), and the threshold with it; a chart that was widened because few
// requests tell no less stays as it is.
func (c Chart) scaled(made, scale, most float64) Chart {
	switch {
	case scale > 1:
		c.Reference = max(c.Reference, min(made*scale, most))
	case c.Reference <= made*higher:
		c.Reference *= scale
		c.Threshold /= scale
	}
	return c
}

// maxRanks bounds the ranks of a calibration that was read: the square of them is its size.
const maxRanks = 4096

// Validate refuses what no held-out requests lead to: a calibration is read from a file.
func (c *Calibration) Validate() error {
	switch {
	case c.Ranks < 1 || c.Ranks > maxRanks:
		return fmt.Errorf("ranks is %d; allowed is 1 to %d", c.Ranks, maxRanks)
	case c.Requests < LeastRequests:
		return fmt.Errorf("requests is %d; at least %d are needed", c.Requests, LeastRequests)
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
