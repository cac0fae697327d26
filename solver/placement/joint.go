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
	// jointStarts is the number of seeds; even ones cluster the requests, odd ones anneal one layer.
	jointStarts = 16
	// jointRounds bounds the rounds of alternation of one start.
	jointRounds = 20
	// jointTolerance is how far a rank's load may exceed its share while the placement is searched.
	jointTolerance = 0.02
	// jointPriceSteps is the number of price updates per round.
	jointPriceSteps = 60
)

// solveJoint solves attention data parallelism: a request has one rank for all layers, which ties the layers together.
// What is decided first is the rank of each request; then every layer's experts follow exactly, and so on in turn.
func solveJoint(ctx context.Context, p *Problem) (Result, error) {
	stop := limit{ctx, p.Deadline}
	profile := newProfile(p.Requests)
	found := make([]jointState, jointStarts)
	var done atomic.Int64
	err := affinity.Parallel(ctx, jointStarts, func(start int) {
		random := rand.New(rand.NewPCG(p.Seed, uint64(start)))
		s := newJointSearch(p, stop)
		if start%2 == 0 {
			found[start] = s.alternate(s.clusterRequests(profile, random))
		} else {
			found[start] = s.alternate(s.annealLayer(random.IntN(p.Requests.Layers), random))
		}
		if p.Progress != nil {
			p.Progress(int(done.Add(1)), jointStarts)
		}
	})
	if err != nil {
		return Result{}, err
	}
	best := newJointSearch(p, stop).contiguous()
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

// jointState is one solution: the rank of each expert in each layer with its copies, and its value with balanced requests.
type jointState struct {
	rankOf [][]int
	copies []extras
	value  float64
}

// jointSearch holds the buffers of one start.
type jointSearch struct {
	requests    *affinity.RequestCounts
	ranks       int
	redundant   int
	stop        limit
	activations float64
	balance     assign.Weighted
	exact       assign.Solver
	weight      []float32
}

func newJointSearch(p *Problem, stop limit) *jointSearch {
	s := &jointSearch{requests: p.Requests, ranks: p.Ranks, redundant: p.RedundantSlots, stop: stop}
	total := 0.0
	for _, n := range p.Requests.Tokens {
		total += float64(n)
	}
	s.activations = max(total, 1) * float64(p.Requests.TopK*p.Requests.Layers)
	s.balance = assign.Weighted{
		Sizes:  p.Requests.Tokens,
		Scores: make([]float32, len(p.Requests.Rows)*p.Ranks),
		Limits: slices.Repeat([]float64{total / float64(p.Ranks)}, p.Ranks),
	}
	s.weight = make([]float32, p.Requests.Experts*p.Ranks)
	return s
}

// contiguous is the default placement with its best balanced requests.
func (s *jointSearch) contiguous() jointState {
	rankOf := slices.Repeat([][]int{contiguousRanks(s.requests.Experts, s.ranks)}, s.requests.Layers)
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

// alternate improves an assignment of requests until neither side gains.
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

// bestExperts is the exact optimum of every layer's experts for the given ranks of the requests, and the best copies of
// them.
func (s *jointSearch) bestExperts(requestRank []int) ([][]int, []extras) {
	capacity := slices.Repeat([]int{s.requests.Experts / s.ranks}, s.ranks)
	rankOf, copies := make([][]int, s.requests.Layers), make([]extras, s.requests.Layers)
	for l := range rankOf {
		s.affinities(l, requestRank)
		rankOf[l] = slices.Clone(s.exact.Assign(s.weight, capacity))
		copies[l] = bestCopies(s.weight, rankOf[l], s.ranks, s.redundant)
	}
	return rankOf, copies
}

// bestRequests balances the requests on a placement and returns their ranks and the local activation rate.
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

// scoreRequest fills the request's activations on each rank, over the layers for which rankOf has an entry.
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
	prices, _ := s.balance.Price(jointPriceSteps, nil, true)
	return s.balance.Assign(prices, jointTolerance)
}

// annealLayer seeds the requests' ranks from one layer's affinities alone.
func (s *jointSearch) annealLayer(layer int, random *rand.Rand) []int {
	p := randomPartition(requestGram(s.requests, layer), s.ranks, random)
	p.anneal(random, s.stop)
	rankOf := make([][]int, s.requests.Layers)
	rankOf[layer] = p.rankOf
	ranks, _ := s.bestRequests(rankOf, make([]extras, len(rankOf)))
	return ranks
}

// clusterRequests seeds the requests' ranks by balanced k-means on their profiles.
func (s *jointSearch) clusterRequests(p *profile, random *rand.Rand) []int {
	const rounds = 12
	centres := p.spread(s.ranks, random)
	var ranks []int
	for range rounds {
		for r, point := range p.points {
			for i, centre := range centres {
				// Near is good; the size weighs a long request like many short ones.
				s.balance.Scores[r*s.ranks+i] = -s.requests.Tokens[r] * squaredDistance(point, centre)
			}
		}
		next := s.assignBalanced()
		if slices.Equal(next, ranks) {
			break
		}
		ranks = next
		p.means(centres, ranks, s.requests.Tokens)
	}
	return ranks
}
