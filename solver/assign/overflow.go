// SPDX-License-Identifier: Apache-2.0

package assign

import (
	"container/heap"
	"math"
)

// overflow moves items out of overfull bins, one at a time. Only bins that are not overfull receive items, and no
// move makes its target overfull. Therefore the set of possible moves only shrinks, except when a bin stops being
// overfull.
type overflow struct {
	w *Weighted
	// bins are the current bins of the items, loads the resulting loads, maxLoads the maximum load of each bin.
	bins            []int
	loads, maxLoads []float64
	// cheapestMoves contains, for each overfull bin, the minimum-loss move of each of its items; nil if it is not computed
	// yet. If a move has become impossible, the item's next move has at least the same loss.
	cheapestMoves []moves
}

// move moves an item to another bin, at a loss per unit of load.
type move struct {
	loss     float64
	item, to int
}

// fullest returns the bin with the largest excess over its limit, the first one among equals, or -1.
func (o *overflow) fullest() int {
	fullest, most := -1, 0.0
	for bin, load := range o.loads {
		if over := load - o.maxLoads[bin]; over > most {
			fullest, most = bin, over
		}
	}
	return fullest
}

// relieve makes the minimum-loss move out of a bin. It returns false if there is none.
func (o *overflow) relieve(from int) bool {
	if o.cheapestMoves[from] == nil {
		o.cheapestMoves[from] = o.movesFrom(from)
	}
	for list := &o.cheapestMoves[from]; list.Len() > 0 && (*list)[0].to >= 0; heap.Fix(list, 0) {
		first := &(*list)[0]
		if o.fits(first.item, first.to) {
			o.take(from, heap.Pop(list).(move))
			return true
		}
		*first = o.cheapest(first.item, from)
	}
	return false
}

func (o *overflow) take(from int, m move) {
	size := float64(o.w.Sizes[m.item])
	o.loads[from] -= size
	o.loads[m.to] += size
	o.bins[m.item] = m.to
	if o.loads[from] <= o.maxLoads[from] {
		o.cheapestMoves[from] = nil
		o.admit(from)
	}
}

// admit adds the moves to a bin that is no longer overfull to those of the bins that still are.
func (o *overflow) admit(to int) {
	for from, list := range o.cheapestMoves {
		for i := range list {
			item := list[i].item
			list[i].consider(o.loss(item, o.w.score(item, from), o.w.score(item, to)), to)
		}
		heap.Init(&o.cheapestMoves[from])
	}
}

// movesFrom returns the minimum-loss moves of a bin's items. An item without a possible move has one to bin -1 of infinite
// loss.
func (o *overflow) movesFrom(from int) moves {
	list := moves{}
	for item, bin := range o.bins {
		if bin == from && o.w.Sizes[item] > 0 {
			list = append(list, o.cheapest(item, from))
		}
	}
	heap.Init(&list)
	return list
}

// cheapest returns an item's possible move of minimum loss, to the first bin among equals, or to bin -1 if there is
// none.
func (o *overflow) cheapest(item, from int) move {
	m, score := move{math.Inf(1), item, -1}, o.w.score(item, from)
	if o.w.Sparse == nil {
		for to := range o.loads {
			if to != from && o.fits(item, to) {
				m.consider(o.loss(item, score, o.w.score(item, to)), to)
			}
		}
		return m
	}
	bins, scores := o.w.Sparse.row(item)
	for i, bin := range bins {
		if to := int(bin); to != from && o.fits(item, to) {
			m.consider(o.loss(item, score, float64(scores[i])), to)
		}
	}
	// All bins of score zero have the same loss.
	for to := range o.loads {
		if to != from && !o.w.Sparse.stored(item, to) && o.fits(item, to) {
			m.consider(o.loss(item, score, 0), to)
			break
		}
	}
	return m
}

// loss returns the loss per unit of load of a move between bins with the given scores.
func (o *overflow) loss(item int, from, to float64) float64 {
	return (from - to) / float64(o.w.Sizes[item])
}

// consider replaces the move by one to another bin that has less loss, or the same loss and a lower index.
func (m *move) consider(loss float64, to int) {
	if loss < m.loss || loss == m.loss && to < m.to {
		m.loss, m.to = loss, to
	}
}

func (o *overflow) fits(item, bin int) bool {
	return o.loads[bin]+float64(o.w.Sizes[item]) <= o.maxLoads[bin]
}

// moves is a min-heap by loss, then by item.
type moves []move

func (m moves) Len() int      { return len(m) }
func (m moves) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m moves) Less(i, j int) bool {
	return m[i].loss < m[j].loss || m[i].loss == m[j].loss && m[i].item < m[j].item
}
func (m *moves) Push(x any) { *m = append(*m, x.(move)) }
func (m *moves) Pop() any {
	last := len(*m) - 1
	x := (*m)[last]
	*m = (*m)[:last]
	return x
}
