package assign

import (
	"container/heap"
	"math"
)

// overflow moves items out of overfull bins, one at a time. Only bins that are not overfull take items, and none becomes overfull by that:
// but for bins that cease to be, fewer and fewer moves are possible.
type overflow struct {
	w *Weighted
	// bins are where the items are, loads what that makes, most what each bin may hold.
	bins        []int
	loads, most []float64
	// leaving are, for each overfull bin, its items' moves of the smallest loss; nil where they are to be found anew. A move may have become
	// impossible, which leaves the item none of a smaller loss.
	leaving []moves
}

// move takes an item to another bin at a loss per unit of load.
type move struct {
	loss     float64
	item, to int
}

// fullest is the bin that exceeds its limit most, the first of equal ones, or -1.
func (o *overflow) fullest() int {
	fullest, most := -1, 0.0
	for bin, load := range o.loads {
		if over := load - o.most[bin]; over > most {
			fullest, most = bin, over
		}
	}
	return fullest
}

// relieve makes the move of the smallest loss out of a bin; false where there is none.
func (o *overflow) relieve(from int) bool {
	if o.leaving[from] == nil {
		o.leaving[from] = o.movesFrom(from)
	}
	leaving := &o.leaving[from]
	for leaving.Len() > 0 {
		first := &(*leaving)[0]
		if o.fits(first.item, first.to) {
			o.take(from, heap.Pop(leaving).(move))
			return true
		}
		if next := o.cheapest(first.item, from); next.to >= 0 {
			*first = next
			heap.Fix(leaving, 0)
		} else {
			heap.Pop(leaving)
		}
	}
	return false
}

func (o *overflow) take(from int, m move) {
	size := float64(o.w.Sizes[m.item])
	o.loads[from] -= size
	o.loads[m.to] += size
	o.bins[m.item] = m.to
	if o.loads[from] <= o.most[from] {
		clear(o.leaving) // it may take items now
	}
}

// movesFrom are the cheapest moves of a bin's items.
func (o *overflow) movesFrom(from int) moves {
	list := moves{}
	for item, bin := range o.bins {
		if bin != from || o.w.Sizes[item] == 0 {
			continue
		}
		if m := o.cheapest(item, from); m.to >= 0 {
			list = append(list, m)
		}
	}
	heap.Init(&list)
	return list
}

// cheapest is an item's possible move of the smallest loss, to the first of equal bins; to bin -1 where there is none.
func (o *overflow) cheapest(item, from int) move {
	m := move{math.Inf(1), item, -1}
	scores, size := o.w.Scores[item*len(o.loads):(item+1)*len(o.loads)], float64(o.w.Sizes[item])
	for bin, score := range scores {
		if bin == from || !o.fits(item, bin) {
			continue
		}
		if loss := (float64(scores[from]) - float64(score)) / size; loss < m.loss {
			m.loss, m.to = loss, bin
		}
	}
	return m
}

func (o *overflow) fits(item, bin int) bool {
	return o.loads[bin]+float64(o.w.Sizes[item]) <= o.most[bin]
}

// moves is a heap whose first is the one of the smallest loss, and of equal ones that of the first item.
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
