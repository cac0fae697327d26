// SPDX-License-Identifier: Apache-2.0

package affinity

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/trace"
)

// TestTransitions compares with a count by hand: four experts on two ranks, three layers, one expert per token.
func TestTransitions(t *testing.T) {
	tr := &trace.Trace{
		Model:  trace.Model{Experts: 4, TopK: 1, Vocabulary: 3, Layers: []int{0, 1, 2}, HiddenLayers: 3},
		Tokens: []int32{0, 1, 2, 0}, Offsets: []int64{0, 4}, Documents: []int32{0},
		// Ranks of the tokens in the three layers: 0 1 1, 0 1 0, 1 1 0, 1 1 0.
		Experts: []uint16{0, 2, 3, 1, 3, 0, 2, 2, 1, 3, 2, 1},
	}
	hosts := []Hosts{{{0}, {0}, {1}, {1}}, {{0}, {0}, {1}, {1}}, {{0}, {0}, {1}, {1}}}
	table, err := CountRankTransitions(t.Context(), tr, []int{0}, hosts, 2)
	if err != nil {
		t.Fatal(err)
	}
	const half, threeQuarters, all = 32768, 49151, ScoreScale
	want := &Transitions{
		Layers: 3, Ranks: 2,
		Rank: []uint16{0, 0, 0, 0 /* layer 1 */, 1, 1, 1, 1 /* layer 2 */, 0, 0, 0, 0},
		// A row of a layer is (rank in the previous layer, rank in the layer before); unseen sequences have the mean.
		Confidence: []uint16{half, half, half, half, all, all, all, all, threeQuarters, threeQuarters, half, all},
	}
	if diff := cmp.Diff(want, table); diff != "" {
		t.Error(diff)
	}
	tokens := &TokenTable{Layers: 3, Vocabulary: 3, Best: 1, Ranks: 2, Rank: make([]uint16, 9), Score: []uint16{0, 0, 0, 0, 0, 0, all, all, half}}
	for i := range 6 {
		tokens.Score[i] = half
	}
	f, dst := table.Forecast(tokens, hosts, tr), make([]float32, 2)
	for _, test := range []struct {
		layer, position int
		want            []float32
	}{
		{0, 0, []float32{half / float32(all), 1 - half/float32(all)}}, // the sequence has no higher confidence than the token
		{1, 0, []float32{half / float32(all), 1}},                     // the sequence has higher confidence and predicts the other rank
		{2, 0, []float32{1, 0}},                                       // the token has higher confidence
		{2, 2, []float32{1, 1 - half/float32(all)}},                   // the token has higher confidence
	} {
		if f.Score(dst, test.layer, test.position); !cmp.Equal(dst, test.want) {
			t.Errorf("layer %d, position %d: scores %v, want %v", test.layer, test.position, dst, test.want)
		}
	}
	if table, err := CountRankTransitions(t.Context(), tr, []int{0}, hosts, MaxTransitionRanks+1); table != nil || err != nil {
		t.Errorf("too many ranks: %v, %v", table, err)
	}
}
