// SPDX-License-Identifier: Apache-2.0

package assign

import "math"

// Prices are the dual variables of the load limits: the price of one unit of load in each bin.
type Prices []float64

// Weighted is an assignment problem of sized items: scores [item × bin] to maximize, sizes, and a limit on the load of
// each bin.
type Weighted struct {
	Scores []float32
	// Sparse, if not nil, are the scores instead of Scores. It is faster if most scores are zero.
	Sparse *SparseScores
	Sizes  []float32
	Limits []float64
}

func (w *Weighted) score(item, bin int) float64 {
	if w.Sparse != nil {
		return float64(w.Sparse.at(item, bin))
	}
	return float64(w.Scores[item*len(w.Limits)+bin])
}

// AddScores adds the scores of an item to a row of values.
func (w *Weighted) AddScores(row []float32, item int) {
	if w.Sparse == nil {
		for bin, score := range w.Scores[item*len(w.Limits) : (item+1)*len(w.Limits)] {
			row[bin] += score
		}
		return
	}
	bins, scores := w.Sparse.row(item)
	for i, bin := range bins {
		row[bin] += scores[i]
	}
}

// Take returns each item's best bin at the prices, and the resulting loads.
func (w *Weighted) Take(prices Prices) (bins []int, loads []float64) {
	bins, loads = make([]int, len(w.Sizes)), make([]float64, len(w.Limits))
	at := w.at(prices)
	for item, size := range w.Sizes {
		bins[item], _ = at.best(item, 0)
		loads[bins[item]] += float64(size)
	}
	return bins, loads
}

// Price minimizes the value of the Lagrangian relaxation, Σ_i max_b (score_ib − size_i·price_b) + Σ_b price_b·limit_b
// over items i and bins b, over non-negative prices. It takes the given number of subgradient steps, and returns the
// best prices with their value. The value is an upper bound on the sum of scores of every assignment within the limits,
// including fractional ones. If start is nil, all prices start at 0.
func (w *Weighted) Price(steps int, start Prices) (Prices, float64) {
	return w.price(steps, start, w.priceScale(), false)
}

// PriceExact is Price for bins that must be filled exactly to their limits: prices may be negative, and the value bounds
// every assignment that fills them.
func (w *Weighted) PriceExact(steps int, start Prices) (Prices, float64) {
	return w.price(steps, start, w.priceScale(), true)
}

// FollowExact is PriceExact from prices that are the best ones for nearly the same scores: steps are half as long at
// first. Long steps would leave the start, and move many items to and fro.
func (w *Weighted) FollowExact(steps int, start Prices) (Prices, float64) {
	return w.price(steps, start, w.priceScale()/2, true)
}

func (w *Weighted) price(steps int, start Prices, scale float64, exact bool) (Prices, float64) {
	prices := append(Prices(nil), start...)
	if prices == nil {
		prices = make(Prices, len(w.Limits))
	}
	if steps < 1 {
		return prices, math.Inf(1)
	}
	d := descent{follower: follower{w: w}, exact: exact}
	value := d.minimize(prices, steps, scale)
	return d.best, value
}

// descent minimizes the value of the relaxation by subgradient steps. It keeps its buffers between calls.
type descent struct {
	follower
	// exact is set if bins must be filled exactly, so that prices may be negative.
	exact                  bool
	prices, best           Prices
	stride, excess, change []float64
}

// minimize takes the given number of steps, at least 1, from the given prices, and sets best to the prices of the
// minimum value, which it returns. scale is the scale of prices. The follower is then at the last prices.
func (d *descent) minimize(start Prices, steps int, scale float64) float64 {
	d.prices, d.best = append(d.prices[:0], start...), append(d.best[:0], start...)
	d.stride, d.excess, d.change = resized(d.stride, len(start)), resized(d.excess, len(start)), resized(d.change, len(start))
	for bin := range d.stride {
		d.stride[bin], d.excess[bin] = scale, 0
	}
	limits, bestValue := d.w.Limits, math.Inf(1)
	d.takeAll(d.prices)
	for step := range steps {
		if step > 0 {
			d.follow(d.prices, d.change)
		}
		if value := d.value(d.prices); value < bestValue {
			bestValue = value
			copy(d.best, d.prices)
		}
		for bin, price := range d.prices {
			now := (d.loads[bin] - limits[bin]) / max(limits[bin], 1e-9)
			// The step size of a price grows while its gradient keeps its sign, and shrinks after a sign change.
			if now*d.excess[bin] > 0 {
				d.stride[bin] *= 1.25
			} else if now*d.excess[bin] < 0 {
				d.stride[bin] *= 0.5
			}
			d.excess[bin] = now
			d.prices[bin] += d.stride[bin] * now
			if !d.exact {
				d.prices[bin] = max(d.prices[bin], 0)
			}
			d.change[bin] = d.prices[bin] - price
		}
	}
	return bestValue
}

// resized returns a buffer of the given length, with arbitrary content.
func resized[T any](buffer []T, n int) []T {
	if cap(buffer) < n {
		return make([]T, n)
	}
	return buffer[:n]
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
	return 0.25 * w.meanSpread() * float64(len(w.Sizes)) / size
}

// meanSpread returns the mean difference between an item's best score and its mean score.
func (w *Weighted) meanSpread() float64 {
	bins, total := len(w.Limits), 0.0
	for item := range w.Sizes {
		best, sum := float32(math.Inf(-1)), float32(0)
		var scores []float32
		if w.Sparse == nil {
			scores = w.Scores[item*bins : (item+1)*bins]
		} else if _, scores = w.Sparse.row(item); len(scores) < bins {
			best = 0
		}
		for _, score := range scores {
			best = max(best, score)
			sum += score
		}
		total += float64(best) - float64(sum)/float64(bins)
	}
	return total / float64(len(w.Sizes))
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
