package simulate

import (
	"context"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/trace"
)

// mostScores bounds the scores that are remembered: 512 MiB of them.
const mostScores = 1 << 27

// scores are those of a forecast for some requests of a trace: the same tokens are dispatched at many rates, and a forecast by context takes
// microseconds for each.
type scores struct {
	layers, ranks int
	// at is the number of each position of the trace among those that are scored; rows are [scored positions × layers × ranks].
	at   []int
	rows []float32
}

// remember returns a forecast that scores the tokens of the requests as the given one does. It is that one where there are too many.
func remember(ctx context.Context, t *trace.Trace, f cost.TokenForecast, requests []Request, ranks int) (cost.TokenForecast, error) {
	layers := len(t.Model.Layers)
	r := &scores{layers: layers, ranks: ranks, at: make([]int, len(t.Tokens))}
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
	if positions*layers*ranks > mostScores {
		return f, nil
	}
	r.rows = make([]float32, positions*layers*ranks)
	// A forecast is asked for the positions of a layer one after the other.
	err := affinity.Parallel(ctx, layers, func(layer int) {
		for _, source := range sources {
			for position := int(t.Offsets[source]); position < int(t.Offsets[source+1]); position++ {
				f.Score(r.row(layer, position), layer, position)
			}
		}
	})
	return r, err
}

func (r *scores) row(layer, position int) []float32 {
	at := (r.at[position]*r.layers + layer) * r.ranks
	return r.rows[at : at+r.ranks]
}

// Score fills dst with what the forecast has scored.
func (r *scores) Score(dst []float32, layer, position int) { copy(dst, r.row(layer, position)) }
