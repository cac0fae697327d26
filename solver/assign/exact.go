package assign

import "math"

// Solver assigns items to bins of fixed capacity. It keeps its buffers and its prices between calls, so that a stream
// of similar problems is solved fast and without allocation. The zero value is ready; it is not safe for concurrent use.
//
// The method: items take their best bin at the current prices, which is optimal for the loads that result; then, one by
// one, the surplus of overfull bins moves along shortest paths of smallest regret to bins with room, which keeps it
// optimal.
type Solver struct {
	prices []float64
	bins   int
	bin    []int
	load   []int
	// cheapest[a*bins+b] orders the items of bin a by what moving to bin b would lose; entries of items that have left a
	// are dropped when they surface.
	cheapest []regretHeap
	// losses are those of the items on top [bins × bins]; infinite where there is none.
	losses   []float64
	distance []float64
	parent   []int
	// open are the bins from which paths may become shorter.
	open []bool
}

// Assign returns the bin of each item: scores[item*bins+bin] summed over all items is largest under the condition that
// no bin holds more items than its capacity. The capacities must sum to the number of items or more. The result is valid
// until the next call.
func (s *Solver) Assign(scores []float32, capacity []int) []int {
	bins := len(capacity)
	items := len(scores) / bins
	s.reset(items, bins)
	s.adjustPrices(scores, capacity)
	s.takeBest(scores)
	for bin := range bins {
		if s.load[bin] > capacity[bin] {
			s.buildHeaps(scores)
			break
		}
	}
	for bin := range bins {
		for s.load[bin] > capacity[bin] {
			s.relieve(bin, scores, capacity)
		}
	}
	return s.bin
}

func (s *Solver) reset(items, bins int) {
	if s.bins != bins {
		*s = Solver{
			bins: bins, prices: make([]float64, bins), load: make([]int, bins),
			cheapest: make([]regretHeap, bins*bins), losses: make([]float64, bins*bins),
			distance: make([]float64, bins), parent: make([]int, bins), open: make([]bool, bins),
		}
	}
	if cap(s.bin) < items {
		s.bin = make([]int, items)
	}
	s.bin = s.bin[:items]
}

// adjustPrices takes a few subgradient steps from the last call's prices: the fewer items are left to move one by one.
// Where there is room to spare, bins that stay below their capacity must cost nothing, and there are no prices.
func (s *Solver) adjustPrices(scores []float32, capacity []int) {
	const rounds = 8
	items, room := len(s.bin), 0
	for _, n := range capacity {
		room += n
	}
	if items < 4*s.bins || room > items {
		clear(s.prices)
		return
	}
	spread := meanSpread(scores, s.bins)
	for round := range rounds {
		s.takeBest(scores)
		step := spread / float64(round+2)
		for bin := range s.prices {
			share := float64(capacity[bin])
			s.prices[bin] += step * (float64(s.load[bin]) - share) / max(share, 1)
		}
	}
}

// meanSpread is the mean distance between an item's best score and its mean score: the scale of sensible prices.
func meanSpread(scores []float32, bins int) float64 {
	total := 0.0
	for begin := 0; begin < len(scores); begin += bins {
		best, sum := scores[begin], float32(0)
		for _, score := range scores[begin : begin+bins] {
			best = max(best, score)
			sum += score
		}
		total += float64(best) - float64(sum)/float64(bins)
	}
	return total * float64(bins) / float64(len(scores))
}

func (s *Solver) takeBest(scores []float32) {
	clear(s.load)
	for item := range s.bin {
		row := scores[item*s.bins : (item+1)*s.bins]
		best, bestValue := 0, math.Inf(-1)
		for bin, score := range row {
			if value := float64(score) - s.prices[bin]; value > bestValue {
				best, bestValue = bin, value
			}
		}
		s.bin[item] = best
		s.load[best]++
	}
}

func (s *Solver) buildHeaps(scores []float32) {
	for i := range s.cheapest {
		s.cheapest[i] = s.cheapest[i][:0]
	}
	for item, a := range s.bin {
		for b := range s.bins {
			if b != a {
				heap := &s.cheapest[a*s.bins+b]
				*heap = append(*heap, regret{s.regret(scores, item, a, b), int32(item)})
			}
		}
	}
	for i := range s.cheapest {
		s.cheapest[i].build()
	}
	for bin := range s.bins {
		s.look(bin)
	}
}

// look takes the losses of a bin from the tops of its heaps.
func (s *Solver) look(a int) {
	for b := range s.bins {
		s.losses[a*s.bins+b] = math.Inf(1)
		if first, ok := s.top(a, b); ok && a != b {
			s.losses[a*s.bins+b] = first.loss
		}
	}
}

func (s *Solver) regret(scores []float32, item, from, to int) float64 {
	return float64(scores[item*s.bins+from]) - float64(scores[item*s.bins+to])
}

// top returns the item of bin a that loses least by moving to bin b.
func (s *Solver) top(a, b int) (regret, bool) {
	heap := &s.cheapest[a*s.bins+b]
	for len(*heap) > 0 {
		if first := (*heap)[0]; s.bin[first.item] == a {
			return first, true
		}
		heap.pop()
	}
	return regret{}, false
}

// relieve moves one item's worth of load from an overfull bin to the bin with room that is nearest in regret.
func (s *Solver) relieve(from int, scores []float32, capacity []int) {
	s.shortestPaths(from)
	to := -1
	for bin := range s.bins {
		if s.load[bin] < capacity[bin] && s.parent[bin] >= 0 && (to < 0 || s.distance[bin] < s.distance[to]) {
			to = bin
		}
	}
	s.load[from]--
	s.load[to]++
	for bin := to; bin != from; bin = s.parent[bin] {
		first, _ := s.top(s.parent[bin], bin)
		s.move(int(first.item), bin, scores)
	}
	for bin := to; bin >= 0; bin = s.parent[bin] {
		s.look(bin)
	}
}

// shortestPaths is Bellman-Ford on the bins: regrets may be negative, but no cycle is. A bin whose distance is what it was when it
// was looked at last makes no other any nearer.
func (s *Solver) shortestPaths(from int) {
	for bin := range s.bins {
		s.distance[bin], s.parent[bin], s.open[bin] = math.Inf(1), -1, false
	}
	s.distance[from], s.open[from] = 0, true
	for range s.bins {
		changed := false
		for a := range s.bins {
			if s.open[a] && s.extend(a, from) {
				changed = true
			}
		}
		if !changed {
			return
		}
	}
}

// extend makes the paths to other bins go by way of bin a where that is shorter, and reports whether it is for any.
func (s *Solver) extend(a, from int) (changed bool) {
	const rounding = 1e-12
	s.open[a] = false
	so := s.distance[a]
	for b, loss := range s.losses[a*s.bins : (a+1)*s.bins] {
		if so+loss >= s.distance[b]-rounding || b == from {
			continue
		}
		if s.passes(a, b) {
			s.open[a] = true // it may not, another time
			continue
		}
		s.distance[b], s.parent[b], s.open[b] = so+loss, a, true
		changed = true
	}
	return changed
}

// passes reports whether the path to bin a already goes through bin b; rounding must not tie a knot.
func (s *Solver) passes(a, b int) bool {
	for ; a >= 0; a = s.parent[a] {
		if a == b {
			return true
		}
	}
	return false
}

func (s *Solver) move(item, to int, scores []float32) {
	s.bin[item] = to
	for b := range s.bins {
		if b != to {
			s.cheapest[to*s.bins+b].push(regret{s.regret(scores, item, to, b), int32(item)})
		}
	}
}

// regret is what an item loses by a move.
type regret struct {
	loss float64
	item int32
}

func (r regret) less(other regret) bool {
	return r.loss < other.loss || r.loss == other.loss && r.item < other.item
}

// regretHeap is a binary heap, smallest loss first.
type regretHeap []regret

func (h regretHeap) build() {
	for i := len(h)/2 - 1; i >= 0; i-- {
		h.sink(i)
	}
}

func (h *regretHeap) push(r regret) {
	*h = append(*h, r)
	heap := *h
	for i := len(heap) - 1; i > 0; {
		up := (i - 1) / 2
		if !heap[i].less(heap[up]) {
			return
		}
		heap[i], heap[up] = heap[up], heap[i]
		i = up
	}
}

func (h *regretHeap) pop() {
	heap := *h
	last := len(heap) - 1
	heap[0] = heap[last]
	*h = heap[:last]
	h.sink(0)
}

func (h regretHeap) sink(i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && h[child+1].less(h[child]) {
			child++
		}
		if !h[child].less(h[i]) {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}
