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
	layers := make([]Layer, len(p.Layers))
	for l, rankOf := range best.rankOf {
		layers[l] = fromRanks(p.Layers[l], rankOf, p.Ranks)
	}
	return Result{
		Placement: &Placement{Ranks: p.Ranks, Experts: p.experts(), SlotsPerRank: p.experts() / p.Ranks, Layers: layers},
		TrainLAR:  best.value,
		Truncated: stop.overdue(),
	}, nil
}

// jointState is one solution: the rank of each expert in each layer, and its value with balanced requests.
type jointState struct {
	rankOf [][]int
	value  float64
}

// jointSearch holds the buffers of one start.
type jointSearch struct {
	requests    *affinity.RequestCounts
	ranks       int
	stop        limit
	activations float64
	balance     assign.Weighted
	exact       assign.Solver
	weight      []float32
}

func newJointSearch(p *Problem, stop limit) *jointSearch {
	s := &jointSearch{requests: p.Requests, ranks: p.Ranks, stop: stop}
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
	rankOf := make([][]int, s.requests.Layers)
	for l := range rankOf {
		rankOf[l] = make([]int, s.requests.Experts)
		for e := range rankOf[l] {
			rankOf[l][e] = e * s.ranks / s.requests.Experts
		}
	}
	_, value := s.bestRequests(rankOf)
	return jointState{rankOf, value}
}

// alternate improves an assignment of requests until neither side gains.
func (s *jointSearch) alternate(requestRank []int) jointState {
	best := jointState{value: math.Inf(-1)}
	for range jointRounds {
		rankOf := s.bestExperts(requestRank)
		var value float64
		requestRank, value = s.bestRequests(rankOf)
		if value <= best.value*(1+1e-6) {
			break
		}
		best = jointState{rankOf, value}
		if s.stop.reached() {
			break
		}
	}
	return best
}

// bestExperts is the exact optimum of every layer's experts for the given ranks of the requests.
func (s *jointSearch) bestExperts(requestRank []int) [][]int {
	n := s.requests.Experts
	capacity := slices.Repeat([]int{n / s.ranks}, s.ranks)
	rankOf := make([][]int, s.requests.Layers)
	for l := range rankOf {
		clear(s.weight)
		for r, rank := range requestRank {
			for e, count := range s.requests.Rows[r][l*n : (l+1)*n] {
				s.weight[e*s.ranks+rank] += count
			}
		}
		rankOf[l] = slices.Clone(s.exact.Assign(s.weight, capacity))
	}
	return rankOf
}

// bestRequests balances the requests on a placement and returns their ranks and the local activation rate.
func (s *jointSearch) bestRequests(rankOf [][]int) ([]int, float64) {
	for r := range s.requests.Rows {
		s.scoreRequest(r, rankOf)
	}
	ranks := s.assignBalanced()
	local := 0.0
	for r, rank := range ranks {
		local += float64(s.balance.Scores[r*s.ranks+rank])
	}
	return ranks, local / s.activations
}

// scoreRequest fills the request's activations on each rank, over the layers for which rankOf has an entry.
func (s *jointSearch) scoreRequest(r int, rankOf [][]int) {
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
	ranks, _ := s.bestRequests(rankOf)
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
