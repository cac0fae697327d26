// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/placement/bound"
	"github.com/semmoe/operator/solver/trace"
)

// DataParallel scores a plan for attention data parallelism, over several seeded arrival orders.
func DataParallel(ctx context.Context, t *trace.Trace, p *placement.Placement, forecast RequestForecast, o Options) (Report, error) {
	if err := o.validate(t, p); err != nil {
		return Report{}, err
	}
	if o.Orders < 1 {
		return Report{}, fmt.Errorf("orders is %d; it must be at least 1", o.Orders)
	}
	requests, err := describe(ctx, t, p.Ranks, forecast, &o, 100)
	if err != nil {
		return Report{}, err
	}
	orders, err := playOrders(ctx, t, p, requests, &o)
	if err != nil {
		return Report{}, err
	}
	r := Report{WindowImbalance: new(float64)}
	tallies := make([][]*tally, len(orders))
	for i, run := range orders {
		tallies[i] = run.tallies
		*r.WindowImbalance += run.windowImbalance / float64(o.Orders)
		r.ExpertWindowImbalance += run.expertWindowImbalance / float64(o.Orders)
		addShare(&r.BaselineLAR, run.baseline/float64(o.Orders))
	}
	r.fill(tallies, t.Model.Layers)
	r.model(t, p, tallies, &o)
	if o.Volume {
		r.addVolume(t, p, tallies, &o)
	}
	r.Decision = decisions(orders, &o)
	if o.caches() {
		r.Reuse = reuse(orders)
	}
	r.Queue = queueReport(orders)
	if o.ByRequest {
		r.ByRequest = byRequest(orders, o.Requests)
	}
	if o.Detail {
		r.Detail = newDetail(tallies)
	}
	if o.ScorePercent > 0 {
		if r.PartialScores, err = partial(ctx, t, p, forecast, &o); err != nil {
			return Report{}, err
		}
	}
	if o.WithoutBounds || o.caches() {
		return r, nil
	}
	return r, bounds(ctx, t, p, orders, &o, &r)
}

// caches reports whether ranks cache the prefixes that they have computed. With recorded requests, every request is
// computed in full: the policy prefix knows the simulated caches, but nothing counts as cached.
func (o *Options) caches() bool { return o.Workload != "" && o.Workload != trace.Recorded }

// described is the input of a scheduler for a request.
type described struct {
	dispatch.Request
	prefixes []uint64
	// seen is the number of leading tokens from which its scores are computed.
	seen int
}

// describe prepares the requests, indexed like the trace's, with scores of the given percentage of each request, at
// least one token.
func describe(ctx context.Context, t *trace.Trace, ranks int, forecast RequestForecast, o *Options, percent int) ([]described, error) {
	beginnings, partial := forecast.(PartialForecast)
	if percent < 100 && !partial {
		return nil, fmt.Errorf("the forecast cannot score a part of a request")
	}
	requests := make([]described, t.Requests())
	err := affinity.Parallel(ctx, len(o.Requests), func(i int) {
		r := o.Requests[i]
		d := described{Request: dispatch.Request{Scores: make([]float32, ranks), Tokens: t.Length(r)}, seen: t.Length(r)}
		if percent < 100 {
			d.seen = max(1, t.Length(r)*percent/100)
			beginnings.ScoreFirst(d.Scores, r, d.seen)
		} else {
			forecast.Score(d.Scores, r)
		}
		if o.caches() || o.Policy == dispatch.Prefix {
			d.prefixes = dispatch.PrefixHashes(nil, t.Request(r))
		}
		requests[r] = d
	})
	return requests, err
}

// playOrders simulates every arrival order.
func playOrders(ctx context.Context, t *trace.Trace, p *placement.Placement, requests []described, o *Options) ([]*orderRun, error) {
	orders := make([]*orderRun, o.Orders)
	failures := make([]error, o.Orders)
	err := affinity.Parallel(ctx, o.Orders, func(i int) {
		run := &orderRun{trace: t, placement: p, options: o, requests: requests}
		run.order = o.Workload.Arrivals(t, o.Requests, o.Seed+uint64(i))
		failures[i] = run.play(ctx)
		orders[i] = run
	})
	return orders, cmp.Or(err, errors.Join(failures...))
}

// partial simulates the orders again with scores of only the beginning of each request.
func partial(ctx context.Context, t *trace.Trace, p *placement.Placement, forecast RequestForecast, o *Options) (*PartialScores, error) {
	requests, err := describe(ctx, t, p.Ranks, forecast, o, o.ScorePercent)
	if err != nil {
		return nil, err
	}
	orders, err := playOrders(ctx, t, p, requests, o)
	if err != nil {
		return nil, err
	}
	r := &PartialScores{Percent: o.ScorePercent}
	whole := Report{}
	tallies := make([][]*tally, len(orders))
	local, all := 0, 0
	for i, run := range orders {
		tallies[i] = run.tallies
		r.WindowImbalance += run.windowImbalance / float64(len(orders))
		for at, request := range run.order {
			from := max(run.cached[at], requests[request].seen)
			local += run.local(request, run.own[at], from)
			all += run.activations(request, from)
		}
	}
	whole.fill(tallies, t.Model.Layers)
	r.LAR, r.RestLAR = whole.LAR, float64(local)/float64(max(all, 1))
	return r, nil
}

// decisions returns the mean components over all orders.
func decisions(orders []*orderRun, o *Options) *DecisionReport {
	if o.Policy == dispatch.Window {
		return nil
	}
	var r DecisionReport
	for _, run := range orders {
		weight := 1 / float64(len(orders)*len(run.order))
		for _, d := range run.decisions {
			r.add(d.Affinity, d.Prefix, d.Price, d.Load, weight)
		}
	}
	return &r
}

// reuse returns the cached share, and the figures without caching.
func reuse(orders []*orderRun) *Reuse {
	r := &Reuse{}
	weight := 1 / float64(len(orders))
	for _, run := range orders {
		cached, tokens, local, all := 0, 0, 0, 0
		last := newWindow(run.options, len(run.order), run.placement.Ranks, 0)
		for at, request := range run.order {
			cached += run.cached[at]
			tokens += run.trace.Length(request)
			local += run.local(request, run.own[at], 0)
			all += run.activations(request, 0)
			last.next()[run.own[at]] = int32(run.trace.Length(request))
			last.measure()
		}
		r.PrefixHitTokens += weight * float64(cached) / float64(tokens)
		r.AllTokensLAR += weight * float64(local) / float64(all)
		imbalance, _ := last.means()
		r.AllTokensWindowImbalance += weight * imbalance
	}
	return r
}

// orderRun evaluates one arrival order.
type orderRun struct {
	trace     *trace.Trace
	placement *placement.Placement
	options   *Options
	requests  []described
	order     []int
	// own is the rank of each request of order. cached is the number of its leading tokens that the rank already had
	// cached. decisions contains the reasons, except for the policy window.
	own, cached []int
	decisions   []dispatch.Decision
	// waited is, for the policy late, how many requests arrived after each request before its dispatch.
	waited  []int
	tallies []*tally
	// rates are the rates of each request of order.
	rates []Rates

	windowImbalance, expertWindowImbalance float64
	baseline                               float64
}

func (r *orderRun) play(ctx context.Context) error {
	r.countBaseline() // the round-robin baseline dispatches in arrival order, even if the policy reorders requests
	if err := r.schedule(); err != nil {
		return err
	}
	layers, ranks := len(r.placement.Layers), r.placement.Ranks
	for l := range layers {
		r.tallies = append(r.tallies, newTally(r.placement, l, kindsOf(r.trace), r.options))
	}
	last := newWindow(r.options, len(r.order), ranks, layers)
	for i, request := range r.order {
		if err := ctx.Err(); err != nil {
			return err
		}
		before := r.sums()
		r.count(request, r.own[i], r.cached[i], last.next())
		r.rates = append(r.rates, r.sums().since(before, r.trace.Model.TopK))
		last.measure()
	}
	r.windowImbalance, r.expertWindowImbalance = last.means()
	return nil
}

func (r *orderRun) schedule() error {
	caches := dispatch.NewPrefixes(r.options.CacheTokens)
	for range r.placement.Ranks {
		caches.Add()
	}
	if r.options.Policy == dispatch.Window {
		return r.scheduleWindow(caches)
	}
	if r.options.Policy == dispatch.Late {
		return r.scheduleLate(caches)
	}
	scheduler, err := dispatch.NewScheduler(r.scheduling())
	if err != nil {
		return err
	}
	places := make([]dispatch.Place, r.placement.Ranks)
	for _, request := range r.order {
		asked := &r.requests[request]
		d := scheduler.Decide(&asked.Request, r.places(places, request, scheduler.Load, caches))
		r.recordDecision(request, &d, caches)
		scheduler.Take(&asked.Request, &d)
	}
	return nil
}

// scheduling returns the options of a scheduler.
func (r *orderRun) scheduling() dispatch.Options {
	return dispatch.Options{
		Policy: r.options.Policy, Ranks: r.placement.Ranks, Cap: r.options.Cap, Capacity: r.options.RankCapacity, Weights: r.options.Weights,
		Costs: ShapeOf(&r.trace.Model).Costs(r.options.Machines),
	}
}

// places returns the ranks as a request sees them. The evaluation has no clock: the last arrivals count as outstanding.
func (r *orderRun) places(places []dispatch.Place, request int, load func(rank int) int, caches *dispatch.Prefixes) []dispatch.Place {
	caches.Match(r.requests[request].prefixes)
	for rank := range places {
		places[rank] = dispatch.Place{Rank: rank, Outstanding: int64(load(rank)), Cached: r.cachedOn(rank, request, caches)}
	}
	return places
}

// recordDecision records a decision on the request that was matched with the caches last.
func (r *orderRun) recordDecision(request int, d *dispatch.Decision, caches *dispatch.Prefixes) {
	if !r.options.caches() {
		d.Tokens = r.requests[request].Tokens
	}
	r.serve(request, d.Rank, caches)
	r.decisions = append(r.decisions, *d)
}

// scheduleWindow implements the policy window.
func (r *orderRun) scheduleWindow(caches *dispatch.Prefixes) error {
	if r.options.RankCapacity != nil {
		return fmt.Errorf("policy %s assigns equal numbers of requests and does not support rank capacities", dispatch.Window)
	}
	queue := dispatch.NewQueue(r.placement.Ranks)
	waiting := make([]dispatch.Request, 0, queue.Size())
	for chunk := range slices.Chunk(r.order, queue.Size()) {
		waiting = waiting[:0]
		for _, request := range chunk {
			waiting = append(waiting, r.requests[request].Request)
		}
		for i, rank := range queue.Assign(waiting) {
			caches.Match(r.requests[chunk[i]].prefixes)
			r.serve(chunk[i], rank, caches)
		}
	}
	return nil
}

// serve records that a rank serves the request that was matched with the caches last.
func (r *orderRun) serve(request, rank int, caches *dispatch.Prefixes) {
	r.own = append(r.own, rank)
	cached := 0
	if r.options.caches() {
		cached = r.cachedOn(rank, request, caches).Tokens
	}
	r.cached = append(r.cached, cached)
	caches.Put(rank, r.requests[request].prefixes)
}

// cachedOn returns the part of the request, matched with the caches last, that a rank has cached. The last token is
// never cached, because it produces the next token.
func (r *orderRun) cachedOn(rank, request int, caches *dispatch.Prefixes) dispatch.Hit {
	hit := caches.Hit(rank)
	hit.Tokens = min(hit.Tokens, r.trace.Length(request)-1)
	return hit
}

// local counts the activations of a request's tokens, starting at token from, whose expert is on the request's rank.
func (r *orderRun) local(request, own, from int) int {
	local := 0
	for l, t := range r.tallies {
		for position := int(r.trace.Offsets[request]) + from; position < int(r.trace.Offsets[request+1]); position++ {
			for _, expert := range r.trace.Row(position, l) {
				if t.isLocal(int(expert), own) {
					local++
				}
			}
		}
	}
	return local
}

// activations returns the number of all activations of a request's tokens, starting at token from.
func (r *orderRun) activations(request, from int) int {
	return max(0, r.trace.Length(request)-from) * len(r.tallies) * r.trace.Model.TopK
}

// count counts the computed part of a request on its rank, and records its load.
func (r *orderRun) count(request, own, cached int, load []int32) {
	ranks := r.placement.Ranks
	load[own] = int32(r.trace.Length(request) - cached)
	for l, t := range r.tallies {
		served := load[(l+1)*ranks : (l+2)*ranks]
		for rank, n := range t.served {
			served[rank] = int32(-n)
		}
		for position := int(r.trace.Offsets[request]) + cached; position < int(r.trace.Offsets[request+1]); position++ {
			local := t.add(r.trace.Row(position, l), own)
			if t.kinds != nil {
				t.kinds[kindOf(r.trace, request)].add(own, local, r.trace.Model.TopK)
			}
		}
		for rank, n := range t.served {
			served[rank] += int32(n)
		}
	}
}

// countBaseline counts the baseline: contiguous experts, with requests assigned round-robin.
func (r *orderRun) countBaseline() {
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

// maxStacked is the maximum number of (layer, expert) columns that the bound treats as one matrix. Larger problems are
// bounded layer by layer, which is valid but looser.
const maxStacked = 1024

// bounds computes the oracle and the upper bound.
func bounds(ctx context.Context, t *trace.Trace, p *placement.Placement, orders []*orderRun, o *Options, r *Report) error {
	routes, err := newRealRoutes(ctx, t, p, o)
	if err != nil {
		return err
	}
	if r.Detail != nil {
		if err := routes.layers(ctx, p, orders[0].tallies[0].tokens, r.Detail); err != nil {
			return err
		}
	}
	highestLoad := 1.0
	for _, run := range orders {
		limits := routes.limits(run.tallies[0].tokens)
		for _, limit := range limits {
			highestLoad = max(highestLoad, limit/routes.fair)
		}
		r.OracleLAR += routes.oracle(limits) / float64(len(orders))
	}
	anyLoad := float64(min(p.SlotsPerRank, t.Model.TopK)) / float64(t.Model.TopK)
	r.UpperBound = anyLoad
	if !p.Redundant() {
		if anyLoad, r.UpperBound, err = routes.upperBounds(ctx, highestLoad); err != nil {
			return err
		}
	}
	// Both are upper bounds of the same quantity, since the oracle is computed from its dual.
	r.OracleLAR = min(r.OracleLAR, r.UpperBound)
	best, scored := routes.unbalanced(orders[0].requests, o.Requests)
	r.Gap = newGap(anyLoad, best, scored, r.LAR)
	return nil
}

// realRoutes contains the activations of each request on each rank. Activations per expert are recounted on demand,
// because for many short requests they need much more memory.
type realRoutes struct {
	trace    *trace.Trace
	requests []int
	ranks    int
	// fair is the mean load; shares are the target loads of the ranks.
	fair        float64
	shares      []float64
	activations float64
	weighted    assign.Weighted
}

func newRealRoutes(ctx context.Context, t *trace.Trace, p *placement.Placement, o *Options) (*realRoutes, error) {
	s := &realRoutes{trace: t, requests: o.Requests, ranks: p.Ranks}
	s.weighted = assign.Weighted{Sizes: make([]float32, len(o.Requests)), Scores: make([]float32, len(o.Requests)*p.Ranks)}
	hosts := make([][][]int, len(p.Layers))
	for l := range hosts {
		hosts[l] = p.Local(l)
	}
	err := affinity.Parallel(ctx, len(o.Requests), func(i int) {
		s.weighted.Sizes[i] = float32(t.Length(o.Requests[i]))
		s.countRanks(s.weighted.Scores[i*p.Ranks:(i+1)*p.Ranks], o.Requests[i], hosts)
	})
	if err != nil {
		return nil, err
	}
	tokens := float64(t.TokenCount(o.Requests))
	s.fair = tokens / float64(p.Ranks)
	s.shares = slices.Repeat([]float64{s.fair}, p.Ranks)
	total := 0.0
	for _, c := range o.RankCapacity {
		total += c
	}
	for rank, c := range o.RankCapacity {
		s.shares[rank] = tokens * c / total
	}
	s.activations = tokens * float64(t.Model.TopK*len(p.Layers))
	return s, nil
}

// countRanks counts a request's activations on each rank, over all layers.
func (s *realRoutes) countRanks(dst []float32, request int, hosts [][][]int) {
	on := make([]int, s.ranks)
	for position := s.trace.Offsets[request]; position < s.trace.Offsets[request+1]; position++ {
		for l, of := range hosts {
			for _, expert := range s.trace.Row(int(position), l) {
				for _, rank := range of[expert] {
					on[rank]++
				}
			}
		}
	}
	for rank, n := range on {
		dst[rank] = float32(n)
	}
}

// eachRow calls do for every request, with the columns (layer, expert) that it activates in the given layers, and its
// activations there. Both slices are reused by the next call.
func (s *realRoutes) eachRow(layers, from int, do func(i int, columns []int, activations []float64)) {
	experts := s.trace.Model.Experts
	row := make([]float64, layers*experts)
	var columns []int
	var activations []float64
	for i, request := range s.requests {
		clear(row)
		for position := s.trace.Offsets[request]; position < s.trace.Offsets[request+1]; position++ {
			for l := range layers {
				for _, expert := range s.trace.Row(int(position), from+l) {
					row[l*experts+int(expert)]++
				}
			}
		}
		columns, activations = columns[:0], activations[:0]
		for column, n := range row {
			if n > 0 {
				columns, activations = append(columns, column), append(activations, n)
			}
		}
		do(i, columns, activations)
	}
}

// limits returns the loads that the oracle may use: the maximum of the rank's share and the load under the policy.
func (s *realRoutes) limits(tokens []int) []float64 {
	limits := make([]float64, s.ranks)
	for rank, n := range tokens {
		limits[rank] = max(s.shares[rank], float64(n))
	}
	return limits
}

// oracle returns the dual value of the best assignment within the limits: an upper bound, within 1e-4 of the optimum.
func (s *realRoutes) oracle(limits []float64) float64 {
	const steps = 150
	s.weighted.Limits = limits
	_, value := s.weighted.Price(steps, nil)
	return value / s.activations
}

// unbalanced returns the rates with every request on its best rank, and on the rank with its highest score, regardless
// of loads.
func (s *realRoutes) unbalanced(described []described, requests []int) (best, scored float64) {
	for i, request := range requests {
		local := s.weighted.Scores[i*s.ranks : (i+1)*s.ranks]
		best += float64(slices.Max(local))
		scored += float64(local[highest(described[request].Scores)])
	}
	return best / s.activations, scored / s.activations
}

// upperBounds returns the bound for any loads, and the bound for loads of at most highestLoad times the fair share.
func (s *realRoutes) upperBounds(ctx context.Context, highestLoad float64) (anyLoad, limited float64, err error) {
	layers, experts := len(s.trace.Model.Layers), s.trace.Model.Experts
	stacked := layers
	if layers*experts > maxStacked {
		stacked = 1
	}
	groups := layers / stacked
	values := make([][2]float64, groups)
	err = affinity.Parallel(ctx, groups, func(g int) {
		rows := bound.New(s.ranks, experts, stacked)
		s.eachRow(stacked, g*stacked, func(i int, columns []int, activations []float64) {
			rows.Add(columns, activations, float64(s.weighted.Sizes[i]), s.concentration(i))
		})
		unbalanced := min(rows.PerRow(), rows.Tangent(0))
		values[g] = [2]float64{unbalanced, min(unbalanced, rows.Balanced(highestLoad))}
	})
	for _, v := range values {
		addShare(&anyLoad, v[0]/float64(groups))
		addShare(&limited, v[1]/float64(groups))
	}
	return anyLoad, limited, err
}

// concentration returns Σ over ranks of (share of the request's activations on the rank)², the starting point of the
// tangent bound.
func (s *realRoutes) concentration(r int) float64 {
	total, squares := 0.0, 0.0
	for _, n := range s.weighted.Scores[r*s.ranks : (r+1)*s.ranks] {
		total += float64(n)
		squares += float64(n) * float64(n)
	}
	return squares / (total * total)
}
