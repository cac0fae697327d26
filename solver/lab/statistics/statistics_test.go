// SPDX-License-Identifier: Apache-2.0

package statistics_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/lab/statistics"
	"github.com/semmoe/operator/solver/trace"
)

var about = cmpopts.EquateApprox(0, 1e-9)

// byHand returns a trace of three requests over four experts, top-2, in two MoE layers. The first two requests are the
// train requests.
func byHand(t *testing.T) (*trace.Trace, []affinity.Counts) {
	t.Helper()
	tr := &trace.Trace{
		Model:  trace.Model{Experts: 4, TopK: 2, Vocabulary: 4, Layers: []int{0, 1}, HiddenLayers: 2},
		Tokens: []int32{0, 0, 1, 0, 0, 1, 2}, Offsets: []int64{0, 2, 4, 7}, Documents: []int32{0, 1, 2},
		// By position, layer 0 and then layer 1.
		Experts: []uint16{0, 1, 2, 3, 0, 1, 2, 3, 2, 3, 0, 1, 0, 2, 0, 1, 0, 1, 2, 3, 2, 0, 0, 1, 1, 3, 2, 3},
	}
	if err := tr.Validate(); err != nil {
		t.Fatal(err)
	}
	counts, err := affinity.CountTokens(t.Context(), tr, []int{0, 1})
	if err != nil {
		t.Fatal(err)
	}
	return tr, counts
}

// In layer 0 the profile has token 0 on experts 0 (3 times), 1 (2) and 2 (1), and token 1 on 2 and 3, once each. The
// test occurrences are token 0 on {0,1}: 2 hits; token 1 on {2,0}: 1 hit; the unseen token 2 on {1,3}.
func TestStaticTopK(t *testing.T) {
	tr, counts := byHand(t)
	got := statistics.StaticTopK(tr, []int{2}, 0, &counts[0])
	want := statistics.Prediction{Precision: 3. / 4, Recall: 3. / 6, F1: 0.6}
	if diff := cmp.Diff(want, got, about); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]uint16{0, 1}, statistics.Hottest(&counts[0], 0)); diff != "" {
		t.Error(diff)
	}
	if got := statistics.Hottest(&counts[0], 2); got != nil {
		t.Errorf("an unseen token has %v", got)
	}
	if diff := cmp.Diff(statistics.Seen{Once: 2. / 3, Often: 0}, statistics.SeenTokens(tr, []int{2}, &counts[0]), about); diff != "" {
		t.Error(diff)
	}
}

func TestKurtosis(t *testing.T) {
	for name, test := range map[string]struct {
		counts  []float32
		experts int
		want    float64
	}{
		"uniform":      {[]float32{2, 2, 2, 2}, 4, 0},
		"one of four":  {[]float32{1}, 4, 7. / 3},   // deviations 3/4 and three times 1/4: 4·(84/256)/(12/16)²
		"one of 64":    {[]float32{5}, 64, 62.0159}, // n - 2 + 1/(n-1)
		"half of four": {[]float32{3, 3}, 4, 1},
	} {
		if got := statistics.Kurtosis(test.counts, test.experts); math.Abs(got-test.want) > 1e-4 {
			t.Errorf("%s: %v; want %v", name, got, test.want)
		}
	}
}

// Token 0 has 6 activations, 5 of them of experts 0 and 1; token 1 has 2, both of its two experts. The rest is one
// activation of expert 2. Deviations of token 0's row (3,2,1,0) are 1.5, .5, .5, 1.5: 4·10.25/25; deviations of token
// 1's row are 1/2 each.
func TestConcentrations(t *testing.T) {
	_, counts := byHand(t)
	want := statistics.Concentration{Kurtosis: (3*1.64 + 1) / 4, Above8: 0, Covered: 7. / 8, RestHotness: 1, RestUniform: 0.5}
	if diff := cmp.Diff(want, statistics.Concentrations(&counts[0]), about); diff != "" {
		t.Error(diff)
	}
}

// Ranks of two experts have one partner per expert. Expert 0 was activated twice with 1 and once with 2, and so on. The
// diagonal does not count.
func TestCoactivation(t *testing.T) {
	together := []float32{
		3, 2, 1, 0,
		2, 2, 0, 0,
		1, 0, 2, 1,
		0, 0, 1, 1,
	}
	want := statistics.Partners{Share: (2. + 2 + 1 + 1) / 8, Uniform: 1. / 3}
	if diff := cmp.Diff(want, statistics.Coactivation(together, 4, 2), about); diff != "" {
		t.Error(diff)
	}
	if got := statistics.Coactivation(together, 4, 1); got.Share != 0 || got.Uniform != 0 {
		t.Errorf("ranks of one expert: %+v", got)
	}
	want = statistics.Partners{Share: (5. + 4 + 3 + 2) / 16, Uniform: 0.5}
	if diff := cmp.Diff(want, statistics.Transition(together, 4, 2), about); diff != "" {
		t.Error(diff)
	}
}

// Ranks hold experts {0,1} and {2,3}. In layer 0 the profile goes to ranks 0, 0, 1, 0 (experts 0 and 2 tie, the lower
// rank wins), in layer 1 to 1, 1, 0, 0. Rank 0 is followed by 1, 1, 0 and rank 1 by 0. The test goes 0, 0, 0 and then
// 1, 0, 1: 2 of 3 predictions are correct.
func TestRoutes(t *testing.T) {
	tr, _ := byHand(t)
	hosts := affinity.Hosts{{0}, {0}, {1}, {1}}
	routes := affinity.Routes(tr, []affinity.Hosts{hosts, hosts}, 2)
	if diff := cmp.Diff([][]uint16{{0, 0, 1, 0, 0, 0, 0}, {1, 1, 0, 0, 1, 0, 1}}, routes); diff != "" {
		t.Error(diff)
	}
	train, test := []int{0, 1}, []int{2}
	want := statistics.Guess{Confidence: 3. / 4, Accuracy: 2. / 3, Known: 1}
	if diff := cmp.Diff(want, statistics.LookBack(tr, train, test, routes, 1, 1, 2), about); diff != "" {
		t.Error(diff)
	}
	// Token 0 goes to rank 1 in two of three cases, token 1 to rank 0. The test has these tokens on 1 and 0, and an
	// unseen token.
	want = statistics.Guess{Confidence: 3. / 4, Accuracy: 2. / 3, Known: 2. / 3}
	if diff := cmp.Diff(want, statistics.ByToken(tr, train, test, routes[1], 2), about); diff != "" {
		t.Error(diff)
	}
}
