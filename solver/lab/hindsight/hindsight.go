// SPDX-License-Identifier: Apache-2.0

// Package hindsight computes what dispatch under a limit of the window imbalance could have reached with prior
// knowledge of all arrivals and routes: an upper bound for every dispatcher, and an assignment close to the bound.
//
// A dispatcher that decides at arrival stays below both; the package does not say by how much.
package hindsight

import (
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
)

// Run contains the requests of a placement in order of arrival.
type Run struct {
	// Local is the share of each request's activations that is local on each rank [requests][ranks].
	Local [][]float64
	// Tokens are the sizes of the requests, at least 1 each.
	Tokens []int
}

// ranks returns the number of ranks.
func (r *Run) ranks() int { return len(r.Local[0]) }

// total returns the number of tokens of all requests.
func (r *Run) total() float64 {
	total := 0
	for _, n := range r.Tokens {
		total += n
	}
	return float64(total)
}

// LAR returns the local activation rate of an assignment to ranks.
func (r *Run) LAR(own []int) float64 {
	local := 0.0
	for i, rank := range own {
		local += float64(r.Tokens[i]) * r.Local[i][rank]
	}
	return local / r.total()
}

// Imbalance returns the window imbalance of an assignment: the maximum over the mean of the ranks' tokens in the last
// dispatch.Arrivals requests, averaged over all arrivals from the first full window on. Fewer requests form one window.
func (r *Run) Imbalance(own []int) float64 {
	s := newState(r, newWindows(r, dispatch.Arrivals), slices.Clone(own))
	return s.imbalance
}

// windows are the sets of consecutive requests over which load is measured.
type windows struct {
	// size is the number of requests of a window. Window i begins with request i.
	size int
	// weights are the increase of the mean imbalance per additional token on the fullest rank, for each window.
	weights []float64
}

func newWindows(r *Run, size int) windows {
	w := windows{size: min(size, len(r.Tokens))}
	count := len(r.Tokens) - w.size + 1
	tokens := 0
	for i, n := range r.Tokens {
		tokens += n
		if i < w.size-1 {
			continue
		}
		w.weights = append(w.weights, float64(r.ranks())/float64(tokens*count))
		tokens -= r.Tokens[i-w.size+1]
	}
	return w
}

// of returns the windows that contain a request, from first to before end.
func (w *windows) of(request int) (first, end int) {
	return max(0, request-w.size+1), min(request+1, len(w.weights))
}
