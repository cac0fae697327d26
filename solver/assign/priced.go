package assign

import (
	"math"
	"slices"
)

// Prices are the duals of load limits: what one unit of load costs on each bin.
type Prices []float64

// Weighted is a problem of sized items: scores [item × bin] to be summed, sizes, and a limit on the load of each bin.
type Weighted struct {
	Scores []float32
	Sizes  []float32
	Limits []float64
}

// Take returns each item's best bin at the prices, and the loads that result.
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

// RelaxedValue is Σ over items of the best (score − size·price) + Σ over bins of price·limit. For non-negative prices no
// assignment within the limits, fractional ones included, sums to more; for any prices none that fills each bin to its limit exactly.
func (w *Weighted) RelaxedValue(prices Prices) float64 {
	f := newFollower(w)
	f.takeAll(prices)
	return f.value(prices)
}

// Price lowers RelaxedValue over non-negative prices by the given number of subgradient steps, and returns the best prices found with
// their value: the limits are what bins hold at most. It begins with prices of 0 where start is nil.
func (w *Weighted) Price(steps int, start Prices) (Prices, float64) {
	return w.price(steps, start, false)
}

// PriceExact is Price where bins must hold exactly their limits: prices may be negative.
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
			// A price that must go on in the same direction goes faster, one that went too far goes back slower.
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

// priceScale is the mean score per unit of size that an item's best bin has over its mean: the scale of sensible prices.
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
// as the sizes allow: best bins at the prices, then the moves of smallest loss per unit of load out of overfull bins.
func (w *Weighted) Assign(prices Prices, tolerance float64) []int {
	bins, loads := w.Take(prices)
	o := &overflow{w: w, bins: bins, loads: loads, most: make([]float64, len(loads)), leaving: make([]moves, len(loads))}
	for bin, limit := range w.Limits {
		o.most[bin] = limit * (1 + tolerance)
	}
	for from := o.fullest(); from >= 0 && o.relieve(from); from = o.fullest() {
		continue
	}
	return bins
}
