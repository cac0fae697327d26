// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"slices"

	"github.com/semmoe/operator/solver/affinity"
)

// rows are the units that are assigned to ranks together with the experts: token IDs in one layer (attention TP), or
// requests over all layers (attention DP). The published algorithms treat both in the same way.
type rows struct {
	ranks, experts int
	// sizes are the numbers of tokens.
	sizes []float32
	// layers contain the activations of each row.
	layers []sparseRows
	// grams are computed on first use.
	grams []*gram
	// profile contains the rows as points; only promptRows sets it.
	profile *profile
}

type sparseRows struct {
	start  []int
	expert []uint16
	count  []float32
}

func (s *sparseRows) row(r int) ([]uint16, []float32) {
	begin, end := s.start[r], s.start[r+1]
	return s.expert[begin:end], s.count[begin:end]
}

// tokenRows returns the rows of at most the given number of token IDs, the most frequent ones; 0 means no limit.
func tokenRows(c *affinity.Counts, ranks, most int) *rows {
	least := float32(0)
	if most > 0 && most < len(c.Occurrences) {
		sizes := slices.Sorted(slices.Values(c.Occurrences))
		least = sizes[len(sizes)-most-1]
	}
	out := &rows{ranks: ranks, experts: c.Experts, layers: []sparseRows{{start: []int{0}}}}
	layer := &out.layers[0]
	for token, n := range c.Occurrences {
		if n <= least {
			continue
		}
		experts, counts := c.Row(token)
		layer.expert, layer.count = append(layer.expert, experts...), append(layer.count, counts...)
		layer.start = append(layer.start, len(layer.expert))
		out.sizes = append(out.sizes, n)
	}
	return out
}

func requestRows(c *affinity.RequestCounts, ranks int) *rows {
	out := &rows{ranks: ranks, experts: c.Experts, sizes: c.Tokens, layers: make([]sparseRows, c.Layers)}
	for l := range out.layers {
		layer := &out.layers[l]
		layer.start = append(layer.start, 0)
		for _, row := range c.Rows {
			for e, n := range row[l*c.Experts : (l+1)*c.Experts] {
				if n > 0 {
					layer.expert, layer.count = append(layer.expert, uint16(e)), append(layer.count, n)
				}
			}
			layer.start = append(layer.start, len(layer.expert))
		}
	}
	return out
}

// affinities fills weight with each expert's activations by the rows of each rank [experts × ranks].
func (r *rows) affinities(weight []float32, layer int, rowRank []int) {
	clear(weight)
	for i, rank := range rowRank {
		experts, counts := r.layers[layer].row(i)
		for k, e := range experts {
			weight[int(e)*r.ranks+rank] += counts[k]
		}
	}
}

// local fills scores with each row's activations on each rank [rows × ranks].
func (r *rows) local(scores []float32, rankOf [][]int) {
	clear(scores)
	for l := range r.layers {
		for i := range r.sizes {
			experts, counts := r.layers[l].row(i)
			for k, e := range experts {
				scores[i*r.ranks+rankOf[l][e]] += counts[k]
			}
		}
	}
}

// loads returns each expert's activations in a layer.
func (r *rows) loads(layer int) []float64 {
	loads := make([]float64, r.experts)
	for i, e := range r.layers[layer].expert {
		loads[e] += float64(r.layers[layer].count[i])
	}
	return loads
}

func (r *rows) tokens() float64 {
	total := 0.0
	for _, n := range r.sizes {
		total += float64(n)
	}
	return total
}

// bySize lists the rows, largest first.
func (r *rows) bySize() []int {
	order := make([]int, len(r.sizes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return compareDescending(float64(r.sizes[a]), float64(r.sizes[b])) })
	return order
}

// spread assigns the rows only by size, each to the least loaded rank.
func (r *rows) spread() []int {
	rank, load := make([]int, len(r.sizes)), make([]float64, r.ranks)
	for _, i := range r.bySize() {
		least := lowest(load)
		rank[i] = least
		load[least] += float64(r.sizes[i])
	}
	return rank
}

// greedy assigns each row, largest first, to the rank with the highest score among those that stay within slack times
// their fair share. A row that fits on no rank is assigned to the least loaded one.
func (r *rows) greedy(scores []float32, slack float64) (rank []int, local float64) {
	rank, load := make([]int, len(r.sizes)), make([]float64, r.ranks)
	limit := slack * r.tokens() / float64(r.ranks)
	for _, i := range r.bySize() {
		best := -1
		for b, score := range scores[i*r.ranks : (i+1)*r.ranks] {
			if load[b]+float64(r.sizes[i]) <= limit && (best < 0 || score > scores[i*r.ranks+best]) {
				best = b
			}
		}
		if best < 0 {
			best = lowest(load)
		}
		rank[i] = best
		load[best] += float64(r.sizes[i])
		local += float64(scores[i*r.ranks+best])
	}
	return rank, local
}

func lowest(values []float64) int {
	best := 0
	for i, v := range values {
		if v < values[best] {
			best = i
		}
	}
	return best
}
