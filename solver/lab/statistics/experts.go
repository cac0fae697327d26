// SPDX-License-Identifier: Apache-2.0

package statistics

// Partners describes how concentrated the partners of experts are.
type Partners struct {
	// Share is the share of an expert's pairs with its most frequent partners, averaged over experts by their pairs.
	// The number of partners is the number that would share its rank. Uniform is the value for equally frequent
	// partners.
	Share   float64 `json:"share"`
	Uniform float64 `json:"uniform"`
}

// Coactivation returns the partners among the experts that a token activates together in a layer [N × N], without the
// diagonal. A rank has size experts (Occult, GRACE-MoE).
func Coactivation(together []float32, experts, size int) Partners {
	p := partners(experts, size-1, func(e, f int) float64 {
		if e == f {
			return 0
		}
		return float64(together[e*experts+f])
	})
	p.Uniform = float64(size-1) / float64(max(experts-1, 1))
	return p
}

// Transition returns the partners of an expert among the experts that the same token activates in the next MoE layer [N
// × N] (ExFlow, MoETuner).
func Transition(counts []float32, experts, size int) Partners {
	p := partners(experts, size, func(e, f int) float64 { return float64(counts[e*experts+f]) })
	p.Uniform = float64(size) / float64(experts)
	return p
}

func partners(experts, count int, pairs func(e, f int) float64) Partners {
	kept, total := 0.0, 0.0
	row := make([]float64, experts)
	for e := range experts {
		for f := range row {
			row[f] = pairs(e, f)
			total += row[f]
		}
		kept += largest(row, count)
	}
	return Partners{Share: kept / max(total, 1)}
}
