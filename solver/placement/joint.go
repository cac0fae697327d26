// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/assign"
)

const (
	// jointStarts is the number of starts. Even starts cluster the requests, odd starts anneal one layer.
	jointStarts = 16
	// jointRounds is the maximum number of alternations of one start.
	jointRounds = 20
	// jointTolerance is the maximum relative excess of a rank over its share during the search.
	jointTolerance = 0.02
	// jointPriceSteps is the number of price updates per round.
	jointPriceSteps = 60
)

// solveJoint solves attention data parallelism: a request has one rank for all layers, which couples the layers. It
// alternates between the ranks of the requests and the exact assignment of every layer's experts.
func solveJoint(ctx context.Context, p *Problem) (Result, error) {
	stop := limit{ctx, p.Deadline}
	part := *p
	part.Requests = sampleRequests(p.Requests, p.Seed)
	p = &part
	begins := p.jointBegins()
	found := make([]jointState, len(begins))
	var done atomic.Int64
	err := affinity.Parallel(ctx, len(begins), func(i int) {
		s := newJointSearch(p, stop)
		found[i] = s.alternate(begins[i](s, rand.New(rand.NewPCG(p.Seed, uint64(i)))))
		if p.Progress != nil {
			p.Progress(int(done.Add(1)), len(begins))
		}
	})
	if err != nil {
		return Result{}, err
	}
	last := newJointSearch(p, stop)
	best := last.given(slices.Repeat([][]int{contiguousRanks(p.experts(), p.Ranks)}, len(p.Layers)))
	if p.Current != nil {
		found = append(found, last.given(p.allCurrentRanks()))
	}
	for _, s := range found {
		if s.value > best.value {
			best = s
		}
	}
	result := Result{Placement: p.placement(), TrainLAR: best.value, Truncated: stop.overdue()}
	for l, rankOf := range best.rankOf {
		result.Placement.Layers[l] = layerOf(p.Layers[l], rankOf, best.copies[l], p.Ranks)
	}
	return result, nil
}

const (
	// jointCells is the size (requests × layers × experts) above which requests are sampled for the search, to at least
	// minRequests. jointWork limits the total size over all starts.
	jointCells  = 1 << 23
	minRequests = 1500
	jointWork   = 1 << 27
	minStarts   = 4
)

// sampleRequests returns as many requests as the search can use, in their order.
func sampleRequests(c *affinity.RequestCounts, seed uint64) *affinity.RequestCounts {
	n := max(jointCells/(c.Layers*c.Experts), minRequests)
	if n >= len(c.Rows) {
		return c
	}
	order := rand.New(rand.NewPCG(seed, 0x73616d706c65)).Perm(len(c.Rows))
	if c.Weight != nil {
		return c.Thinned(order, n)
	}
	picked := order[:n]
	slices.Sort(picked)
	return c.Part(picked)
}

// jointBegins returns the initial assignments of requests. A warm search starts only from the current placement.
func (p *Problem) jointBegins() []func(*jointSearch, *rand.Rand) []int {
	if p.warm() {
		return []func(*jointSearch, *rand.Rand) []int{func(s *jointSearch, _ *rand.Rand) []int {
			rankOf := p.allCurrentRanks()
			ranks, _ := s.bestRequests(rankOf, make([]extras, len(rankOf)))
			return ranks
		}}
	}
	profile := newProfile(p.Requests)
	starts := min(jointStarts, max(minStarts, jointWork/(len(p.Requests.Rows)*p.Requests.Layers*p.Requests.Experts)))
	begins := make([]func(*jointSearch, *rand.Rand) []int, starts)
	for i := range begins {
		begins[i] = func(s *jointSearch, random *rand.Rand) []int {
			if i%2 == 0 {
				return s.clusterRequests(profile, random)
			}
			return s.annealLayer(random.IntN(p.Requests.Layers), random)
		}
	}
	return begins
}

// jointState is a solution: the rank of each expert in each layer with its copies, and its value with balanced
// requests.
type jointState struct {
	rankOf [][]int
	copies []extras
	value  float64
}

// jointSearch contains the buffers of one start.
type jointSearch struct {
	requests    *affinity.RequestCounts
	ranks       int
	groups      int
	redundant   int
	stop        limit
	activations float64
	balance     assign.Weighted
	tolerance   float64
	exact       exactRanks
	weight      []float32
}

func newJointSearch(p *Problem, stop limit) *jointSearch {
	s := &jointSearch{requests: p.Requests, ranks: p.Ranks, groups: p.groups(), redundant: p.RedundantSlots, stop: stop}
	total := p.Requests.TokenCount()
	s.activations = max(total, 1) * float64(p.Requests.TopK*p.Requests.Layers)
	s.balance = assign.Weighted{
		Sizes:  p.Requests.Tokens,
		Scores: make([]float32, len(p.Requests.Rows)*p.Ranks),
		Limits: p.Constraints.tokenLimits(total, p.Ranks),
	}
	s.tolerance = p.Constraints.tolerance(jointTolerance)
	s.weight = make([]float32, p.Requests.Experts*p.Ranks)
	return s
}

// given returns the state of a placement with its best balanced requests and copies.
func (s *jointSearch) given(rankOf [][]int) jointState {
	copies := make([]extras, s.requests.Layers)
	requestRank, value := s.bestRequests(rankOf, copies)
	if s.redundant > 0 {
		for l := range copies {
			s.affinities(l, requestRank)
			copies[l] = bestCopies(s.weight, rankOf[l], s.ranks, s.redundant)
		}
		_, value = s.bestRequests(rankOf, copies)
	}
	return jointState{rankOf, copies, value}
}

// alternate improves an assignment of requests until neither step has a gain.
func (s *jointSearch) alternate(requestRank []int) jointState {
	best := jointState{value: math.Inf(-1)}
	for range jointRounds {
		rankOf, copies := s.bestExperts(requestRank)
		var value float64
		requestRank, value = s.bestRequests(rankOf, copies)
		if value <= best.value*(1+1e-6) {
			break
		}
		best = jointState{rankOf, copies, value}
		if s.stop.reached() {
			break
		}
	}
	return best
}

// affinities fills weight with each expert's activations in a layer by the requests of each rank.
func (s *jointSearch) affinities(layer int, requestRank []int) {
	n := s.requests.Experts
	clear(s.weight)
	for r, rank := range requestRank {
		for e, count := range s.requests.Rows[r][layer*n : (layer+1)*n] {
			s.weight[e*s.ranks+rank] += count
		}
	}
}

// bestExperts returns the exact optimum of every layer's experts for the given ranks of the requests, and the best
// copies of them.
func (s *jointSearch) bestExperts(requestRank []int) ([][]int, []extras) {
	rankOf, copies := make([][]int, s.requests.Layers), make([]extras, s.requests.Layers)
	for l := range rankOf {
		s.affinities(l, requestRank)
		rankOf[l] = s.exact.assign(s.weight, s.ranks, s.groups)
		copies[l] = bestCopies(s.weight, rankOf[l], s.ranks, s.redundant)
	}
	return rankOf, copies
}

// bestRequests balances the requests on a placement, and returns their ranks and the local activation rate.
func (s *jointSearch) bestRequests(rankOf [][]int, copies []extras) ([]int, float64) {
	for r := range s.requests.Rows {
		s.scoreRequest(r, rankOf, copies)
	}
	ranks := s.assignBalanced()
	local := 0.0
	for r, rank := range ranks {
		local += float64(s.balance.Scores[r*s.ranks+rank])
	}
	return ranks, local / s.activations
}

// scoreRequest computes the request's activations on each rank, over the layers for which rankOf has an entry.
func (s *jointSearch) scoreRequest(r int, rankOf [][]int, copies []extras) {
	n := s.requests.Experts
	row := s.balance.Scores[r*s.ranks : (r+1)*s.ranks]
	clear(row)
	for l, of := range rankOf {
		if of == nil {
			continue
		}
		for e, count := range s.requests.Rows[r][l*n : (l+1)*n] {
			row[of[e]] += count
		}
		if copies[l] == nil {
			continue
		}
		for e, ranks := range copies[l] {
			for _, rank := range ranks {
				row[rank] += s.requests.Rows[r][l*n+e]
			}
		}
	}
}

func (s *jointSearch) assignBalanced() []int {
	prices, _ := s.balance.PriceExact(jointPriceSteps, nil)
	return s.balance.Assign(prices, s.tolerance)
}

// annealLayer initializes the requests' ranks from the affinities of one layer.
func (s *jointSearch) annealLayer(layer int, random *rand.Rand) []int {
	p := randomPartition(requestGram(s.requests, layer), s.ranks, s.groups, random)
	p.anneal(random, s.stop, cold)
	rankOf := make([][]int, s.requests.Layers)
	rankOf[layer] = p.rankOf
	ranks, _ := s.bestRequests(rankOf, make([]extras, len(rankOf)))
	return ranks
}

// clusterRequests initializes the requests' ranks by balanced k-means on their profiles.
func (s *jointSearch) clusterRequests(p *profile, random *rand.Rand) []int {
	const rounds = 12
	centers := p.spread(s.ranks, random)
	var ranks []int
	for range rounds {
		for r, point := range p.points {
			for i, centre := range centers {
				// The score is the negative distance. The size weighs a long request like many short ones.
				s.balance.Scores[r*s.ranks+i] = -s.requests.Tokens[r] * squaredDistance(point, centre)
			}
		}
		next := s.assignBalanced()
		if slices.Equal(next, ranks) {
			break
		}
		ranks = next
		if s.stop.reached() {
			break
		}
		p.means(centers, ranks, s.requests.Tokens)
	}
	return ranks
}
