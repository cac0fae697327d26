// SPDX-License-Identifier: Apache-2.0

package drift

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Options are the design targets and simulation parameters of a calibration.
type Options struct {
	// FalseAlarms is the target rate of false alarms per sampled request, over all charts.
	FalseAlarms float64
	// Residual and Level are the reference values k, as relative drops: half of the drops to detect.
	Residual, Level float64
	// Novelty is the reference value k of the novelty chart: the distance above the mean share of unseen content of the
	// kind with most of it, in standard deviations within a kind.
	Novelty float64
	// Chance is the local share of tokens that the tables do not know: one over the number of ranks.
	Chance float64
	// Sticky is the probability that a request has the same kind as the previous one, in the second simulated order.
	// The first order is random.
	Sticky float64
	// Cap is the load limit of a rank in simulated traffic, as in the request router; 0 is LoadCap.
	Cap float64
	// Steps is the number of simulated requests in each order.
	Steps int
	Seed  uint64
}

// DefaultOptions returns the default options. Their false alarm rate is a tenth of the promised rate of one in a
// million sampled requests, because a calibration on some documents must hold for other documents of the same kinds.
func DefaultOptions() Options {
	return Options{FalseAlarms: 1e-7, Residual: 0.05, Level: 0.15, Novelty: 0.5, Sticky: 0.9, Steps: 500_000, Seed: 1}
}

func (o *Options) validate(requests []Request) error {
	switch {
	case len(requests) < MinRequests:
		return fmt.Errorf("%d held-out requests; at least %d are needed to distinguish drift from chance", len(requests), MinRequests)
	case !(o.FalseAlarms > 0 && o.FalseAlarms < 1):
		return fmt.Errorf("the rate of false alarms is %v; it must be between 0 and 1", o.FalseAlarms)
	case o.Steps < minSteps:
		return fmt.Errorf("steps is %d; it must be at least %d", o.Steps, minSteps)
	}
	return nil
}

func (o *Options) orders() []Order { return []Order{{0, o.Cap, o.Seed}, {o.Sticky, o.Cap, o.Seed}} }

const (
	// MinRequests is the minimum number of requests. With fewer, the means are too uncertain to distinguish a change
	// from chance.
	MinRequests = 50
	// MaxRows is the maximum number of activation rows (tokens times MoE layers) that a calibration reads from a trace,
	// for any number of requests. Reading a row costs less than scoring the plan on it.
	MaxRows = 64 << 20
	// minSteps is the minimum number of simulated requests. With fewer, the exceededBy of a chart is not observed.
	minSteps = 1000
	// meanSteps is the divisor of Options.Steps for simulations that only estimate means.
	meanSteps = 10
	// peakStream is the random stream of the simulation of peaks; stream 0 is traffic.
	peakStream = 1
	// stepsPerCheck is the number of simulated requests between two checks for cancellation: tens of milliseconds.
	stepsPerCheck = 100_000
)

// Calibrate estimates the expected local shares of a plan's requests and sets the reference values and decision
// intervals of the charts. The requests must not be among those that the plan was solved from.
func Calibrate(ctx context.Context, requests []Request, o Options) (*Calibration, error) {
	if err := o.validate(requests); err != nil {
		return nil, err
	}
	weights, err := servingWeights(requests, &o)
	if err != nil {
		return nil, err
	}
	c, delay, err := calibrate(ctx, requests, weights, nil, &o)
	if err != nil || requests[0].Bag == nil || delay <= acceptableDelay {
		return c, err
	}
	text, withText := fitText(requests, c.residuals(requests))
	if text == nil {
		return c, nil
	}
	textCalibration, textDelay, err := calibrate(ctx, withText, weights, text, &o)
	if err == nil && textDelay < delay {
		c = textCalibration
	}
	return c, err
}

// acceptableDelay is a detection delay, in requests, that is short enough without a text model. A text model would make
// the test depend on more properties that differ between documents.
const acceptableDelay = 50

// calibrate makes a calibration with the given text model, or without one if text is nil. It returns the approximate
// detection delay, in requests, of a drop of twice the requested reference value.
func calibrate(ctx context.Context, requests []Request, weights [][]float64, text *Text, o *Options) (c *Calibration, delay float64, err error) {
	c = &Calibration{
		Ranks: len(requests[0].Predicted), Requests: len(requests), FalseAlarms: o.FalseAlarms, Chance: o.Chance, Text: text,
		Residual: Chart{Reference: o.Residual}, Level: Chart{Reference: o.Level},
	}
	c.fit(requests, weights)
	spread, err := c.setTargetMeans(requests, o)
	if err != nil {
		return nil, 0, err
	}
	if err := c.setCharts(ctx, requests, o); err != nil {
		return nil, 0, err
	}
	if err := c.raiseResidualReference(ctx, requests, o, spread); err != nil {
		return nil, 0, err
	}
	return c, c.detectionDelay(2*o.Residual, c.Residual, spread), nil
}

// residuals returns the residual of each request on its best rank.
func (c *Calibration) residuals(requests []Request) []float64 {
	residuals := make([]float64, len(requests))
	for i, r := range requests {
		s := r.sample(r.best())
		residuals[i] = s.Local - c.Expected(s)
	}
	return residuals
}

// servingWeights simulates traffic and returns how often each rank serves each request, relative to the frequency of
// the request [request][rank]. Every rank gets a small weight, because other ranks serve a request while its best ranks
// are unavailable.
func servingWeights(requests []Request, o *Options) ([][]float64, error) {
	const others = 0.05
	ranks := len(requests[0].Predicted)
	weights := make([][]float64, len(requests))
	for i := range weights {
		weights[i] = make([]float64, ranks)
	}
	for _, order := range o.orders() {
		traffic, err := newSimulator(requests, order)
		if err != nil {
			return nil, err
		}
		for range o.Steps / meanSteps {
			request, rank := traffic.next()
			weights[request][rank]++
		}
	}
	for _, byRank := range weights {
		sum := 0.0
		for _, n := range byRank {
			sum += n
		}
		for rank, n := range byRank {
			byRank[rank] = others/float64(ranks) + (1-others)*n/max(sum, 1)
		}
	}
	return weights, nil
}

// prior is the weight of the pooled mean in the mean of a cell, in requests. The weight is small and ensures that
// rarely visited cells have a mean. Shrinkage reappears as residuals that differ between the orders of requests, and
// the target mean has to follow the lower of them.
const prior = 0.2

// cell accumulates weighted sums over requests with one best rank on one serving rank.
type cell struct{ weight, highest, predicted, known, pairs, local float64 }

func (a *cell) add(weight float64, s Sample) {
	a.weight += weight
	a.highest += weight * s.Highest
	a.predicted += weight * s.Predicted
	a.known += weight * s.Known
	a.pairs += weight * s.Pairs
	a.local += weight * s.Local
}

// fit estimates the means of all cells, each shrunk to the pooled mean of its class (weights by the best rank or not),
// and the slopes about these means. A request counts on a rank as often as the rank serves it: the scheduler sends
// requests to a rank if they lose little there. Known tokens and pairs are regressors only if requests have no rank. A
// best rank distinguishes kinds of requests equally well, and slopes without benefit add uncertainty.
func (c *Calibration) fit(requests []Request, weights [][]float64) {
	cells := make([]cell, c.Ranks*c.Ranks)
	var all [2]cell
	for i, r := range requests {
		for rank, weight := range weights[i] {
			s := r.sample(rank)
			cells[s.Best*c.Ranks+rank].add(weight, s)
			all[cellClass(s.Best, rank)].add(weight, s)
		}
	}
	c.Highest, c.Predicted, c.Local = make([]float64, len(cells)), make([]float64, len(cells)), make([]float64, len(cells))
	for i, a := range cells {
		pooled := all[cellClass(i/c.Ranks, i%c.Ranks)]
		c.Highest[i] = rounded((a.highest + prior*pooled.highest/pooled.weight) / (a.weight + prior))
		c.Predicted[i] = rounded((a.predicted + prior*pooled.predicted/pooled.weight) / (a.weight + prior))
		c.Local[i] = rounded((a.local + prior*pooled.local/pooled.weight) / (a.weight + prior))
	}
	if c.Ranks == 1 {
		c.Known = &Known{all[1].known / all[1].weight, all[1].pairs / all[1].weight}
	}
	c.fitSlopes(requests, weights)
}

// rounded rounds a mean to the four digits that drift.json contains. There are ranks² means, and they must fit into a
// ConfigMap. All other parameters are estimated from the rounded means, which compensates the rounding.
func rounded(mean float64) float64 {
	const digits = 4
	if !(mean > 0) {
		return mean
	}
	scale := math.Pow10(digits - int(math.Floor(math.Log10(mean))) - 1)
	return math.Round(mean*scale) / scale
}

// fitSlopes estimates the slopes by weighted least squares.
func (c *Calibration) fitSlopes(requests []Request, weights [][]float64) {
	var sums regression
	for i, r := range requests {
		for rank, weight := range weights[i] {
			s := r.sample(rank)
			sums.add(weight, c.aboveMeans(s), s.Local-c.Local[s.Best*c.Ranks+rank])
		}
	}
	c.Slopes = sums.slopes()
}

// cellClass returns 1 for requests on their best rank and 0 for requests on other ranks. Cells of one class share a
// pooled mean.
func cellClass(best, rank int) int {
	if best == rank {
		return 1
	}
	return 0
}

// setTargetMeans sets Offset and Usual: the mean residual of weights requests becomes 0 in the order in which it is
// lower, and Usual.Best is the lower of both means. In long runs of one kind, load balancing serves other requests of a
// cell than in random order. In the order with the higher residuals, the test is slower but has no more false alarms.
// The other means of Usual are those of the random order, which plans are scored with. The returned spread is the
// difference of the mean residuals of both orders.
func (c *Calibration) setTargetMeans(requests []Request, o *Options) (spread float64, err error) {
	offset, best, maxResidual := math.Inf(1), math.Inf(1), math.Inf(-1)
	for i, order := range o.orders() {
		traffic, err := newSimulator(requests, order)
		if err != nil {
			return 0, err
		}
		steps := float64(o.Steps / meanSteps)
		residual, mean := 0.0, Usual{}
		for range o.Steps / meanSteps {
			s := traffic.nextSample()
			residual += (s.Local - c.Expected(s)) / steps
			mean.Served += s.Local / steps
			mean.Best += c.onBest(s) / steps
			mean.Known += s.Known / steps
		}
		offset, best, maxResidual = min(offset, residual), min(best, mean.Best), max(maxResidual, residual)
		if i == 0 {
			c.Usual = mean
		}
	}
	c.Offset, c.Usual = offset, Usual{Served: asShare(c.Usual.Served), Best: asShare(best), Known: asShare(c.Usual.Known)}
	return maxResidual - offset, nil
}

// asShare limits a mean of shares to 0..1. The sum is rounded, and the expectation on a best rank can exceed 1.
func asShare(mean float64) float64 { return min(max(mean, 0), 1) }

const (
	// minReference and minThreshold are lower bounds for k and h. They keep a chart that never moved in simulation from
	// an alarm at the first deviating request.
	minReference, minThreshold = 0.02, 0.1
)

// referenceScales are the factors by which reference values may exceed the requested ones, tried in this order.
var referenceScales = []float64{1, 1.5, 2, 3, 4, 6}

// maxDetectionDelay is the maximum number of requests for the detection of a change of twice the reference value.
const maxDetectionDelay = 1000

// setCharts sets the reference values k and decision intervals h. The mean of a few requests can be wrong by more than
// the reference value; in-control requests are then evidence of a change, and no decision interval is both safe and
// useful. A chart that does not detect a change of twice its reference value within maxDetectionDelay gets a larger
// reference value: it detects only changes that so few requests can distinguish from chance.
func (c *Calibration) setCharts(ctx context.Context, requests []Request, o *Options) error {
	var done [charts]bool
	for _, scale := range referenceScales {
		kinds := c.setReferences(requests, o, scale, done)
		thresholds, err := c.decisionIntervals(ctx, requests, kinds, o)
		if err != nil {
			return err
		}
		changes := [charts]float64{scale * o.Residual * c.Usual.Served, scale * o.Level * c.Usual.Best, scale * o.Novelty * kinds.within[noveltyChart]}
		for i, chart := range c.charts() {
			if !done[i] {
				chart.Threshold = thresholds[i]
				done[i] = chart.Threshold <= max(minThreshold, maxDetectionDelay*changes[i])
			}
		}
		if done == [charts]bool{true, true, true} {
			break
		}
	}
	return nil
}

// raisedReference is the factor of the raised reference value of the residual chart (raiseResidualReference).
const raisedReference = 1.2

// raiseResidualReference raises the reference value of the residual chart if that shortens the detection delay of a
// change of twice the requested value. In runs of a kind with low residuals the chart then rises less, and the decision
// interval shrinks by more than the increments under a change. Spread is the difference of the mean residuals of both
// orders.
func (c *Calibration) raiseResidualReference(ctx context.Context, requests []Request, o *Options, spread float64) error {
	requested := c.Residual
	if requested.Reference != o.Residual {
		return nil // setCharts already widened the reference value because of few requests
	}
	thresholds, err := c.decisionIntervals(ctx, requests, c.setReferences(requests, o, raisedReference, [charts]bool{levelChart: true, noveltyChart: true}), o)
	if err != nil {
		return err
	}
	c.Residual.Threshold = thresholds[residualChart]
	if c.detectionDelay(2*o.Residual, c.Residual, spread) >= c.detectionDelay(2*o.Residual, requested, spread) {
		c.Residual = requested
	}
	return nil
}

// detectionDelay returns the approximate number of requests until the residual chart detects a drop, in the order of
// requests with the higher residuals.
func (c *Calibration) detectionDelay(drop float64, chart Chart, spread float64) float64 {
	increment := (drop-chart.Reference)*c.Usual.Served - spread
	if increment <= 0 {
		return math.Inf(1)
	}
	return chart.Threshold / increment
}

// setReferences scales the reference values of all charts that are not done, and returns the estimates of the kinds of
// requests under these values.
func (c *Calibration) setReferences(requests []Request, o *Options, scale float64, done [charts]bool) *kinds {
	for chart, reference := range [charts]float64{residualChart: o.Residual, levelChart: o.Level} {
		if !done[chart] {
			c.charts()[chart].Reference = min(1, scale*reference)
		}
	}
	previous := c.Novelty.Reference
	c.Novelty.Reference = 0 // evidence is then the novelty share itself
	estimates := estimateKinds(c, requests)
	if c.Novelty.Reference = previous; !done[noveltyChart] {
		c.Novelty.Reference = estimates.noveltyReference(scale * o.Novelty)
	}
	return estimates
}

// toleratedOutliers is a number of requests with local share 0 that the decision interval must tolerate, times the
// number of held-out requests: events rarer than one in the number of held-out requests were not observed, and a run of
// one kind can repeat them.
const toleratedOutliers = 200

// decisionIntervals returns the values that the charts together exceed at the target false alarm rate, in the order of
// requests with the higher values.
func (c *Calibration) decisionIntervals(ctx context.Context, requests []Request, of *kinds, o *Options) ([charts]float64, error) {
	tolerated := toleratedOutliers / float64(len(requests))
	thresholds := [charts]float64{
		max(minThreshold, tolerated*c.Usual.Served), max(minThreshold, tolerated*c.Usual.Best), minThreshold,
	}
	exceeding := o.FalseAlarms * float64(o.Steps) / charts
	for _, order := range o.orders() {
		peaks, err := c.peaks(ctx, requests, of, order, o.Steps)
		if err != nil {
			return thresholds, err
		}
		for chart := range thresholds {
			thresholds[chart] = max(thresholds[chart], exceededBy(peaks[chart], exceeding))
		}
	}
	return thresholds, nil
}

// peaks simulates worst-case in-control traffic and returns the maximum of each chart between two zeros.
func (c *Calibration) peaks(ctx context.Context, requests []Request, of *kinds, order Order, steps int) ([charts][]float64, error) {
	var peaks [charts][]float64
	traffic, err := newSimulator(requests, order)
	if err != nil {
		return peaks, err
	}
	random := rand.New(rand.NewPCG(order.Seed, peakStream))
	var values, peak [charts]float64
	for i := range steps {
		if i%stepsPerCheck == 0 && ctx.Err() != nil {
			return peaks, ctx.Err()
		}
		request, rank := traffic.next()
		evidence := c.evidence(requests[request].sample(rank))
		if order.Sticky > 0 {
			evidence = of.worstCase(evidence, request, requests[request].Kind, random)
		} else {
			for chart := range evidence {
				evidence[chart] += of.worstShift[chart]
			}
		}
		for chart := range values {
			values[chart] = cusum(values[chart], evidence[chart])
			if values[chart] == 0 && peak[chart] > 0 {
				peaks[chart] = append(peaks[chart], peak[chart])
				peak[chart] = 0
			}
			peak[chart] = max(peak[chart], values[chart])
		}
	}
	for chart, value := range peak {
		peaks[chart] = append(peaks[chart], value)
	}
	return peaks, nil
}

// exceededBy returns the height that the expected number of peaks exceeds. It extrapolates from the 500 and from the 50
// highest peaks and returns the larger height: the highest peaks are further apart if few kinds of requests move a
// chart that others leave at zero. With fewer than four peaks it returns twice the highest peak.
func exceededBy(peaks []float64, exceeding float64) float64 {
	slices.Sort(peaks)
	if len(peaks) < 4 {
		return 2 * peaks[len(peaks)-1]
	}
	return max(extrapolate(peaks, 500, exceeding), extrapolate(peaks, 50, exceeding))
}

// extrapolate returns this height from the top peaks, at most a quarter of all. The peaks of a random walk with
// negative drift have an exponential exceededBy (Siegmund 1985, chapter II).
func extrapolate(peaks []float64, top int, exceeding float64) float64 {
	top = min(len(peaks)/4, top)
	level, excess := peaks[len(peaks)-1-top], 0.0
	for _, peak := range peaks[len(peaks)-top:] {
		excess += (peak - level) / float64(top)
	}
	return level + excess*math.Log(max(1, float64(top)/exceeding))
}
