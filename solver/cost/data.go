package cost

import (
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

// DataParallel scores a plan for attention data parallelism, in several seeded arrival orders.
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
	r.Line = lineReport(orders)
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

// caches reports whether ranks keep what they have computed. Requests as they were recorded are all computed in full: the policy
// prefix knows what ranks would hold, and nothing is counted as cached.
func (o *Options) caches() bool { return o.Workload != "" && o.Workload != trace.Recorded }

// described is what a scheduler is told about a request.
type described struct {
	dispatch.Request
	prefixes []uint64
	// seen is the number of its first tokens that its scores are made of.
	seen int
}

// describe prepares the requests, indexed like the trace's, with scores that see the given part of each, at least one token.
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

// playOrders plays every arrival order.
func playOrders(ctx context.Context, t *trace.Trace, p *placement.Placement, requests []described, o *Options) ([]*orderRun, error) {
	orders := make([]*orderRun, o.Orders)
	failures := make([]error, o.Orders)
	err := affinity.Parallel(ctx, o.Orders, func(i int) {
		run := &orderRun{trace: t, placement: p, options: o, requests: requests}
		run.order = o.Workload.Arrivals(t, o.Requests, o.Seed+uint64(i))
		failures[i] = run.play()
		orders[i] = run
	})
	return orders, errors.Join(append(failures, err)...)
}

// partial plays the orders again with scores that see only the beginning of each request.
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

// decisions are the mean components over all orders.
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

// reuse tells what was cached, and what the figures would be without.
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
	// own is the rank of each request of order, cached how many of its tokens the rank had computed before; decisions say why, but
	// for the policy window.
	own, cached []int
	decisions   []dispatch.Decision
	// waited is, with the policy late, how many requests came after each one before it went.
	waited  []int
	tallies []*tally
	// rates are those of each request of order.
	rates []Rates

	windowImbalance, expertWindowImbalance float64
	baseline                               float64
}

func (r *orderRun) play() error {
	r.deal() // what deals out in turn lets none wait, whatever order the policy makes of that of arrival
	if err := r.schedule(); err != nil {
		return err
	}
	layers, ranks := len(r.placement.Layers), r.placement.Ranks
	for l := range layers {
		r.tallies = append(r.tallies, newTally(r.placement, l, kindsOf(r.trace), r.options))
	}
	last := newWindow(r.options, len(r.order), ranks, layers)
	for i, request := range r.order {
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
		return r.scheduleQueues(caches)
	}
	if r.options.Policy == dispatch.Late {
		return r.scheduleLine(caches)
	}
	scheduler, err := dispatch.NewScheduler(r.scheduling())
	if err != nil {
		return err
	}
	places := make([]dispatch.Place, r.placement.Ranks)
	for _, request := range r.order {
		asked := &r.requests[request]
		d := scheduler.Decide(&asked.Request, r.places(places, request, scheduler.Load, caches))
		r.decided(request, &d, caches)
		scheduler.Take(&asked.Request, &d)
	}
	return nil
}

// scheduling are the options of a scheduler.
func (r *orderRun) scheduling() dispatch.Options {
	return dispatch.Options{
		Policy: r.options.Policy, Ranks: r.placement.Ranks, Cap: r.options.Cap, Capacity: r.options.RankCapacity, Weights: r.options.Weights,
		Costs: ShapeOf(&r.trace.Model).Costs(r.options.Machines),
	}
}

// places are the ranks as they are for a request. There is no clock here: what arrived last is what is outstanding.
func (r *orderRun) places(places []dispatch.Place, request int, load func(rank int) int, caches *dispatch.Prefixes) []dispatch.Place {
	caches.Match(r.requests[request].prefixes)
	for rank := range places {
		places[rank] = dispatch.Place{Rank: rank, Outstanding: int64(load(rank)), Cached: r.cachedOn(rank, request, caches)}
	}
	return places
}

// decided notes a decision on the request that the caches were asked for last.
func (r *orderRun) decided(request int, d *dispatch.Decision, caches *dispatch.Prefixes) {
	if !r.options.caches() {
		d.Tokens = r.requests[request].Tokens
	}
	r.serve(request, d.Rank, caches)
	r.decisions = append(r.decisions, *d)
}

// scheduleQueues is the policy window.
func (r *orderRun) scheduleQueues(caches *dispatch.Prefixes) error {
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

// serve notes that a rank serves the request that the caches were asked for last.
func (r *orderRun) serve(request, rank int, caches *dispatch.Prefixes) {
	r.own = append(r.own, rank)
	cached := 0
	if r.options.caches() {
		cached = r.cachedOn(rank, request, caches).Tokens
	}
	r.cached = append(r.cached, cached)
	caches.Put(rank, r.requests[request].prefixes)
}

// cachedOn is what of the request that the caches were asked for last need not be computed on a rank: never its last token, which the
// next one follows from.
func (r *orderRun) cachedOn(rank, request int, caches *dispatch.Prefixes) dispatch.Hit {
	hit := caches.Hit(rank)
	hit.Tokens = min(hit.Tokens, r.trace.Length(request)-1)
	return hit
}

// local counts the activations of a request's tokens, from one of them on, whose expert is on a rank.
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

// activations is the number of all of these.
func (r *orderRun) activations(request, from int) int {
	return max(0, r.trace.Length(request)-from) * len(r.tallies) * r.trace.Model.TopK
}

// count counts on its rank what is computed of a request, and notes the load that it makes.
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
	// Both are upper bounds of the same thing: the oracle is computed from its dual.
	r.OracleLAR = min(r.OracleLAR, r.UpperBound)
	best, scored := routes.unbalanced(orders[0].requests, o.Requests)
	r.Gap = newGap(anyLoad, best, scored, r.LAR)
	return nil
}

// realRoutes holds what each request activates on each rank. What it activates of each expert is counted anew where it is asked for: for
// many requests, however short, that is much more.
type realRoutes struct {
	trace    *trace.Trace
	requests []int
	ranks    int
	// fair is the mean load, shares are the loads that ranks are to have.
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

// eachRow calls do for every request with the columns that it activates in some layers side by side, and its activations there. Both are
// the next call's, too.
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
	_, value := s.weighted.Price(steps, nil)
	return value / s.activations
}

// unbalanced is the rate with every request on its best rank, and on that of its highest score, whatever the loads.
func (s *realRoutes) unbalanced(described []described, requests []int) (best, scored float64) {
	for i, request := range requests {
		local := s.weighted.Scores[i*s.ranks : (i+1)*s.ranks]
		best += float64(slices.Max(local))
		scored += float64(local[highest(described[request].Scores)])
	}
	return best / s.activations, scored / s.activations
}

// upperBounds are that for any loads, and that for loads of at most highestLoad times the fair share.
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

// concentration is Σ over ranks of (share of the request's activations on the rank)², the tangent bound's incumbent.
func (s *realRoutes) concentration(r int) float64 {
	total, squares := 0.0, 0.0
	for _, n := range s.weighted.Scores[r*s.ranks : (r+1)*s.ranks] {
		total += float64(n)
		squares += float64(n) * float64(n)
	}
	return squares / (total * total)
}
