// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"
)

// Parameters of Sem-MoE's Algorithm 1 (arXiv 2503.04398), which the paper does not publish.
const (
	alternatingRounds = 30
	alternatingSwaps  = 500
	// Weights of an expert's affinity with experts, its affinity with rows, and the load.
	expertAffinityWeight, rowAffinityWeight, expertLoadWeight = 0.5, 1.0, 0.5
	// theta is the weight of imbalance relative to remote activations.
	theta = 0.5
	// rowSlack is the maximum load of a rank relative to its share of the rows' tokens.
	rowSlack = 1.1
)

// alternate is a practical variant of Sem-MoE's Algorithm 1. It alternates two greedy steps: it places experts for the
// rows' ranks, hottest first, and improves them by random swaps; then it places rows for the experts, largest first.
// The state with the lowest cost is kept. alternatePrinted is the algorithm as printed. The differences:
//
//   - Rows are token IDs with attention TP, and have the counted activations. In the paper, rows are requests with
//     forecasts.
//   - It starts from rows balanced by size. The paper starts from clusters of similar rows.
//   - The score of a row has no affinity with other rows. Ranks are balanced in tokens. The paper balances the
//     number of rows.
//   - A swap is scored only by the affinity with rows. The paper also uses co-activation and load.
//   - A state is scored by the objective of section 3.3. The paper uses the fullest rank plus remote activations.
func alternate(r *rows, random *rand.Rand, stop limit) [][]int {
	rowRank := r.spread()
	scores := make([]float32, len(r.sizes)*r.ranks)
	var best [][]int
	bestCost := 0.0
	for range alternatingRounds {
		rankOf := make([][]int, len(r.layers))
		for l := range r.layers {
			rankOf[l] = r.placeHottestFirst(l, rowRank, random)
		}
		r.local(scores, rankOf)
		var local float64
		rowRank, local = r.greedy(scores, rowSlack)
		if cost := r.cost(rowRank, local); best == nil || cost < bestCost {
			best, bestCost = rankOf, cost
		}
		if stop.reached() {
			break
		}
	}
	return best
}

// cost returns the paper's objective, with both terms as fractions: θ·imbalance + (1-θ)·remote.
func (r *rows) cost(rowRank []int, local float64) float64 {
	load := make([]float64, r.ranks)
	for i, rank := range rowRank {
		load[rank] += float64(r.sizes[i])
	}
	fair, imbalance := r.tokens()/float64(r.ranks), 0.0
	for _, n := range load {
		imbalance += max(n-fair, fair-n) / r.tokens()
	}
	activations := 0.0
	for l := range r.layers {
		for _, n := range r.layers[l].count {
			activations += float64(n)
		}
	}
	return theta*imbalance + (1-theta)*(1-local/activations)
}

// placeHottestFirst places the experts of one layer for the rows' ranks.
func (r *rows) placeHottestFirst(layer int, rowRank []int, random *rand.Rand) []int {
	n := r.experts
	weight := make([]float32, n*r.ranks)
	r.affinities(weight, layer, rowRank)
	loads := r.loads(layer)
	order := make([]int, n)
	total := 0.0
	for e := range order {
		order[e] = e
		total += loads[e]
	}
	slices.SortStableFunc(order, func(a, b int) int { return compareDescending(loads[a], loads[b]) })
	together := r.together(layer)
	rankOf, load, count := make([]int, n), make([]float64, r.ranks), make([]int, r.ranks)
	for i := range rankOf {
		rankOf[i] = -1
	}
	for _, e := range order {
		coactivations := make([]float64, r.ranks)
		for f, rank := range rankOf {
			if rank >= 0 {
				coactivations[rank] += float64(together.row(e)[f])
			}
		}
		best, bestValue := -1, 0.0
		for rank := range r.ranks {
			if count[rank] == n/r.ranks {
				continue
			}
			value := expertAffinityWeight*coactivations[rank]/max(slices.Max(coactivations), 1e-9) +
				rowAffinityWeight*float64(weight[e*r.ranks+rank])/max(loads[e], 1e-9) -
				expertLoadWeight*load[rank]*float64(r.ranks)/max(total, 1e-9)/float64(n/r.ranks)
			if best < 0 || value > bestValue {
				best, bestValue = rank, value
			}
		}
		rankOf[e] = best
		load[best] += loads[e]
		count[best]++
	}
	for range alternatingSwaps {
		e, f := random.IntN(n), random.IntN(n)
		p, q := rankOf[e], rankOf[f]
		if weight[e*r.ranks+q]+weight[f*r.ranks+p] > weight[e*r.ranks+p]+weight[f*r.ranks+q] {
			rankOf[e], rankOf[f] = q, p
		}
	}
	return rankOf
}

// together returns the Gram matrix of a layer's rows.
func (r *rows) together(layer int) *gram {
	if r.grams == nil {
		r.grams = make([]*gram, len(r.layers))
	}
	if r.grams[layer] != nil {
		return r.grams[layer]
	}
	g := newGram(r.experts)
	for i, size := range r.sizes {
		experts, counts := r.layers[layer].row(i)
		for k, e := range experts {
			row := g.row(int(e))
			for j := k + 1; j < len(experts); j++ {
				row[experts[j]] += counts[k] * counts[j] / size
			}
		}
	}
	g.mirror()
	r.grams[layer] = g
	return g
}
