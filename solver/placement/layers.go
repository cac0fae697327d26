// SPDX-License-Identifier: Apache-2.0

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
	// starts is the number of annealing runs per layer. elites is the number of runs that are improved by alternation
	// and exact swaps. On held-out tokens, more elites help more than more starts.
	starts = 8
	elites = 6
	// pairStarts is the number of annealing runs by co-activations, after which no other improvement follows.
	pairStarts = 24
	// alternations is the maximum number of alternations. The search ends earlier without a gain.
	alternations = 8
	// priceSteps is the number of price updates to value one placement.
	priceSteps = 24
	// partsPerRank is the number of parts of a rank's share of the tokens, of which a token ID has at most one: a token ID
	// with more occurrences is divided. tolerance is the excess of a rank's tokens over an equal share that is allowed.
	partsPerRank = 8
	tolerance    = 0.02
	// sparseRanks is the number of ranks from which most token IDs activate experts of few ranks only.
	sparseRanks = 24
)

// solveLayers solves attention tensor parallelism, in which layers are independent.
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

// layerSearch is the search in one layer. It assigns experts to ranks, and token IDs to ranks by Lagrangian prices.
type layerSearch struct {
	counts *affinity.Counts
	ranks  int
	// groups is the number of groups within which experts may move. Group g has the g'th run of ranks. If ranks are
	// interchangeable, neither the order of ranks nor that of groups matters.
	groups int
	// named is set if ranks are not interchangeable, because they have unequal shares of the tokens.
	named bool
	// layers is the number of layers to search. It divides the effort.
	layers    int
	shrinkage float32
	stop      limit
	// Placements are valued on a sample of the token IDs.
	sample
	activations float64
	balance     assign.Weighted
	// scored is the placement whose scores are in balance; empty if balance has other scores.
	scored []int
	exact  exactRanks
}

func newLayerSearch(p *Problem, c *affinity.Counts, stop limit) *layerSearch {
	return newLayerSearchOf(p, c, valuedTokens(p.Ranks), stop)
}

// newLayerSearchOf returns a search that values placements by at most the given number of token IDs.
func newLayerSearchOf(p *Problem, c *affinity.Counts, tokens int, stop limit) *layerSearch {
	s := &layerSearch{counts: c, ranks: p.Ranks, groups: p.groups(), layers: len(p.Layers), shrinkage: float32(p.Shrinkage), stop: stop}
	s.sample = newSample(c, tokens, s.shrinkage)
	total := 0.0
	for _, size := range s.sizes {
		total += float64(size)
	}
	s.sample = s.sample.split(float32(total / float64(partsPerRank*p.Ranks)))
	s.activations = max(total*float64(c.TopK), 1)
	s.balance.Sizes = s.sizes
	if s.ranks >= sparseRanks {
		s.balance.Sparse = assign.NewSparseScores(s.ranks)
	} else {
		s.balance.Scores = make([]float32, len(s.tokens)*s.ranks)
	}
	s.balance.Limits = p.Constraints.tokenLimits(total, s.ranks)
	s.named = slices.Min(s.balance.Limits) < slices.Max(s.balance.Limits)
	return s
}

// solve returns the best placement found and its value. The contiguous placement is one of the candidates.
func (s *layerSearch) solve(seed, layer uint64) ([]int, float64) {
	g := tokenGram(s.counts, s.shrinkage)
	contiguous := contiguousRanks(s.counts.Experts, s.ranks)
	// A few price steps, equally many for all candidates, suffice to select those that are improved.
	screened := func(rankOf []int) candidate {
		prices, value := s.valueIn(s.steps()/3, rankOf, nil)
		return s.bestNames(candidate{rankOf, prices, value}, s.steps()/3)
	}
	candidates := []candidate{screened(contiguous)}
	starts, elites := s.effort()
	for start := range starts {
		if s.stop.reached() {
			break
		}
		random := rand.New(rand.NewPCG(seed, layer<<16|uint64(start)))
		p := randomPartition(g, s.ranks, s.groups, random)
		p.anneal(random, s.stop, cold)
		candidates = append(candidates, screened(s.canonical(p.rankOf)))
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
		// Values must be comparable: the alternation's prices started elsewhere, and ties depend on the numbering of
		// ranks.
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

// candidate is a placement being improved, with the prices that balance it.
type candidate struct {
	rankOf []int
	prices assign.Prices
	value  float64
}

// deduplicated keeps the first of candidates with equal placements. The list is short.
func deduplicated(candidates []candidate) []candidate {
	var kept []candidate
	for _, c := range candidates {
		if !slices.ContainsFunc(kept, func(k candidate) bool { return slices.Equal(k.rankOf, c.rankOf) }) {
			kept = append(kept, c)
		}
	}
	return kept
}

// orContiguous returns the contiguous placement if it has a higher value. The first selection may have dropped it for a
// placement that loses value with more price steps, and a search from the placement in service may not reach it.
func (s *layerSearch) orContiguous(rankOf []int, value float64) ([]int, float64) {
	contiguous := contiguousRanks(s.counts.Experts, s.ranks)
	if plain, better := s.above(value, contiguous); better {
		return contiguous, plain
	}
	return rankOf, value
}

// solvePairs returns the placement of maximum affinity by the mixed Gram matrix, and its value by token rows. It cannot
// alternate, because the forecast for the placement is not known yet.
func (s *layerSearch) solvePairs(pairs *affinity.Pairs, seed, layer uint64) ([]int, float64) {
	g := mixedGram(s.counts, pairs)
	best := annealed(g, s.ranks, s.groups, pairStarts, seed, layer, s.stop)
	_, value := s.value(best.rankOf, nil)
	return best.rankOf, value
}

// annealed returns the partition of maximum affinity among several annealing runs and the contiguous one.
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

// solveCopies adds the best copies to a placement, and alternates while there is a gain.
func (s *layerSearch) solveCopies(rankOf []int, perRank int) ([]int, extras, float64) {
	prices, _ := s.value(rankOf, nil)
	weight := s.affinities(rankOf, prices)
	copies := bestCopies(weight, rankOf, s.ranks, perRank)
	value := func(rankOf []int, copies extras) (assign.Prices, float64) {
		s.scoreWith(rankOf, copies)
		prices, value := s.balance.PriceExact(s.steps(), nil)
		return prices, value / s.activations
	}
	prices, best := value(rankOf, copies)
	for range alternations {
		s.scoreWith(rankOf, copies)
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

// score computes the scores in balance: the activations of each token ID on each rank.
func (s *layerSearch) score(rankOf []int) {
	if slices.Equal(s.scored, rankOf) {
		return
	}
	s.scoreWith(rankOf, nil)
	s.scored = append(s.scored[:0], rankOf...)
}

// scoreWith is score with the activations that copies make local; copies is nil if there are none.
func (s *layerSearch) scoreWith(rankOf []int, copies extras) {
	s.scored = s.scored[:0]
	sparse, row := s.balance.Sparse, make([]float32, s.ranks)
	if sparse != nil {
		sparse.Reset()
	}
	for i := range s.tokens {
		if sparse == nil {
			row = s.balance.Scores[i*s.ranks : (i+1)*s.ranks]
		}
		clear(row)
		experts, counts := s.rows.row(i)
		for j, expert := range experts {
			row[rankOf[expert]] += counts[j]
			if copies != nil {
				for _, rank := range copies[expert] {
					row[rank] += counts[j]
				}
			}
		}
		if sparse != nil {
			sparse.Append(row)
		}
	}
}

// value returns the local activation rate of a placement with the best balanced assignment of token IDs, and the prices
// that balance it. The assignment is fractional if a frequent token ID must be split.
func (s *layerSearch) value(rankOf []int, start assign.Prices) (assign.Prices, float64) {
	return s.valueIn(s.steps(), rankOf, start)
}

// valueIn is value after the given number of price steps: an upper bound of the value after more steps.
func (s *layerSearch) valueIn(steps int, rankOf []int, start assign.Prices) (assign.Prices, float64) {
	s.score(rankOf)
	prices, value := s.balance.PriceExact(steps, start)
	return prices, value / s.activations
}

// above reports whether the value of a placement exceeds the given value, and returns it. A few price steps reject most
// placements, because more steps only lower the value.
func (s *layerSearch) above(value float64, rankOf []int) (float64, bool) {
	if _, most := s.valueIn(min(screeningSteps, s.steps()), rankOf, nil); most <= value {
		return 0, false
	}
	_, v := s.value(rankOf, nil)
	return v, v > value
}

// bestExperts returns the exact optimum of the experts' ranks for the token assignment at the prices.
func (s *layerSearch) bestExperts(rankOf []int, prices assign.Prices) []int {
	return s.exact.assign(s.affinities(rankOf, prices), s.ranks, s.groups)
}

// affinities returns each expert's activations by the tokens of each rank [experts × ranks], with tokens assigned by
// the prices on the placement.
func (s *layerSearch) affinities(rankOf []int, prices assign.Prices) []float32 {
	s.score(rankOf)
	weight := make([]float32, s.counts.Experts*s.ranks)
	s.fillAffinities(weight, prices)
	return weight
}

// balancedAffinities is affinities with token IDs moved from ranks that have more than an equal share of the tokens. At
// the prices alone, all parts of a frequent token ID are on one rank, which would seem to exchange more than it does.
func (s *layerSearch) balancedAffinities(rankOf []int, prices assign.Prices) []float32 {
	s.score(rankOf)
	weight := make([]float32, s.counts.Experts*s.ranks)
	s.addAffinities(weight, s.balance.Assign(prices, tolerance))
	return weight
}

// fillAffinities computes affinities from the scores in balance.Scores.
func (s *layerSearch) fillAffinities(weight []float32, prices assign.Prices) {
	clear(weight)
	token, _ := s.balance.Take(prices)
	s.addAffinities(weight, token)
}

// addAffinities adds the activations of tokens with the given ranks.
func (s *layerSearch) addAffinities(weight []float32, rankOfToken []int) {
	for i, rank := range rankOfToken {
		experts, counts := s.rows.row(i)
		for j, expert := range experts {
			weight[int(expert)*s.ranks+rank] += counts[j]
		}
	}
}
