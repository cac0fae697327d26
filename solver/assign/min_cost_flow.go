// SPDX-License-Identifier: Apache-2.0

package assign

import "math"

// Solver assigns items to bins of fixed capacity. It keeps its buffers and its prices between calls, so that a stream
// of similar problems is solved fast and without allocation. The zero value is ready for use. A Solver is not safe for
// concurrent use.
//
// The method is min-cost flow by successive shortest paths (Ahuja, Magnanti, Orlin, "Network Flows", 1993, section
// 9.7). First, every item takes its best bin at the current prices, which is optimal for the resulting loads. Then, one
// by one, the surplus of overfull bins moves along shortest paths of minimum loss to bins with room, which preserves
// optimality.
type Solver struct {
	prices []float64
	bins   int
	bin    []int
	load   []int
	// cheapest[a*bins+b] orders the items of bin a by the loss of moving to bin b. Entries of items that have left a
	// are dropped when they reach the top.
	cheapest []regretHeap
	// losses are the losses of the top items [bins × bins]; infinite without an item.
	losses   []float64
	distance []float64
	parent   []int
	// open are the bins from which paths may still become shorter.
	open []bool
}

// Assign returns the bin of each item. It maximizes the sum over all items of scores[item*bins+bin], under the
// condition that no bin contains more items than its capacity. The sum of capacities must be at least the number of
// items. The result is valid until the next call.
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

// adjustPrices takes a few subgradient steps from the last call's prices, so that fewer items remain to be moved one by
// one. If the total capacity exceeds the number of items, all prices are 0, because bins below their capacity must have
// price 0.
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

// meanSpread returns the mean distance between an item's best score and its mean score, which is the scale of prices.
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
		s.updateLosses(bin)
	}
}

// updateLosses updates the losses of a bin from the tops of its heaps.
func (s *Solver) updateLosses(a int) {
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

// top returns the item of bin a with the minimum loss for moving to bin b.
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

// relieve moves one item's worth of load from an overfull bin to the nearest bin with room, by loss.
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
		s.updateLosses(bin)
	}
}

// shortestPaths is the Bellman-Ford algorithm on the bins. Losses may be negative, but no cycle has a negative sum. A
// bin whose distance has not changed since it was last processed cannot shorten other paths.
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

// extend routes paths to other bins through bin a if that is shorter, and reports whether any path changed.
func (s *Solver) extend(a, from int) (changed bool) {
	const rounding = 1e-12
	s.open[a] = false
	so := s.distance[a]
	for b, loss := range s.losses[a*s.bins : (a+1)*s.bins] {
		if so+loss >= s.distance[b]-rounding || b == from {
			continue
		}
		if s.passes(a, b) {
			s.open[a] = true // the path through b may be open in a later step
			continue
		}
		s.distance[b], s.parent[b], s.open[b] = so+loss, a, true
		changed = true
	}
	return changed
}

// passes reports whether the path to bin a already contains bin b. It prevents cycles caused by rounding.
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

// regret is the loss of an item by a move.
type regret struct {
	loss float64
	item int32
}

func (r regret) less(other regret) bool {
	return r.loss < other.loss || r.loss == other.loss && r.item < other.item
}

// regretHeap is a binary min-heap by loss.
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
