package placement

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

const (
	// starts is the number of annealing runs per layer, elites how many of them are improved, by alternation and exact swaps. On
	// held-out tokens more elites are worth more than more starts.
	starts = 8
	elites = 6
	// pairStarts is the number of annealing runs by co-activations, which are all that there is then.
	pairStarts = 24
	// alternations bounds the rounds of alternation; it ends before when nothing is gained.
	alternations = 8
	// priceSteps is the number of price updates that value one placement.
	priceSteps = 24
)

// solveLayers solves attention tensor parallelism: layers do not depend on one another.
func solveLayers(ctx context.Context, p *Problem) (Result, error) {
	result := Result{Placement: p.placement()}
	stop := limit{ctx, p.Deadline}
	values := make([]float64, len(p.Layers))
	var done atomic.Int64
	failures := make([]error, len(p.Layers))
	err := affinity.Parallel(ctx, len(p.Layers), func(l int) {
		counts, err := p.layerCounts(l)
		if err != nil {
			failures[l] = err
			return
		}
		s := newLayerSearch(p, counts, stop)
		var rankOf []int
		var value float64
		switch {
		case p.warm():
			rankOf, value = s.improve(p.currentRanks(l), p.pairs(l), p.Seed, uint64(l))
		case p.Pairs != nil:
			rankOf, value = s.solvePairs(&p.Pairs[l], p.Seed, uint64(l))
		default:
			rankOf, value = s.solve(p.Seed, uint64(l))
		}
		if s.named {
			named := s.valued(rankOf)
			rankOf, value = named.rankOf, named.value
		}
		if p.Pairs == nil {
			rankOf, value = s.orContiguous(rankOf, value)
		}
		var copies extras
		if p.RedundantSlots > 0 {
			rankOf, copies, value = s.solveCopies(rankOf, p.RedundantSlots)
		}
		result.Placement.Layers[l] = layerOf(p.Layers[l], rankOf, copies, p.Ranks)
		values[l] = value
		if p.Progress != nil {
			p.Progress(int(done.Add(1)), len(p.Layers))
		}
	})
	if err = errors.Join(append(failures, err)...); err != nil {
		return Result{}, err
	}
	for _, value := range values {
		result.TrainLAR += value / float64(len(values))
	}
	result.Truncated = stop.overdue()
	return result, nil
}

// layerSearch is the search in one layer: experts on ranks, token ids on ranks in proportion to prices.
type layerSearch struct {
	counts *affinity.Counts
	ranks  int
	// groups is the number of groups within which experts may move. Group g has the g'th run of ranks: without a name, the
	// order of ranks does not matter, nor does that of groups.
	groups int
	// named says that it does: ranks have unequal shares of the tokens.
	named bool
	// layers is the number of layers to be searched: the more, the less each may take.
	layers    int
	shrinkage float32
	stop      limit
	// Placements are valued by a sample of the token ids.
	sample
	activations float64
	balance     assign.Weighted
	// scored is the placement whose scores balance holds; nil where it holds others.
	scored []int
	exact  exactRanks
}

func newLayerSearch(p *Problem, c *affinity.Counts, stop limit) *layerSearch {
	return newLayerSearchOf(p, c, valuedTokens(p.Ranks), stop)
}

// newLayerSearchOf values placements by at most that many token ids.
func newLayerSearchOf(p *Problem, c *affinity.Counts, tokens int, stop limit) *layerSearch {
	s := &layerSearch{counts: c, ranks: p.Ranks, groups: p.groups(), layers: len(p.Layers), shrinkage: float32(p.Shrinkage), stop: stop}
	s.sample = newSample(c, tokens, s.shrinkage)
	total := 0.0
	for _, size := range s.sizes {
		total += float64(size)
	}
	s.activations = max(total*float64(c.TopK), 1)
	s.balance.Sizes = s.sizes
	s.balance.Scores = make([]float32, len(s.tokens)*s.ranks)
	s.balance.Limits = p.Constraints.tokenLimits(total, s.ranks)
	s.named = slices.Min(s.balance.Limits) < slices.Max(s.balance.Limits)
	return s
}

// solve returns the best placement found and its value. The contiguous one is among the candidates.
func (s *layerSearch) solve(seed, layer uint64) ([]int, float64) {
	g := tokenGram(s.counts, s.shrinkage)
	contiguous := contiguousRanks(s.counts.Experts, s.ranks)
	// A few price steps, as many for all, are enough to choose those that are worth more of them.
	glanced := func(rankOf []int) candidate {
		prices, value := s.valueIn(s.steps()/3, rankOf, nil)
		return s.bestNames(candidate{rankOf, prices, value}, s.steps()/3)
	}
	candidates := []candidate{glanced(contiguous)}
	starts, elites := s.effort()
	for start := range starts {
		if s.stop.reached() {
			break
		}
		random := rand.New(rand.NewPCG(seed, layer<<16|uint64(start)))
		p := randomPartition(g, s.ranks, s.groups, random)
		p.anneal(random, s.stop, cold)
		candidates = append(candidates, glanced(s.canonical(p.rankOf)))
	}
	slices.SortStableFunc(candidates, func(a, b candidate) int { return compareDescending(a.value, b.value) })
	candidates = deduplicated(candidates)
	candidates = candidates[:min(elites, len(candidates))]
	for i := range candidates {
		c := &candidates[i]
		for range alternations {
			if s.stop.reached() {
				break
			}
			rankOf := s.bestExperts(c.rankOf, c.prices)
			if slices.Equal(rankOf, c.rankOf) {
				break
			}
			prices, value := s.valueIn(s.steps()/3, rankOf, c.prices)
			if value <= c.value*(1+1e-6) {
				break
			}
			*c = candidate{rankOf, prices, value}
		}
	}
	for i := range candidates {
		candidates[i] = s.exchanged(candidates[i])
	}
	for i := range candidates {
		candidates[i].rankOf = s.canonical(candidates[i].rankOf)
	}
	candidates = deduplicated(candidates)
	for i := range candidates {
		// The alternation's prices began elsewhere, and ties fall by the ranks' names: values must be comparable.
		c := &candidates[i]
		*c = s.valued(c.rankOf)
		c.rankOf, c.value = s.polish(c.rankOf, c.value)
	}
	best := candidates[0]
	for _, c := range candidates[1:] {
		if c.value > best.value {
			best = c
		}
	}
	if s.exhaustible() {
		return s.exhaust(best.rankOf, best.value)
	}
	return best.rankOf, best.value
}

// candidate is a placement under improvement, with the prices that balance it.
type candidate struct {
	rankOf []int
	prices assign.Prices
	value  float64
}

// deduplicated keeps the first of those that have the same placement. There are a few.
func deduplicated(candidates []candidate) []candidate {
	var kept []candidate
	for _, c := range candidates {
		if !slices.ContainsFunc(kept, func(k candidate) bool { return slices.Equal(k.rankOf, c.rankOf) }) {
			kept = append(kept, c)
		}
	}
	return kept
}

// orContiguous returns the contiguous placement where that is worth more: after a glance it may have been dropped for one that
// more price steps make worse, and a search from a placement in service need not come near it.
func (s *layerSearch) orContiguous(rankOf []int, value float64) ([]int, float64) {
	contiguous := contiguousRanks(s.counts.Experts, s.ranks)
	if plain, better := s.above(value, contiguous); better {
		return contiguous, plain
	}
	return rankOf, value
}

// solvePairs returns the placement of the highest affinity of the mixed Gram matrix, and its value by token rows. What a
// forecast will make of it is not known yet: there is nothing to alternate with.
func (s *layerSearch) solvePairs(pairs *affinity.Pairs, seed, layer uint64) ([]int, float64) {
	g := mixedGram(s.counts, pairs)
	best := annealed(g, s.ranks, s.groups, pairStarts, seed, layer, s.stop)
	_, value := s.value(best.rankOf, nil)
	return best.rankOf, value
}

// annealed is the partition of highest affinity of several annealing runs and the contiguous one.
func annealed(g *gram, ranks, groups, starts int, seed, layer uint64, stop limit) *partition {
	best := newPartition(g, contiguousRanks(g.n, ranks), ranks, groups)
	for start := range starts {
		if stop.reached() {
			break
		}
		random := rand.New(rand.NewPCG(seed, layer<<16|uint64(start)))
		p := randomPartition(g, ranks, groups, random)
		p.anneal(random, stop, cold)
		if p.inside() > best.inside() {
			best = p
		}
	}
	return best
}

func contiguousRanks(experts, ranks int) []int {
	rankOf := make([]int, experts)
	for e := range rankOf {
		rankOf[e] = e * ranks / experts
	}
	return rankOf
}

func compareDescending(a, b float64) int {
	switch {
	case a > b:
		return -1
	case a < b:
		return 1
	}
	return 0
}

// solveCopies adds the best copies to a placement, and alternates as long as that gains.
func (s *layerSearch) solveCopies(rankOf []int, perRank int) ([]int, extras, float64) {
	prices, _ := s.value(rankOf, nil)
	weight := s.affinities(rankOf, prices)
	copies := bestCopies(weight, rankOf, s.ranks, perRank)
	value := func(rankOf []int, copies extras) (assign.Prices, float64) {
		s.score(rankOf)
		s.scoreCopies(copies)
		prices, value := s.balance.PriceExact(s.steps(), nil)
		return prices, value / s.activations
	}
	prices, best := value(rankOf, copies)
	for range alternations {
		s.score(rankOf)
		s.scoreCopies(copies)
		s.fillAffinities(weight, prices)
		nextRankOf := s.exact.assign(weight, s.ranks, s.groups)
		nextCopies := bestCopies(weight, nextRankOf, s.ranks, perRank)
		nextPrices, v := value(nextRankOf, nextCopies)
		if v <= best*(1+1e-6) || s.stop.reached() {
			break
		}
		rankOf, copies, prices, best = nextRankOf, nextCopies, nextPrices, v
	}
	return rankOf, copies, best
}

// scoreCopies adds what copies make local to balance.Scores.
func (s *layerSearch) scoreCopies(copies extras) {
	s.scored = nil
	for i := range s.tokens {
		row := s.balance.Scores[i*s.ranks : (i+1)*s.ranks]
		experts, counts := s.rows.row(i)
		for j, expert := range experts {
			for _, rank := range copies[expert] {
				row[rank] += counts[j]
			}
		}
	}
}

// score fills balance.Scores: the activations of each token id on each rank.
func (s *layerSearch) score(rankOf []int) {
	if slices.Equal(s.scored, rankOf) {
		return
	}
	s.scored = append(s.scored[:0], rankOf...)
	clear(s.balance.Scores)
	for i := range s.tokens {
		row := s.balance.Scores[i*s.ranks : (i+1)*s.ranks]
		experts, counts := s.rows.row(i)
		for j, expert := range experts {
			row[rankOf[expert]] += counts[j]
		}
	}
}

// value is the local activation rate of a placement with the best balanced assignment of token ids, fractional where a
// frequent one must be split, and the prices that balance it.
func (s *layerSearch) value(rankOf []int, start assign.Prices) (assign.Prices, float64) {
	return s.valueIn(s.steps(), rankOf, start)
}

// valueIn is value after some price steps: an upper bound of what more steps would make of it.
func (s *layerSearch) valueIn(steps int, rankOf []int, start assign.Prices) (assign.Prices, float64) {
	s.score(rankOf)
	prices, value := s.balance.PriceExact(steps, start)
	return prices, value / s.activations
}

// above reports whether a placement is worth more than a value, and what it is worth then. Most are seen not to be after a few
// price steps: more of them lower the value.
func (s *layerSearch) above(value float64, rankOf []int) (float64, bool) {
	if _, most := s.valueIn(min(glanceSteps, s.steps()), rankOf, nil); most <= value {
		return 0, false
	}
	_, v := s.value(rankOf, nil)
	return v, v > value
}

// bestExperts is the exact optimum of the experts' ranks for the token assignment that the prices make.
func (s *layerSearch) bestExperts(rankOf []int, prices assign.Prices) []int {
	return s.exact.assign(s.affinities(rankOf, prices), s.ranks, s.groups)
}

// affinities are each expert's activations by the tokens of each rank [experts × ranks], tokens being where the prices send
// them on the placement.
func (s *layerSearch) affinities(rankOf []int, prices assign.Prices) []float32 {
	s.score(rankOf)
	weight := make([]float32, s.counts.Experts*s.ranks)
	s.fillAffinities(weight, prices)
	return weight
}

// fillAffinities does so for the scores that are in balance.Scores.
func (s *layerSearch) fillAffinities(weight []float32, prices assign.Prices) {
	clear(weight)
	token, _ := s.balance.Take(prices)
	for i, rank := range token {
		experts, counts := s.rows.row(i)
		for j, expert := range experts {
			weight[int(expert)*s.ranks+rank] += counts[j]
		}
	}
}
