// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// small returns a shape with a dense layer and three MoE layers, as in the generated trace.
func small(tr *trace.Trace) pipeline.Shape {
	return pipeline.Shape{
		HiddenLayers: 4, MoELayers: 3, Experts: tr.Model.Experts, TopK: tr.Model.TopK, Hidden: 64, ExpertSize: 32, SharedSize: 16, DenseSize: 128,
		Heads: 4, KVHeads: 4, QueryDim: 16, ValueDim: 16,
	}
}

func testOptions(tr *trace.Trace, attention placement.Attention, ranks int, p *hardware.Profile) *Options {
	return &Options{
		Attention: attention, Collective: ReduceScatter, Shape: small(tr), Profile: p, Topology: OneNode(ranks, p), Messages: PerActivation, DispatchBytes: 2,
		StepTokens: 256, Running: 64, CacheTokens: 1 << 14, Cap: 1.15, Weights: dispatch.DefaultWeights,
	}
}

func vanilla(tr *trace.Trace, ranks int) *Method {
	return &Method{Name: "vanilla", Placement: placement.Contiguous(tr.Model.Layers, tr.Model.Experts, ranks), Policy: dispatch.RoundRobin}
}

func draw(t *testing.T, tr *trace.Trace, count int) []Request {
	t.Helper()
	outputs, err := ParseLengths("uniform:1:9")
	if err != nil {
		t.Fatal(err)
	}
	requests, err := (&Workload{Sources: tr.AllRequests(), Count: count, Prompts: Recorded, Outputs: outputs, Seed: 3}).Draw(tr)
	if err != nil {
		t.Fatal(err)
	}
	return requests
}

// attentionOnly returns a profile with 1,000 µs for the attention of all layers, and almost nothing for other work.
func attentionOnly() *hardware.Profile {
	p := plain()
	fast := hardware.GEMM{BytesPerMicrosecond: 1e15, FlopsPerMicrosecond: 1e15}
	p.Grouped, p.Dense = fast, fast
	none := straight(0, 1e15)
	p.Attention, p.AllToAll, p.AllReduce, p.ReduceScatter, p.AllGather = hardware.Attention{Line: hardware.Line{Start: 1000, PerMicrosecond: 1e15}}, none, none, none, none
	return p
}

// Steps of 4 ms with 4 tokens each: a prompt of 10 tokens takes three steps, and the next request's prompt begins in
// the rest of the third.
func TestServingByHand(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	o := testOptions(tr, placement.TensorParallel, 1, attentionOnly())
	o.StepTokens = 4
	requests := []Request{{Source: 0, Prompt: 10, Output: 3}, {Source: 1, Prompt: 3, Output: 1, Arrival: 0.001}, {Source: 2, Prompt: 1, Output: 2, Arrival: 1}}
	e, err := newEngine(tr, vanilla(tr, 1), requests, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.run(t.Context(), requests, 1); err != nil {
		t.Fatal(err)
	}
	// The first request has tokens at 12, 16 and 20 ms. The second arrives at 1 ms and has 2 tokens in the third step
	// and 1 in the fourth. The third runs without other requests.
	r := e.record
	for i, want := range []struct{ first, each float64 }{{15e3, -1}, {12e3, 4e3}, {4e3, 4e3}} {
		if math.Abs(r.first[i]-want.first) > 1 || math.Abs(r.each[i]-want.each) > 1 {
			t.Errorf("request %d by end: first token after %v µs, then %v each; want %v and %v", i, r.first[i], r.each[i], want.first, want.each)
		}
	}
	x := r.result(1, Objective{TTFT: 12.5, TPOT: 5}, e.step)
	if math.Abs(x.Within-2.0/3) > 1e-9 || math.Abs(x.Seconds-1.004) > 1e-6 || math.Abs(x.Requests-2/x.Seconds) > 1e-9 || math.Abs(x.Tokens-16/x.Seconds) > 1e-9 || math.Abs(x.OutputTokens-5/x.Seconds) > 1e-9 || math.Abs(x.TTFT.P50-12) > 1e-3 || math.Abs(x.TTFT.P90-15) > 1e-3 || x.LAR == nil || *x.LAR != 1 || math.Abs(x.TBT90-4) > 1e-3 {
		t.Errorf("%+v", x)
	}
	if want := (12.0 + 3 + 2) / 7; math.Abs(x.StepTokens-want) > 1e-9 { // 4, 4, 4 tokens, then 2 (1 of each), 1, and 1, 1
		t.Errorf("%v tokens per step; want %v", x.StepTokens, want)
	}
}

// A cache for one request serves requests sequentially.
func TestCacheLimitsConcurrency(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	o := testOptions(tr, placement.TensorParallel, 1, attentionOnly())
	o.CacheTokens = 10
	requests := []Request{{Prompt: 5, Output: 3}, {Prompt: 5, Output: 3}}
	e, err := newEngine(tr, vanilla(tr, 1), requests, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.run(t.Context(), requests, 1); err != nil {
		t.Fatal(err)
	}
	if math.Abs(e.record.first[0]-4e3) > 1 || math.Abs(e.record.first[1]-16e3) > 1 {
		t.Errorf("first tokens after %v µs", e.record.first)
	}
	requests[1].Prompt = 9
	if _, err := newEngine(tr, vanilla(tr, 1), requests, o); err == nil || !strings.Contains(err.Error(), "request 1 has 12 tokens; the KV cache of a rank has room for 10") {
		t.Errorf("error %v", err)
	}
}

// At light load, a request's first token takes the sum of the stages of its prompt, which the test computes from the
// shape.
func TestLightLoadIsTheSumOfStages(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	p := plain()
	o := testOptions(tr, placement.DataParallel, 2, p)
	requests := []Request{{Source: 0, Prompt: 1, Output: 1}}
	m := vanilla(tr, 2)
	got, err := lightLoad(t.Context(), tr, m, requests, o)
	if err != nil {
		t.Fatal(err)
	}
	const flop = 1 / 1e6 // 1 µs per million
	projections := 4 * (3 + 64*64*2*flop)
	attention := 7 + projections + 2*0.5*4*(16+16)*flop
	forward := func(width float64) float64 { return 2*3 + 3*64*width*2*flop }
	want := 4*attention + 3*forward(16) + forward(128)
	home := tr.Model.Experts / 2
	for l := range 3 {
		// The token is on rank 0; its experts are on both ranks.
		// A tile of 128 rows each.
		var rows [2]int
		for _, expert := range tr.Row(0, l) {
			rows[int(expert)/home]++
		}
		want += 3 + 64*16*2*flop                                    // gate
		want += 2*3 + 2*(10+float64(rows[1])*64*2/100)              // there and back
		want += 2*5 + 128*float64(slices.Max(rows[:]))*6*64*32*flop // products
	}
	if math.Abs(got.TTFT-want/1e3) > 1e-9*want || got.TPOT != 0 {
		t.Errorf("%+v; want %v ms", got, want/1e3)
	}
}

// Every token is computed once in each layer, its rows go to the ranks of its experts, and every request ends, for all
// modes and limits.
func TestConservation(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := draw(t, tr, 150)
	tokens := 0
	for _, r := range requests {
		tokens += r.Tokens()
	}
	copies := placement.Contiguous(tr.Model.Layers, tr.Model.Experts, 4)
	copies.SlotsPerRank++
	for l := range copies.Layers {
		var slots []int
		for rank, own := range slices.Collect(slices.Chunk(copies.Layers[l].Slots, copies.SlotsPerRank-1)) {
			slots = append(append(slots, own...), (rank*4+4)%tr.Model.Experts)
		}
		copies.Layers[l].Slots = slots
	}
	for name, change := range map[string]func(o *Options, m *Method){
		"attention dp":        func(*Options, *Method) {},
		"attention tp":        func(o *Options, _ *Method) { o.Attention = placement.TensorParallel },
		"all-reduce":          func(o *Options, _ *Method) { o.Attention, o.Collective = placement.TensorParallel, AllReduce },
		"steps of one token":  func(o *Options, _ *Method) { o.StepTokens = 4 },
		"few at a time":       func(o *Options, _ *Method) { o.Running = 4 },
		"copies":              func(_ *Options, m *Method) { m.Placement = copies },
		"the least loaded":    func(_ *Options, m *Method) { m.Policy = dispatch.LeastLoaded },
		"prices, no forecast": func(_ *Options, m *Method) { m.Policy = dispatch.Price },
		"requests that wait":  func(o *Options, m *Method) { o.Hold, m.Policy, m.Requests = time.Second, dispatch.Price, favourite{tr} },
	} {
		t.Run(name, func(t *testing.T) {
			o, m := testOptions(tr, placement.DataParallel, 4, plain()), vanilla(tr, 4)
			change(o, m)
			e, err := newEngine(tr, m, requests, o)
			if err != nil {
				t.Fatal(err)
			}
			if err := e.run(t.Context(), requests, 1e4); err != nil {
				t.Fatal(err)
			}
			if e.record.stepTokens != tokens || e.step.rows != tokens*3*tr.Model.TopK || len(e.record.first) != len(requests)-len(requests)/4 {
				t.Errorf("%d tokens, %d rows, %d measured requests; want %d, %d and three quarters of %d", e.record.stepTokens, e.step.rows, len(e.record.first), tokens, tokens*3*tr.Model.TopK, len(requests))
			}
			for rank, l := range e.lanes {
				if len(l.waiting)+len(l.running) != 0 || l.free != o.CacheTokens/len(e.lanes) || l.outstanding != 0 {
					t.Errorf("lane %d ends with %d waiting, %d running, room for %d, %d outstanding", rank, len(l.waiting), len(l.running), l.free, l.outstanding)
				}
			}
		})
	}
}

// The counts of a step equal a count token by token.
func TestCountsOfCopies(t *testing.T) {
	// Experts 0 and 1 on rank 0, 1 and 2 on rank 1, 2 and 3 on rank 2, 3 and 0 on rank 3; two nodes.
	p := &placement.Placement{Ranks: 4, Experts: 4, SlotsPerRank: 2, Layers: []placement.Layer{{Slots: []int{0, 1, 1, 2, 2, 3, 3, 0}}}}
	r, c := newRoutes(p, 0, 2), newCounts(4, 2)
	r.add(c, []uint16{0, 1}, 0) // both local
	r.add(c, []uint16{2, 3}, 0) // 2 on the node's other rank; 3 is remote, on rank 2 in the even turn
	r.add(c, []uint16{3, 2}, 0) // 3 on rank 3 in the odd turn
	want := &Counts{
		Tokens: []int{3, 0, 0, 0}, Rows: []int{2, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, Distinct: []int{1, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		Experts: []int{1, 1, 0, 2, 0, 1, 1, 0},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

// Ranks share the widths of blocks for which all of them have all tokens, and the tokens of other blocks.
func TestDenseBlocksAreShared(t *testing.T) {
	tr, p := tracetest.Generate(tracetest.Small, 1), plain()
	const tokens, ranks = 64, 4
	block := func(width, tokens float64) float64 { return p.Dense.Block(64*width, tokens) }
	for name, c := range map[string]struct {
		attention  placement.Attention
		collective Collective
		want       float64
	}{
		"attention dp":   {placement.DataParallel, ReduceScatter, 3*block(16, tokens) + block(128, tokens)},
		"reduce-scatter": {placement.TensorParallel, ReduceScatter, 3*block(16, tokens/ranks) + block(128/ranks, tokens)},
		"all-reduce":     {placement.TensorParallel, AllReduce, 3*block(16/ranks, tokens) + block(128/ranks, tokens)},
	} {
		o := testOptions(tr, c.attention, ranks, p)
		o.Collective = c.collective
		if got := newStepper(tr, vanilla(tr, ranks), o).denseTime(tokens); math.Abs(got/c.want-1) > 1e-9 {
			t.Errorf("%s: %v µs; want %v", name, got, c.want)
		}
	}
}

// With higher load, latencies rise and fewer requests meet the objective; the throughput grows up to a maximum.
func TestSaturation(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := draw(t, tr, 200)
	for _, attention := range []placement.Attention{placement.DataParallel, placement.TensorParallel} {
		o, m := testOptions(tr, attention, 4, plain()), vanilla(tr, 4)
		light, err := lightLoad(t.Context(), tr, m, requests, o)
		if err != nil {
			t.Fatal(err)
		}
		objective := Objective{TTFT: 5 * light.TTFT, TPOT: 5 * light.TPOT}
		var before *Result
		for rate := 8.0; rate < 1e5; rate *= 4 {
			x, err := Run(t.Context(), tr, m, requests, rate, objective, o)
			if err != nil {
				t.Fatal(err)
			}
			if before != nil && (x.Within > before.Within+0.02 || x.TTFT.Mean < before.TTFT.Mean*0.98 || x.Tokens < before.Tokens*0.98) {
				t.Errorf("attention %s: at rate %v %+v, at rate %v %+v", attention, rate, x, before.Rate, before)
			}
			if before == nil && x.Within < 1 {
				t.Errorf("attention %s: at light load only a share of %v meets the objective", attention, x.Within)
			}
			before = x
		}
		if before.Within > 0.5 {
			t.Errorf("attention %s: a share of %v meets the objective at 10⁵ requests per second", attention, before.Within)
		}
	}
}

// A slower rank, link or kernel makes no step faster.
func TestSlowerLinksTakeLonger(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := draw(t, tr, 100)
	ttft := func(topology func(p *hardware.Profile) Topology) float64 {
		p := plain()
		p.AllToAll.PerMicrosecond = 1e5
		o := testOptions(tr, placement.DataParallel, 8, p)
		o.Topology = topology(p)
		x, err := Run(t.Context(), tr, vanilla(tr, 8), requests, 50, Objective{}, o)
		if err != nil {
			t.Fatal(err)
		}
		return x.TTFT.Mean
	}
	node := ttft(func(p *hardware.Profile) Topology { return OneNode(8, p) })
	nodes := ttft(func(p *hardware.Profile) Topology { return Nodes(8, 4, p) })
	islands := ttft(func(p *hardware.Profile) Topology { return Islands(8, p) })
	if !(node < nodes && nodes < islands) {
		t.Errorf("first tokens after %v ms on a node, %v on two nodes, %v on islands", node, nodes, islands)
	}
}

func TestCompareIsRepeatable(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := draw(t, tr, 80)
	roundRobin := vanilla(tr, 4)
	roundRobin.Name, roundRobin.Placement = "round-robin", placement.RoundRobin(tr.Model.Layers, tr.Model.Experts, 4)
	compare := func() *Report {
		r, err := Compare(t.Context(), tr, []Method{*vanilla(tr, 4), *roundRobin}, requests, nil, DefaultGoal, testOptions(tr, placement.DataParallel, 4, plain()))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := compare()
	processors := runtime.GOMAXPROCS(1)
	second := compare()
	runtime.GOMAXPROCS(processors)
	if diff := cmp.Diff(first, second); diff != "" {
		t.Errorf("on one processor: %s", diff)
	}
	for _, c := range first.Curves {
		if c.Served == nil || c.Served.Within < DefaultGoal.Share || c.Goodput != c.Served.Rate || len(c.Rates) != 8 {
			t.Errorf("%+v", c)
		}
	}
	if first.Objective.TTFT != 5*first.Light.TTFT || first.Curves[0].Rates[4].Rate > 1.01*first.Curves[0].Goodput || first.Curves[0].Rates[7].Within >= DefaultGoal.Share {
		t.Errorf("%+v", first)
	}
}

// If all rates meet the objective, the goodput is unbounded for every method. The default rates are then around the
// rate at light load.
func TestUnboundedGoodput(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	goal := DefaultGoal
	goal.Scale = 1e6
	other := vanilla(tr, 4)
	other.Name = "other"
	r, err := Compare(t.Context(), tr, []Method{*vanilla(tr, 4), *other}, draw(t, tr, 16), nil, goal, testOptions(tr, placement.DataParallel, 4, plain()))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range r.Curves {
		if !c.Unbounded || c.Goodput != 0 || c.Served != nil || len(c.Rates) != 8 {
			t.Errorf("%+v", c)
		}
	}
}

func TestLengths(t *testing.T) {
	for _, text := range []string{"", "0", "1.5", "-3", "x", "uniform:3", "uniform:5:4", "uniform:1:2.5", "exp:0", "exp:1:2", "lognormal:100", "lognormal:100:9", "fixed", "normal:1:2", "exp:NaN", "exp:1e9"} {
		if l, err := ParseLengths(text); err == nil {
			t.Errorf("%q is %+v", text, l)
		}
	}
	tr := tracetest.Generate(tracetest.Small, 1)
	for text, want := range map[string]float64{"7": 7, "uniform:10:30": 20, "exp:50": 50, "lognormal:100:0.5": 100 * math.Exp(0.125)} {
		l, err := ParseLengths(text)
		if err != nil {
			t.Fatal(err)
		}
		const count = 20000
		requests, err := (&Workload{Sources: []int{0}, Count: count, Prompts: l, Outputs: l, Seed: 1}).Draw(tr)
		if err != nil {
			t.Fatal(err)
		}
		prompts, outputs := 0, 0
		for _, r := range requests {
			prompts, outputs = prompts+r.Prompt, outputs+r.Output
		}
		for _, mean := range []float64{float64(prompts) / count, float64(outputs) / count} {
			if math.Abs(mean/want-1) > 0.03 {
				t.Errorf("%s: the mean is %v; want %v", text, mean, want)
			}
		}
		if rate := count / requests[count-1].Arrival; math.Abs(rate-1) > 0.05 {
			t.Errorf("the arrival rate is %v", rate)
		}
	}
	// All requests of the trace are drawn once before any is drawn again.
	seen := map[int]int{}
	for _, r := range draw(t, tr, 2*tr.Requests()) {
		seen[r.Source]++
	}
	for r := range tr.Requests() {
		if seen[r] != 2 {
			t.Errorf("request %d is drawn %d times", r, seen[r])
		}
	}
}

func TestRefuses(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	requests := draw(t, tr, 5)
	for want, change := range map[string]func(o *Options, m *Method){
		"hidden size: 0":             func(o *Options, _ *Method) { o.Shape.Hidden = 0 },
		"the model has 8 experts":    func(o *Options, _ *Method) { o.Shape.Experts = 8 },
		"is for 2 ranks; there are":  func(_ *Options, m *Method) { *m = *vanilla(tr, 2) },
		"attention is \"\"":          func(o *Options, _ *Method) { o.Attention = "" },
		"a step of 3 tokens":         func(o *Options, _ *Method) { o.StepTokens = 3 },
		"the links connect 0 of 4":   func(o *Options, _ *Method) { o.Topology.Links = nil },
		"values have 0 bytes":        func(o *Options, _ *Method) { o.DispatchBytes = 0 },
		"policy window decides":      func(_ *Options, m *Method) { m.Policy = dispatch.Window },
		"the placement has 16 exper": func(_ *Options, m *Method) { m.Placement.Layers = m.Placement.Layers[:1] },
	} {
		o, m := testOptions(tr, placement.DataParallel, 4, plain()), vanilla(tr, 4)
		change(o, m)
		if _, err := Run(t.Context(), tr, m, requests, 1, Objective{}, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %[2]v; want %[1]q", want, err)
		}
	}
	o, m := testOptions(tr, placement.DataParallel, 4, plain()), vanilla(tr, 4)
	if _, err := Run(t.Context(), tr, m, requests, 0, Objective{}, o); err == nil {
		t.Error("a rate of 0 is accepted")
	}
	if _, err := Compare(t.Context(), tr, nil, requests, nil, DefaultGoal, o); err == nil {
		t.Error("no methods are accepted")
	}
	if _, err := Compare(t.Context(), tr, []Method{*m}, requests, nil, Goal{Scale: 5}, o); err == nil {
		t.Error("a goal without a share is accepted")
	}
	for _, w := range []Workload{{Sources: []int{0}, Prompts: Recorded}, {Count: 1, Prompts: Recorded}, {Count: 1, Sources: []int{0}, Prompts: Recorded, Outputs: Recorded}} {
		if _, err := w.Draw(tr); err == nil {
			t.Errorf("%+v is drawn", w)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Compare(ctx, tr, []Method{*m}, requests, nil, DefaultGoal, o); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v after it was cancelled", err)
	}
}

// numbered scores a token by its position and counts its calls.
type numbered struct{ asked *atomic.Int64 }

func (n numbered) Score(dst []float32, layer, position int) {
	n.asked.Add(1)
	for rank := range dst {
		dst[rank] = float32(1000*position + 10*layer + rank)
	}
}

func TestForecastsAreCached(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	asked := &atomic.Int64{}
	requests := []Request{{Source: 3}, {Source: 1}, {Source: 3}}
	f, err := cacheScores(t.Context(), tr, numbered{asked}, requests, 2)
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(3 * (tr.Length(1) + tr.Length(3))); asked.Load() != want {
		t.Errorf("%d scores computed; want %d", asked.Load(), want)
	}
	got := make([]float32, 2)
	for _, r := range []int{1, 3} {
		for position := int(tr.Offsets[r]); position < int(tr.Offsets[r+1]); position++ {
			if f.Score(got, 2, position); got[0] != float32(1000*position+20) || got[1] != got[0]+1 {
				t.Fatalf("request %d, position %d: %v", r, position, got)
			}
		}
	}
}
