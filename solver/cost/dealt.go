package cost

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// DefaultPlacement is what engines do without a plan: contiguous experts. Where the ranks do not divide the experts, it has the largest
// number of ranks below that does: engines refuse others without redundant experts.
func DefaultPlacement(layers []int, experts, ranks int) *placement.Placement {
	return placement.Contiguous(layers, experts, baselineRanks(&placement.Placement{Ranks: ranks, Experts: experts}))
}

// Dealt scores what serves without a plan: DefaultPlacement, with tokens or requests dealt out in turn. Its LAR is the BaselineLAR of every
// plan on the same requests. There are no bounds.
func Dealt(ctx context.Context, t *trace.Trace, attention placement.Attention, ranks int, o Options) (Report, error) {
	p := DefaultPlacement(t.Model.Layers, t.Model.Experts, ranks)
	o.WithoutBounds, o.Policy, o.RankCapacity, o.ScorePercent = true, dispatch.RoundRobin, nil, 0 // nothing is scored
	if attention == placement.DataParallel {
		return DataParallel(ctx, t, p, indifferent{}, o)
	}
	if err := o.validate(t, p); err != nil {
		return Report{}, err
	}
	return tensorParallel(ctx, t, p, &o, (*layerRun).dispatchInTurn)
}

// dispatchInTurn assigns the tokens to one rank after the other and counts.
func (r *layerRun) dispatchInTurn(positions []int) {
	own, next, batches := make([]int, min(r.options.BatchTokens, len(positions))), 0, 0
	for batch := range slices.Chunk(positions, r.options.BatchTokens) {
		for i := range batch {
			own[i] = next
			next = (next + 1) % r.placement.Ranks
		}
		r.count(batch, own)
		batches++
	}
	r.batchImbalance /= float64(batches)
	r.batchExpertImbalance /= float64(batches)
}

// indifferent knows nothing of a request.
type indifferent struct{}

func (indifferent) Score(dst []float32, _ int) { clear(dst) }
