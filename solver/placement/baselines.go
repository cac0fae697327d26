// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

// rowAlgorithm clusters rows and experts. It returns the ranks of each layer's experts, and the ranks of the rows if
// the algorithm reports them.
type rowAlgorithm func(*rows, *rand.Rand, limit) (rankOf [][]int, rowRank []int)

// placingOnly wraps an algorithm that does not report the ranks of rows.
func placingOnly(algorithm func(*rows, *rand.Rand, limit) [][]int) rowAlgorithm {
	return func(r *rows, random *rand.Rand, stop limit) ([][]int, []int) { return algorithm(r, random, stop), nil }
}

// solveRows runs a published algorithm layer by layer with attention TP, and once for all layers with attention DP.
func solveRows(ctx context.Context, p *Problem, algorithm rowAlgorithm) (Result, error) {
	stop := limit{ctx, p.Deadline}
	rankOf := make([][]int, len(p.Layers))
	parts := len(p.Layers)
	if p.Attention == DataParallel {
		parts = 1
	}
	rowRanks := make([][]int, parts)
	var done atomic.Int64
	err := affinity.Parallel(ctx, parts, func(part int) {
		random := rand.New(rand.NewPCG(p.Seed, uint64(part)))
		first, last := part, part+1
		if p.Attention == DataParallel {
			last = len(p.Layers)
		}
		var placed [][]int
		placed, rowRanks[part] = algorithm(p.rows(first, last), random, stop)
		copy(rankOf[first:last], placed)
		if p.Progress != nil {
			p.Progress(int(done.Add(1)), parts)
		}
	})
	result := p.result(rankOf, stop)
	if rowRanks[0] != nil {
		result.RowRanks = rowRanks
	}
	return result, err
}

// rows returns the rows to cluster together with the experts of MoE layers first (inclusive) to last (exclusive):
// requests by their forecasts, requests by their counts, or token IDs of one layer.
func (p *Problem) rows(first, last int) *rows {
	switch {
	case p.Algorithm == AlternatingPrinted:
		return p.promptRows(first, last)
	case p.Attention == DataParallel:
		return requestRows(p.Requests, p.Ranks)
	default:
		return tokenRows(&p.Tokens[first], p.Ranks, p.MaxRows)
	}
}

// result returns a placement without a value.
func (p *Problem) result(rankOf [][]int, stop limit) Result {
	if stop.ctx.Err() != nil {
		return Result{}
	}
	layers := make([]Layer, len(p.Layers))
	for l, of := range rankOf {
		layers[l] = fromRanks(p.Layers[l], of, p.Ranks)
	}
	return Result{
		Placement: &Placement{Ranks: p.Ranks, Experts: p.experts(), SlotsPerRank: p.experts() / p.Ranks, Layers: layers},
		Truncated: stop.overdue(),
	}
}

// layerLoads returns the activations of each expert in a MoE layer.
func (p *Problem) layerLoads(l int) []float64 {
	if p.Attention == TensorParallel {
		return p.Tokens[l].ExpertTotals()
	}
	n := p.Requests.Experts
	loads := make([]float64, n)
	for _, row := range p.Requests.Rows {
		for e, count := range row[l*n : (l+1)*n] {
			loads[e] += float64(count)
		}
	}
	return loads
}

// solveEPLB balances only expert load, as DeepSeek's EPLB does.
func solveEPLB(ctx context.Context, p *Problem) (Result, error) {
	result := Result{Placement: p.placement()}
	for l, layer := range p.Layers {
		loads := p.layerLoads(l)
		if p.RedundantSlots > 0 {
			result.Placement.Layers[l] = Layer{Layer: layer, Slots: replicate(loads, p.Ranks, p.RedundantSlots)}
		} else {
			result.Placement.Layers[l] = fromRanks(layer, packByLoad(loads, p.Ranks), p.Ranks)
		}
	}
	return result, ctx.Err()
}

// packByLoad places experts hottest first, each on the least loaded rank with room.
func packByLoad(loads []float64, ranks int) []int {
	order := make([]int, len(loads))
	for e := range order {
		order[e] = e
	}
	slices.SortStableFunc(order, func(a, b int) int { return compareDescending(loads[a], loads[b]) })
	rankOf, load, room := make([]int, len(loads)), make([]float64, ranks), slices.Repeat([]int{len(loads) / ranks}, ranks)
	for _, e := range order {
		best := -1
		for rank := range ranks {
			if room[rank] > 0 && (best < 0 || load[rank] < load[best]) {
				best = rank
			}
		}
		rankOf[e] = best
		load[best] += loads[e]
		room[best]--
	}
	return rankOf
}

// solveCoactivation groups experts that single tokens activate together (Occult, GRACE-MoE), regardless of token IDs.
func solveCoactivation(ctx context.Context, p *Problem) (Result, error) {
	if err := p.needPairs(); err != nil {
		return Result{}, err
	}
	stop := limit{ctx, p.Deadline}
	rankOf := make([][]int, len(p.Layers))
	err := affinity.Parallel(ctx, len(p.Layers), func(l int) {
		g := newGram(p.experts())
		copy(g.values, p.Pairs[l].Together)
		g.mirror()
		rankOf[l] = annealed(g, p.Ranks, 1, starts, p.Seed, uint64(l), stop).rankOf
	})
	return p.result(rankOf, stop), err
}

func (p *Problem) needPairs() error {
	if len(p.Pairs) != len(p.Layers) {
		return fmt.Errorf("algorithm %s needs the co-activations of each of %d MoE layers; it has %d", p.Algorithm, len(p.Layers), len(p.Pairs))
	}
	return nil
}

// chainSweeps is the number of passes over the layers in the inter-layer algorithms.
const chainSweeps = 6

// solveChain keeps a token on its rank from layer to layer (ExFlow). Each layer's experts are assigned exactly for the
// activations exchanged with neighboring layers, in several passes. With balanced load (MoETuner), experts first form
// clusters of equal load, and whole clusters are assigned.
func solveChain(ctx context.Context, p *Problem, balanced bool) (Result, error) {
	if len(p.Transitions) != len(p.Layers)-1 {
		return Result{}, fmt.Errorf("algorithm %s needs the transitions between %d MoE layers; it has %d", p.Algorithm, len(p.Layers), len(p.Transitions))
	}
	stop := limit{ctx, p.Deadline}
	n := p.experts()
	rankOf := make([][]int, len(p.Layers))
	for l := range rankOf {
		rankOf[l] = packByLoad(p.layerLoads(l), p.Ranks)
	}
	var exact assign.Solver
	weight := make([]float32, n*p.Ranks)
	for sweep := range chainSweeps {
		for i := range rankOf {
			l := i
			if sweep%2 == 1 {
				l = len(rankOf) - 1 - i
			}
			p.neighbours(weight, rankOf, l)
			if !balanced {
				rankOf[l] = slices.Clone(exact.Assign(weight, slices.Repeat([]int{n / p.Ranks}, p.Ranks)))
				continue
			}
			clusters := make([]float32, p.Ranks*p.Ranks)
			for e, cluster := range rankOf[l] {
				add(clusters[cluster*p.Ranks:(cluster+1)*p.Ranks], weight[e*p.Ranks:(e+1)*p.Ranks], 1)
			}
			to := slices.Clone(exact.Assign(clusters, slices.Repeat([]int{1}, p.Ranks)))
			for e, cluster := range rankOf[l] {
				rankOf[l][e] = to[cluster]
			}
			p.swapWithinLoad(rankOf[l], weight, p.layerLoads(l))
		}
	}
	return p.result(rankOf, stop), ctx.Err()
}

// neighbours fills weight with the exchange of each expert of a layer with the experts of the previous and the next
// layer on each rank.
func (p *Problem) neighbours(weight []float32, rankOf [][]int, l int) {
	clear(weight)
	n := p.experts()
	for e := range n {
		row := weight[e*p.Ranks : (e+1)*p.Ranks]
		if l > 0 {
			for f, rank := range rankOf[l-1] {
				row[rank] += p.Transitions[l-1][f*n+e]
			}
		}
		if l+1 < len(rankOf) {
			for f, rank := range rankOf[l+1] {
				row[rank] += p.Transitions[l][e*n+f]
			}
		}
	}
}

// balancedLoad is the maximum expert load of a rank, relative to the mean, for the algorithm that balances load.
const balancedLoad = 1.05

// swapWithinLoad swaps experts to increase weight while no rank's load grows above the limit.
func (p *Problem) swapWithinLoad(rankOf []int, weight []float32, loads []float64) {
	load, total := make([]float64, p.Ranks), 0.0
	for e, rank := range rankOf {
		load[rank] += loads[e]
		total += loads[e]
	}
	most := balancedLoad * total / float64(p.Ranks)
	for improved := true; improved; {
		improved = false
		for e := range rankOf {
			for f := range e {
				a, b := rankOf[e], rankOf[f]
				if a == b || weight[e*p.Ranks+b]+weight[f*p.Ranks+a] <= (weight[e*p.Ranks+a]+weight[f*p.Ranks+b])*(1+1e-6) {
					continue
				}
				shift := loads[e] - loads[f]
				if load[a]-shift > max(most, load[a]) || load[b]+shift > max(most, load[b]) {
					continue
				}
				rankOf[e], rankOf[f] = b, a
				load[a], load[b] = load[a]-shift, load[b]+shift
				improved = true
			}
		}
	}
}
