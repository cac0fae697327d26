// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
)

func machines(t testing.TB) *hardware.Profile {
	t.Helper()
	p, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// profiles returns the built-in profile, and one with a separate fit for large exchanges.
func profiles(t *testing.T) []*hardware.Profile {
	t.Helper()
	text, err := os.ReadFile("../lab/simulate/testdata/h200x2.json")
	if err != nil {
		t.Fatal(err)
	}
	p, err := hardware.Parse(text)
	if err != nil || p.AllToAll.Large == nil {
		t.Fatalf("all-to-alls are %+v, error %v", p, err)
	}
	return []*hardware.Profile{machines(t), p}
}

// backbone returns the shape of DeepSeek-V2.
func backbone() *pipeline.Shape {
	return &pipeline.Shape{
		HiddenLayers: 60, MoELayers: 59, Experts: 160, TopK: 6, Hidden: 5120, ExpertSize: 1536, SharedSize: 3072, DenseSize: 12288,
		Heads: 128, KVHeads: 128, QueryDim: 192, ValueDim: 128, KVRank: 512, QueryRank: 1536, RopeDim: 64,
	}
}

// small returns the shape of Qwen3-30B-A3B.
func small() *pipeline.Shape {
	return &pipeline.Shape{
		HiddenLayers: 48, MoELayers: 48, Experts: 128, TopK: 8, Hidden: 2048, ExpertSize: 768, Heads: 32, KVHeads: 4, QueryDim: 128, ValueDim: 128,
	}
}

func made(t *testing.T, shape *pipeline.Shape, in Inputs) *Schedule {
	t.Helper()
	return madeFor(t, machines(t), shape, in)
}

func madeFor(t *testing.T, p *hardware.Profile, shape *pipeline.Shape, in Inputs) *Schedule {
	t.Helper()
	s, err := Of(shape, p, in)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(in.Ranks); err != nil {
		t.Fatalf("what was made is refused: %v", err)
	}
	return s
}

// Each length has the plan that the search finds for it, which is at least as good as its baselines, within the limit
// of tokens in memory.
func TestEachLengthHasItsBestPlan(t *testing.T) {
	for _, p := range profiles(t) {
		for name, c := range map[string]struct {
			shape *pipeline.Shape
			ranks int
		}{"8 ranks": {backbone(), 8}, "4 ranks": {small(), 4}, "2 ranks": {small(), 2}, "96 ranks": {backbone(), 96}} {
			s := madeFor(t, p, c.shape, Inputs{c.ranks, max(1, c.shape.Experts/c.ranks), 0.3})
			if len(s.Disaggregated) != len(lengths) || len(s.Shared) != len(loads) || s.Hardware != p.Name || s.Ranks != c.ranks {
				t.Fatalf("%s: %d lengths and %d loads by %s on %d ranks", name, len(s.Disaggregated), len(s.Shared), s.Hardware, s.Ranks)
			}
			for i, l := range s.Disaggregated {
				if l.Sequence != lengths[i] || l.Samples*l.Sizes.MicroBatches*l.Sequence > s.TokensHeld {
					t.Errorf("%s, length %d: %d micro-batches of %d samples of %d tokens", name, lengths[i], l.Sizes.MicroBatches, l.Samples, l.Sequence)
				}
				if l.TokensPerSecond < l.PPPipeTokensPerSecond*(1-1e-9) || l.TokensPerSecond < l.NaiveTokensPerSecond*(1-1e-9) || l.TokensPerSecond > l.BoundTokensPerSecond*(1+1e-9) {
					t.Errorf("%s, length %d: %+v", name, l.Sequence, l)
				}
				if drawing, err := l.Draw(l.Sequence, 2); err != nil || !strings.HasPrefix(string(drawing), "<svg ") {
					t.Errorf("%s, length %d: the drawing is %.40q, error %v", name, l.Sequence, drawing, err)
				}
			}
		}
	}
}

// Groups never make a layer slower, their number is at most the number of experts, and loads dominated by start-up
// times have one group.
func TestGroupsPay(t *testing.T) {
	for _, p := range profiles(t) {
		checkGroups(t, p)
	}
	// Local activations are not exchanged.
	remote, local := made(t, small(), Inputs{8, 16, 0.125}), made(t, small(), Inputs{8, 16, 0.9})
	for i := range remote.Shared {
		if local.Shared[i].Ungrouped >= remote.Shared[i].Ungrouped {
			t.Errorf("%d tokens: %v µs with 90%% local, %v with 12.5%%", remote.Shared[i].TokensPerRank, local.Shared[i].Ungrouped, remote.Shared[i].Ungrouped)
		}
	}
}

func checkGroups(t *testing.T, p *hardware.Profile) {
	t.Helper()
	for _, lar := range []float64{0, 0.125, 0.5, 1} {
		before := 0.0
		for _, l := range madeFor(t, p, small(), Inputs{8, 16, lar}).Shared {
			if l.Time > l.Ungrouped*(1+1e-9) || l.Groups == 1 && l.Time != l.Ungrouped || 16%l.Groups != 0 {
				t.Errorf("local %v, %d tokens: %+v", lar, l.TokensPerRank, l)
			}
			if (l.Multiprocessors > 0) != (l.Groups > 1) || l.Multiprocessors > exchangeMultiprocessors {
				t.Errorf("local %v, %d tokens: %d multiprocessors for %d groups", lar, l.TokensPerRank, l.Multiprocessors, l.Groups)
			}
			if l.Time < before {
				t.Errorf("local %v: %d tokens take %v µs, fewer %v", lar, l.TokensPerRank, l.Time, before)
			}
			before = l.Time
			if l.TokensPerRank == loads[0] && l.Groups != 1 {
				t.Errorf("local %v: %d tokens are worked off in %d groups", lar, l.TokensPerRank, l.Groups)
			}
		}
	}
}

// The time with one group is the sum of its stages.
func TestUngroupedByHand(t *testing.T) {
	p, shape := machines(t), small()
	const tokens, lar = 4096, 0.25
	weights, rows := 2048.0*768, tokens*8/16.0
	exchange := p.AllToAll.Microseconds(tokens * 8 * (1 - lar) * 2048 * 2)
	want := 2*exchange + p.Grouped.Microseconds(2*16*weights, rows) + p.Grouped.Microseconds(16*weights, rows)
	for _, l := range made(t, shape, Inputs{8, 16, lar}).Shared {
		if l.TokensPerRank == tokens && (l.Kernel != Grouped || math.Abs(l.Ungrouped/want-1) > 1e-9) {
			t.Errorf("%+v; wanted are grouped kernels and %v µs", l, want)
		}
	}
}

func TestOfASingleRank(t *testing.T) {
	if s, err := Of(small(), machines(t), Inputs{1, 128, 1}); s != nil || err != nil {
		t.Errorf("%+v, %v", s, err)
	}
}

// Lengths without sufficient memory are omitted, possibly all of them.
func TestWithoutRoom(t *testing.T) {
	if s := made(t, backbone(), Inputs{2, 80, 0.5}); len(s.Disaggregated) != 0 || len(s.Shared) != len(loads) {
		t.Errorf("%d lengths and %d loads", len(s.Disaggregated), len(s.Shared))
	}
}

func TestOfRefuses(t *testing.T) {
	for want, in := range map[string]Inputs{"0 slots per rank": {8, 0, 0.5}, "rate of 1.5": {8, 16, 1.5}, "rate of NaN": {8, 16, math.NaN()}} {
		if _, err := Of(small(), machines(t), in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("wanted is an error with %q; got %v", want, err)
		}
	}
	if _, err := Of(&pipeline.Shape{}, machines(t), Inputs{8, 16, 0.5}); err == nil || !strings.Contains(err.Error(), "hidden layers") {
		t.Errorf("no shape: %v", err)
	}
}

// The schedule round-trips through JSON.
func TestJSON(t *testing.T) {
	s := made(t, small(), Inputs{8, 16, 0.3})
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var back Schedule
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s, &back); diff != "" {
		t.Error(diff)
	}
	if len(text) > 16<<10 {
		t.Errorf("%d bytes; a ConfigMap is to have room for it", len(text))
	}
}

func TestCheckRefuses(t *testing.T) {
	for want, change := range map[string]func(s *Schedule){
		"hardware is missing":               func(s *Schedule) { s.Hardware = "" },
		"ranks is 4; the plan has 8":        func(s *Schedule) { s.Ranks = 4 },
		"lar is -1":                         func(s *Schedule) { s.LAR = -1 },
		"tokens_held is 0":                  func(s *Schedule) { s.TokensHeld = 0 },
		"model: hidden layers: 0":           func(s *Schedule) { s.Model.HiddenLayers = 0 },
		"disaggregated[1].sequence is 512":  func(s *Schedule) { s.Disaggregated[1].Sequence = 512 },
		"disaggregated[0] has 0 attention":  func(s *Schedule) { s.Disaggregated[0].AttentionRanks = 0 },
		"disaggregated[0]: there are":       func(s *Schedule) { s.Disaggregated[0].Samples = 0 },
		"disaggregated[2]: the order has 0": func(s *Schedule) { s.Disaggregated[2].Order = nil },
		"disaggregated[0]: durations are":   func(s *Schedule) { s.Disaggregated[0].Durations.Experts = -1 },
		"disaggregated[0]: makespan_us is":  func(s *Schedule) { s.Disaggregated[0].Makespan = 0 },
		"disaggregated[0]: 48 layers, 1 micro-": func(s *Schedule) {
			s.Disaggregated[0].Sizes = pipeline.Sizes{Layers: 48, MicroBatches: 1, Chunks: 1 << 20}
		},
		"shared[0].tokens_per_rank is 0":     func(s *Schedule) { s.Shared[0].TokensPerRank = 0 },
		"shared[1]: groups is 0":             func(s *Schedule) { s.Shared[1].Groups = 0 },
		`shared[1]: kernel is "magic"`:       func(s *Schedule) { s.Shared[1].Kernel = "magic" },
		"shared[1]: communication_multiproc": func(s *Schedule) { s.Shared[1].Multiprocessors = -2 },
		"shared[1]: us is 0":                 func(s *Schedule) { s.Shared[1].Time = 0 },
	} {
		s := made(t, small(), Inputs{8, 16, 0.3})
		change(s)
		if err := s.Check(8); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("wanted is an error with %q; got %v", want, err)
		}
	}
}

// BenchmarkOf computes the schedules of two models.
func BenchmarkOf(b *testing.B) {
	p := machines(b)
	for name, c := range map[string]struct {
		shape *pipeline.Shape
		in    Inputs
	}{
		"DeepSeek-V2-8-ranks": {backbone(), Inputs{8, 20, 0.3}}, "DeepSeek-V2-160-ranks": {backbone(), Inputs{160, 1, 0.05}}, "Qwen3-30B-8-ranks": {small(), Inputs{8, 16, 0.3}},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := Of(c.shape, p, c.in); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Micro-batches save time only where the exchange is worth hiding: from a threshold, at all larger loads.
func TestMicroBatches(t *testing.T) {
	s := made(t, backbone(), Inputs{Ranks: 8, SlotsPerRank: 20, LAR: 0.4})
	m, err := s.MicroBatches(machines(t), 20, s.LAR)
	if err != nil {
		t.Fatal(err)
	}
	from := m.Threshold(2, 0.01)
	if from < loads[0] || from > loads[len(loads)-1] {
		t.Fatalf("the threshold is %d", from)
	}
	for _, tokens := range loads {
		one, two := m.Time(tokens, 1), m.Time(tokens, 2)
		t.Logf("%d tokens: %.0f µs, in two micro-batches %.0f µs", tokens, one, two)
		if tokens >= from && two > 0.99*one {
			t.Errorf("%d tokens: two micro-batches take %v µs, one %v", tokens, two, one)
		}
		for _, load := range s.Shared {
			if load.TokensPerRank == tokens && math.Abs(load.Ungrouped-one) > 1e-6*one {
				t.Errorf("%d tokens: one micro-batch takes %v µs, and one group of experts %v", tokens, one, load.Ungrouped)
			}
		}
	}
	if before := loads[0] / 8; m.Time(before, 2) < m.Time(before, 1) {
		t.Errorf("two micro-batches of %d tokens are faster, although each reads all weights", before)
	}
	if none := m.Threshold(2, 0.9); none != 0 {
		t.Errorf("a saving of 90%% from %d tokens", none)
	}
	for _, bad := range []float64{-1, 2, math.NaN()} {
		if _, err := s.MicroBatches(machines(t), 20, bad); err == nil {
			t.Errorf("a rate of %v is accepted", bad)
		}
	}
}
