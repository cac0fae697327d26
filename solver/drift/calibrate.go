package drift

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Options are what a calibration aims at.
type Options struct {
	// FalseAlarms is the rate of false alarms per sampled request that the thresholds are made for, over all charts.
	FalseAlarms float64
	// Residual and Level are the relative drops that count neither for nor against drift: half of those that are to be found.
	Residual, Level float64
	// Novelty is the same for the share of what is new in requests: how far it is above that of the usual kind of requests with most of
	// it, in standard deviations of the requests of a kind.
	Novelty float64
	// Chance is the local share of tokens of which nothing is known: one over the number of ranks.
	Chance float64
	// Sticky is the probability, in the traffic that is simulated beside one in random order, that a request is of the same kind
	// as the one before it.
	Sticky float64
	// Cap bounds a rank's load in the traffic that is simulated, as the request router does; 0 is LoadCap.
	Cap float64
	// Steps is the number of requests that are simulated in each order.
	Steps int
	Seed  uint64
}

// DefaultOptions aim at a tenth of one false alarm in a million sampled requests: what is calibrated on some documents has to hold
// for others of their kinds.
func DefaultOptions() Options {
	return Options{FalseAlarms: 1e-7, Residual: 0.05, Level: 0.15, Novelty: 0.5, Sticky: 0.9, Steps: 500_000, Seed: 1}
}

func (o *Options) validate(requests []Request) error {
	switch {
	case len(requests) < LeastRequests:
		return fmt.Errorf("%d held-out requests; at least %d are needed to tell drift from chance", len(requests), LeastRequests)
	case !(o.FalseAlarms > 0 && o.FalseAlarms < 1):
		return fmt.Errorf("the rate of false alarms is %v; it must be between 0 and 1", o.FalseAlarms)
	case o.Steps < leastSteps:
		return fmt.Errorf("steps is %d; it must be at least %d", o.Steps, leastSteps)
	}
	return nil
}

func (o *Options) orders() []Order { return []Order{{0, o.Cap, o.Seed}, {o.Sticky, o.Cap, o.Seed}} }

const (
	// LeastRequests is the number of requests below which no mean is known well enough to tell any change from chance.
	LeastRequests = 50
	// MaxRows bounds what a calibration reads of a trace, in rows of activations (tokens times MoE layers), however few requests that is. A
	// row costs less than when the plan is scored on it.
	MaxRows = 64 << 20
	// leastSteps is the number of simulated requests below which the tail of a chart is not seen.
	leastSteps = 1000
	// meanSteps is the part of the steps that means are taken from, one in as many.
	meanSteps = 10
	// peakStream tells the random numbers of peaks from those of traffic.
	peakStream = 1
	// stepsPerCheck is the number of simulated requests between two looks at whether to go on: tens of milliseconds.
	stepsPerCheck = 100_000
)

// Calibrate finds what is to be expected of a plan's requests, and the thresholds. The requests must not be among those that the
// plan was solved from.
func Calibrate(ctx context.Context, requests []Request, o Options) (*Calibration, error) {
	if err := o.validate(requests); err != nil {
		return nil, err
	}
	served, err := serve(requests, &o)
	if err != nil {
		return nil, err
	}
	c, within, err := calibrate(ctx, requests, served, nil, &o)
	if err != nil || requests[0].Bag == nil || within <= soon {
		return c, err
	}
	text, told := learnText(requests, c.residuals(requests))
	if text == nil {
		return c, nil
	}
	reading, sooner, err := calibrate(ctx, told, served, text, &o)
	if err == nil && sooner < within {
		c = reading
	}
	return c, err
}

// soon is the number of requests within which a change of twice the reference that is asked for is found soon enough by forecasts alone: to ask the
// tokens too would let the test depend on more that other documents change.
const soon = 50

// calibrate makes a calibration that reads text, or where that is nil, none. A change of twice the reference that is asked for is found
// within about as many requests as are returned.
func calibrate(ctx context.Context, requests []Request, served [][]float64, text *Text, o *Options) (c *Calibration, within float64, err error) {
	c = &Calibration{
		Ranks: len(requests[0].Predicted), Requests: len(requests), FalseAlarms: o.FalseAlarms, Chance: o.Chance, Text: text,
		Residual: Chart{Reference: o.Residual}, Level: Chart{Reference: o.Level},
	}
	c.fit(requests, served)
	spread, err := c.centre(requests, o)
	if err != nil {
		return nil, 0, err
	}
	if err := c.limit(ctx, requests, o); err != nil {
		return nil, 0, err
	}
	if err := c.sooner(ctx, requests, o, spread); err != nil {
		return nil, 0, err
	}
	return c, c.requestsToFind(2*o.Residual, c.Residual, spread), nil
}

// residuals are those of requests on their best ranks.
func (c *Calibration) residuals(requests []Request) []float64 {
	residuals := make([]float64, len(requests))
	for i, r := range requests {
		s := r.sample(r.best())
		residuals[i] = s.Local - c.Expected(s)
	}
	return residuals
}

// serve is how often each rank serves each request in simulated traffic [request][rank], relative to how often the request comes. A
// little of every rank is in it: others serve it where the best ranks are away.
func serve(requests []Request, o *Options) ([][]float64, error) {
	const others = 0.05
	ranks := len(requests[0].Predicted)
	served := make([][]float64, len(requests))
	for i := range served {
		served[i] = make([]float64, ranks)
	}
	for _, order := range o.orders() {
		traffic, err := NewTraffic(requests, order)
		if err != nil {
			return nil, err
		}
		for range o.Steps / meanSteps {
			request, rank := traffic.next()
			served[request][rank]++
		}
	}
	for _, on := range served {
		sum := 0.0
		for _, n := range on {
			sum += n
		}
		for rank, n := range on {
			on[rank] = others/float64(ranks) + (1-others)*n/max(sum, 1)
		}
	}
	return served, nil
}

// prior is the number of requests of a cell that weigh as much as the mean of all cells like it. It is little, so that cells that a
// request rarely comes to have a mean at all: what is shrunk of the others comes back as residuals that differ with the order of
// requests, and the test has to be centred on the lower ones.
const prior = 0.2

// cell sums what is known of requests with one best rank on one rank, by their weight.
type cell struct{ weight, highest, predicted, known, pairs, local float64 }

func (a *cell) add(weight float64, s Sample) {
	a.weight += weight
	a.highest += weight * s.Highest
	a.predicted += weight * s.Predicted
	a.known += weight * s.Known
	a.pairs += weight * s.Pairs
	a.local += weight * s.Local
}

// fit finds the means of all cells, each shrunk to that of its like (served by the best rank or not), and slopes about them.
// Requests count on a rank as often as it serves them: a scheduler takes those there that lose little by it. What is known of their
// tokens counts where they have no rank: a best rank tells kinds of requests apart as well, and slopes that gain nothing cost certainty.
func (c *Calibration) fit(requests []Request, served [][]float64) {
	cells := make([]cell, c.Ranks*c.Ranks)
	var all [2]cell
	for i, r := range requests {
		for rank, weight := range served[i] {
			s := r.sample(rank)
			cells[s.Best*c.Ranks+rank].add(weight, s)
			all[like(s.Best, rank)].add(weight, s)
		}
	}
	c.Highest, c.Predicted, c.Local = make([]float64, len(cells)), make([]float64, len(cells)), make([]float64, len(cells))
	for i, a := range cells {
		of := all[like(i/c.Ranks, i%c.Ranks)]
		c.Highest[i] = written((a.highest + prior*of.highest/of.weight) / (a.weight + prior))
		c.Predicted[i] = written((a.predicted + prior*of.predicted/of.weight) / (a.weight + prior))
		c.Local[i] = written((a.local + prior*of.local/of.weight) / (a.weight + prior))
	}
	if c.Ranks == 1 {
		c.Known = &Known{all[1].known / all[1].weight, all[1].pairs / all[1].weight}
	}
	c.slope(requests, served)
}

// written is a mean as drift.json has it, to four digits: there are ranks² of them, and it has to fit a ConfigMap. Everything else is
// found with these means, and makes up for what is lost.
func written(mean float64) float64 {
	const digits = 4
	if !(mean > 0) {
		return mean
	}
	scale := math.Pow10(digits - int(math.Floor(math.Log10(mean))) - 1)
	return math.Round(mean*scale) / scale
}

// slope finds the slopes by weighted least squares.
func (c *Calibration) slope(requests []Request, served [][]float64) {
	var sums regression
	for i, r := range requests {
		for rank, weight := range served[i] {
			s := r.sample(rank)
			sums.add(weight, c.aboveMeans(s), s.Local-c.Local[s.Best*c.Ranks+rank])
		}
	}
	c.Slopes = sums.slopes()
}

// like is which cells have something in common.
func like(best, rank int) int {
	if best == rank {
		return 1
	}
	return 0
}

// centre makes the mean residual of served requests zero, and takes the mean share on best ranks, in the order in which it is lower:
// where ranks have to be balanced against long runs of one kind, other requests of a cell are served than in a random order. In the
// other order, by the spread that is returned, the test is slower, never more often wrong. What else is usual is that of the random order, by which plans are scored.
func (c *Calibration) centre(requests []Request, o *Options) (spread float64, err error) {
	offset, best, most := math.Inf(1), math.Inf(1), math.Inf(-1)
	for i, order := range o.orders() {
		traffic, err := NewTraffic(requests, order)
		if err != nil {
			return 0, err
		}
		steps := float64(o.Steps / meanSteps)
		residual, mean := 0.0, Usual{}
		for range o.Steps / meanSteps {
			s := traffic.Next()
			residual += (s.Local - c.Expected(s)) / steps
			mean.Served += s.Local / steps
			mean.Best += c.onBest(s) / steps
			mean.Known += s.Known / steps
		}
		offset, best, most = min(offset, residual), min(best, mean.Best), max(most, residual)
		if i == 0 {
			c.Usual = mean
		}
	}
	c.Offset, c.Usual = offset, Usual{Served: asShare(c.Usual.Served), Best: asShare(best), Known: asShare(c.Usual.Known)}
	return most - offset, nil
}

// asShare is a mean of shares: what is added up to it rounds, and what is expected of a best rank need not stay below all there is.
func asShare(mean float64) float64 { return min(max(mean, 0), 1) }

const (
	// leastReference and leastThreshold keep a chart that has never moved from alarming at the first request that is otherwise.
	leastReference, leastThreshold = 0.02, 0.1
)

// widths are by how much more than is asked for references may be.
var widths = []float64{1, 1.5, 2, 3, 4, 6}

// reach is the number of requests within which a change of twice the reference is to be found.
const reach = 1000

// limit sets references and thresholds. The mean of few requests may be off by more than the reference: what usual requests give is
// then evidence of a change, and no threshold is both safe and of use. A chart that does not find a change of twice its reference
// within reach gets a larger one: it looks for what so few requests can tell from chance.
func (c *Calibration) limit(ctx context.Context, requests []Request, o *Options) error {
	var found [charts]bool
	for _, width := range widths {
		of := c.refer(requests, o, width, found)
		thresholds, err := c.thresholds(ctx, requests, of, o)
		if err != nil {
			return err
		}
		changes := [charts]float64{width * o.Residual * c.Usual.Served, width * o.Level * c.Usual.Best, width * o.Novelty * of.within[noveltyChart]}
		for chart, set := range c.charts() {
			if !found[chart] {
				set.Threshold = thresholds[chart]
				found[chart] = set.Threshold <= max(leastThreshold, reach*changes[chart])
			}
		}
		if found == [charts]bool{true, true, true} {
			break
		}
	}
	return nil
}

// higher is by how much more than is asked for the reference of residuals may be for the sake of sooner alarms.
const higher = 1.2

// sooner takes a higher reference of residuals where that finds a change of twice the one asked for in fewer requests: runs of a kind
// whose residuals are low climb less, and the threshold falls by more than what a change adds to each request. Spread is by how much
// residuals are higher in one order of requests than in the other.
func (c *Calibration) sooner(ctx context.Context, requests []Request, o *Options, spread float64) error {
	asked := c.Residual
	if asked.Reference != o.Residual {
		return nil // it is larger already: few requests tell little
	}
	thresholds, err := c.thresholds(ctx, requests, c.refer(requests, o, higher, [charts]bool{levelChart: true, noveltyChart: true}), o)
	if err != nil {
		return err
	}
	c.Residual.Threshold = thresholds[residualChart]
	if c.requestsToFind(2*o.Residual, c.Residual, spread) >= c.requestsToFind(2*o.Residual, asked, spread) {
		c.Residual = asked
	}
	return nil
}

// requestsToFind is about after how many requests a chart of residuals finds a drop, in the order of requests in which they are higher.
func (c *Calibration) requestsToFind(drop float64, chart Chart, spread float64) float64 {
	each := (drop-chart.Reference)*c.Usual.Served - spread
	if each <= 0 {
		return math.Inf(1)
	}
	return chart.Threshold / each
}

// refer gives the charts whose threshold was not found yet references of a width, and returns what is known of the kinds under these.
func (c *Calibration) refer(requests []Request, o *Options, width float64, found [charts]bool) *kinds {
	for chart, reference := range [charts]float64{residualChart: o.Residual, levelChart: o.Level} {
		if !found[chart] {
			c.charts()[chart].Reference = min(1, width*reference)
		}
	}
	kept := c.Novelty.Reference
	c.Novelty.Reference = 0 // the share of what is new itself
	of := kindsOf(c, requests)
	if c.Novelty.Reference = kept; !found[noveltyChart] {
		c.Novelty.Reference = of.newest(width * o.Novelty)
	}
	return of
}

// unseen is how many requests that are not local at all thresholds withstand, times the number of requests that they are made
// from: what comes less often than once in as many was not seen, and a run of a kind may repeat it.
const unseen = 200

// thresholds are what all charts together exceed as often as is allowed, in the order of requests in which that is higher.
func (c *Calibration) thresholds(ctx context.Context, requests []Request, of *kinds, o *Options) ([charts]float64, error) {
	withstood := unseen / float64(len(requests))
	thresholds := [charts]float64{
		max(leastThreshold, withstood*c.Usual.Served), max(leastThreshold, withstood*c.Usual.Best), leastThreshold,
	}
	exceeding := o.FalseAlarms * float64(o.Steps) / charts
	for _, order := range o.orders() {
		peaks, err := c.peaks(ctx, requests, of, order, o.Steps)
		if err != nil {
			return thresholds, err
		}
		for chart := range thresholds {
			thresholds[chart] = max(thresholds[chart], tail(peaks[chart], exceeding))
		}
	}
	return thresholds, nil
}

// peaks are the highest values of each chart between times at which it is zero, in traffic as bad as is to be feared.
func (c *Calibration) peaks(ctx context.Context, requests []Request, of *kinds, order Order, steps int) ([charts][]float64, error) {
	var peaks [charts][]float64
	traffic, err := NewTraffic(requests, order)
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
			evidence = of.run(evidence, request, requests[request].Kind, random)
		} else {
			for chart := range evidence {
				evidence[chart] += of.worse[chart]
			}
		}
		for chart := range values {
			values[chart] = climb(values[chart], evidence[chart])
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

// tail is the height that as many peaks are expected to exceed: by the highest 500, or by the highest 50 where these lie further apart,
// as they do where few kinds of requests move a chart that others leave at zero. Of few peaks twice the highest is taken.
func tail(peaks []float64, exceeding float64) float64 {
	slices.Sort(peaks)
	if len(peaks) < 4 {
		return 2 * peaks[len(peaks)-1]
	}
	return max(extrapolated(peaks, 500, exceeding), extrapolated(peaks, 50, exceeding))
}

// extrapolated is that height by the highest peaks, at most a quarter of them. The peaks of a random walk with negative drift have an
// exponential tail (Siegmund 1985, chapter II).
func extrapolated(peaks []float64, top int, exceeding float64) float64 {
	top = min(len(peaks)/4, top)
	level, excess := peaks[len(peaks)-1-top], 0.0
	for _, peak := range peaks[len(peaks)-top:] {
		excess += (peak - level) / float64(top)
	}
	return level + excess*math.Log(max(1, float64(top)/exceeding))
}
