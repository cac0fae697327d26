// SPDX-License-Identifier: Apache-2.0

package forecast_test

import (
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// foreseen returns a trace with a look-ahead that misses the given percentage of the actual experts.
func foreseen(seed uint64, missPercent int) *trace.Trace {
	tr := tracetest.Generate(tracetest.Small, seed)
	tracetest.AddLookAhead(tr, 5, missPercent, seed)
	return tr
}

func trainedLookAhead(t *testing.T, tr *trace.Trace) *forecast.LookAhead {
	t.Helper()
	m, err := forecast.TrainLookAhead(t.Context(), tr, tr.AllRequests()[:tr.Requests()/2], 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Validate(); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestLookAheadMargins checks raw scores: of two experts, the first is four times as probable as the threshold between
// the second and the third.
func TestLookAheadMargins(t *testing.T) {
	m := forecast.RawLookAhead(&trace.Model{Experts: 4, TopK: 2, Layers: []int{0}})
	r := m.Ranks(0, [][]int{{0}, {0}, {1}, {1, 0}})
	dst := make([]float32, 2)
	// Scores are one less than powers of two, because logScore adds one.
	r.Score(dst, forecast.Observation{Experts: []uint16{2, 0, 3}, Scores: []uint16{1<<14 - 1, 1<<12 - 1, 1<<12 - 1}})
	chance := func(margin float64) float64 { return 1 / (1 + math.Exp(-2*margin)) }
	two, none := chance(math.Log(4)), chance(-4)
	total := two + 2*chance(0) + none
	want := []float64{(2*chance(0) + none) / total, (two + chance(0)) / total}
	for rank, score := range dst {
		if math.Abs(float64(score)-want[rank]) > 1e-5 {
			t.Errorf("scores %v, want %v", dst, want)
		}
	}
}

// TestLookAheadLearns trains on look-aheads that always confuse two experts; the correction reverts the confusion.
func TestLookAheadLearns(t *testing.T) {
	tr := foreseen(1, 0)
	for i, expert := range tr.LookAhead.Experts {
		tr.LookAhead.Experts[i] = (expert + 5) % uint16(tr.Model.Experts)
	}
	local := func(m *forecast.LookAhead) float64 {
		h, dst, sum, n := hosts(tr), make([]float32, ranks), 0, 0
		f := m.Bind(h, tr)
		for p := int(tr.Offsets[tr.Requests()/2]); p < len(tr.Tokens); p++ {
			for l := range tr.Model.Layers {
				f.Score(dst, l, p)
				best := slices.Index(dst, slices.Max(dst))
				for _, expert := range tr.Row(p, l) {
					if h[l][expert][0] == best {
						sum++
					}
					n++
				}
			}
		}
		return float64(sum) / float64(n)
	}
	raw, corrected := local(forecast.RawLookAhead(&tr.Model)), local(trainedLookAhead(t, tr))
	if raw > 0.25 || corrected < 0.5 {
		t.Errorf("local share %.3f raw, %.3f corrected", raw, corrected)
	}
}

// TestLookAheadUsesOnlyAvailableInformation changes all information that a look-ahead must not use, and information
// that it may use.
func TestLookAheadUsesOnlyAvailableInformation(t *testing.T) {
	tr := foreseen(2, 20)
	position, layer := len(tr.Tokens)/2, 1
	for name, m := range map[string]*forecast.LookAhead{"raw": forecast.RawLookAhead(&tr.Model), "corrected": trainedLookAhead(t, tr)} {
		score := func(of *trace.Trace) []float32 {
			dst := make([]float32, ranks)
			m.Bind(hosts(of), of).Score(dst, layer, position)
			return dst
		}
		want := score(tr)
		if moved := !slices.Equal(want, score(change(tr, true, func(p, l int) bool { return p != position || l != layer-1 }))); moved {
			t.Errorf("%s: the score depends on tokens, other positions, or routes of this or later layers", name)
		}
		moved := !slices.Equal(want, score(change(tr, false, func(p, l int) bool { return p == position && l == layer-1 })))
		if moved != (name == "corrected") {
			t.Errorf("%s: the score depends on the routes of the previous layer: %v", name, moved)
		}
		other := *tr
		other.LookAhead = &trace.LookAhead{Width: tr.LookAhead.Width, Experts: slices.Clone(tr.LookAhead.Experts), Scores: tr.LookAhead.Scores}
		experts, _ := other.LookAheadRow(position, layer)
		for i := range experts {
			experts[i] = (experts[i] + 5) % uint16(tr.Model.Experts)
		}
		if slices.Equal(want, score(&other)) {
			t.Errorf("%s: the score does not depend on the look-ahead", name)
		}
	}
}

func TestLookAheadTrainingIsDeterministic(t *testing.T) {
	tr := foreseen(3, 20)
	before := runtime.GOMAXPROCS(1)
	first := trainedLookAhead(t, tr)
	runtime.GOMAXPROCS(4)
	again := trainedLookAhead(t, tr)
	runtime.GOMAXPROCS(before)
	if diff := cmp.Diff(first, again); diff != "" {
		t.Error(diff)
	}
}

func TestLookAheadRefuses(t *testing.T) {
	tr := foreseen(4, 20)
	m := trainedLookAhead(t, tr)
	for name, test := range map[string]struct {
		change func(*trace.Trace)
		want   string
	}{
		"none":     {func(t *trace.Trace) { t.LookAhead = nil }, "no look-ahead"},
		"narrow":   {func(t *trace.Trace) { t.LookAhead = &trace.LookAhead{Width: 2} }, "has 2 experts per look-ahead"},
		"layers":   {func(t *trace.Trace) { t.Model.Layers = t.Model.Layers[1:] }, "the trace has 2 layers"},
		"activate": {func(t *trace.Trace) { t.Model.TopK = 1 }, "top-1 of 16"},
	} {
		other := *tr
		test.change(&other)
		if err := m.Fits(&other); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	plain := *tr
	plain.LookAhead = nil
	if _, err := forecast.TrainLookAhead(t.Context(), &plain, plain.AllRequests(), 1, nil); err == nil || !strings.Contains(err.Error(), "add it with semmoe-lab lookahead") {
		t.Errorf("error %v", err)
	}
}
