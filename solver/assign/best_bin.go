// SPDX-License-Identifier: Apache-2.0

package assign

import (
	"cmp"
	"math"
	"slices"
)

// atPrices finds the best bin of each item at prices.
type atPrices struct {
	*Weighted
	prices Prices
	// ascending lists the bins by price, then by index. It is set if NonZero is.
	ascending []int
}

func (w *Weighted) at(prices Prices) atPrices {
	a := atPrices{Weighted: w, prices: prices}
	if w.NonZero != nil {
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
		return a.bestOfSparse(item, hint)
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
func (a *atPrices) bestOfSparse(item, hint int) (bin int, margin float64) {
	size, scores := float64(a.Sizes[item]), a.Scores[item*len(a.prices):]
	bin, best, second := hint, float64(scores[hint])-size*a.prices[hint], math.Inf(-1)
	for b := range a.nonZero(item) {
		v := float64(scores[b]) - size*a.prices[b]
		if v <= second || b == hint {
			continue
		}
		if v > best || v == best && b < bin {
			bin, best, second = b, v, best
		} else {
			second = v
		}
	}
	nonZero := a.NonZero[item*BinWords(len(a.prices)):]
	for _, b := range a.ascending {
		v := -size * a.prices[b]
		if v < second {
			break
		}
		if b == hint || nonZero[b/64]&(1<<(b%64)) != 0 {
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
