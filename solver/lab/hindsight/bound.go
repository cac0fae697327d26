// SPDX-License-Identifier: Apache-2.0

package hindsight

import (
	"math"

	"github.com/semmoe/operator/solver/dispatch"
)

const (
	// minPrice and priceDoublings define the prices of imbalance to try, in local activation rate per unit of
	// imbalance.
	minPrice, priceDoublings = 1.0 / 96, 5
	// boundSteps is the number of subgradient steps per price. boundStride is the relative change of a weight in the
	// first step, for a load of twice the mean. The second half of the steps lowers the bound by about .0001.
	boundSteps, boundStride = 1000, 0.4
)

// Bound returns an upper bound on the local activation rate of any assignment with a window imbalance of at most limit,
// including assignments that split requests. It holds by weak duality for any prices.
func (r *Run) Bound(limit float64) float64 { return r.bound(limit, newWindows(r, dispatch.Arrivals)) }

func (r *Run) bound(limit float64, w windows) float64 {
	best := math.Inf(1)
	for doubling := range priceDoublings {
		best = min(best, newDual(r, w, math.Ldexp(minPrice, doubling)).lower(limit))
	}
	return best
}

// dual is the Lagrangian relaxation of the limit. A window's highest load is at least any weighted mean of its ranks'
// loads, so for weights that sum to 1 over the ranks of each window
//
//	LAR ≤ price × limit + Σ over requests of tokens/total × max over ranks of (local − price × total × Σ over its windows of weight)
//
// in units of windows.weights.
type dual struct {
	run     *Run
	windows windows
	price   float64
	// weights are indexed [windows][ranks].
	weights [][]float64
	// sums are the cumulative weighted prices before each window. loads are the changes of the ranks' loads from one
	// window to the next if every request takes its best rank [windows + 1][ranks].
	sums, loads [][]float64
}

func newDual(r *Run, w windows, price float64) *dual {
	d := &dual{run: r, windows: w, price: price}
	for range len(w.weights) + 1 {
		weights := make([]float64, r.ranks())
		for rank := range weights {
			weights[rank] = 1 / float64(r.ranks())
		}
		d.weights = append(d.weights, weights)
		d.sums, d.loads = append(d.sums, make([]float64, r.ranks())), append(d.loads, make([]float64, r.ranks()))
	}
	return d
}

// lower runs the subgradient steps and returns the lowest bound found.
func (d *dual) lower(limit float64) float64 {
	best := math.Inf(1)
	for step := range boundSteps {
		best = min(best, d.value(limit))
		d.follow(boundStride / math.Sqrt(float64(step+1)))
	}
	return best
}

// value returns the bound of the current weights and updates the corresponding loads.
func (d *dual) value(limit float64) float64 {
	total := d.run.total()
	for w, weight := range d.windows.weights {
		for rank, sum := range d.sums[w] {
			d.sums[w+1][rank] = sum + d.price*total*weight*d.weights[w][rank]
		}
	}
	for _, loads := range d.loads {
		clear(loads)
	}
	value := 0.0
	for i, local := range d.run.Local {
		first, end := d.windows.of(i)
		best, highest := 0, math.Inf(-1)
		for rank, share := range local {
			if x := share - d.sums[end][rank] + d.sums[first][rank]; x > highest {
				best, highest = rank, x
			}
		}
		tokens := float64(d.run.Tokens[i])
		value += tokens * highest
		d.loads[first][best] += tokens
		d.loads[end][best] -= tokens
	}
	return value/total + d.price*limit
}

// follow raises the weights of ranks with a load above a window's mean.
func (d *dual) follow(stride float64) {
	loads := make([]float64, d.run.ranks())
	for w, weight := range d.windows.weights {
		sum := 0.0
		for rank, change := range d.loads[w] {
			loads[rank] += change
			excess := loads[rank]*weight*float64(len(d.windows.weights)) - 1
			// A weight of 0 would stay 0.
			d.weights[w][rank] = max(d.weights[w][rank], 1e-7) * math.Exp(stride*excess)
			sum += d.weights[w][rank]
		}
		for rank := range d.weights[w] {
			d.weights[w][rank] /= sum
		}
	}
}
