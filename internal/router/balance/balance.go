// Package balance measures how evenly the load of the last requests is spread over the ranks of pods.
package balance

import (
	"math"
	"sync"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/solver/dispatch"
)

// Requests is the number of requests over which the balance is measured.
const Requests = dispatch.Arrivals

// Window holds the last requests. It is safe for concurrent use.
type Window struct {
	mu   sync.Mutex
	ring []Arrival
	next int
}

// Arrival is one request that a rank took, of the ranks that its pod has.
type Arrival struct {
	Rank, Ranks int
	Tokens      int64
}

// Add counts a request for one of the ranks of its pod; a request without a rank does not count.
func (w *Window) Add(a Arrival) {
	if a.Rank == discovery.NoRank {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ring) < Requests {
		w.ring = append(w.ring, a)
		return
	}
	w.ring[w.next] = a
	w.next = (w.next + 1) % Requests
}

// Imbalance is the largest over the mean load of the ranks; NaN before the first request.
func (w *Window) Imbalance() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	ranks := 0
	for _, a := range w.ring {
		ranks = max(ranks, a.Ranks)
	}
	load := make([]int64, ranks)
	var most, total int64
	for _, a := range w.ring {
		load[a.Rank] += a.Tokens
		most = max(most, load[a.Rank])
		total += a.Tokens
	}
	if total == 0 {
		return math.NaN()
	}
	return float64(most) * float64(ranks) / float64(total)
}
