// Package hindsight says what dispatch under a limit of the window imbalance could have reached, had it known every arrival and the
// routes of every request beforehand: a bound that no dispatcher exceeds, and an assignment that comes near it.
//
// What a dispatcher that decides at once can reach lies below both, and how far is not said here.
package hindsight

import (
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
)

// Run is a placement's requests in their order of arrival.
type Run struct {
	// Local is the share of each request's activations that is local on each rank [requests][ranks].
	Local [][]float64
	// Tokens are the sizes of the requests, at least 1 each.
	Tokens []int
}

// ranks is their number.
func (r *Run) ranks() int { return len(r.Local[0]) }

// total is the number of tokens of all requests.
func (r *Run) total() float64 {
	total := 0
	for _, n := range r.Tokens {
		total += n
	}
	return float64(total)
}

// LAR is the local activation rate of an assignment to ranks.
func (r *Run) LAR(own []int) float64 {
	local := 0.0
	for i, rank := range own {
		local += float64(r.Tokens[i]) * r.Local[i][rank]
	}
	return local / r.total()
}

// Imbalance is the window imbalance of an assignment: max over mean of the ranks' tokens in the last dispatch.Arrivals requests, mean
// over all arrivals from the first full window on. Fewer requests are one window.
func (r *Run) Imbalance(own []int) float64 {
	s := newState(r, newWindows(r, dispatch.Arrivals), slices.Clone(own))
	return s.imbalance
}

// windows are the sets of consecutive requests over which load is measured.
type windows struct {
	// size is the number of requests of a window, which begins with the request of its index.
	size int
	// weights are what one more token on its fullest rank adds to the mean imbalance, for each window.
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

// of are the windows that hold a request: those from first to before end.
func (w *windows) of(request int) (first, end int) {
	return max(0, request-w.size+1), min(request+1, len(w.weights))
}
