// SPDX-License-Identifier: Apache-2.0

package assign

import (
	"math"
	"slices"
)

// Prices are the dual variables of the load limits: the price of one unit of load in each bin.
type Prices []float64

// Weighted is an assignment problem of sized items: scores [item × bin] to maximize, sizes, and a limit on the load of
// each bin.
type Weighted struct {
	Scores []float32
	Sizes  []float32
	Limits []float64
}

// Take returns each item's best bin at the prices, and the resulting loads.
func (w *Weighted) Take(prices Prices) (bins []int, loads []float64) {
	bins, loads = make([]int, len(w.Sizes)), make([]float64, len(w.Limits))
	for item, size := range w.Sizes {
		bins[item], _ = w.best(item, prices)
		loads[bins[item]] += float64(size)
	}
	return bins, loads
}

func (w *Weighted) best(item int, prices Prices) (bin int, value float64) {
	n := len(w.Limits)
	value = math.Inf(-1)
	for b, score := range w.Scores[item*n : (item+1)*n] {
		if v := float64(score) - float64(w.Sizes[item])*prices[b]; v > value {
			bin, value = b, v
		}
	}
	return bin, value
}

// Price minimizes the value of the Lagrangian relaxation, Σ_i max_b (score_ib − size_i·price_b) + Σ_b price_b·limit_b
// over items i and bins b, over non-negative prices. It takes the given number of subgradient steps, and returns the
// best prices with their value. The value is an upper bound on the sum of scores of every assignment within the limits,
// including fractional ones. If start is nil, all prices start at 0.
func (w *Weighted) Price(steps int, start Prices) (Prices, float64) {
	return w.price(steps, start, false)
}

// PriceExact is Price for bins that must be filled exactly to their limits: prices may be negative, and the value bounds
// every assignment that fills them.
func (w *Weighted) PriceExact(steps int, start Prices) (Prices, float64) {
	return w.price(steps, start, true)
}

func (w *Weighted) price(steps int, start Prices, exact bool) (Prices, float64) {
	prices := append(Prices(nil), start...)
	if prices == nil {
		prices = make(Prices, len(w.Limits))
	}
	best, bestValue := append(Prices(nil), prices...), math.Inf(1)
	if steps < 1 {
		return best, bestValue
	}
	f := newFollower(w)
	f.takeAll(prices)
	stride, excess := slices.Repeat([]float64{w.priceScale()}, len(w.Limits)), make([]float64, len(w.Limits))
	change := make([]float64, len(w.Limits))
	for step := range steps {
		if step > 0 {
			f.follow(prices, change)
		}
		if value := f.value(prices); value < bestValue {
			bestValue = value
			copy(best, prices)
		}
		for bin, price := range prices {
			now := (f.loads[bin] - w.Limits[bin]) / max(w.Limits[bin], 1e-9)
			// The step size of a price grows while its gradient keeps its sign, and shrinks after a sign change.
			if now*excess[bin] > 0 {
				stride[bin] *= 1.25
			} else if now*excess[bin] < 0 {
				stride[bin] *= 0.5
			}
			excess[bin] = now
			prices[bin] += stride[bin] * now
			if !exact {
				prices[bin] = max(prices[bin], 0)
			}
			change[bin] = prices[bin] - price
		}
	}
	return best, bestValue
}

// priceScale returns the mean difference, per unit of size, between an item's best score and its mean score: the scale
// of prices.
func (w *Weighted) priceScale() float64 {
	size := 0.0
	for _, s := range w.Sizes {
		size += float64(s)
	}
	if size == 0 {
		return 0
	}
	return 0.25 * meanSpread(w.Scores, len(w.Limits)) * float64(len(w.Sizes)) / size
}

// Assign returns an assignment whose loads exceed the limits by at most the tolerance (a fraction of the limit), as far
// as the sizes allow. It takes the best bins at the prices, then makes the moves of minimum loss per unit of load out
// of overfull bins.
func (w *Weighted) Assign(prices Prices, tolerance float64) []int {
	bins, loads := w.Take(prices)
	o := &overflow{w: w, bins: bins, loads: loads, maxLoads: make([]float64, len(loads)), cheapestMoves: make([]moves, len(loads))}
	for bin, limit := range w.Limits {
		o.maxLoads[bin] = limit * (1 + tolerance)
	}
	for from := o.fullest(); from >= 0 && o.relieve(from); from = o.fullest() {
		continue
	}
	return bins
}
