package dispatch

import "math"

// Arrivals is the number of most recent requests over which load is measured.
const Arrivals = 128

// recent holds the load of the requests before the one to be decided: at most Arrivals-1.
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
	oldest := r.next // the ring is full: what comes next in it came first
	r.load[r.ranks[oldest]] -= r.tokens[oldest]
	r.total -= r.tokens[oldest]
	r.count--
}

// fillUp is the share of a window's missing requests that counts as spread evenly: more locality at the start for less balance.
const fillUp = 0.75

// missing is the number of requests that stand for those that a full window would hold besides those seen and the next one, over
// the number of these. Without them the first requests would find every rank above the cap, and be placed by load alone.
func (r *recent) missing() float64 {
	return fillUp * float64(Arrivals-1-r.count) / float64(r.count+1)
}

// room is the largest request that leaves a rank at or below the cap, a multiple of its share of the load over the last
// requests, this one included. A rank that has all of the load has room for any.
func (r *recent) room(rank int, share, loadCap float64) float64 {
	fill := r.missing()
	fair := loadCap * share * (1 + fill)
	perToken := 1 + fill*share - fair
	if perToken <= 0 {
		return math.Inf(1)
	}
	return (fair*float64(r.total) - fill*share*float64(r.total) - float64(r.load[rank])) / perToken
}

// excess is the rank's load over its share of the load of a full window, less 1.
func (r *recent) excess(rank int, share float64) float64 {
	if r.total == 0 {
		return 0
	}
	seen := 1 / (1 + r.missing())
	return seen * (float64(r.load[rank])/(share*float64(r.total)) - 1)
}
