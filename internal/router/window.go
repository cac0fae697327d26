package router

import (
	"math"
	"sync"

	"github.com/semmoe/operator/internal/router/discovery"
)

// windowSize is the number of requests over which the balance between ranks is measured.
const windowSize = 128

// window measures how evenly the load of the last requests is spread over ranks. It is safe for concurrent use.
type window struct {
	mu   sync.Mutex
	ring []arrival
	next int
}

// arrival is one request that a rank took.
type arrival struct {
	rank, ranks int
	tokens      int64
}

// add counts a request for one of the ranks of its pod; a request without a rank does not count.
func (w *window) add(a arrival) {
	if a.rank == discovery.NoRank {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.ring) < windowSize {
		w.ring = append(w.ring, a)
		return
	}
	w.ring[w.next] = a
	w.next = (w.next + 1) % windowSize
}

// imbalance is the largest over the mean load of the ranks; NaN before the first request.
func (w *window) imbalance() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	ranks := 0
	for _, a := range w.ring {
		ranks = max(ranks, a.ranks)
	}
	load := make([]int64, ranks)
	var most, total int64
	for _, a := range w.ring {
		load[a.rank] += a.tokens
		most = max(most, load[a.rank])
		total += a.tokens
	}
	if total == 0 {
		return math.NaN()
	}
	return float64(most) * float64(ranks) / float64(total)
}
