// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/semmoe/operator/solver/affinity"
)

// loadLimits are the limits on the load of a rank's experts, in percent of the mean, for the points of the front in a
// search by time, in addition to the point without a limit. Each limit starts from the placements of the previous one.
var loadLimits = []float64{130, 115, 108, 104, 101}

// timedPairs is the number of pairs of experts, over all layers and starts, up to which a search by time improves all
// starts. Beyond it, only the best starts are improved, at least minTimeStarts.
const (
	timedPairs    = 1 << 23
	minTimeStarts = 2
)

// nearRounds is the maximum number of rounds of a search that starts from the result for the previous limit.
const nearRounds = 2

// Point is a placement from a search by time.
type Point struct {
	// Name identifies the start of the search and its limit.
	Name      string
	Placement *Placement
	// ExpertLoadLimit is the limit in percent of the mean; 0 means none.
	ExpertLoadLimit float64
	// LAR, ExpertImbalance and Microseconds are values on the profile with the best balanced assignment of tokens or
	// requests, as means over layers.
	LAR, ExpertImbalance, Microseconds float64
}

// timeRefiner refines layers by modelled time. Another refiner assigns tokens or requests to ranks.
type timeRefiner struct {
	refiner
	clock *Clock
	// layers are the indices of the refined layers, ranks is the number of ranks.
	layers []int
	ranks  int
	// descends is set if starts are already good, so that swaps are not annealed first.
	descends bool
	// settled is the placement for which tokens or requests are assigned, before the previous one. A search settles the
	// same placements repeatedly, so both are cached.
	settled, before settlement
}

// settlement is a placement with its value.
type settlement struct {
	rankOf [][]int
	// weights are each expert's activations by the tokens of each rank, in each layer.
	weights [][]float32
	value   float64
}

func (s *settlement) of(rankOf [][]int) bool {
	return slices.EqualFunc(s.rankOf, rankOf, slices.Equal[[]int])
}

func (r *timeRefiner) anneals() bool { return !r.descends }

func (r *timeRefiner) settle(rankOf [][]int) float64 {
	switch {
	case r.settled.of(rankOf):
		return r.settled.value
	case r.before.of(rankOf):
		r.settled, r.before = r.before, r.settled
		return r.settled.value
	}
	r.refiner.settle(rankOf)
	s := settlement{weights: make([][]float32, len(rankOf))}
	for l := range rankOf {
		s.rankOf = append(s.rankOf, slices.Clone(rankOf[l]))
		s.weights[l] = r.refiner.copies(l, rankOf[l])
		s.value += newTiming(r.clock, r.layers[l], s.weights[l], rankOf[l], r.ranks).value
	}
	r.settled, r.before = s, r.settled
	return s.value
}

func (r *timeRefiner) copies(l int, _ []int) []float32 { return slices.Clone(r.settled.weights[l]) }

func (r *timeRefiner) timing(l int, rankOf []int) *timing {
	return newTiming(r.clock, r.layers[l], r.settled.weights[l], rankOf, r.ranks)
}

func (r *timeRefiner) swaps(l int, rankOf []int) swapper { return r.timing(l, rankOf) }

// measure adds a layer's values to a point.
func (r *timeRefiner) measure(to *Point, l int, rankOf []int, weight float64) {
	t := r.timing(l, rankOf)
	to.LAR += weight * t.lar()
	to.ExpertImbalance += weight * t.imbalance()
	to.Microseconds += weight * t.microseconds()
}

// sweep is a search by time under a sequence of load limits. Each limit starts from the placements of the previous one.
type sweep struct {
	problem *Problem
	stop    limit
	limits  []float64
	// byActivation are the load limits of searches by activations. Their placements are starts of the search by time,
	// and points of the front.
	byActivation []float64
	// within are the constraints of each layer without load limits, starts the starting placements [starts][layers].
	within []*limits
	starts [][][]int
}

// solveTimed solves by time. The placement of the result is the point of the front with the minimum time on the
// profile.
func (p *Problem) solveTimed(ctx context.Context, solve func(context.Context, *Problem) (Result, error)) (Result, error) {
	s := &sweep{problem: p, stop: limit{ctx, p.Deadline}, limits: p.sweptLimits()}
	var err error
	if s.within, err = p.allLimits(); err != nil {
		return Result{}, err
	}
	if s.starts, err = p.constrainedStarts(ctx, solve, s.within, s.stop); err != nil {
		return Result{}, err
	}
	s.byActivation = p.activationLimits()
	front := make([]Point, 1+len(s.limits), 1+len(s.limits)+len(s.byActivation))
	front[0] = Point{Name: PointOfActivation, Placement: p.placement()}
	for i, limit := range s.limits {
		front[1+i] = Point{Name: fmt.Sprintf("%s-load-%g", PointOfTime, limit), ExpertLoadLimit: limit, Placement: p.placement()}
	}
	front[1].Name = PointOfTime
	for _, limit := range s.byActivation {
		front = append(front, Point{Name: fmt.Sprintf("%s-load-%g", PointOfActivation, limit), ExpertLoadLimit: limit, Placement: p.placement()})
	}
	if p.Attention == DataParallel {
		layers := make([]int, len(p.Layers))
		for l := range layers {
			layers[l] = l
		}
		err = s.run(ctx, &timeRefiner{refiner: p.jointRefiner(s.stop), clock: p.Clock, layers: layers, ranks: p.Ranks}, front)
	} else {
		err = s.runLayers(ctx, front)
	}
	if err != nil {
		return Result{}, err
	}
	best := slices.MinFunc(front, func(a, b Point) int { return cmp.Compare(a.Microseconds, b.Microseconds) })
	return Result{Placement: best.Placement, TrainLAR: best.LAR, Front: front, Truncated: s.stop.overdue()}, nil
}

// Names of the points from the search by activations, and from the search by time without an additional load limit.
const (
	PointOfActivation = "activation"
	PointOfTime       = "time"
)

// sweptLimits returns the load limits of the front, descending. The first one is that of the constraints.
func (p *Problem) sweptLimits() []float64 {
	given := p.Constraints.ExpertLoadLimit
	limits := []float64{given}
	if p.RedundantSlots > 0 {
		return limits // the engine chooses which copy computes an expert
	}
	for _, limit := range loadLimits {
		if given == 0 || limit < given {
			limits = append(limits, limit)
		}
	}
	return limits
}

// activationLimits returns the load limits of the search by activations. With few train requests, a mean over all ranks
// generalizes better than the busiest rank.
func (p *Problem) activationLimits() []float64 {
	if p.RedundantSlots > 0 || p.Constraints.ExpertLoadLimit > 0 {
		return nil
	}
	return []float64{108, 104}
}

// runLayers solves attention tensor parallelism, in which layers are independent.
func (s *sweep) runLayers(ctx context.Context, front []Point) error {
	p := s.problem
	parts, failures := make([][]Point, len(p.Layers)), make([]error, len(p.Layers))
	var done atomic.Int64
	err := affinity.Parallel(ctx, len(p.Layers), func(l int) {
		counts, err := p.layerCounts(l)
		if err != nil {
			failures[l] = err
			return
		}
		parts[l] = make([]Point, len(front))
		for i := range front {
			parts[l][i].Placement = front[i].Placement
		}
		by := &tokenRefiner{search: newLayerSearch(p, counts, s.stop), balanced: true}
		by.follows = by.search.steps() == priceSteps // a small layer is valued more accurately instead
		failures[l] = s.run(ctx, &timeRefiner{refiner: by, clock: p.Clock, layers: []int{l}, ranks: p.Ranks}, parts[l])
		if p.Progress != nil {
			p.Progress(int(done.Add(1)), len(p.Layers))
		}
	})
	if err = errors.Join(append(failures, err)...); err != nil {
		return err
	}
	for _, part := range parts {
		for i := range front {
			front[i].add(&part[i])
		}
	}
	return nil
}

func (to *Point) add(part *Point) {
	to.LAR += part.LAR
	to.ExpertImbalance += part.ExpertImbalance
	to.Microseconds += part.Microseconds
}

// run solves the layers of a refiner under each limit, and sets the points.
func (s *sweep) run(ctx context.Context, by *timeRefiner, front []Point) error {
	p := s.problem
	starts := make([][][]int, len(s.starts))
	for i, start := range s.starts {
		for _, l := range by.layers {
			starts[i] = append(starts[i], start[l])
		}
	}
	loads, err := by.loads(p)
	if err != nil {
		return err
	}
	fill := func(to *Point, rankOf [][]int, within []*limits) {
		by.settle(rankOf)
		for at, l := range by.layers {
			by.measure(to, at, rankOf[at], 1/float64(len(p.Layers)))
			to.Placement.Layers[l] = layerOf(p.Layers[l], rankOf[at], p.copiesOf(by, at, l, rankOf[at], within[at]), p.Ranks)
		}
	}
	capped := func(limit float64) []*limits {
		within := make([]*limits, len(by.layers))
		for at, l := range by.layers {
			within[at] = s.within[l].capped(loads[at], limit)
		}
		return within
	}
	towards := func(start [][]int, within []*limits, stream int) [][]int {
		near := make([][]int, len(within))
		for at := range near {
			near[at] = within[at].towards(start[at], rand.New(rand.NewPCG(p.Seed, uint64(stream<<16|at))))
			if !within[at].keeps(near[at]) {
				near[at] = start[at]
			}
		}
		return near
	}
	free := starts[len(starts)-1] // the search by activations comes last
	fill(&front[0], free, capped(s.limits[0]))
	for i, limit := range s.byActivation {
		within := capped(limit)
		r := refining{by: by.refiner, within: within, stop: s.stop, seed: p.Seed ^ uint64(by.layers[0])<<32 ^ uint64(i)<<40, rounds: nearRounds}
		rankOf, err := r.best(ctx, [][][]int{towards(free, within, i)})
		if err != nil {
			return err
		}
		fill(&front[1+len(s.limits)+i], rankOf, within)
		starts = append(starts, rankOf)
	}
	for i, limit := range s.limits {
		within := capped(limit)
		by.descends = i > 0
		if i > 0 {
			if keepsLoads(within, starts[0]) {
				fill(&front[1+i], starts[0], within) // the limit changes nothing
				continue
			}
			starts[0] = towards(starts[0], within, i)
		}
		r := refining{by: by, within: within, stop: s.stop, seed: p.Seed ^ uint64(by.layers[0])<<32 ^ uint64(i)<<48}
		if by.descends {
			r.rounds = nearRounds
		} else {
			r.most = max(minTimeStarts, timedPairs/(len(p.Layers)*p.experts()*p.experts()))
		}
		rankOf, err := r.best(ctx, starts)
		if err != nil {
			return err
		}
		fill(&front[1+i], rankOf, within)
		starts = [][][]int{rankOf}
	}
	return nil
}

// keepsLoads reports whether the layers of a placement respect their load limits.
func keepsLoads(within []*limits, rankOf [][]int) bool {
	for at := range within {
		if within[at].excess(rankOf[at]) > 0 {
			return false
		}
	}
	return true
}

// loads returns the activations of the experts of each layer.
func (r *timeRefiner) loads(p *Problem) ([][]float64, error) {
	loads := make([][]float64, len(r.layers))
	for at, l := range r.layers {
		if of, ok := r.refiner.(*tokenRefiner); ok {
			loads[at] = of.search.counts.ExpertTotals()
			continue
		}
		var err error
		if loads[at], err = p.expertLoads(l); err != nil {
			return nil, err
		}
	}
	return loads, nil
}

// capped returns the constraints with a limit on the load of a rank's experts, in percent of the mean; 0 means no
// limit.
func (l *limits) capped(loads []float64, percent float64) *limits {
	to := *l
	if percent > 0 {
		to.loads, to.maxLoad = loads, sum(loads)/float64(l.ranks)*percent/100
	}
	return &to
}
