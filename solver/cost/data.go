package cost

import (
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/placement/bound"
	"github.com/semmoe/operator/solver/trace"
)

// DataParallel scores a plan for attention data parallelism, in several seeded arrival orders.
func DataParallel(ctx context.Context, t *trace.Trace, p *placement.Placement, forecast RequestForecast, o Options) (Report, error) {
	if err := o.validate(t, p); err != nil {
		return Report{}, err
	}
	if o.Orders < 1 {
		return Report{}, fmt.Errorf("orders is %d; it must be at least 1", o.Orders)
	}
	requests, err := describe(ctx, t, p.Ranks, forecast, &o)
	if err != nil {
		return Report{}, err
	}
	orders := make([]*orderRun, o.Orders)
	failures := make([]error, o.Orders)
	err = affinity.Parallel(ctx, o.Orders, func(i int) {
		run := &orderRun{trace: t, placement: p, options: &o, requests: requests}
		run.order = trace.Shuffled(o.Requests, o.Seed+uint64(i))
		failures[i] = run.play()
		orders[i] = run
	})
	if err != nil {
		return Report{}, err
	}
	for _, failure := range failures {
		if failure != nil {
			return Report{}, failure
		}
	}
	r := Report{WindowImbalance: new(float64)}
	tallies := make([][]*tally, len(orders))
	for i, run := range orders {
		tallies[i] = run.tallies
		*r.WindowImbalance += run.windowImbalance / float64(o.Orders)
		r.ExpertWindowImbalance += run.expertWindowImbalance / float64(o.Orders)
		r.BaselineLAR += run.baseline / float64(o.Orders)
	}
	r.fill(tallies, t.Model.Layers)
	r.ModelledUS = modelled(t, p, tallies, &o)
	if o.WithoutBounds {
		return r, nil
	}
	return r, bounds(ctx, t, p, orders, &o, &r)
}

// describe prepares what the scheduler is told about each request, indexed like the trace's requests.
func describe(ctx context.Context, t *trace.Trace, ranks int, forecast RequestForecast, o *Options) ([]dispatch.Request, error) {
	requests := make([]dispatch.Request, t.Requests())
	err := affinity.Parallel(ctx, len(o.Requests), func(i int) {
		r := o.Requests[i]
		scores := make([]float32, ranks)
		forecast.Score(scores, r)
		requests[r] = dispatch.Request{Scores: scores, Tokens: t.Length(r)}
		if o.Policy == dispatch.Prefix {
			requests[r].Prefixes = dispatch.PrefixHashes(nil, t.Request(r))
		}
	})
	return requests, err
}

// orderRun evaluates one arrival order.
type orderRun struct {
	trace     *trace.Trace
	placement *placement.Placement
	options   *Options
	requests  []dispatch.Request
	order     []int
	// own is the rank of each request of order.
	own     []int
	tallies []*tally

	windowImbalance, expertWindowImbalance float64
	baseline                               float64
}

func (r *orderRun) play() error {
	if err := r.schedule(); err != nil {
		return err
	}
	layers, ranks := len(r.placement.Layers), r.placement.Ranks
	for l := range layers {
		r.tallies = append(r.tallies, newTally(r.placement.Hosts(l), ranks, r.options))
	}
	// loads holds, for each request, its tokens per rank and then its activations per layer and rank.
	width := (layers + 1) * ranks
	loads := make([]int, len(r.order)*width)
	for i, request := range r.order {
		r.count(request, r.own[i], loads[i*width:(i+1)*width])
	}
	r.windows(loads, width)
	r.deal()
	return nil
}

func (r *orderRun) schedule() error {
	if r.options.Policy == dispatch.Window {
		if r.options.RankCapacity != nil {
			return fmt.Errorf("policy %s deals out equal numbers of requests; it knows no rank capacities", dispatch.Window)
		}
		queue := dispatch.NewQueue(r.placement.Ranks)
		waiting := make([]dispatch.Request, 0, queue.Size())
		for chunk := range slices.Chunk(r.order, queue.Size()) {
			waiting = waiting[:0]
			for _, request := range chunk {
				waiting = append(waiting, r.requests[request])
			}
			r.own = append(r.own, queue.Assign(waiting)...)
		}
		return nil
	}
	scheduler, err := dispatch.NewWeightedScheduler(r.options.Policy, r.placement.Ranks, r.options.Cap, r.options.RankCapacity)
	if err != nil {
		return err
	}
	for _, request := range r.order {
		r.own = append(r.own, scheduler.Assign(r.requests[request]))
	}
	return nil
}

// count counts a request on its rank and notes the load that it makes.
func (r *orderRun) count(request, own int, load []int) {
	ranks := r.placement.Ranks
	load[own] = r.trace.Length(request)
	for l, t := range r.tallies {
		served := load[(l+1)*ranks : (l+2)*ranks]
		for rank, n := range t.served {
			served[rank] = -n
		}
		for position := r.trace.Offsets[request]; position < r.trace.Offsets[request+1]; position++ {
			t.add(r.trace.Row(int(position), l), own)
		}
		for rank, n := range t.served {
			served[rank] += n
		}
	}
}

// windows measures the balance of the last requests after each arrival, from the first full window on; fewer requests
// are one window.
func (r *orderRun) windows(loads []int, width int) {
	ranks, layers := r.placement.Ranks, len(r.tallies)
	sum := make([]int, width)
	size := min(dispatch.Arrivals, len(r.order))
	windows := 0
	for i := range r.order {
		for x, n := range loads[i*width : (i+1)*width] {
			sum[x] += n
		}
		if i < size-1 {
			continue
		}
		windows++
		r.windowImbalance += r.options.tokenImbalance(sum[:ranks])
		for l := range layers {
			r.expertWindowImbalance += imbalance(sum[(l+1)*ranks:(l+2)*ranks]) / float64(layers)
		}
		oldest := i - size + 1
		for x, n := range loads[oldest*width : (oldest+1)*width] {
			sum[x] -= n
		}
	}
	r.windowImbalance /= float64(windows)
	r.expertWindowImbalance /= float64(windows)
}

// deal counts the default: contiguous experts, requests dealt out in turn.
func (r *orderRun) deal() {
	ranks, experts := baselineRanks(r.placement), r.placement.Experts
	home := make([]int, experts)
	for expert := range home {
		home[expert] = expert * ranks / experts
	}
	width := len(r.placement.Layers) * r.trace.Model.TopK
	local, all := 0, 0
	for i, request := range r.order {
		rank := i % ranks
		routed := r.trace.Experts[int(r.trace.Offsets[request])*width : int(r.trace.Offsets[request+1])*width]
		for _, expert := range routed {
			if home[expert] == rank {
				local++
			}
		}
		all += len(routed)
	}
	r.baseline = float64(local) / float64(all)
}

// maxStacked is the largest number of (layer, expert) columns that the bound treats as one; more are bounded layer by
// layer, which is valid and looser.
const maxStacked = 1024

// bounds fills the oracle and the upper bound.
func bounds(ctx context.Context, t *trace.Trace, p *placement.Placement, orders []*orderRun, o *Options, r *Report) error {
	counts, err := affinity.CountRequests(ctx, t, o.Requests)
	if err != nil {
		return err
	}
	routes := newRealRoutes(counts, p, o.RankCapacity)
	highestLoad := 1.0
	for _, run := range orders {
		limits := routes.limits(run.tallies[0].tokens)
		for _, limit := range limits {
			highestLoad = max(highestLoad, limit/routes.fair)
		}
		r.OracleLAR += routes.oracle(limits) / float64(len(orders))
	}
	anyLoad := float64(min(p.SlotsPerRank, counts.TopK)) / float64(counts.TopK)
	r.UpperBound = anyLoad
	if !p.Redundant() {
		if anyLoad, r.UpperBound, err = routes.upperBounds(ctx, highestLoad); err != nil {
			return err
		}
	}
	// Both are upper bounds of the same thing: the oracle is computed from its dual.
	r.OracleLAR = min(r.OracleLAR, r.UpperBound)
	best, scored := routes.unbalanced(orders[0].requests, o.Requests)
	r.Gap = newGap(anyLoad, best, scored, r.LAR)
	return nil
}

// realRoutes holds what each request activates on each rank.
type realRoutes struct {
	counts *affinity.RequestCounts
	ranks  int
	// fair is the mean load, shares are the loads that ranks are to have.
	fair        float64
	shares      []float64
	activations float64
	weighted    assign.Weighted
}

func newRealRoutes(counts *affinity.RequestCounts, p *placement.Placement, capacity []float64) *realRoutes {
	s := &realRoutes{counts: counts, ranks: p.Ranks}
	s.weighted = assign.Weighted{Sizes: counts.Tokens, Scores: make([]float32, len(counts.Rows)*p.Ranks)}
	for l := range p.Layers {
		hosts := p.Hosts(l)
		for r, row := range counts.Rows {
			for expert, n := range row[l*counts.Experts : (l+1)*counts.Experts] {
				for _, rank := range hosts[expert] {
					s.weighted.Scores[r*p.Ranks+rank] += n
				}
			}
		}
	}
	tokens := 0.0
	for _, n := range counts.Tokens {
		tokens += float64(n)
	}
	s.fair = tokens / float64(p.Ranks)
	s.shares = slices.Repeat([]float64{s.fair}, p.Ranks)
	total := 0.0
	for _, c := range capacity {
		total += c
	}
	for rank, c := range capacity {
		s.shares[rank] = tokens * c / total
	}
	s.activations = tokens * float64(counts.TopK*counts.Layers)
	return s
}

// limits are the loads that the oracle may use: at least the rank's share, at least what the policy used.
func (s *realRoutes) limits(tokens []int) []float64 {
	limits := make([]float64, s.ranks)
	for rank, n := range tokens {
		limits[rank] = max(s.shares[rank], float64(n))
	}
	return limits
}

// oracle is the dual of the best assignment within the limits: never below it, and within 1e-4 of it.
func (s *realRoutes) oracle(limits []float64) float64 {
	const steps = 150
	s.weighted.Limits = limits
	_, value := s.weighted.Price(steps, nil, false)
	return value / s.activations
}

// unbalanced is the rate with every request on its best rank, and on that of its highest score, whatever the loads.
func (s *realRoutes) unbalanced(described []dispatch.Request, requests []int) (best, scored float64) {
	for i, request := range requests {
		local := s.weighted.Scores[i*s.ranks : (i+1)*s.ranks]
		best += float64(slices.Max(local))
		scored += float64(local[highest(described[request].Scores)])
	}
	return best / s.activations, scored / s.activations
}

// upperBounds are that for any loads, and that for loads of at most highestLoad times the fair share.
func (s *realRoutes) upperBounds(ctx context.Context, highestLoad float64) (anyLoad, limited float64, err error) {
	c := s.counts
	stacked := c.Layers
	if c.Layers*c.Experts > maxStacked {
		stacked = 1
	}
	groups := c.Layers / stacked
	values := make([][2]float64, groups)
	err = affinity.Parallel(ctx, groups, func(g int) {
		rows := bound.New(s.ranks, c.Experts, stacked)
		width := stacked * c.Experts
		var columns []int
		var activations []float64
		for r, row := range c.Rows {
			columns, activations = columns[:0], activations[:0]
			for x, n := range row[g*width : (g+1)*width] {
				if n > 0 {
					columns, activations = append(columns, x), append(activations, float64(n))
				}
			}
			rows.Add(columns, activations, float64(c.Tokens[r]), s.concentration(r))
		}
		unbalanced := min(rows.PerRow(), rows.Tangent(0))
		values[g] = [2]float64{unbalanced, min(unbalanced, rows.Balanced(highestLoad))}
	})
	for _, v := range values {
		anyLoad += v[0] / float64(groups)
		limited += v[1] / float64(groups)
	}
	return anyLoad, limited, err
}

// concentration is Σ over ranks of (share of the request's activations on the rank)², the tangent bound's incumbent.
func (s *realRoutes) concentration(r int) float64 {
	total, squares := 0.0, 0.0
	for _, n := range s.weighted.Scores[r*s.ranks : (r+1)*s.ranks] {
		total += float64(n)
		squares += float64(n) * float64(n)
	}
	return squares / (total * total)
}
