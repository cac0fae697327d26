package placement

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

const (
	// starts is the number of annealing runs per layer.
	starts = 8
	// elites is how many of them are improved by alternation.
	elites = 3
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
	err := affinity.Parallel(ctx, len(p.Layers), func(l int) {
		s := newLayerSearch(&p.Tokens[l], p.Ranks, stop)
		var rankOf []int
		var value float64
		if p.Pairs != nil {
			rankOf, value = s.solvePairs(&p.Pairs[l], p.Seed, uint64(l))
		} else {
			rankOf, value = s.solve(p.Seed, uint64(l))
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
	if err != nil {
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
	stop   limit
	// tokens are the ids that occur; their sizes are occurrences.
	tokens      []int
	activations float64
	balance     assign.Weighted
	exact       assign.Solver
}

func newLayerSearch(c *affinity.Counts, ranks int, stop limit) *layerSearch {
	s := &layerSearch{counts: c, ranks: ranks, stop: stop}
	total := 0.0
	for token, n := range c.Occurrences {
		if n > 0 {
			s.tokens = append(s.tokens, token)
			s.balance.Sizes = append(s.balance.Sizes, n)
			total += float64(n)
		}
	}
	s.activations = max(total*float64(c.TopK), 1)
	s.balance.Scores = make([]float32, len(s.tokens)*ranks)
	s.balance.Limits = slices.Repeat([]float64{total / float64(ranks)}, ranks)
	return s
}

// solve returns the best placement found and its value. The contiguous one is among the candidates.
func (s *layerSearch) solve(seed, layer uint64) ([]int, float64) {
	g := tokenGram(s.counts)
	contiguous := contiguousRanks(s.counts.Experts, s.ranks)
	type candidate struct {
		rankOf []int
		prices assign.Prices
		value  float64
	}
	valued := func(rankOf []int) candidate {
		prices, value := s.value(rankOf, nil)
		return candidate{rankOf, prices, value}
	}
	candidates := []candidate{valued(contiguous)}
	starts, elites := s.effort()
	for start := range starts {
		if s.stop.reached() {
			break
		}
		random := rand.New(rand.NewPCG(seed, layer<<16|uint64(start)))
		p := randomPartition(g, s.ranks, random)
		p.anneal(random, s.stop)
		candidates = append(candidates, valued(renamed(p.rankOf)))
	}
	slices.SortStableFunc(candidates, func(a, b candidate) int { return compareDescending(a.value, b.value) })
	for i := range candidates[:min(elites, len(candidates))] {
		c := &candidates[i]
		for range alternations {
			if s.stop.reached() {
				break
			}
			rankOf := s.bestExperts(c.rankOf, c.prices)
			prices, value := s.value(rankOf, c.prices)
			if value <= c.value*(1+1e-6) {
				break
			}
			*c = candidate{rankOf, prices, value}
		}
	}
	for i := range candidates[:min(elites, len(candidates))] {
		// The alternation's prices began elsewhere, and ties fall by the ranks' names: values must be comparable.
		c := &candidates[i]
		*c = valued(renamed(c.rankOf))
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

// solvePairs returns the placement of the highest affinity of the mixed Gram matrix, and its value by token rows. What a
// forecast will make of it is not known yet: there is nothing to alternate with.
func (s *layerSearch) solvePairs(pairs *affinity.Pairs, seed, layer uint64) ([]int, float64) {
	g := mixedGram(s.counts, pairs)
	best := annealed(g, s.ranks, seed, layer, s.stop)
	_, value := s.value(best.rankOf, nil)
	return best.rankOf, value
}

// annealed is the partition of highest affinity of several annealing runs and the contiguous one.
func annealed(g *gram, ranks int, seed, layer uint64, stop limit) *partition {
	best := newPartition(g, contiguousRanks(g.n, ranks), ranks)
	for start := range starts {
		if stop.reached() {
			break
		}
		random := rand.New(rand.NewPCG(seed, layer<<16|uint64(start)))
		p := randomPartition(g, ranks, random)
		p.anneal(random, stop)
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
		prices, value := s.balance.Price(s.steps(), nil, true)
		return prices, value / s.activations
	}
	prices, best := value(rankOf, copies)
	capacity := slices.Repeat([]int{s.counts.Experts / s.ranks}, s.ranks)
	for range alternations {
		s.score(rankOf)
		s.scoreCopies(copies)
		s.fillAffinities(weight, prices)
		nextRankOf := slices.Clone(s.exact.Assign(weight, capacity))
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
	for i, token := range s.tokens {
		row := s.balance.Scores[i*s.ranks : (i+1)*s.ranks]
		experts, counts := s.counts.Row(token)
		for j, expert := range experts {
			for _, rank := range copies[expert] {
				row[rank] += counts[j]
			}
		}
	}
}

// score fills balance.Scores: the activations of each token id on each rank.
func (s *layerSearch) score(rankOf []int) {
	clear(s.balance.Scores)
	for i, token := range s.tokens {
		row := s.balance.Scores[i*s.ranks : (i+1)*s.ranks]
		experts, counts := s.counts.Row(token)
		for j, expert := range experts {
			row[rankOf[expert]] += counts[j]
		}
	}
}

// value is the local activation rate of a placement with the best balanced assignment of token ids, fractional where a
// frequent one must be split, and the prices that balance it.
func (s *layerSearch) value(rankOf []int, start assign.Prices) (assign.Prices, float64) {
	s.score(rankOf)
	prices, value := s.balance.Price(s.steps(), start, true)
	return prices, value / s.activations
}

// bestExperts is the exact optimum of the experts' ranks for the token assignment that the prices make.
func (s *layerSearch) bestExperts(rankOf []int, prices assign.Prices) []int {
	capacity := slices.Repeat([]int{s.counts.Experts / s.ranks}, s.ranks)
	return slices.Clone(s.exact.Assign(s.affinities(rankOf, prices), capacity))
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
		experts, counts := s.counts.Row(s.tokens[i])
		for j, expert := range experts {
			weight[int(expert)*s.ranks+rank] += counts[j]
		}
	}
}
