// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// DefaultPlacement returns the placement of engines without a plan: contiguous experts. If the number of ranks does not
// divide the number of experts, it uses the next smaller number that does, because engines reject other numbers without
// redundant experts.
func DefaultPlacement(layers []int, experts, ranks int) *placement.Placement {
	return placement.Contiguous(layers, experts, baselineRanks(&placement.Placement{Ranks: ranks, Experts: experts}))
}

// EvaluateBaseline scores serving without a plan: DefaultPlacement, with tokens or requests assigned round-robin. Its LAR is the
// BaselineLAR of every plan on the same requests. It computes no bounds.
func EvaluateBaseline(ctx context.Context, t *trace.Trace, attention placement.Attention, ranks int, o Options) (Report, error) {
	p := DefaultPlacement(t.Model.Layers, t.Model.Experts, ranks)
	o.WithoutBounds, o.Policy, o.RankCapacity, o.ScorePercent = true, dispatch.RoundRobin, nil, 0 // no scores
	if attention == placement.DataParallel {
		return DataParallel(ctx, t, p, noScores{}, o)
	}
	if err := o.validate(t, p); err != nil {
		return Report{}, err
	}
	return tensorParallel(ctx, t, p, &o, (*layerRun).dispatchRoundRobin)
}

// dispatchRoundRobin assigns the tokens round-robin and counts them.
func (r *layerRun) dispatchRoundRobin(positions []int) error {
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
	return nil
}

// noScores is a forecast without information about requests.
type noScores struct{}

func (noScores) Score(dst []float32, _ int) { clear(dst) }

// NoForecast gives all ranks the same score, so that tokens are assigned round-robin.
type NoForecast struct{}

// Score sets all scores to 0.
func (NoForecast) Score(dst []float32, _, _ int) { clear(dst) }
