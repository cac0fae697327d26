// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"context"
	"slices"

	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/placement/bound"
	"github.com/semmoe/operator/solver/trace"
)

// layerRun evaluates attention tensor parallelism in one MoE layer.
type layerRun struct {
	trace     *trace.Trace
	placement *placement.Placement
	options   *Options
	layer     int
	tally     *tally

	batchImbalance, batchExpertImbalance float64
	baseline, oracle, upper              float64
	// kinds are the domains of the trace's tokens; nil if not requested.
	kinds []uint8
	// scored is the rate if each token took the rank of its highest score, without balance.
	scored float64
}

func newLayerRun(t *trace.Trace, p *placement.Placement, layer int, o *Options) *layerRun {
	return &layerRun{
		trace: t, placement: p, options: o, layer: layer, tally: newTally(p, layer, kindsOf(t), o),
	}
}

// dispatch assigns the tokens batch by batch and counts them. It returns the context's error on cancellation.
func (r *layerRun) dispatch(ctx context.Context, forecast TokenForecast, positions []int) error {
	ranks := r.placement.Ranks
	shards, stream := dispatch.NewWeightedShards(ranks, r.options.RankCapacity), dispatch.NewWeightedStream(ranks, r.options.RankCapacity)
	scores := make([]float32, min(r.options.BatchTokens, len(positions))*ranks)
	own := make([]int, len(scores)/ranks)
	batches, local := 0, 0
	for batch := range slices.Chunk(positions, r.options.BatchTokens) {
		if err := ctx.Err(); err != nil {
			return err
		}
		for i, position := range batch {
			row := scores[i*ranks : (i+1)*ranks]
			forecast.Score(row, r.layer, position)
			local += r.localOn(highest(row), position)
			if r.options.Shards == FreeShards {
				own[i] = stream.Assign(row)
			}
		}
		if r.options.Shards == EqualShards {
			copy(own, shards.Assign(scores[:len(batch)*ranks]))
		}
		r.count(batch, own)
		batches++
	}
	r.batchImbalance /= float64(batches)
	r.batchExpertImbalance /= float64(batches)
	r.scored = float64(local) / float64(len(positions)*r.trace.Model.TopK)
	return nil
}

// highest returns the rank of the highest score, the first one among equals.
func highest(scores []float32) int {
	best := 0
	for rank, score := range scores {
		if score > scores[best] {
			best = rank
		}
	}
	return best
}

// localOn returns the number of a token's activations with a copy of their expert on a rank.
func (r *layerRun) localOn(rank, position int) int {
	local := 0
	for _, expert := range r.trace.Row(position, r.layer) {
		if r.tally.isLocal(int(expert), rank) {
			local++
		}
	}
	return local
}

func (r *layerRun) count(batch []int, own []int) {
	tokens, served := slices.Clone(r.tally.tokens), slices.Clone(r.tally.served)
	for i, position := range batch {
		local := r.tally.add(r.trace.Row(position, r.layer), own[i])
		if r.kinds != nil {
			r.tally.kinds[r.kinds[position]].add(own[i], local, r.trace.Model.TopK)
		}
	}
	for rank := range tokens {
		tokens[rank] = r.tally.tokens[rank] - tokens[rank]
		served[rank] = r.tally.served[rank] - served[rank]
	}
	r.batchImbalance += r.options.tokenImbalance(tokens)
	r.batchExpertImbalance += imbalance(served)
}

// countBaseline counts the baseline: contiguous experts, with tokens assigned round-robin.
func (r *layerRun) countBaseline(positions []int) {
	local := 0
	ranks, experts := baselineRanks(r.placement), r.placement.Experts
	for i, position := range positions {
		for _, expert := range r.trace.Row(position, r.layer) {
			if int(expert)*ranks/experts == i%ranks {
				local++
			}
		}
	}
	r.baseline = float64(local) / float64(len(positions)*r.trace.Model.TopK)
}

// bounds finds each token's best rank on its recorded experts, and the upper bound for all placements.
func (r *layerRun) bounds(positions []int) {
	model, ranks := r.trace.Model, r.placement.Ranks
	rows := bound.NewOccurrences(ranks, model.Experts, model.TopK)
	on, local := make([]int, ranks), r.placement.Local(r.layer)
	columns, ones := make([]int, model.TopK), slices.Repeat([]float64{1}, model.TopK)
	best := 0
	for _, position := range positions {
		clear(on)
		for k, expert := range r.trace.Row(position, r.layer) {
			columns[k] = int(expert)
			for _, rank := range local[expert] {
				on[rank]++
			}
		}
		squares := 0
		for _, n := range on {
			squares += n * n
		}
		best += slices.Max(on)
		if !r.placement.Redundant() {
			slices.Sort(columns)
			rows.Add(columns, ones, 1, float64(squares)/float64(model.TopK*model.TopK))
		}
	}
	r.oracle = float64(best) / float64(len(positions)*model.TopK)
	if r.placement.Redundant() {
		r.upper = float64(min(r.placement.SlotsPerRank, model.TopK)) / float64(model.TopK)
		return
	}
	// The oracle is not balanced, so the nuclear-norm bound must hold for any load.
	r.upper = min(rows.PerRow(), rows.Tangent(tangentSteps(model.Experts)), rows.Balanced(float64(ranks)))
}

// tangentSteps returns the number of eigendecompositions, more for small matrices.
func tangentSteps(size int) int {
	switch {
	case size <= 64:
		return 60
	case size <= 128:
		return 20
	default:
		return 0
	}
}
