package placement

import (
	"context"
	"slices"
)

// Enumerate is the value of the best placement of the first layer, as the search of attention tensor parallelism values
// placements: the experts that are left are parted by taking the first one with every choice of companions.
func Enumerate(ctx context.Context, p Problem) float64 {
	s := newLayerSearch(&p.Tokens[0], p.Ranks, limit{ctx: ctx})
	n := s.counts.Experts
	size, best := n/p.Ranks, 0.0
	rankOf := make([]int, n)
	for e := range rankOf {
		rankOf[e] = -1
	}
	var group func(rank int)
	var companions func(rank, from, missing int)
	group = func(rank int) {
		if rank == p.Ranks {
			_, value := s.value(rankOf, nil)
			best = max(best, value)
			return
		}
		first := slices.Index(rankOf, -1)
		rankOf[first] = rank
		companions(rank, first+1, size-1)
		rankOf[first] = -1
	}
	companions = func(rank, from, missing int) {
		if missing == 0 {
			group(rank + 1)
			return
		}
		for e := from; e < n; e++ {
			if rankOf[e] < 0 {
				rankOf[e] = rank
				companions(rank, e+1, missing-1)
				rankOf[e] = -1
			}
		}
	}
	group(0)
	return best
}

// ValueSampled is the value of the contiguous placement of the first layer by at most so many scores.
func ValueSampled(ctx context.Context, p Problem, scores int) float64 {
	s := newLayerSearchOf(&p.Tokens[0], p.Ranks, scores, limit{ctx: ctx})
	_, value := s.value(contiguousRanks(s.counts.Experts, p.Ranks), nil)
	return value
}

// Value is what the search of attention tensor parallelism makes of a placement, mean over layers.
func Value(ctx context.Context, p Problem, of *Placement) float64 {
	sum := 0.0
	for l := range of.Layers {
		rankOf := make([]int, of.Experts)
		for e, ranks := range of.Hosts(l) {
			rankOf[e] = ranks[0]
		}
		_, value := newLayerSearch(&p.Tokens[l], p.Ranks, limit{ctx: ctx}).value(rankOf, nil)
		sum += value / float64(len(of.Layers))
	}
	return sum
}
