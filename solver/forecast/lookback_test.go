// SPDX-License-Identifier: Apache-2.0

package forecast_test

import (
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// trainedLookBack returns a look-back of the first half of the requests and its token table.
func trainedLookBack(t *testing.T, tr *trace.Trace, depth int) (*forecast.LookBack, *affinity.TokenTable) {
	t.Helper()
	train := tr.AllRequests()[:tr.Requests()/2]
	counts, err := affinity.CountTokens(t.Context(), tr, train)
	if err != nil {
		t.Fatal(err)
	}
	m, err := forecast.TrainLookBack(t.Context(), tr, train, hosts(tr), ranks, depth, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Validate(); err != nil {
		t.Fatal(err)
	}
	return m, affinity.NewTokenTable(counts, hosts(tr), ranks, ranks, affinity.Estimator{Shrinkage: 1})
}

// scorer is a forecast bound to a trace.
type scorer interface {
	Score(dst []float32, layer, position int)
}

// localShare returns the share of local activations in the second half of the requests if every token goes to its best
// rank.
func localShare(tr *trace.Trace, f scorer) float64 {
	h, dst, routed, sum, n := hosts(tr), make([]float32, ranks), make([]float32, ranks), 0.0, 0
	for p := int(tr.Offsets[tr.Requests()/2]); p < len(tr.Tokens); p++ {
		for l := range tr.Model.Layers {
			f.Score(dst, l, p)
			affinity.RankShares(routed, tr.Row(p, l), h[l])
			sum += float64(routed[slices.Index(dst, slices.Max(dst))])
			n++
		}
	}
	return sum / float64(n)
}

// TestLookBackBeatsTheMerge compares the look-back on real routes with the token table, and with the papers' merge of
// the same evidence.
func TestLookBackBeatsTheMerge(t *testing.T) {
	tr, err := trace.Open(t.Context(), "../testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	merge, err := affinity.CountRankTransitions(t.Context(), tr, tr.AllRequests()[:tr.Requests()/2], hosts(tr), ranks)
	if err != nil {
		t.Fatal(err)
	}
	_, tokens := trainedLookBack(t, tr, 1)
	table, merged := localShare(tr, tokens.Forecast(tr)), localShare(tr, merge.Forecast(tokens, hosts(tr), tr))
	for _, depth := range []int{2, 3} {
		m, _ := trainedLookBack(t, tr, depth)
		if got := localShare(tr, m.Bind(tokens, hosts(tr), tr)); got < merged || got <= table {
			t.Errorf("%d layers: local share %.4f; %.4f with the papers' merge, %.4f with token ids", depth, got, merged, table)
		}
	}
}

// TestLookBackScoresAreShares also scores positions in arbitrary order.
func TestLookBackScoresAreShares(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 3)
	for depth := 1; depth <= forecast.LookBackDepth(ranks); depth++ {
		m, tokens := trainedLookBack(t, tr, depth)
		f, dst := m.Bind(tokens, hosts(tr), tr), make([]float32, ranks)
		for i := range tr.Tokens {
			f.Score(dst, i%m.Layers, (i*7919)%len(tr.Tokens))
			sum := 0.0
			for _, share := range dst {
				if !(share >= 0 && share <= 1) {
					t.Fatalf("%d layers: score %v", depth, share)
				}
				sum += float64(share)
			}
			if math.Abs(sum-1) > 1e-4 {
				t.Fatalf("%d layers: the scores %v sum to %v", depth, dst, sum)
			}
		}
	}
}

// TestLookBackWithoutEvidence expects the token's row where nothing is known: in the first layer, and everywhere with a
// profile of a single document, for which no other document remains to evaluate sequences.
func TestLookBackWithoutEvidence(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 4)
	m, tokens := trainedLookBack(t, tr, 2)
	nothing, err := forecast.TrainLookBack(t.Context(), tr, tr.AllRequests()[:1], hosts(tr), ranks, 2, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	want, got := make([]float32, ranks), make([]float32, ranks)
	for p := range tr.Tokens {
		for l := range tr.Model.Layers {
			tokens.Forecast(tr).Score(want, l, p)
			nothing.Bind(tokens, hosts(tr), tr).Score(got, l, p)
			if l == 0 {
				m.Bind(tokens, hosts(tr), tr).Score(got, l, p)
			}
			if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b float32) bool { return math.Abs(float64(a-b)) < 1e-5 })); diff != "" {
				t.Fatalf("layer %d, position %d: %s", l, p, diff)
			}
		}
	}
}

// TestLookBackSequences checks by hand which factors apply to a token's shares: two ranks, three layers, sequences of
// two.
func TestLookBackSequences(t *testing.T) {
	tr := &trace.Trace{
		Model:  trace.Model{Experts: 2, TopK: 1, Vocabulary: 1, Layers: []int{0, 1, 2}, HiddenLayers: 3},
		Tokens: []int32{0}, Offsets: []int64{0, 1}, Documents: []int32{0}, Experts: []uint16{0, 1, 0},
	}
	h := []affinity.Hosts{{{0}, {1}}, {{0}, {1}}, {{0}, {1}}}
	const half = 32768
	tokens := &affinity.TokenTable{Layers: 3, Vocabulary: 1, Best: 1, Ranks: 2, Rank: make([]uint16, 3), Score: []uint16{half, half, half}}
	m := &forecast.LookBack{Layers: 3, Ranks: 2, Depth: 2, Factor: slices.Repeat([]float32{1}, 24)}
	m.Factor[0] = 3    // layer 0
	m.Factor[8+1] = 3  // layer 1: rank 0 in layer 0, no earlier layer
	m.Factor[16+4] = 7 // layer 2: rank 1 in layer 1, rank 0 in layer 0
	dst := make([]float32, 2)
	for layer, want := range []float64{0.75, 0.25, 0.875} {
		m.Bind(tokens, h, tr).Score(dst, layer, 0)
		if math.Abs(float64(dst[0])-want) > 1e-4 || math.Abs(float64(dst[1])-(1-want)) > 1e-4 {
			t.Errorf("layer %d: scores %v; want %v of rank 0", layer, dst, want)
		}
	}
}

// TestLookBackUsesOnlyAvailableInformation changes all information that a look-back must not use, and information that
// it may use.
func TestLookBackUsesOnlyAvailableInformation(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 2)
	m, tokens := trainedLookBack(t, tr, 2)
	position, layer := len(tr.Tokens)/2, 2
	score := func(of *trace.Trace) []float32 {
		dst := make([]float32, ranks)
		m.Bind(tokens, hosts(of), of).Score(dst, layer, position)
		return dst
	}
	want := score(tr)
	if got := score(change(tr, true, func(p, _ int) bool { return p != position })); !slices.Equal(want, got) {
		t.Error("the score depends on other positions")
	}
	if got := score(change(tr, false, func(p, l int) bool { return p == position && l >= layer })); !slices.Equal(want, got) {
		t.Error("the score depends on routes of the layer")
	}
	if got := score(change(tr, false, func(p, l int) bool { return p == position && l < layer })); slices.Equal(want, got) {
		t.Error("the score does not depend on the routes of earlier layers")
	}
}

func TestLookBackTrainingIsDeterministic(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 5)
	before := runtime.GOMAXPROCS(1)
	first, _ := trainedLookBack(t, tr, 3)
	runtime.GOMAXPROCS(4)
	again, _ := trainedLookBack(t, tr, 3)
	runtime.GOMAXPROCS(before)
	if diff := cmp.Diff(first, again); diff != "" {
		t.Error(diff)
	}
}

func TestLookBackDepth(t *testing.T) {
	for ranks, want := range map[int]int{1: 4, 4: 4, 9: 4, 10: 3, 16: 3, 17: 2, 40: 2, 41: 1, 256: 1, 257: 0} {
		if got := forecast.LookBackDepth(ranks); got != want {
			t.Errorf("%d ranks: %d layers, want %d", ranks, got, want)
		}
	}
}

func TestLookBackRefuses(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 6)
	for _, depth := range []int{0, 5} {
		if _, err := forecast.TrainLookBack(t.Context(), tr, tr.AllRequests(), hosts(tr), ranks, depth, 1, nil); err == nil || !strings.Contains(err.Error(), "allowed is 1 to 4") {
			t.Errorf("%d layers: error %v", depth, err)
		}
	}
	for name, test := range map[string]struct {
		change func(*forecast.LookBack)
		want   string
	}{
		"depth":    {func(m *forecast.LookBack) { m.Depth = 0 }, "the look-back is 0 layers for 4 ranks; allowed is 1 to 4"},
		"length":   {func(m *forecast.LookBack) { m.Factor = m.Factor[1:] }, "the look-back has 47 factors; 3 layers of 4 ranks need 48"},
		"zero":     {func(m *forecast.LookBack) { m.Factor[3] = 0 }, "a factor of the look-back is 0"},
		"infinite": {func(m *forecast.LookBack) { m.Factor[3] = float32(math.Inf(1)) }, "a factor of the look-back is +Inf"},
		"NaN":      {func(m *forecast.LookBack) { m.Factor[3] = float32(math.NaN()) }, "a factor of the look-back is NaN"},
	} {
		m, _ := trainedLookBack(t, tr, 1)
		test.change(m)
		if err := m.Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
}
