// SPDX-License-Identifier: Apache-2.0

package drift

// Causes splits the drop of the local share from the in-control mean by cause. All shares are 0 if the local share has
// not dropped.
type Causes struct {
	// Usual is the in-control local share, Observed the local share of the samples, Samples the number of samples. Only
	// samples count that follow the last zero of the chart nearest to its decision interval: that zero is the most
	// likely time of the change.
	Usual    float64 `json:"usual"`
	Observed float64 `json:"observed"`
	Samples  int     `json:"samples"`
	// NewTokens is the share of the drop caused by tokens that the tables have not seen, which are assumed as local as
	// chance. Mix is the share of requests for which the plan expects less on their best ranks, Balance the share of
	// serving requests on other ranks than their best, and Rest the share that the forecast does not explain. The four
	// shares sum to 1; a component that is not a drop counts as 0.
	NewTokens float64 `json:"new_tokens"`
	Mix       float64 `json:"mix"`
	Balance   float64 `json:"balance"`
	Rest      float64 `json:"rest"`
}

// Explain returns the causes of a low local share of the samples, which are ordered from oldest to newest.
func (c *Calibration) Explain(samples []Sample) Causes {
	var mean struct{ local, best, known, loss, n float64 }
	for _, s := range samples[c.changePoint(samples):] {
		best := c.expectedOnBest(s)
		loss := c.balanceLoss(s)
		if !finite(s.Local, best, loss, s.Known) {
			continue
		}
		mean.n++
		mean.local += (s.Local - mean.local) / mean.n
		mean.best += (best - mean.best) / mean.n
		mean.known += (s.Known - mean.known) / mean.n
		mean.loss += (loss - mean.loss) / mean.n
	}
	causes := Causes{Usual: c.Usual.Served, Observed: mean.local, Samples: int(mean.n)}
	drop := c.Usual.Served - mean.local
	if mean.n == 0 || drop <= 0 {
		return causes
	}
	// Share that one unit of known tokens adds over chance, such that the known share yields the in-control mean.
	perNew := max(0, c.Usual.Served-c.Chance) / max(c.Usual.Known, 1e-9)
	newTokens := min(max(0, (c.Usual.Known-mean.known)*perNew), drop)
	mix := max(0, c.Usual.Best-mean.best-newTokens)
	balance := c.excessLoss(mean.loss)
	rest := max(0, drop-newTokens-mix-balance)
	sum := newTokens + mix + balance + rest
	causes.NewTokens, causes.Mix, causes.Balance, causes.Rest = newTokens/sum, mix/sum, balance/sum, rest/sum
	return causes
}

// BalanceLoss returns the mean local share that the samples lost by being served on other ranks than their best, beyond the
// loss of baseline traffic. Under load, requests go to ranks where they do not delay other requests. The result is 0 if
// the loss is not above the baseline.
func (c *Calibration) BalanceLoss(samples []Sample) float64 {
	mean, n := 0.0, 0.0
	for _, s := range samples {
		if loss := c.balanceLoss(s); finite(loss) {
			n++
			mean += (loss - mean) / n
		}
	}
	return c.excessLoss(mean)
}

// balanceLoss returns the expected local share of a request on its best rank minus the expected share on its serving
// rank.
func (c *Calibration) balanceLoss(s Sample) float64 { return c.expectedOnBest(s) - c.Expected(s) }

// excessLoss returns the loss by load balancing beyond that of baseline traffic.
func (c *Calibration) excessLoss(loss float64) float64 {
	return max(0, loss-(c.Usual.Best-c.Usual.Served))
}

func finite(values ...float64) bool {
	for _, v := range values {
		if v-v != 0 { // NaN and infinities
			return false
		}
	}
	return true
}

// changePoint returns the index of the first sample after the last zero of the chart that is finally nearest to its
// decision interval.
func (c *Calibration) changePoint(samples []Sample) int {
	var statistic Statistic
	var zero [3]int
	for i, s := range samples {
		statistic = c.Next(statistic, s)
		for chart, value := range c.ratios(statistic) {
			if value == 0 {
				zero[chart] = i + 1
			}
		}
	}
	highest, ratios := 0, c.ratios(statistic)
	for chart, value := range ratios {
		if value > ratios[highest] {
			highest = chart
		}
	}
	return zero[highest]
}
