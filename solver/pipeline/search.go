package pipeline

import (
	"cmp"
	"slices"
)

// Plan is a schedule with its sizes and what is expected of it.
type Plan struct {
	AttentionRanks int `json:"attention_ranks"`
	ExpertRanks    int `json:"expert_ranks"`
	// Samples is that of a micro-batch of one attention rank (m_a), TokensPerExpert that of a chunk in the mean (m_e).
	Samples         int       `json:"samples_per_micro_batch"`
	TokensPerExpert float64   `json:"tokens_per_expert"`
	Sizes           Sizes     `json:"sizes"`
	Order           Order     `json:"order"`
	OrderName       string    `json:"order_name"`
	Durations       Durations `json:"durations"`
	// Makespan is the time of all layers for what the attention group holds at once, TokensPerSecond what that comes to.
	Makespan        float64 `json:"makespan_us"`
	TokensPerSecond float64 `json:"tokens_per_second"`
}

// Result is what Search finds, beside what it is to be compared with.
type Result struct {
	Plan Plan `json:"plan"`
	// Naive has one micro-batch and one chunk: attention and experts take turns. PPPipe has micro-batches alone, and shared experts as a
	// part of attention. Both have the split, and PPPipe the number of micro-batches, that suit them best.
	Naive  Plan `json:"naive"`
	PPPipe Plan `json:"pppipe"`
	// BoundTokensPerSecond is what no order reaches with any split and sizes; Gap is what the plan lacks to it, in parts of the bound.
	BoundTokensPerSecond float64 `json:"bound_tokens_per_second"`
	Gap                  float64 `json:"gap"`
}

// candidate is a split and a number of micro-batches, with the largest samples that leave room for as many.
type candidate struct {
	split                 *Split
	samples, microBatches int
	// oneWay is the split with one of the ways to dispatch, and to combine.
	oneWay *Split
	// bound is the throughput, in tokens per microsecond, that no order reaches with any number of chunks.
	bound float64
}

// searcher holds what a search needs again and again.
type searcher struct {
	problem *Problem
	evaluator
}

// Search finds the split, micro-batches, chunks and order of the highest throughput.
//
// It looks at few of all sizes. Throughput grows with the samples of a micro-batch, so that for each number of micro-batches the largest
// that fit are enough. A makespan is convex in the number of chunks, as the longest of sums of convex terms, so that a binary search finds
// the best. The order ASAS has a closed form; AASS is computed only where bounds allow it to win. With the winner's
// sizes other orders are then tried, as long as one is faster.
//
// Where chunks can be sent in several ways, none of that is true of the fastest of them, which need not be convex, but of each. So each pair of ways is
// searched by itself, and the best of all is the best: a makespan does not fall when a task takes longer, so that of any sizes it is the least
// of those with one pair of ways, one of which takes what the fastest take, and the others no less.
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

// candidates are all, without their bounds.
func (s *searcher) candidates() []candidate {
	var list []candidate
	for i := range s.problem.Splits {
		split := &s.problem.Splits[i]
		oneWay := split.sentOneWay()
		for batches := 1; batches <= min(split.Samples, s.problem.microBatches()); batches++ {
			samples := split.Samples / batches
			if batches < s.problem.microBatches() && split.Samples/(batches+1) == samples {
				continue // one more with the same samples is better
			}
			for way := range oneWay {
				list = append(list, candidate{split: split, samples: samples, microBatches: batches, oneWay: &oneWay[way]})
			}
		}
	}
	return list
}

// promising are the candidates that can reach a throughput, in tokens per second, by falling bound. There must be a schedule that reaches it, such as PPPipe's.
func (s *searcher) promising(candidates []candidate, throughput float64) []candidate {
	var list []candidate
	for _, c := range candidates {
		if 1e6*s.tokens(&c)/s.busiest(&c) < throughput*(1-worthwhile) {
			continue
		}
		_, least := s.leastChunks(&c, Bound)
		c.bound = s.tokens(&c) / least
		list = append(list, c)
	}
	slices.SortStableFunc(list, func(a, b candidate) int { return cmp.Compare(b.bound, a.bound) })
	return list
}

// busiest is a time that no number of chunks comes below: the work of the busiest resource if no micro-batch is cut. Cut it takes no less, as each chunk
// starts anew.
func (s *searcher) busiest(c *candidate) float64 {
	d := s.problem.durations(c.oneWay, c.samples, 1)
	return float64(s.problem.Layers) * float64(c.microBatches) * max(d.own(), d.slowest())
}

// tokens is what the attention group holds at once.
func (s *searcher) tokens(c *candidate) float64 {
	return float64(c.microBatches) * float64(c.samples) * float64(c.split.AttentionRanks) * float64(s.problem.Sequence)
}

// leastChunks finds the number of chunks, sent in a candidate's ways, with the least of a time that is convex in them; of equal ones the fewest.
func (s *searcher) leastChunks(c *candidate, time func(Durations, Sizes) float64) (chunks int, least float64) {
	at := func(chunks int) float64 {
		return time(s.problem.durations(c.oneWay, c.samples, chunks), Sizes{s.problem.Layers, c.microBatches, chunks})
	}
	// Rounding must not make a flat stretch, which convexity allows at the minimum alone, look like a fall.
	const rounding = 1e-12
	low, high := 1, s.problem.mostChunks(c.split, c.samples)
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

// worthwhile is the part by which another schedule must be faster to be taken, so that rounding decides nothing.
const worthwhile = 1e-9

// best is the best of ASAS and AASS over all candidates.
func (s *searcher) best(candidates []candidate) Plan {
	var best Plan
	try := func(c *candidate, order func(int) Order, time func(Durations, Sizes) float64) {
		chunks, least := s.leastChunks(c, time)
		if throughput := 1e6 * s.tokens(c) / least; throughput > best.TokensPerSecond*(1+worthwhile) {
			best = s.plan(c, chunks, order(c.microBatches), time)
		}
	}
	hopeless := func(c *candidate) bool { return 1e6*c.bound <= best.TokensPerSecond*(1+worthwhile) }
	for i := range candidates {
		if hopeless(&candidates[i]) {
			break
		}
		try(&candidates[i], ASAS, ClosedForm)
	}
	for i := range candidates {
		c := &candidates[i]
		if hopeless(c) {
			break
		}
		if _, least := s.leastChunks(c, lateBound); 1e6*s.tokens(c)/least <= best.TokensPerSecond*(1+worthwhile) {
			continue
		}
		order := AASS(c.microBatches)
		try(c, AASS, func(d Durations, sizes Sizes) float64 { return s.makespan(d, sizes, order) })
	}
	return best
}

// plan is that of a candidate's sizes, each chunk sent in the way that is fastest.
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

// maxSteps bounds the climb: the steps of the attention group that are looked at, over all orders tried. It is about a millisecond.
const maxSteps = 300_000

// climb seeks an order that is faster than the plan's, from ASAS and from AASS: the shared experts of a micro-batch move to wherever that is
// faster, until nothing is. (Swaps of neighbours alone hardly ever find a way: most change nothing.)
func (s *searcher) climb(p *Plan) {
	if p.Durations.Shared == 0 {
		return
	}
	bound := Bound(p.Durations, p.Sizes) * (1 + worthwhile)
	budget := maxSteps
	for _, order := range []Order{ASAS(p.Sizes.MicroBatches), AASS(p.Sizes.MicroBatches)} {
		least := s.makespan(p.Durations, p.Sizes, order)
		for faster := true; faster && least > bound && budget > 0; {
			faster = false
			for i := range p.Sizes.MicroBatches {
				if moved, time := s.move(p, order, i, least, &budget); moved != nil {
					order, least, faster = moved, time, true
				}
			}
		}
		if least < p.Makespan*(1-worthwhile) {
			p.TokensPerSecond *= p.Makespan / least
			p.Makespan, p.Order, p.OrderName = least, order, order.Name()
		}
	}
}

// move finds the best place for the shared experts of micro-batch i, if it is faster than a time.
func (s *searcher) move(p *Plan, o Order, i int, than float64, budget *int) (best Order, time float64) {
	tried := slices.Clone(o)
	at := slices.Index(tried, ^Step(i))
	tried = append(slices.Delete(tried, at, at+1), 0)
	for at := range tried {
		copy(tried[at+1:], tried[at:len(tried)-1])
		tried[at] = ^Step(i)
		if *budget -= len(o) * min(p.Sizes.Layers, 8); *budget < 0 { // a makespan takes few layers, as a rule: see shift
			return best, time
		}
		if t := s.makespan(p.Durations, p.Sizes, tried); t < than*(1-worthwhile) {
			best, time, than = slices.Clone(tried), t, t
		}
		copy(tried[at:], tried[at+1:])
	}
	return best, time
}

// naive is the best split with one micro-batch and one chunk.
func (s *searcher) naive() Plan {
	var best Plan
	for i := range s.problem.Splits {
		split := &s.problem.Splits[i]
		plan := s.plan(&candidate{split: split, samples: split.Samples, microBatches: 1}, 1, ASAS(1), ClosedForm)
		if plan.TokensPerSecond > best.TokensPerSecond {
			best = plan
		}
	}
	return best
}

// pppipe is the best of micro-batches alone, shared experts being a part of attention.
func (s *searcher) pppipe(candidates []candidate) Plan {
	together := func(d Durations) Durations {
		d.Attention, d.Shared = d.own(), 0
		return d
	}
	asas := func(d Durations, sizes Sizes) float64 { return ClosedForm(together(d), sizes) }
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
