// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
)

// refiner is a local search in one layer, or in several layers that share the ranks of tokens or requests. It assigns
// tokens or requests for a placement, and then swaps experts of each layer under this assignment.
type refiner interface {
	// settle assigns tokens or requests for a placement, and returns its value in units of the objective over the
	// profile.
	settle(rankOf [][]int) float64
	// swaps searches layer l from a placement, which it modifies. It may be called for several layers concurrently.
	swaps(l int, rankOf []int) swapper
	// copies returns the value of a copy of each expert on each rank in layer l [experts × ranks].
	copies(l int, rankOf []int) []float32
	// anneals reports whether swaps are annealed first, because the objective has many local optima.
	anneals() bool
}

const (
	// refineRounds is the maximum number of alternations between assignment and swaps. The search ends when the
	// relative gain of a round is below worthwhile.
	refineRounds = 6
	minRoundGain = 1e-4
	// maxStartGap is the maximum relative distance to the best start for improving another start of a single layer. It
	// does not apply to starts of several layers, whose value can look too low because the numbering of ranks differs
	// between layers.
	maxStartGap = 0.1
)

// refining is the local search for placements under limits.
type refining struct {
	by     refiner
	within []*limits
	stop   limit
	seed   uint64
	// rounds is the maximum number of rounds from each start; 0 means refineRounds.
	rounds int
	// most is the maximum number of improved starts, the best ones; 0 means no limit.
	most int
}

// worth orders placements: first by the excess over limits, then by value.
type worth struct{ excess, value float64 }

// better reports whether w is better, by more than the fraction by of the value.
func (w worth) better(than worth, by float64) bool {
	if w.excess != than.excess {
		return w.excess < than.excess
	}
	return w.value > than.value+by*math.Abs(than.value)
}

// compare orders the better of two first.
func (w worth) compare(other worth) int {
	return cmp.Or(cmp.Compare(w.excess, other.excess), cmp.Compare(other.value, w.value))
}

func (r *refining) worth(rankOf [][]int) worth {
	w := worth{value: r.by.settle(rankOf)}
	for l, within := range r.within {
		w.excess += within.excess(rankOf[l])
		w.value -= within.migration(rankOf[l])
	}
	return w
}

// best improves every promising start and returns the best placement found, including the starts. The first start
// represents no change.
func (r *refining) best(ctx context.Context, starts [][][]int) ([][]int, error) {
	worths, first := make([]worth, len(starts)), 0
	for i, start := range starts {
		if worths[i] = r.worth(start); worths[i].better(worths[first], 1e-6) {
			first = i
		}
	}
	found, value := starts[first], worths[first]
	hopeless := value
	hopeless.value -= maxStartGap * math.Abs(value.value)
	least := slices.SortedFunc(slices.Values(worths), worth.compare)[min(cmp.Or(r.most, len(starts)), len(starts))-1]
	for i, start := range starts {
		at, here := start, worths[i]
		if least.better(here, 0) {
			continue
		}
		if len(start) == 1 && hopeless.better(here, 0) {
			continue
		}
		// Swaps depend on the last assignment.
		r.by.settle(at)
		for round := range cmp.Or(r.rounds, refineRounds) {
			if r.stop.reached() {
				break
			}
			next := make([][]int, len(at))
			err := affinity.Parallel(ctx, len(at), func(l int) {
				next[l] = slices.Clone(at[l])
				random := rand.New(rand.NewPCG(r.seed^uint64(l)<<16, uint64(i<<8|round)))
				if round == 0 && r.by.anneals() {
					annealSwaps(r.by.swaps(l, next[l]), r.within[l], random, r.stop)
				} else {
					descendSwaps(r.by.swaps(l, next[l]), r.within[l], r.stop)
				}
			})
			if err != nil {
				return nil, err
			}
			there := r.worth(next)
			if !there.better(here, 1e-6) {
				break
			}
			last := !there.better(here, minRoundGain)
			at, here = next, there
			if last {
				break
			}
		}
		if here.better(value, 1e-6) {
			found, value = at, here
		}
	}
	// Copies and the value depend on the last assignment.
	r.by.settle(found)
	return found, nil
}

// refines reports whether the placement requires a search by exact swaps: for constraints, or for messages.
func (p *Problem) refines() bool {
	return p.Constraints.Binding() || p.Algorithm == Auto && !p.Messages.None()
}

// solveRefined first solves without constraints, if that helps, and then searches under constraints. TrainLAR is that
// of the search by activations, and empty for other objectives.
func (p *Problem) solveRefined(ctx context.Context, solve func(context.Context, *Problem) (Result, error)) (Result, error) {
	stop := limit{ctx, p.Deadline}
	within, err := p.allLimits()
	if err != nil {
		return Result{}, err
	}
	starts, err := p.constrainedStarts(ctx, solve, within, stop)
	if err != nil {
		return Result{}, err
	}
	if p.Attention == DataParallel {
		return p.refineJoint(ctx, starts, within, stop)
	}
	return p.refineLayers(ctx, starts, within, stop)
}

// allLimits returns the constraints of all layers.
func (p *Problem) allLimits() ([]*limits, error) {
	within := make([]*limits, len(p.Layers))
	for l := range within {
		var err error
		if within[l], err = p.limits(l); err != nil {
			return nil, err
		}
	}
	return within, nil
}

// constrainedStarts returns starting placements under constraints. The first one is the default placement.
func (p *Problem) constrainedStarts(ctx context.Context, solve func(context.Context, *Problem) (Result, error), within []*limits, stop limit) ([][][]int, error) {
	starts, err := p.simpleStarts(within)
	if err != nil {
		return nil, err
	}
	if p.Algorithm == Auto {
		solved, err := p.solvedStarts(ctx, solve, stop)
		if err != nil {
			return nil, err
		}
		for i, start := range p.renamedStarts(solved, within) {
			near := make([][]int, len(start))
			for l := range near {
				near[l] = within[l].towards(start[l], rand.New(rand.NewPCG(p.Seed, uint64(i<<16|l))))
				if !within[l].keeps(near[l]) {
					// Too many moves are needed: the layer starts from its default placement.
					near[l] = starts[0][l]
				}
			}
			starts = append(starts, near)
		}
	}
	return starts, nil
}

// renamedStarts returns placements with ranks renumbered to match pins and the current placement. With unequal shares
// of the tokens, ranks are not interchangeable, so the original placements also remain starts.
func (p *Problem) renamedStarts(solved [][][]int, within []*limits) [][][]int {
	var starts [][][]int
	for _, start := range solved {
		if p.Constraints.RankCapacity != nil {
			kept := make([][]int, len(start))
			for l := range kept {
				kept[l] = slices.Clone(start[l])
			}
			starts = append(starts, kept)
		}
		p.rename(start, within)
		starts = append(starts, start)
	}
	return starts
}

// simpleStarts returns the default placement, or an error if pins and the move budget are infeasible.
func (p *Problem) simpleStarts(within []*limits) ([][][]int, error) {
	simple := make([][]int, len(within))
	for l, w := range within {
		simple[l] = w.simple(rand.New(rand.NewPCG(p.Seed, uint64(l))))
		if w.keeps(simple[l]) {
			continue
		}
		if w.moved > w.budget {
			return nil, fmt.Errorf("layer %d: pins, groups and new slots require %d moves; the move budget is %d", p.Layers[l], w.moved, w.budget)
		}
		return nil, fmt.Errorf("layer %d: pins and groups conflict: a group's experts must be on the ranks of the group", p.Layers[l])
	}
	return [][][]int{simple}, nil
}

// solvedStarts returns placements from the search without constraints.
func (p *Problem) solvedStarts(ctx context.Context, solve func(context.Context, *Problem) (Result, error), stop limit) ([][][]int, error) {
	var starts [][][]int
	if p.Current != nil {
		starts = append(starts, p.allCurrentRanks())
	}
	for _, start := range p.Starts {
		starts = append(starts, p.ranksOf(start))
	}
	if !p.Messages.None() {
		start := make([][]int, len(p.Layers))
		err := affinity.Parallel(ctx, len(start), func(l int) { start[l] = p.together(l, stop) })
		if err != nil {
			return nil, err
		}
		starts = append(starts, start)
	}
	if p.Messages.None() || p.Attention == DataParallel {
		free := *p
		free.Constraints = Constraints{RankCapacity: p.Constraints.RankCapacity, TokenLoadLimit: p.Constraints.TokenLoadLimit}
		free.RedundantSlots, free.Messages = 0, affinity.Messages{}
		result, err := solve(ctx, &free)
		if err != nil {
			return nil, err
		}
		start := make([][]int, len(p.Layers))
		for l := range start {
			start[l] = make([]int, p.experts())
			for e, ranks := range result.Placement.Hosts(l) {
				start[l][e] = ranks[0]
			}
		}
		starts = append(starts, start)
	}
	return starts, nil
}

// limits returns the constraints of one layer.
func (p *Problem) limits(l int) (*limits, error) {
	n := p.experts()
	w := &limits{
		ranks: p.Ranks, groups: p.groups(), pinned: slices.Repeat([]int{-1}, n), each: max(p.each, 1), budget: math.MaxInt,
		cost: p.Constraints.MigrationCost, loads: make([]float64, n), maxLoad: math.Inf(1),
	}
	for _, pin := range p.Constraints.Pins {
		if pin.Layer != p.Layers[l] {
			continue
		}
		if before := w.pinned[pin.Expert]; before >= 0 && before != pin.Rank {
			return nil, fmt.Errorf("layer %d: experts of one group are pinned to ranks %d and %d; a rank contains whole groups", pin.Layer, before, pin.Rank)
		}
		w.pinned[pin.Expert] = pin.Rank
	}
	if p.Current != nil {
		w.held = make([]bool, n*p.Ranks)
		for e, ranks := range p.Current.Hosts(l) {
			for _, rank := range ranks {
				w.held[e*p.Ranks+rank] = true
			}
		}
		if p.base != nil {
			w.base = p.base[l]
		}
		w.extra = max(p.experts()/p.Ranks+p.RedundantSlots-p.Current.SlotsPerRank, 0)
		if p.Constraints.MoveBudget != nil {
			w.budget = *p.Constraints.MoveBudget
		}
		// A search weighs the cost of moves against their gain. Without a search, moves have no gain.
		w.stay = p.Constraints.MoveBudget != nil || p.Algorithm == ContiguousAlgorithm && p.Constraints.MigrationCost > 0
	}
	if p.Constraints.ExpertLoadLimit > 0 {
		loads, err := p.expertLoads(l)
		if err != nil {
			return nil, err
		}
		w.loads = loads
		w.maxLoad = sum(loads) / float64(p.Ranks) * p.Constraints.ExpertLoadLimit / 100
	}
	return w, nil
}

// nodes returns the number of nodes that the objective distinguishes.
func (p *Problem) nodes() int {
	if p.Messages.Node == 0 {
		return 1
	}
	return max(p.Ranks/p.Messages.RanksPerNode, 1)
}

func (p *Problem) expertLoads(l int) ([]float64, error) {
	if p.Attention == DataParallel {
		return p.layerLoads(l), nil
	}
	counts, err := p.layerCounts(l)
	if err != nil {
		return nil, err
	}
	return counts.ExpertTotals(), nil
}

func sum(values []float64) float64 {
	total := 0.0
	for _, v := range values {
		total += v
	}
	return total
}

// rename renumbers the ranks of a placement to maximize satisfied pins, then experts that stay: layer by layer with
// tensor parallelism, with the same permutation for all layers with data parallelism. Ranks of a node, or of a group,
// stay together.
func (p *Problem) rename(rankOf [][]int, within []*limits) {
	nodes, groups := p.nodes(), p.groups()
	blocks := max(nodes, groups)
	if p.Current == nil && len(p.Constraints.Pins) == 0 || min(nodes, groups) > 1 && nodes != groups {
		return
	}
	layers := make([]int, len(rankOf))
	for l := range layers {
		layers[l] = l
	}
	together := slices.Collect(slices.Chunk(layers, 1))
	if p.Attention == DataParallel {
		together = [][]int{layers}
	}
	for _, layers := range together {
		same := make([]float32, p.Ranks*p.Ranks)
		for _, l := range layers {
			for e, rank := range rankOf[l] {
				within[l].like(same[rank*p.Ranks:(rank+1)*p.Ranks], e)
			}
		}
		var exact exactRanks
		name := exact.assign(same, p.Ranks, blocks)
		for _, l := range layers {
			for e, rank := range rankOf[l] {
				rankOf[l][e] = name[rank]
			}
		}
	}
}

// like adds to row [ranks] the affinity of an expert to each rank: by its pin first, then by its current rank.
func (l *limits) like(row []float32, e int) {
	if l.pinned[e] >= 0 {
		row[l.pinned[e]] += float32(len(l.pinned))
	}
	for rank := range row {
		if l.held != nil && l.held[e*l.ranks+rank] {
			row[rank]++
		}
	}
}

// refineLayers refines each layer independently.
func (p *Problem) refineLayers(ctx context.Context, starts [][][]int, within []*limits, stop limit) (Result, error) {
	result := Result{Placement: p.placement()}
	values, failures := make([]float64, len(p.Layers)), make([]error, len(p.Layers))
	err := affinity.Parallel(ctx, len(p.Layers), func(l int) {
		by, err := p.layerRefiner(l, stop)
		if err != nil {
			failures[l] = err
			return
		}
		of := make([][][]int, len(starts))
		for i, start := range starts {
			of[i] = start[l : l+1]
		}
		if p.Algorithm == Auto && p.Messages.None() {
			of = append(of, [][]int{by.(*tokenRefiner).annealed(starts[0][l], within[l], p.Seed)})
		}
		if p.Algorithm != Auto {
			of = of[:1]
		}
		var rankOf [][]int
		if rankOf, failures[l] = p.refineFrom(ctx, by, of, within[l:l+1], uint64(l), stop); failures[l] != nil {
			return
		}
		values[l] = by.settle(rankOf)
		result.Placement.Layers[l] = layerOf(p.Layers[l], rankOf[0], p.copiesOf(by, 0, l, rankOf[0], within[l]), p.Ranks)
	})
	if err = errors.Join(append(failures, err)...); err != nil {
		return Result{}, err
	}
	result.Truncated = stop.overdue()
	return result, nil
}

// refineFrom searches from starts. Without a search, the result is the first start, which is the default placement.
func (p *Problem) refineFrom(ctx context.Context, by refiner, starts [][][]int, within []*limits, stream uint64, stop limit) ([][]int, error) {
	if p.Algorithm != Auto {
		by.settle(starts[0])
		return starts[0], nil
	}
	r := refining{by: by, within: within, stop: stop, seed: p.Seed ^ stream<<32}
	return r.best(ctx, starts)
}

// copiesOf returns the best redundant copies for the current assignment of tokens or requests. Under a move budget,
// copies stay in place.
func (p *Problem) copiesOf(by refiner, at, l int, rankOf []int, within *limits) extras {
	if p.RedundantSlots == 0 {
		return nil
	}
	weight := by.copies(at, rankOf)
	bonus := float32(p.Constraints.MigrationCost)
	if p.Constraints.MoveBudget != nil {
		bonus = 2*slices.Max(weight) + 1 // above all other weights; copies in place keep their order
	}
	for i := range weight {
		if within.held != nil && within.held[i] {
			weight[i] += bonus
		}
	}
	return bestCopies(weight, rankOf, p.Ranks, p.RedundantSlots)
}

// refineJoint refines all layers together, for requests with one rank in all layers.
func (p *Problem) refineJoint(ctx context.Context, starts [][][]int, within []*limits, stop limit) (Result, error) {
	by := p.jointRefiner(stop)
	rankOf, err := p.refineFrom(ctx, by, starts, within, 0, stop)
	if err != nil {
		return Result{}, err
	}
	result := Result{Placement: p.placement(), Truncated: stop.overdue()}
	for l := range rankOf {
		result.Placement.Layers[l] = layerOf(p.Layers[l], rankOf[l], p.copiesOf(by, l, l, rankOf[l], within[l]), p.Ranks)
	}
	return result, nil
}
