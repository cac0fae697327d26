// SPDX-License-Identifier: Apache-2.0

package hindsight

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
)

const (
	// hot and cold are the initial and final temperature, in local shares of a request of mean size.
	hot, cold = 0.05, 0.0007
	// near is the maximum distance in arrival of two requests that exchange their ranks: both are in most windows of
	// either.
	near = 100
	// firstPrice is the initial price of imbalance, in local activation rate. After each sweep, the price follows the
	// excess over the limit with the rate priceStride.
	firstPrice, priceStride = 0.1, 0.5
)

// Search searches for the assignment with the highest local activation rate and a window imbalance of at most limit, by
// simulated annealing with one move per request and sweep. It reports whether it found one.
func (r *Run) Search(limit float64, sweeps int, seed uint64) (own []int, found bool) {
	return r.search(limit, newWindows(r, dispatch.Arrivals), sweeps, rand.New(rand.NewPCG(seed, 0x68696e64)))
}

func (r *Run) search(limit float64, w windows, sweeps int, random *rand.Rand) (best []int, found bool) {
	n := len(r.Tokens)
	own := make([]int, n)
	for i := range own {
		own[i] = i % r.ranks()
	}
	s := newState(r, w, own)
	s.price = firstPrice
	highest := math.Inf(-1)
	for sweep := range sweeps {
		temperature := hot * math.Pow(cold/hot, float64(sweep)/float64(sweeps)) / float64(n)
		for range n {
			s.propose(temperature, random)
		}
		if s.imbalance <= limit && s.local > highest {
			best, highest, found = append(best[:0], s.own...), s.local, true
		}
		s.price *= math.Exp(priceStride * (s.imbalance - limit))
	}
	return best, found
}

// state is an assignment with its loads.
type state struct {
	run     *Run
	windows windows
	own     []int
	total   float64
	price   float64
	// loads are the tokens of each rank in each window [windows × ranks], highest the maximum of each window.
	loads, highest []int
	// local is the local activation rate, imbalance the window imbalance.
	local, imbalance float64
}

func newState(r *Run, w windows, own []int) *state {
	s := &state{
		run: r, windows: w, own: own, total: r.total(), local: r.LAR(own),
		loads: make([]int, len(w.weights)*r.ranks()), highest: make([]int, len(w.weights)),
	}
	for i, rank := range own {
		first, end := w.of(i)
		for x := first; x < end; x++ {
			s.loads[x*r.ranks()+rank] += r.Tokens[i]
		}
	}
	for x, weight := range w.weights {
		s.highest[x] = slices.Max(s.loadsOf(x))
		s.imbalance += weight * float64(s.highest[x])
	}
	return s
}

func (s *state) loadsOf(window int) []int {
	ranks := s.run.ranks()
	return s.loads[window*ranks : (window+1)*ranks]
}

// propose moves a request to another rank or exchanges the ranks of two requests, and reverts the move if it is not
// accepted.
func (s *state) propose(temperature float64, random *rand.Rand) {
	i, j := random.IntN(len(s.own)), -1
	from, to := s.own[i], random.IntN(s.run.ranks())
	if random.IntN(2) == 0 {
		if j = i + 1 + random.IntN(near); j >= len(s.own) {
			return
		}
		to = s.own[j]
	}
	if from == to {
		return
	}
	before := s.local - s.price*s.imbalance
	s.move(i, to)
	if j >= 0 {
		s.move(j, from)
	}
	gain := s.local - s.price*s.imbalance - before
	if gain >= 0 || random.Float64() < math.Exp(gain/temperature) {
		return
	}
	if j >= 0 {
		s.move(j, to)
	}
	s.move(i, from)
}

func (s *state) move(request, to int) {
	from, tokens := s.own[request], s.run.Tokens[request]
	s.own[request] = to
	s.local += float64(tokens) * (s.run.Local[request][to] - s.run.Local[request][from]) / s.total
	first, end := s.windows.of(request)
	for w := first; w < end; w++ {
		loads, before := s.loadsOf(w), s.highest[w]
		was := loads[from]
		loads[from] -= tokens
		loads[to] += tokens
		if was == before {
			s.highest[w] = slices.Max(loads)
		} else {
			s.highest[w] = max(before, loads[to])
		}
		s.imbalance += s.windows.weights[w] * float64(s.highest[w]-before)
	}
}
