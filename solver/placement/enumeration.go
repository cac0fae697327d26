// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"slices"
)

// Work is measured in token IDs × ranks × price steps, the cost of valuing placements.
const (
	// exhaustiveWork limits the enumeration of all placements of a layer, and polishWork one round of all swaps.
	exhaustiveWork = 2e8
	polishWork     = 1e7
	// searchWork limits the work to improve placements in all layers together, in entries of rows and scores for each
	// elite.
	searchWork = 4.6e7
	// runsPerElite is the number of annealing runs per improved run.
	runsPerElite = 4
	// minWork is the minimum work to value a placement, for layers with few token IDs, because prices also take time.
	minWork = 1000
	// accurateSteps is the maximum number of price steps to value a placement. Steps × token IDs × ranks is at most
	// accurateWork.
	accurateSteps = 160
	accurateWork  = 2e5
	// screeningSteps is the number of price steps after which most placements are rejected as worse than the best one.
	screeningSteps = 8
	// smallStarts is the number of annealing runs in a layer whose swaps can all be tried.
	smallStarts = 24
	// exhaustibleStarts is the number of annealing runs before the enumeration of all placements of a layer.
	exhaustibleStarts = 2
)

// steps returns the number of price updates to value a placement: more in small layers, for accuracy.
func (s *layerSearch) steps() int {
	return min(accurateSteps, max(priceSteps, int(accurateWork)/max(len(s.tokens)*s.ranks, 1)))
}

func (s *layerSearch) valueWork() float64 { return float64(len(s.tokens) * s.ranks * s.steps()) }

// partitions returns the number of ways to divide n experts among unlabeled ranks.
func partitions(n, ranks int) float64 {
	count, size := 1.0, n/ranks
	for left := ranks; left > 0; left-- {
		// The rank with the first remaining expert takes size-1 of the others.
		others := left*size - 1
		for k := range size - 1 {
			count *= float64(others-k) / float64(k+1)
		}
	}
	return count
}

// exhaustible reports whether all placements can be enumerated.
func (s *layerSearch) exhaustible() bool {
	if s.named {
		return false // labels are not enumerated
	}
	placements := math.Pow(partitions(s.counts.Experts/s.groups, s.ranks/s.groups), float64(s.groups))
	return s.ranks > 1 && placements*float64(max(len(s.tokens)*s.ranks*screeningSteps, minWork)) <= exhaustiveWork
}

// exhaust enumerates all placements and returns the best one, starting from the best known placement.
func (s *layerSearch) exhaust(best []int, bestValue float64) ([]int, float64) {
	n := s.counts.Experts
	best = slices.Clone(best)
	rankOf, load := make([]int, n), make([]int, s.ranks)
	size, span := n/s.groups, s.ranks/s.groups
	var place func(expert, used int)
	place = func(expert, used int) {
		if expert == n {
			if value, better := s.above(bestValue, rankOf); better {
				bestValue = value
				copy(best, rankOf)
			}
			return
		}
		// Ranks are unlabeled: the first unused rank of the expert's group represents all of them.
		first := expert / size * span
		for rank := first; rank < min(used+1, first+span); rank++ {
			if load[rank] == n/s.ranks || s.stop.reached() {
				continue
			}
			rankOf[expert] = rank
			load[rank]++
			place(expert+1, max(used, rank+1))
			load[rank]--
		}
	}
	place(0, 0)
	return best, bestValue
}

// small reports whether all swaps of a placement can be tried.
func (s *layerSearch) small() bool {
	n := s.counts.Experts
	return float64(n*n/2)*s.valueWork() <= polishWork
}

// effort returns the number of annealing runs, and the number of runs to improve. In a small layer the Gram matrix is a
// worse guide, and improving is cheap. Before an enumeration, one good placement suffices.
func (s *layerSearch) effort() (runs, improved int) {
	switch {
	case s.exhaustible():
		return exhaustibleStarts, 1
	case s.small():
		return smallStarts, smallStarts
	}
	// With many or large layers, fewer runs are improved, at least one.
	improved = max(1, min(elites, int(searchWork/(float64(s.layers)*float64(len(s.rows.expert)+len(s.tokens)*s.ranks)))))
	return min(starts, runsPerElite*improved), improved
}

// polish takes the best swap by value until none has a gain, if trying all swaps is cheap.
func (s *layerSearch) polish(rankOf []int, value float64) ([]int, float64) {
	n := len(rankOf)
	if !s.small() || s.exhaustible() {
		return rankOf, value
	}
	for !s.stop.reached() {
		bestE, bestF, best := 0, 0, value*(1+1e-6)
		for e := range n {
			for f := e - e%(n/s.groups); f < e; f++ {
				if rankOf[e] == rankOf[f] {
					continue
				}
				rankOf[e], rankOf[f] = rankOf[f], rankOf[e]
				if v, better := s.above(best, s.canonical(rankOf)); better {
					bestE, bestF, best = e, f, v
				}
				rankOf[e], rankOf[f] = rankOf[f], rankOf[e]
			}
		}
		if bestE == bestF {
			break
		}
		rankOf[bestE], rankOf[bestF] = rankOf[bestF], rankOf[bestE]
		value = best
	}
	return s.canonical(rankOf), value
}

// renamed numbers ranks in the order of their first experts, so that placements that differ only by a permutation of
// ranks are equal.
func renamed(rankOf []int) []int {
	name := map[int]int{}
	names := make([]int, len(rankOf))
	for e, rank := range rankOf {
		if _, known := name[rank]; !known {
			name[rank] = len(name)
		}
		names[e] = name[rank]
	}
	return names
}
