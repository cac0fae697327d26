// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"cmp"
	"math"
	"slices"
)

// attended is a measurement of causal attention.
type attended struct {
	AttentionWork
	us float64
}

func (a attended) microseconds() float64 { return a.us }

func (a attended) compare(b attended) int { return cmp.Compare(a.Flops, b.Flops) }

func (a *Attention) of(measured attended) float64 { return a.Microseconds(measured.AttentionWork) }

func attentions(c *Calibration) []attended {
	var list []attended
	for _, m := range c.Attention {
		list = append(list, attended{CausalAttention(m.Batch, m.Heads, m.Sequence, m.HeadDim, m.HeadDim), m.Microseconds})
	}
	return list
}

func fitAttention(points []attended) (Attention, error) {
	a, fit, err := fitted(points, operations, operationsAndRows)
	if err != nil {
		return Attention{}, err
	}
	a.Fit = fit
	return *a, nil
}

// operations fits attention whose time depends only on the operations.
func operations(points []attended) (*Attention, bool) { return withRows(points, 0) }

// usualRowFlops is the starting value of the search for the cost of a row.
const usualRowFlops = 1e5

// operationsAndRows fits attention with an additional cost for rows.
func operationsAndRows(points []attended) (*Attention, bool) {
	at := descend([]float64{math.Log(usualRowFlops)}, func(logs []float64) float64 {
		a, ok := withRows(points, math.Exp(logs[0]))
		if !ok {
			return math.Inf(1)
		}
		return squares(points, a)
	})
	return withRows(points, math.Exp(at[0]))
}

// withRows fits attention with a given cost of rows.
func withRows(points []attended, rowFlops float64) (*Attention, bool) {
	a := &Attention{RowFlops: rowFlops}
	works := make([]exchanged, len(points))
	for i, p := range points {
		works[i] = exchanged{a.flops(p.AttentionWork), p.us}
	}
	var ok bool
	a.Line, ok = leastLine(works)
	return a, ok
}

// kernels is a measurement of count GEMMs, one after another, each of weights with rows.
type kernels struct{ count, weights, rows, us float64 }

func groupedKernels(c *Calibration) []kernels {
	var list []kernels
	for _, m := range c.Products {
		list = append(list, kernels{1, m.Experts * m.Hidden * 2 * m.Inter, m.TokensPerExpert, m.Microseconds})
	}
	return list
}

func denseKernels(c *Calibration) []kernels {
	var list []kernels
	for _, m := range c.Products {
		if m.Dense > 0 {
			list = append(list, kernels{m.Experts, m.Hidden * 2 * m.Inter, m.TokensPerExpert, m.Dense})
		}
	}
	return list
}

// bothMeasured returns the products that were measured with both kernels, which decide between the kernels.
func bothMeasured(c *Calibration) (list []MeasuredProducts) {
	for _, m := range c.Products {
		if m.Dense > 0 {
			list = append(list, m)
		}
	}
	return list
}

func (k kernels) microseconds() float64 { return k.us }

func (k kernels) compare(l kernels) int {
	return cmp.Or(cmp.Compare(k.rows, l.rows), cmp.Compare(k.weights*k.count, l.weights*l.count))
}

func (g GEMM) of(k kernels) float64 { return k.count * g.Microseconds(k.weights, k.rows) }

func fitGEMM(points []kernels) (GEMM, error) {
	if err := tooFew(points); err != nil {
		return GEMM{}, err
	}
	g, _ := leastGEMM(points)
	g.Fit = fitOf(points, g, heldOut(points, leastGEMM))
	return g, nil
}

// Starting rates of the search for a kernel's rates. The result does not depend on them within several orders of
// magnitude.
const usualBytesPerMicrosecond, usualFlopsPerMicrosecond = 3.09e6, 660e6

// leastGEMM minimizes the mean square of relative errors. It finds a model for any measurements.
func leastGEMM(points []kernels) (GEMM, bool) {
	model := func(logs []float64) GEMM {
		return GEMM{Floor: math.Exp(logs[0]), Start: math.Exp(logs[1]), BytesPerMicrosecond: math.Exp(logs[2]), FlopsPerMicrosecond: math.Exp(logs[3])}
	}
	shortest := math.Inf(1)
	for _, k := range points {
		shortest = min(shortest, k.us/k.count)
	}
	at := []float64{math.Log(shortest), math.Log(shortest / 2), math.Log(usualBytesPerMicrosecond), math.Log(usualFlopsPerMicrosecond)}
	return model(descend(at, func(logs []float64) float64 { return squares(points, model(logs)) })), true
}

// descend finds numbers of the least error from some on, by pattern search over their logarithms: a few numbers and a surface without rough places need
// no more.
func descend(at []float64, errorOf func(logs []float64) float64) []float64 {
	at = slices.Clone(at)
	least := errorOf(at)
	for step := 1.0; step > 1e-4; {
		improved := false
		for i := range at {
			for _, by := range []float64{step, -step} {
				next := slices.Clone(at)
				next[i] += by
				if e := errorOf(next); e < least {
					at, least, improved = next, e, true
				}
			}
		}
		if !improved {
			step /= 2
		}
	}
	return at
}
