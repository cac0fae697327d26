// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
)

// Enumerate returns the value of the best placement of the first layer, by the value function of the search for
// attention tensor parallelism.
func Enumerate(ctx context.Context, p Problem) float64 {
	s := newLayerSearch(&p, &p.Tokens[0], limit{ctx: ctx})
	best := 0.0
	p.everyNamedPlacement(func(rankOf []int) {
		// More price steps lower a value: a few suffice to reject most placements.
		if _, most := s.valueIn(screeningSteps, rankOf, nil); most > best {
			_, value := s.value(rankOf, nil)
			best = max(best, value)
		}
	})
	return best
}

// EnumerateOracle returns the maximum local activation rate of all placements of the first layer, with every row of
// experts on its best rank.
func EnumerateOracle(p Problem, rows [][]uint16) float64 {
	best, activations, on := 0, 0, make([]int, p.Ranks)
	for _, row := range rows {
		activations += len(row)
	}
	p.everyPlacement(func(rankOf []int) {
		local := 0
		for _, row := range rows {
			clear(on)
			for _, e := range row {
				on[rankOf[e]]++
			}
			local += slices.Max(on)
		}
		best = max(best, local)
	})
	return float64(best) / float64(activations)
}

// everyNamedPlacement is everyPlacement with all permutations of ranks if these have unequal shares of the tokens.
func (p *Problem) everyNamedPlacement(do func(rankOf []int)) {
	if p.Constraints.RankCapacity == nil {
		p.everyPlacement(do)
		return
	}
	p.everyPlacement(func(rankOf []int) {
		eachOrder(p.Ranks, func(names []int) {
			named := make([]int, len(rankOf))
			for e, rank := range rankOf {
				named[e] = names[rank]
			}
			do(named)
		})
	})
}

// eachOrder calls do with every permutation of n numbers.
func eachOrder(n int, do func(order []int)) {
	order := make([]int, 0, n)
	var add func()
	add = func() {
		if len(order) == n {
			do(order)
		}
		for next := range n {
			if !slices.Contains(order, next) {
				order = append(order, next)
				add()
				order = order[:len(order)-1]
			}
		}
	}
	add()
}

// everyPlacement calls do for every placement of a layer with interchangeable ranks: it combines the first remaining
// expert with every choice of companions, within its group if there are groups.
func (p *Problem) everyPlacement(do func(rankOf []int)) {
	n := p.experts()
	size, group := n/p.Ranks, n/p.groups()
	rankOf := make([]int, n)
	for e := range rankOf {
		rankOf[e] = -1
	}
	var fill func(rank int)
	var companions func(rank, from, missing int)
	fill = func(rank int) {
		if rank == p.Ranks {
			do(rankOf)
			return
		}
		first := slices.Index(rankOf, -1)
		rankOf[first] = rank
		companions(rank, first+1, size-1)
		rankOf[first] = -1
	}
	companions = func(rank, from, missing int) {
		if missing == 0 {
			fill(rank + 1)
			return
		}
		for e := from; e < (from-1)/group*group+group; e++ {
			if rankOf[e] < 0 {
				rankOf[e] = rank
				companions(rank, e+1, missing-1)
				rankOf[e] = -1
			}
		}
	}
	fill(0)
}

// ValueSampled returns the value of the contiguous placement of the first layer by at most the given number of token
// IDs.
func ValueSampled(ctx context.Context, p Problem, tokens int) float64 {
	s := newLayerSearchOf(&p, &p.Tokens[0], tokens, limit{ctx: ctx})
	_, value := s.value(contiguousRanks(s.counts.Experts, p.Ranks), nil)
	return value
}

// Value returns the value of a placement by the search for attention tensor parallelism, as the mean over layers.
func Value(ctx context.Context, p Problem, of *Placement) float64 {
	sum := 0.0
	for l := range of.Layers {
		rankOf := make([]int, of.Experts)
		for e, ranks := range of.Hosts(l) {
			rankOf[e] = ranks[0]
		}
		_, value := newLayerSearch(&p, &p.Tokens[l], limit{ctx: ctx}).value(rankOf, nil)
		sum += value / float64(len(of.Layers))
	}
	return sum
}

// ValueJoint returns the value of a placement by the search for attention data parallelism.
func ValueJoint(ctx context.Context, p Problem, of *Placement) float64 {
	rankOf := make([][]int, len(of.Layers))
	for l := range rankOf {
		rankOf[l] = make([]int, of.Experts)
		for e, ranks := range of.Hosts(l) {
			rankOf[l][e] = ranks[0]
		}
	}
	return newJointSearch(&p, limit{ctx: ctx}).given(rankOf).value
}

// SampleRequests returns the sample of requests in the search for attention data parallelism.
func SampleRequests(c *affinity.RequestCounts) *affinity.RequestCounts { return sampleRequests(c, 1) }

// ClusterRequests returns initial ranks of the requests in the search for attention data parallelism.
func ClusterRequests(ctx context.Context, p Problem) []int {
	return newJointSearch(&p, limit{ctx: ctx}).clusterRequests(newProfile(p.Requests), rand.New(rand.NewPCG(p.Seed, 0)))
}

// AssignExactly returns the assignment of items to ranks that keeps groups together.
func AssignExactly(scores []float32, ranks, groups int) []int {
	var exact exactRanks
	return exact.assign(scores, ranks, groups)
}

// Worth returns the value of a placement without redundant slots by the search under constraints, in units of the
// objective, minus the cost of moves. excess is the excess of the experts' loads over their limit.
func Worth(ctx context.Context, p Problem, of *Placement) (value, excess float64) {
	rankOf, within := make([][]int, len(of.Layers)), make([]*limits, len(of.Layers))
	for l := range rankOf {
		rankOf[l] = make([]int, of.Experts)
		for e, ranks := range of.Hosts(l) {
			rankOf[l][e] = ranks[0]
		}
		within[l], _ = p.limits(l)
	}
	if p.Attention == DataParallel {
		w := (&refining{by: p.jointRefiner(limit{ctx: ctx}), within: within}).worth(rankOf)
		return w.value, w.excess
	}
	for l := range rankOf {
		by, _ := p.layerRefiner(l, limit{ctx: ctx})
		w := (&refining{by: by, within: within[l : l+1]}).worth(rankOf[l : l+1])
		value, excess = value+w.value, excess+w.excess
	}
	return value, excess
}

// Distinct is the exact search by messages in the first layer.
type Distinct struct{ *distinct }

// NewDistinct starts the search.
func NewDistinct(o *affinity.Occurrences, rankOf []int, own []int32, ranks int, cost affinity.Messages) Distinct {
	return Distinct{newDistinct(o, 0, rankOf, own, ranks, cost)}
}

// Gain, Swap and Total are the operations of the search.
func (d Distinct) Gain(e, f int) float64 { return d.gain(e, f, -1e300) }
func (d Distinct) Swap(e, f int)         { d.swap(e, f) }
func (d Distinct) Total() float64        { return d.total() }

// Exchange is the exact search by swaps in the first layer, at the prices that balance a placement.
type Exchange struct {
	*exchange
	prices []float64
}

// NewExchange starts the search.
func NewExchange(ctx context.Context, p Problem, rankOf []int) Exchange {
	s := newLayerSearch(&p, &p.Tokens[0], limit{ctx: ctx})
	prices, _ := s.value(rankOf, nil)
	x := s.newExchange()
	x.rankOf = slices.Clone(rankOf)
	x.settle(prices)
	return Exchange{x, prices}
}

// Gain and Swap are the operations of the search. Total is its objective, recomputed from the rows.
func (x Exchange) Gain(e, f int) float64 { x.change(e, f); return x.gain(e, f) }
func (x Exchange) Swap(e, f int)         { x.change(e, f); x.swap(e, f) }
func (x Exchange) Total() float64 {
	total := 0.0
	for token, size := range x.search.sizes {
		worth := make([]float64, x.search.ranks)
		for rank, price := range x.prices {
			worth[rank] = -float64(size) * price
		}
		experts, counts := x.search.rows.row(token)
		for i, e := range experts {
			worth[x.rankOf[e]] += float64(counts[i])
		}
		total += slices.Max(worth)
	}
	return total
}

// Exchanged returns the value of a placement of the first layer before and after the rounds of swaps, and the resulting
// placement.
func Exchanged(ctx context.Context, p Problem, rankOf []int) (before, after float64, to []int) {
	s := newLayerSearch(&p, &p.Tokens[0], limit{ctx: ctx})
	prices, value := s.value(rankOf, nil)
	c := s.exchanged(candidate{rankOf, prices, value})
	_, before = s.value(rankOf, nil)
	_, after = s.value(c.rankOf, nil)
	return before, after, c.rankOf
}

// RankOf returns the current rank of an expert.
func (x Exchange) RankOf(e int) int { return x.rankOf[e] }
