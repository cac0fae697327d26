// SPDX-License-Identifier: Apache-2.0

package assign

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// atPrices finds the best bin of each item at prices.
type atPrices struct {
	*Weighted
	prices Prices
	// ascending lists the bins by price, then by index. It is set if Sparse is.
	ascending []int
}

func (w *Weighted) at(prices Prices) atPrices {
	a := atPrices{Weighted: w, prices: prices}
	if w.Sparse != nil {
		a.ascending = make([]int, len(prices))
		for bin := range prices {
			a.ascending[bin] = bin
		}
		slices.SortFunc(a.ascending, func(p, q int) int { return cmp.Or(cmp.Compare(prices[p], prices[q]), cmp.Compare(p, q)) })
	}
	return a
}

// best returns the bin of an item's highest value, the first one among equals, and the margin over the second highest
// value. It is fastest if hint is that bin.
func (a *atPrices) best(item, hint int) (bin int, margin float64) {
	if a.ascending != nil {
		return a.bestOfSparse(item)
	}
	prices := a.prices
	size, scores := float64(a.Sizes[item]), a.Scores[item*len(prices):]
	scores = scores[:len(prices)]
	bin, best, second := hint, float64(scores[hint])-size*prices[hint], math.Inf(-1)
	for b, price := range prices {
		v := float64(scores[b]) - size*price
		if v <= second || b == hint {
			continue
		}
		if v > best || v == best && b < bin {
			bin, best, second = b, v, best
		} else {
			second = v
		}
	}
	return bin, best - second
}

// bestOfSparse is best for scores of which most are zero. The two lowest prices decide among the bins of score zero.
//
// Which scores are maxima so far is unpredictable, and a mispredicted branch costs as much as five scores. Therefore the
// loop over them has no branch: it compares integers in the order of the values, and selects by masks.
func (a *atPrices) bestOfSparse(item int) (bin int, margin float64) {
	prices, size := a.prices, float64(a.Sizes[item])
	bins, scores := a.Sparse.row(item)
	bins = bins[:len(scores)]
	at, first, next := 0, uint64(0), uint64(0)
	for i, score := range scores {
		v := ordered(float64(score) - size*prices[bins[i]])
		_, above := bits.Sub64(first, v, 0) // 1 if first < v
		mask := -above
		next = max(next, v^(v^first)&mask) // the lower one of first and v
		first ^= (first ^ v) & mask
		at ^= (at ^ i) & int(mask)
	}
	best, second := math.Inf(-1), math.Inf(-1)
	if len(scores) > 0 {
		bin, best = int(bins[at]), unordered(first)
	}
	if len(scores) > 1 {
		second = unordered(next)
	}
	for _, b := range a.ascending {
		v := -size * prices[b]
		if v < second {
			break
		}
		if a.Sparse.stored(item, b) {
			continue
		}
		if v > best || v == best && b < bin {
			bin, best, second = b, v, best
		} else {
			second = v
		}
	}
	return bin, best - second
}

// ordered returns an integer above 0 for a value that is not NaN. Integers have the order of values.
func ordered(v float64) uint64 {
	b := math.Float64bits(v)
	return b ^ (uint64(int64(b)>>63) | 1<<63)
}

// unordered is the inverse of ordered.
func unordered(integer uint64) float64 {
	return math.Float64frombits(integer ^ (^uint64(int64(integer)>>63) | 1<<63))
}
