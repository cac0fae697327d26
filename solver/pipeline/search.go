// SPDX-License-Identifier: Apache-2.0

package pipeline

import (
	"cmp"
	"slices"
)

// Plan is a schedule with its sizes and its expected performance.
type Plan struct {
	AttentionRanks int `json:"attention_ranks"`
	ExpertRanks    int `json:"expert_ranks"`
	// Samples is the number of samples of a micro-batch on one attention rank (m_a), TokensPerExpert the mean number of
	// tokens per expert in a chunk (m_e).
	Samples         int       `json:"samples_per_micro_batch"`
	TokensPerExpert float64   `json:"tokens_per_expert"`
	Sizes           Sizes     `json:"sizes"`
	Order           Order     `json:"order"`
	OrderName       string    `json:"order_name"`
	Durations       Durations `json:"durations"`
	// Makespan is the time of all layers for the samples of the attention group, TokensPerSecond the resulting
	// throughput.
	Makespan        float64 `json:"makespan_us"`
	TokensPerSecond float64 `json:"tokens_per_second"`
}

// Result is the plan found by Search with its baselines.
type Result struct {
	Plan Plan `json:"plan"`
	// Naive has one micro-batch and one chunk: attention and experts alternate. PPPipe has only micro-batches, and
	// shared experts as a part of attention. Both use their best split, and PPPipe its best number of micro-batches.
	Naive  Plan `json:"naive"`
	PPPipe Plan `json:"pppipe"`
	// BoundTokensPerSecond is an upper bound of the throughput over all orders, splits and sizes. Gap is the relative
	// distance of the plan to the bound.
	BoundTokensPerSecond float64 `json:"bound_tokens_per_second"`
	Gap                  float64 `json:"gap"`
}

// candidate is a split and a number of micro-batches, with the maximum number of samples per micro-batch.
type candidate struct {
	split                 *Split
	samples, microBatches int
	// oneWay is the split with one way to dispatch and one way to combine.
	oneWay *Split
	// bound is an upper bound of the throughput, in tokens per microsecond, over all orders and numbers of chunks.
	bound float64
}

// searcher contains the reusable state of a search.
type searcher struct {
	problem *Problem
	evaluator
}

// Search finds the split, micro-batches, chunks and order with the highest throughput.
//
// It evaluates few of all sizes. Throughput grows with the samples of a micro-batch, so the maximum number of samples
// is sufficient for each number of micro-batches. A makespan is convex in the number of chunks, as the maximum of sums
// of convex terms, so binary search finds the optimum. The order ASAS has a closed form; AASS is computed only if
// bounds allow it to win. With the winner's sizes, a local search then tries other orders.
//
// With several ways to send chunks, these properties hold for each way, but not for the fastest of them: its time
// need not be convex. Each pair of ways is therefore searched separately, and the best result is optimal: a makespan
// does not decrease when a task takes longer, so for any sizes it is the minimum over the pairs of ways.
func Search(p *Problem) (*Result, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	s := &searcher{problem: p}
	all := s.candidates()
	r := &Result{Naive: s.naive(), PPPipe: s.pppipe(all)}
	promising := s.promising(all, r.PPPipe.TokensPerSecond)
	best := s.best(promising)
	s.climb(&best)
	r.Plan = best
	for _, c := range promising {
		r.BoundTokensPerSecond = max(r.BoundTokensPerSecond, 1e6*c.bound)
	}
	r.Gap = max(0, 1-best.TokensPerSecond/r.BoundTokensPerSecond)
	return r, nil
}

// candidates returns all candidates, without bounds.
func (s *searcher) candidates() []candidate {
	var list []candidate
	for i := range s.problem.Splits {
		split := &s.problem.Splits[i]
		oneWay := split.sentOneWay()
		for batches := 1; batches <= min(split.Samples, s.problem.microBatches()); batches++ {
			samples := split.Samples / batches
			if batches < s.problem.microBatches() && split.Samples/(batches+1) == samples {
				continue // one more micro-batch with the same samples is better
			}
			for way := range oneWay {
				list = append(list, candidate{split: split, samples: samples, microBatches: batches, oneWay: &oneWay[way]})
			}
		}
	}
	return list
}

// promising returns the candidates with bounds at or above the throughput in tokens per second, by descending bound.
// Some schedule, such as PPPipe's, must reach this throughput.
func (s *searcher) promising(candidates []candidate, throughput float64) []candidate {
	var list []candidate
	for _, c := range candidates {
		if 1e6*s.tokens(&c)/s.busiest(&c) < throughput*(1-worthwhile) {
			continue
		}
		_, shortest := s.fastestChunks(&c, Bound)
		c.bound = s.tokens(&c) / shortest
		list = append(list, c)
	}
	slices.SortStableFunc(list, func(a, b candidate) int { return cmp.Compare(b.bound, a.bound) })
	return list
}

// busiest returns a lower bound of the time over all numbers of chunks: the work of the busiest resource with whole
// micro-batches. Chunks take no less time, because each has its own start-up time.
func (s *searcher) busiest(c *candidate) float64 {
	d := s.problem.durations(c.oneWay, c.samples, 1)
	return float64(s.problem.Layers) * float64(c.microBatches) * max(d.own(), d.slowest())
}

// tokens returns the number of tokens of all samples of the attention group.
func (s *searcher) tokens(c *candidate) float64 {
	return float64(c.microBatches) * float64(c.samples) * float64(c.split.AttentionRanks) * float64(s.problem.Sequence)
}

// fastestChunks returns the number of chunks that minimises a time that is convex in it, for the candidate's ways to
// send chunks, and the minimum. Ties go to the lower number.
func (s *searcher) fastestChunks(c *candidate, time func(Durations, Sizes) float64) (chunks int, shortest float64) {
	at := func(chunks int) float64 {
		return time(s.problem.durations(c.oneWay, c.samples, chunks), Sizes{s.problem.Layers, c.microBatches, chunks})
	}
	// Rounding errors must not turn a flat range, which convexity allows only at the minimum, into a decrease.
	const rounding = 1e-12
	low, high := 1, s.problem.maxChunks(c.split, c.samples)
	for low < high {
		middle := low + (high-low)/2
		if here := at(middle); at(middle+1) >= here*(1-rounding) {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low, at(low)
}

// worthwhile is the minimum relative improvement of an alternative schedule, so that rounding does not decide.
const worthwhile = 1e-9

// best returns the best plan of the orders ASAS and AASS over all candidates.
func (s *searcher) best(candidates []candidate) Plan {
	var best Plan
	try := func(c *candidate, order func(int) Order, time func(Durations, Sizes) float64) {
		chunks, shortest := s.fastestChunks(c, time)
		if throughput := 1e6 * s.tokens(c) / shortest; throughput > best.TokensPerSecond*(1+worthwhile) {
			best = s.plan(c, chunks, order(c.microBatches), time)
		}
	}
	hopeless := func(c *candidate) bool { return 1e6*c.bound <= best.TokensPerSecond*(1+worthwhile) }
	for i := range candidates {
		if hopeless(&candidates[i]) {
			break
		}
		try(&candidates[i], ASAS, closedForm)
	}
	for i := range candidates {
		c := &candidates[i]
		if hopeless(c) {
			break
		}
		if _, shortest := s.fastestChunks(c, lateBound); 1e6*s.tokens(c)/shortest <= best.TokensPerSecond*(1+worthwhile) {
			continue
		}
		order := AASS(c.microBatches)
		try(c, AASS, func(d Durations, sizes Sizes) float64 { return s.makespan(d, sizes, order) })
	}
	return best
}

// plan returns the plan of a candidate's sizes, with the fastest way for each chunk.
func (s *searcher) plan(c *candidate, chunks int, o Order, time func(Durations, Sizes) float64) Plan {
	sizes := Sizes{s.problem.Layers, c.microBatches, chunks}
	durations := s.problem.durations(c.split, c.samples, chunks)
	makespan := time(durations, sizes)
	return Plan{
		AttentionRanks: c.split.AttentionRanks, ExpertRanks: c.split.ExpertRanks, Samples: c.samples,
		TokensPerExpert: s.problem.tokensPerExpert(c.split, c.samples) / float64(chunks),
		Sizes:           sizes, Order: o, OrderName: o.Name(), Durations: durations, Makespan: makespan, TokensPerSecond: 1e6 * s.tokens(c) / makespan,
	}
}

// maxSteps is the work limit of the local search: the evaluated steps of the attention group over all orders. It takes
// about a millisecond.
const maxSteps = 300_000

// climb improves the plan's order by local search, from ASAS and from AASS: it moves the shared experts of a
// micro-batch to the fastest position, until no move improves the makespan. (Swaps of adjacent steps hardly ever
// improve it: most change nothing.)
func (s *searcher) climb(p *Plan) {
	if p.Durations.Shared == 0 {
		return
	}
	bound := Bound(p.Durations, p.Sizes) * (1 + worthwhile)
	budget := maxSteps
	for _, order := range []Order{ASAS(p.Sizes.MicroBatches), AASS(p.Sizes.MicroBatches)} {
		shortest := s.makespan(p.Durations, p.Sizes, order)
		for faster := true; faster && shortest > bound && budget > 0; {
			faster = false
			for i := range p.Sizes.MicroBatches {
				if moved, time := s.move(p, order, i, shortest, &budget); moved != nil {
					order, shortest, faster = moved, time, true
				}
			}
		}
		if shortest < p.Makespan*(1-worthwhile) {
			p.TokensPerSecond *= p.Makespan / shortest
			p.Makespan, p.Order, p.OrderName = shortest, order, order.Name()
		}
	}
}

// move returns the order with the best position of the shared experts of micro-batch i and its makespan, or nil if no
// position is faster than the given time.
func (s *searcher) move(p *Plan, o Order, i int, than float64, budget *int) (best Order, time float64) {
	tried := slices.Clone(o)
	at := slices.Index(tried, ^Step(i))
	tried = append(slices.Delete(tried, at, at+1), 0)
	for at := range tried {
		copy(tried[at+1:], tried[at:len(tried)-1])
		tried[at] = ^Step(i)
		if *budget -= len(o) * min(p.Sizes.Layers, 8); *budget < 0 { // a makespan usually evaluates few layers: see shift
			return best, time
		}
		if t := s.makespan(p.Durations, p.Sizes, tried); t < than*(1-worthwhile) {
			best, time, than = slices.Clone(tried), t, t
		}
		copy(tried[at:], tried[at+1:])
	}
	return best, time
}

// naive returns the best split with one micro-batch and one chunk.
func (s *searcher) naive() Plan {
	var best Plan
	for i := range s.problem.Splits {
		split := &s.problem.Splits[i]
		plan := s.plan(&candidate{split: split, samples: split.Samples, microBatches: 1}, 1, ASAS(1), closedForm)
		if plan.TokensPerSecond > best.TokensPerSecond {
			best = plan
		}
	}
	return best
}

// pppipe returns the best plan with micro-batches only, where shared experts are a part of attention.
func (s *searcher) pppipe(candidates []candidate) Plan {
	together := func(d Durations) Durations {
		d.Attention, d.Shared = d.own(), 0
		return d
	}
	asas := func(d Durations, sizes Sizes) float64 { return closedForm(together(d), sizes) }
	var best Plan
	for i := range candidates {
		c := &candidates[i]
		time := asas(s.problem.durations(c.split, c.samples, 1), Sizes{s.problem.Layers, c.microBatches, 1})
		if throughput := 1e6 * s.tokens(c) / time; throughput > best.TokensPerSecond {
			best = s.plan(c, 1, ASAS(c.microBatches), asas)
			best.Durations = together(best.Durations)
		}
	}
	return best
}
