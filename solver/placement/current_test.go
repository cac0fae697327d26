// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"strings"
	"testing"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// TestSolvingAgainMovesFewExperts starts from the placement of the same profile: the placement is kept, including the
// numbering of ranks.
func TestSolvingAgainMovesFewExperts(t *testing.T) {
	shape := tracetest.Small
	shape.Noise = 5
	for _, attention := range modes {
		p := problem(t, tracetest.Generate(shape, 1), attention, 4)
		first := solve(t, p)
		p.Current = first.Placement
		again := solve(t, p)
		if again.TrainLAR < first.TrainLAR*(1-5e-3) {
			t.Errorf("%s: %v from the current placement, %v from nothing", attention, again.TrainLAR, first.TrainLAR)
		}
		if moves := placement.Moves(first.Placement, again.Placement); moves > 6 {
			t.Errorf("%s: %d of 48 experts move although nothing changed", attention, moves)
		}
	}
}

func TestCurrentOfAnotherShapeIsRefused(t *testing.T) {
	p := problem(t, tracetest.Generate(tracetest.Small, 1), placement.TensorParallel, 4)
	p.Current = placement.Contiguous(p.Layers, 16, 8)
	if _, err := placement.Solve(t.Context(), p); err == nil || !strings.Contains(err.Error(), "the current placement has 16 experts in 3 MoE layers on 8 ranks") {
		t.Errorf("error %v", err)
	}
}

func TestCountsLoadLayerByLayer(t *testing.T) {
	p := problem(t, tracetest.Generate(tracetest.Small, 1), placement.TensorParallel, 4)
	want := solve(t, p)
	counts := p.Tokens
	p.Tokens, p.Experts = nil, 16
	p.LoadTokens = func(layer int) (*affinity.Counts, error) { return &counts[layer], nil }
	if got := solve(t, p); got.TrainLAR != want.TrainLAR || placement.Moves(want.Placement, got.Placement) != 0 {
		t.Errorf("%v, loaded %v", want.TrainLAR, got.TrainLAR)
	}
	p.Algorithm = placement.EPLB
	if _, err := placement.Solve(t.Context(), p); err == nil || !strings.Contains(err.Error(), "layer by layer") {
		t.Errorf("error %v", err)
	}
}

// TestManyTokensAreSampled has more token IDs than the search's sample: the value by the sample must be close to the
// value by all of them, which is hard with many ranks of few experts.
func TestManyTokensAreSampled(t *testing.T) {
	shape := tracetest.Shape{
		Experts: 32, TopK: 2, Layers: 1, Vocabulary: 4000, Domains: 2, DocumentsPerDomain: 20, RequestsPerDocument: 10, TokensPerRequest: 100, Noise: 20,
	}
	p := problem(t, tracetest.Generate(shape, 1), placement.TensorParallel, 32)
	all, sampled := placement.ValueSampled(t.Context(), p, 1<<30), placement.ValueSampled(t.Context(), p, 1<<10)
	if diff := sampled/all - 1; diff > 0.03 || diff < -0.03 {
		t.Errorf("the contiguous placement is worth %v by all token ids, %v by a sample", all, sampled)
	}
}
