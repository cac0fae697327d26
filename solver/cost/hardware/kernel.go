// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"cmp"
	"math"
	"slices"
)

// Kernel is the kind of GEMM kernel for a rank's experts, with its time.
type Kernel struct {
	// Grouped means one kernel for all experts, else one for each expert.
	Grouped      bool
	Microseconds float64
}

// Choose returns whether grouped or dense kernels are faster for the gate and up projections of a rank's experts. It
// interpolates the measured products of the nearest sizes between loads. Without measurements, the models decide.
func (p *Profile) Choose(hidden, inter, experts, tokensPerExpert float64) Kernel {
	table := p.nearest(hidden, inter, experts)
	var grouped, dense float64
	if len(table) == 0 {
		weights := hidden * 2 * inter
		grouped, dense = p.Grouped.Microseconds(experts*weights, tokensPerExpert), experts*p.Dense.Microseconds(weights, tokensPerExpert)
	} else {
		grouped = interpolated(table, tokensPerExpert, func(m MeasuredProducts) float64 { return m.Microseconds })
		dense = interpolated(table, tokensPerExpert, func(m MeasuredProducts) float64 { return m.Dense })
	}
	return Kernel{Grouped: grouped <= dense, Microseconds: min(grouped, dense)}
}

// nearest returns the products of the sizes with the nearest ratios, by load. Their times are scaled to the work of the
// given sizes.
func (p *Profile) nearest(hidden, inter, experts float64) []MeasuredProducts {
	far := func(m MeasuredProducts) float64 {
		return math.Abs(math.Log(m.Hidden/hidden)) + math.Abs(math.Log(m.Inter/inter)) + math.Abs(math.Log(m.Experts/experts))
	}
	least := math.Inf(1)
	for _, m := range p.Products {
		least = min(least, far(m))
	}
	var table []MeasuredProducts
	for _, m := range p.Products {
		if far(m) == least {
			scale := hidden * inter * experts / (m.Hidden * m.Inter * m.Experts)
			m.Microseconds, m.Dense = m.Microseconds*scale, m.Dense*scale
			table = append(table, m)
		}
	}
	slices.SortStableFunc(table, func(a, b MeasuredProducts) int { return cmp.Compare(a.TokensPerExpert, b.TokensPerExpert) })
	return table
}

// interpolated returns the time at a load, by linear interpolation between logarithms. Below the table it is the time
// of the smallest load, where kernels are limited by reading weights. Above the table it is proportional to the load.
func interpolated(table []MeasuredProducts, tokens float64, us func(MeasuredProducts) float64) float64 {
	last := table[len(table)-1]
	switch at := slices.IndexFunc(table, func(m MeasuredProducts) bool { return m.TokensPerExpert >= tokens }); {
	case at < 0:
		return us(last) * tokens / last.TokensPerExpert
	case at == 0:
		return us(table[0])
	default:
		a, b := table[at-1], table[at]
		part := math.Log(tokens/a.TokensPerExpert) / math.Log(b.TokensPerExpert/a.TokensPerExpert)
		return us(a) * math.Pow(us(b)/us(a), part)
	}
}
