// SPDX-License-Identifier: Apache-2.0

package dispatch

import "math"

// Arrivals is the number of recent requests over which load is measured.
const Arrivals = 128

// recent contains the load of the requests before the current one, at most Arrivals-1.
type recent struct {
	ranks, tokens [Arrivals]int
	next, count   int
	load          []int
	total         int
}

func newRecent(ranks int) *recent { return &recent{load: make([]int, ranks)} }

func (r *recent) add(rank, tokens int) {
	r.ranks[r.next], r.tokens[r.next] = rank, tokens
	r.load[rank] += tokens
	r.total += tokens
	r.next = (r.next + 1) % Arrivals
	if r.count++; r.count < Arrivals {
		return
	}
	oldest := r.next // the ring is full, so the next entry is the oldest
	r.load[r.ranks[oldest]] -= r.tokens[oldest]
	r.total -= r.tokens[oldest]
	r.count--
}

// fillUp is the share of a window's missing requests that is assumed to be spread evenly: more locality at the start
// for less balance.
const fillUp = 0.75

// missing returns the assumed number of missing requests of a full window per request seen, including the next one.
// Without this assumption, the first requests would find every rank above the cap and be placed by load only.
func (r *recent) missing() float64 {
	return fillUp * float64(Arrivals-1-r.count) / float64(r.count+1)
}

// room returns the largest request that keeps a rank at or below the cap, which is a multiple of its share of the load
// over the last requests including this one. It is infinite for a rank with a fair share of all of the load.
func (r *recent) room(rank int, share, loadCap float64) float64 {
	fill := r.missing()
	fair := loadCap * share * (1 + fill)
	perToken := 1 + fill*share - fair
	if perToken <= 0 {
		return math.Inf(1)
	}
	return (fair*float64(r.total) - fill*share*float64(r.total) - float64(r.load[rank])) / perToken
}

// excess returns the rank's load relative to its share of the load of a full window, minus 1.
func (r *recent) excess(rank int, share float64) float64 {
	if r.total == 0 {
		return 0
	}
	seen := 1 / (1 + r.missing())
	return seen * (float64(r.load[rank])/(share*float64(r.total)) - 1)
}
