package drift

// Causes part what is missing to the usual local share. All are 0 where nothing is.
type Causes struct {
	// Usual is the local share of usual traffic, Observed that of the samples, Samples their number: those since the chart that is
	// nearest to its threshold was last zero, which is when the change most likely came.
	Usual    float64 `json:"usual"`
	Observed float64 `json:"observed"`
	Samples  int     `json:"samples"`
	// NewTokens is the share of the drop that comes with tokens which the tables have not seen, as if these were as local as chance
	// makes them; Mix that of requests of which the plan expects less, on their best ranks; Balance that of serving requests on other
	// ranks than their best; Rest is what the forecast does not know of. They sum to 1: a part that is no drop counts for 0.
	NewTokens float64 `json:"new_tokens"`
	Mix       float64 `json:"mix"`
	Balance   float64 `json:"balance"`
	Rest      float64 `json:"rest"`
}

// Explain tells why the local share of the samples is low; the oldest comes first.
func (c *Calibration) Explain(samples []Sample) Causes {
	var mean struct{ local, best, known, given, n float64 }
	for _, s := range samples[c.begin(samples):] {
		best := c.expectedOnBest(s)
		given := c.given(s)
		if !finite(s.Local, best, given, s.Known) {
			continue
		}
		mean.n++
		mean.local += (s.Local - mean.local) / mean.n
		mean.best += (best - mean.best) / mean.n
		mean.known += (s.Known - mean.known) / mean.n
		mean.given += (given - mean.given) / mean.n
	}
	causes := Causes{Usual: c.Usual.Served, Observed: mean.local, Samples: int(mean.n)}
	drop := c.Usual.Served - mean.local
	if mean.n == 0 || drop <= 0 {
		return causes
	}
	// Tokens that were seen are as local as makes the usual mean.
	perNew := max(0, c.Usual.Served-c.Chance) / max(c.Usual.Known, 1e-9)
	newTokens := min(max(0, (c.Usual.Known-mean.known)*perNew), drop)
	mix := max(0, c.Usual.Best-mean.best-newTokens)
	balance := c.beyondUsual(mean.given)
	rest := max(0, drop-newTokens-mix-balance)
	sum := newTokens + mix + balance + rest
	causes.NewTokens, causes.Mix, causes.Balance, causes.Rest = newTokens/sum, mix/sum, balance/sum, rest/sum
	return causes
}

// Given is the local share that the samples have given up, in the mean, by being served on other ranks than their best ones, beyond what usual
// traffic does: under load requests go where they keep nobody waiting. It is 0 where that is no more.
func (c *Calibration) Given(samples []Sample) float64 {
	mean, n := 0.0, 0.0
	for _, s := range samples {
		if given := c.given(s); finite(given) {
			n++
			mean += (given - mean) / n
		}
	}
	return c.beyondUsual(mean)
}

// given is the local share to be expected of a request on its best rank, less that on the rank that served it.
func (c *Calibration) given(s Sample) float64 { return c.expectedOnBest(s) - c.Expected(s) }

// beyondUsual is what is given up beyond what usual traffic gives up.
func (c *Calibration) beyondUsual(given float64) float64 {
	return max(0, given-(c.Usual.Best-c.Usual.Served))
}

func finite(values ...float64) bool {
	for _, v := range values {
		if v-v != 0 { // so are NaN and infinities
			return false
		}
	}
	return true
}

// begin is the first sample since the chart that is nearest to its threshold at the end was last zero.
func (c *Calibration) begin(samples []Sample) int {
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
