// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"context"

	"github.com/semmoe/operator/solver/trace"
)

// Pairs contains the co-activations of one MoE layer by occurrence. A forecast that uses more than the token id can
// exploit this information, which the averages of token rows do not contain.
type Pairs struct {
	// Experts is the number of experts.
	Experts int
	// Together is, for each pair of experts, the number of occurrences of tokens that activated both, symmetric [N ×
	// N].
	Together []float32
	// Within is Together with each occurrence weighted by 1/(a-1), where a is the number of occurrences of its token
	// id; token ids that occur once count 0. Σ T Tᵀ/(a-1) minus Within is an unbiased estimate of the similarity of two
	// different occurrences of a token.
	Within []float32
}

// CountPairs counts the co-activations of the listed requests and returns one Pairs per MoE layer.
func CountPairs(ctx context.Context, t *trace.Trace, requests []int) ([]Pairs, error) {
	positions, start := groupByToken(t, requests)
	layers := make([]Pairs, len(t.Model.Layers))
	err := Parallel(ctx, len(layers), func(l int) {
		n := t.Model.Experts
		pairs := Pairs{n, make([]float32, n*n), make([]float32, n*n)}
		for id := range t.Model.Vocabulary {
			group := positions[start[id]:start[id+1]]
			weight := float32(0)
			if len(group) > 1 {
				weight = 1 / float32(len(group)-1)
			}
			for _, p := range group {
				pairs.add(t.Row(int(p), l), weight)
			}
		}
		layers[l] = pairs
	})
	return layers, err
}

func (p *Pairs) add(experts []uint16, weight float32) {
	for _, e := range experts {
		row := int(e) * p.Experts
		for _, f := range experts {
			p.Together[row+int(f)]++
			p.Within[row+int(f)] += weight
		}
	}
}

// CountTransitions returns, for each MoE layer but the last, how often a token of the listed requests activated one
// expert there and another in the next MoE layer [N × N].
func CountTransitions(ctx context.Context, t *trace.Trace, requests []int) ([][]float32, error) {
	n := t.Model.Experts
	layers := make([][]float32, len(t.Model.Layers)-1)
	err := Parallel(ctx, len(layers), func(l int) {
		counts := make([]float32, n*n)
		for _, r := range requests {
			for p := int(t.Offsets[r]); p < int(t.Offsets[r+1]); p++ {
				next := t.Row(p, l+1)
				for _, e := range t.Row(p, l) {
					for _, f := range next {
						counts[int(e)*n+int(f)]++
					}
				}
			}
		}
		layers[l] = counts
	})
	return layers, err
}
