package affinity

import (
	"context"

	"github.com/semmoe/operator/solver/trace"
)

// Pairs are the co-activations of one MoE layer, occurrence by occurrence: what a forecast that sees more than the token
// id can exploit, and token rows average away.
type Pairs struct {
	// Experts is the number of experts.
	Experts int
	// Together is, for each two experts, the number of occurrences of tokens that activated both, symmetric [N × N].
	Together []float32
	// Within is the same with each occurrence weighted by 1/(a-1), a being the number of occurrences of its token id; a token
	// id that occurs once counts nothing. Σ T Tᵀ/(a-1) less Within estimates, without bias, how alike two different
	// occurrences of a token are.
	Within []float32
}

// CountPairs counts the listed requests, one Pairs for each MoE layer.
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

// CountTransitions counts, for each MoE layer but the last, how often a token of the listed requests activated an expert there
// and one in the next MoE layer [N × N].
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
