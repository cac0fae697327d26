// SPDX-License-Identifier: Apache-2.0

// Package balance measures how evenly the load of the last requests is spread over the ranks of pods.
package balance

import (
	"math"
	"sync"

	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/solver/dispatch"
)

// Requests is the number of requests over which the imbalance is measured.
const Requests = dispatch.Arrivals

// Window holds the last requests. It is safe for concurrent use.
type Window struct {
	mu   sync.Mutex
	ring []Arrival
	next int
}

// Arrival is a request that was sent to a rank. Ranks is the number of ranks of the pod, Tokens the load.
type Arrival struct {
	Rank, Ranks int
	Tokens      int64
}

// Add records a request. It ignores requests without a rank.
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

// Imbalance returns the largest load of a rank divided by the mean load; NaN before the first request.
func (w *Window) Imbalance() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	ranks := 0
	for _, a := range w.ring {
		ranks = max(ranks, a.Ranks)
	}
	load := make([]int64, ranks)
	var highest, total int64
	for _, a := range w.ring {
		load[a.Rank] += a.Tokens
		highest = max(highest, load[a.Rank])
		total += a.Tokens
	}
	if total == 0 {
		return math.NaN()
	}
	return float64(highest) * float64(ranks) / float64(total)
}
