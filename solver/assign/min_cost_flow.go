// SPDX-License-Identifier: Apache-2.0

package assign

import "math"

// Solver assigns items to bins of fixed capacity. It keeps its buffers and its prices between calls, so that a stream
// of similar problems is solved fast and without allocation. The zero value is ready for use. A Solver is not safe for
// concurrent use.
//
// The method is min-cost flow by successive shortest paths (Ahuja, Magnanti, Orlin, "Network Flows", 1993, section
// 9.7), over groups of items with equal scores: a frequent token is one group. First, every group takes its best bin at
// prices near the optimum, which is optimal for the resulting loads. Then the surplus of overfull bins moves along
// shortest paths of minimum loss to bins with room, which preserves optimality.
type Solver struct {
	descent descent
	prices  Prices
	bins    int
	bin     []int
	load    []int
	groups  groups
	// in are the items of each group in each bin [groups × bins].
	in []int32
	// cheapest[a*bins+b] orders the groups of bin a by the loss of moving to bin b. Entries of groups that have left a
	// are dropped when they reach the top.
	cheapest []regretHeap
	// losses are the losses of the top groups [bins × bins]; infinite without a group.
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
	s.reset(len(capacity))
	s.groups.find(scores, s.bins)
	s.adjustPrices(capacity)
	s.takeBest()
	for bin := range s.bins {
		if s.load[bin] > capacity[bin] {
			s.buildHeaps()
			break
		}
	}
	for bin := range s.bins {
		for s.load[bin] > capacity[bin] {
			s.relieve(bin, capacity)
		}
	}
	return s.binsOfItems()
}

func (s *Solver) reset(bins int) {
	if s.bins != bins {
		*s = Solver{
			bins: bins, prices: make(Prices, bins), load: make([]int, bins),
			cheapest: make([]regretHeap, bins*bins), losses: make([]float64, bins*bins),
			distance: make([]float64, bins), parent: make([]int, bins), open: make([]bool, bins),
			descent: descent{follower: follower{w: &Weighted{Limits: make([]float64, bins)}}, exact: true},
		}
	}
}

// priceRounds is the number of price updates before items move.
const priceRounds = 16

// adjustPrices takes a few subgradient steps from the last call's prices, so that few items remain to be moved. If the
// total capacity exceeds the number of items, all prices are 0, because bins below their capacity must have price 0.
func (s *Solver) adjustPrices(capacity []int) {
	w, items, room := s.descent.w, len(s.groups.of), 0
	for bin, n := range capacity {
		w.Limits[bin] = float64(n)
		room += n
	}
	if items < 4*s.bins || room > items {
		clear(s.prices)
		return
	}
	w.Scores, w.Sizes = resized(w.Scores, len(s.groups.rows)), resized(w.Sizes, len(s.groups.sizes))
	for group, size := range s.groups.sizes {
		w.Sizes[group] = float32(size)
		for bin, score := range s.groups.row(group, s.bins) {
			w.Scores[group*s.bins+bin] = score * float32(size)
		}
	}
	s.descent.minimize(s.prices, priceRounds, w.priceScale())
	copy(s.prices, s.descent.best)
}

// takeBest puts every group into its best bin at the prices.
func (s *Solver) takeBest() {
	s.in = resized(s.in, len(s.groups.rows))
	clear(s.in)
	clear(s.load)
	for group, size := range s.groups.sizes {
		best, bestValue := 0, math.Inf(-1)
		for bin, score := range s.groups.row(group, s.bins) {
			if value := float64(score) - s.prices[bin]; value > bestValue {
				best, bestValue = bin, value
			}
		}
		s.in[group*s.bins+best] = size
		s.load[best] += int(size)
	}
}

// binsOfItems returns the bins of the items: the first items of a group are in its first bins.
func (s *Solver) binsOfItems() []int {
	s.bin = resized(s.bin, len(s.groups.of))
	for item, group := range s.groups.of {
		in, bin := s.in[int(group)*s.bins:], 0
		for in[bin] == 0 {
			bin++
		}
		in[bin]--
		s.bin[item] = bin
	}
	return s.bin
}

func (s *Solver) buildHeaps() {
	for i := range s.cheapest {
		s.cheapest[i] = s.cheapest[i][:0]
	}
	for group := range s.groups.sizes {
		for a, n := range s.in[group*s.bins : (group+1)*s.bins] {
			if n == 0 {
				continue
			}
			for b := range s.bins {
				if b != a {
					heap := &s.cheapest[a*s.bins+b]
					*heap = append(*heap, regret{s.regret(group, a, b), int32(group)})
				}
			}
			break // takeBest puts whole groups into one bin
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

func (s *Solver) regret(group, from, to int) float64 {
	row := s.groups.row(group, s.bins)
	return float64(row[from]) - float64(row[to])
}

// top returns the group of bin a with the minimum loss for moving to bin b.
func (s *Solver) top(a, b int) (regret, bool) {
	heap := &s.cheapest[a*s.bins+b]
	for len(*heap) > 0 {
		if first := (*heap)[0]; s.in[int(first.group)*s.bins+a] > 0 {
			return first, true
		}
		heap.pop()
	}
	return regret{}, false
}

// relieve moves load from an overfull bin to the nearest bin with room, by loss: as many items as every step of the path
// can move at the same loss.
func (s *Solver) relieve(from int, capacity []int) {
	s.shortestPaths(from)
	to := -1
	for bin := range s.bins {
		if s.load[bin] < capacity[bin] && s.parent[bin] >= 0 && (to < 0 || s.distance[bin] < s.distance[to]) {
			to = bin
		}
	}
	n := int32(min(s.load[from]-capacity[from], capacity[to]-s.load[to]))
	for bin := to; bin != from; bin = s.parent[bin] {
		first, _ := s.top(s.parent[bin], bin)
		n = min(n, s.in[int(first.group)*s.bins+s.parent[bin]])
	}
	s.load[from] -= int(n)
	s.load[to] += int(n)
	for bin := to; bin != from; bin = s.parent[bin] {
		first, _ := s.top(s.parent[bin], bin)
		s.move(int(first.group), s.parent[bin], bin, n)
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

// move moves n items of a group.
func (s *Solver) move(group, from, to int, n int32) {
	in := s.in[group*s.bins : (group+1)*s.bins]
	in[from] -= n
	in[to] += n
	if in[to] > n {
		return // the heaps contain the group
	}
	for b := range s.bins {
		if b != to {
			s.cheapest[to*s.bins+b].push(regret{s.regret(group, to, b), int32(group)})
		}
	}
}

// regret is the loss per item of a move of a group.
type regret struct {
	loss  float64
	group int32
}

func (r regret) less(other regret) bool {
	return r.loss < other.loss || r.loss == other.loss && r.group < other.group
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
