package drift

import (
	"context"
	"fmt"
	"math"
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

func (o *Options) orders() []Order { return []Order{{0, o.Seed}, {o.Sticky, o.Seed}} }

const (
	// LeastRequests is the number of requests below which neither a mean nor a tail is known.
	LeastRequests = 50
	// leastSteps is the number of simulated requests below which the tail of a chart is not seen.
	leastSteps = 1000
	// meanSteps is the part of the steps that means are taken from, one in as many.
	meanSteps = 10
	// stepsPerCheck is the number of simulated requests between two looks at whether to go on: tens of milliseconds.
	stepsPerCheck = 100_000
)

// Calibrate finds what is to be expected of a plan's requests, and the thresholds. The requests must not be among those that the
// plan was solved from.
func Calibrate(ctx context.Context, requests []Request, o Options) (*Calibration, error) {
	if err := o.validate(requests); err != nil {
		return nil, err
	}
	c := &Calibration{
		Ranks: len(requests[0].Predicted), Requests: len(requests), FalseAlarms: o.FalseAlarms, Chance: o.Chance,
		Residual: Chart{Reference: o.Residual}, Level: Chart{Reference: o.Level},
	}
	served, err := serve(requests, &o)
	if err != nil {
		return nil, err
	}
	c.fit(requests, served)
	if err := c.centre(requests, &o); err != nil {
		return nil, err
	}
	kinds := spread(c, requests)
	c.Novelty.Reference = kinds.newest(o.Novelty)
	return c, c.limit(ctx, requests, kinds, &o)
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
type cell struct{ weight, highest, predicted, local float64 }

func (a *cell) add(weight float64, s Sample) {
	a.weight += weight
	a.highest += weight * s.Highest
	a.predicted += weight * s.Predicted
	a.local += weight * s.Local
}

// fit finds the means of all cells, each shrunk to that of its like (served by the best rank or not), and slopes about them.
// Requests count on a rank as often as it serves them: a scheduler takes those there that lose little by it.
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
		c.Highest[i] = (a.highest + prior*of.highest/of.weight) / (a.weight + prior)
		c.Predicted[i] = (a.predicted + prior*of.predicted/of.weight) / (a.weight + prior)
		c.Local[i] = (a.local + prior*of.local/of.weight) / (a.weight + prior)
	}
	c.slope(requests, served)
}

// slope finds the slopes by weighted least squares.
func (c *Calibration) slope(requests []Request, served [][]float64) {
	var onBest, onOther line
	for i, r := range requests {
		for rank, weight := range served[i] {
			s := r.sample(rank)
			at := s.Best*c.Ranks + rank
			predicted, highest, local := s.Predicted-c.Predicted[at], s.Highest-c.Highest[at], s.Local-c.Local[at]
			if rank == s.Best {
				onBest.add(weight, predicted, 0, local)
			} else {
				onOther.add(weight, predicted, highest, local)
			}
		}
	}
	c.Slopes.Best, _ = onBest.slopes()
	c.Slopes.Predicted, c.Slopes.Highest = onOther.slopes()
}

// line holds the sums of a regression of z on x and y, all of them about their means.
type line struct{ xx, xy, yy, xz, yz float64 }

func (l *line) add(weight, x, y, z float64) {
	l.xx += weight * x * x
	l.xy += weight * x * y
	l.yy += weight * y * y
	l.xz += weight * x * z
	l.yz += weight * y * z
}

// slopes are 0 for what does not vary, and that of x alone where x and y vary together.
func (l *line) slopes() (x, y float64) {
	const together = 1e-6
	determinant := l.xx*l.yy - l.xy*l.xy
	switch {
	case determinant > together*l.xx*l.yy:
		return (l.xz*l.yy - l.yz*l.xy) / determinant, (l.yz*l.xx - l.xz*l.xy) / determinant
	case l.xx > 0:
		return l.xz / l.xx, 0
	}
	return 0, 0
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
// other order the test is slower, never more often wrong. What else is usual is that of the random order, by which plans are scored.
func (c *Calibration) centre(requests []Request, o *Options) error {
	offset, best := math.Inf(1), math.Inf(1)
	for i, order := range o.orders() {
		traffic, err := NewTraffic(requests, order)
		if err != nil {
			return err
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
		offset, best = min(offset, residual), min(best, mean.Best)
		if i == 0 {
			c.Usual = mean
		}
	}
	c.Offset, c.Usual.Best = offset, best
	return nil
}

// deviation is the mean and the variance of a number of values.
type deviation struct{ n, mean, squares float64 }

func (d *deviation) add(x float64) {
	d.n++
	above := x - d.mean
	d.mean += above / d.n
	d.squares += above * (x - d.mean)
}

// standardError is that of the mean.
func (d *deviation) standardError() float64 { return math.Sqrt(d.squares) / d.n }

// kinds are the residuals on best ranks, and the share of what is new, of the requests of each kind.
type kinds map[int]*struct{ residual, novelty deviation }

func spread(c *Calibration, requests []Request) kinds {
	of := kinds{}
	for i := range requests {
		s := requests[i].sample(requests[i].best())
		if of[requests[i].Kind] == nil {
			of[requests[i].Kind] = &struct{ residual, novelty deviation }{}
		}
		of[requests[i].Kind].residual.add(s.Local - c.Expected(s))
		of[requests[i].Kind].novelty.add(s.novelty())
	}
	return of
}

// newest is the share of what is new in requests of the kind with most of it, and as many standard deviations of the requests of a
// kind above.
func (k kinds) newest(deviations float64) float64 {
	most, squares, n := 0.0, 0.0, 0.0
	for _, kind := range sorted(k) {
		most = max(most, k[kind].novelty.mean)
		squares += k[kind].novelty.squares
		n += k[kind].novelty.n
	}
	return min(1, max(leastReference, most+deviations*math.Sqrt(squares/n)))
}

// sorted are the kinds in ascending order: sums of them must not depend on that of a map.
func sorted(k kinds) []int {
	names := make([]int, 0, len(k))
	for kind := range k {
		names = append(names, kind)
	}
	slices.Sort(names)
	return names
}

const (
	// leastReference and leastThreshold keep a chart that has never moved from alarming at the first request that is otherwise.
	leastReference, leastThreshold = 0.02, 0.1
)

// limit sets the thresholds: in each order, what all charts together exceed as often as is allowed. The mean of a kind is known to its
// standard error, which a run of requests of that kind adds up: these are taken to be worse by it than they were.
func (c *Calibration) limit(ctx context.Context, requests []Request, of kinds, o *Options) error {
	c.Residual.Threshold, c.Level.Threshold, c.Novelty.Threshold = leastThreshold, leastThreshold, leastThreshold
	worse := slices.Clone(requests)
	for i := range worse {
		kind := of[worse[i].Kind]
		worse[i].Local = slices.Clone(worse[i].Local)
		for rank := range worse[i].Local {
			worse[i].Local[rank] -= kind.residual.standardError()
		}
		worse[i].Known -= kind.novelty.standardError()
		worse[i].Pairs -= kind.novelty.standardError()
	}
	for i, order := range o.orders() {
		peaks, err := c.peaks(ctx, [][]Request{requests, worse}[i], order, o.Steps)
		if err != nil {
			return err
		}
		exceeding := o.FalseAlarms * float64(o.Steps) / float64(len(peaks))
		for chart, threshold := range []*float64{&c.Residual.Threshold, &c.Level.Threshold, &c.Novelty.Threshold} {
			*threshold = max(*threshold, tail(peaks[chart], exceeding))
		}
	}
	return nil
}

// peaks are the highest values of each chart between times at which it is zero.
func (c *Calibration) peaks(ctx context.Context, requests []Request, order Order, steps int) ([3][]float64, error) {
	var peaks [3][]float64
	traffic, err := NewTraffic(requests, order)
	if err != nil {
		return peaks, err
	}
	var statistic Statistic
	var peak [3]float64
	for i := range steps {
		if i%stepsPerCheck == 0 && ctx.Err() != nil {
			return peaks, ctx.Err()
		}
		statistic = c.Next(statistic, traffic.Next())
		for chart, value := range [3]float64{statistic.Residual, statistic.Level, statistic.Novelty} {
			if value == 0 && peak[chart] > 0 {
				peaks[chart] = append(peaks[chart], peak[chart])
				peak[chart] = 0
			}
			peak[chart] = max(peak[chart], value)
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
