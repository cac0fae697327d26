// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/trace"
)

// maxScores is the maximum number of cached scores: 512 MiB.
const maxScores = 1 << 27

// cachedScores contains the scores of a forecast for some requests of a trace. The same tokens are dispatched at many
// rates, and a context-based forecast takes microseconds per token.
type cachedScores struct {
	layers, ranks int
	// at is the index of each position of the trace among the scored positions; rows are [scored positions × layers ×
	// ranks].
	at   []int
	rows []float32
}

// cacheScores returns a forecast with cached scores of the requests' tokens, or f itself if there are too many tokens.
func cacheScores(ctx context.Context, t *trace.Trace, f cost.TokenForecast, requests []Request, ranks int) (cost.TokenForecast, error) {
	layers := len(t.Model.Layers)
	r := &cachedScores{layers: layers, ranks: ranks, at: make([]int, len(t.Tokens))}
	var sources []int
	known, positions := make([]bool, t.Requests()), 0
	for _, request := range requests {
		if known[request.Source] {
			continue
		}
		known[request.Source] = true
		sources = append(sources, request.Source)
		for position := t.Offsets[request.Source]; position < t.Offsets[request.Source+1]; position++ {
			r.at[position] = positions
			positions++
		}
	}
	if positions*layers*ranks > maxScores {
		return f, nil
	}
	r.rows = make([]float32, positions*layers*ranks)
	// Forecasts require that positions of a layer are scored sequentially.
	err := affinity.Parallel(ctx, layers, func(layer int) {
		for _, source := range sources {
			for position := int(t.Offsets[source]); position < int(t.Offsets[source+1]); position++ {
				f.Score(r.row(layer, position), layer, position)
			}
		}
	})
	return r, err
}

func (r *cachedScores) row(layer, position int) []float32 {
	at := (r.at[position]*r.layers + layer) * r.ranks
	return r.rows[at : at+r.ranks]
}

// Score fills dst with the cached score.
func (r *cachedScores) Score(dst []float32, layer, position int) { copy(dst, r.row(layer, position)) }
