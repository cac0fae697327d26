// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/refengine/lookahead"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const shuffleRanks = 4

// foreseen returns a part of a real trace of the tiny model, with its look-ahead.
func foreseen(t *testing.T) (*trace.Trace, *model.Model) {
	t.Helper()
	whole, err := trace.Open(t.Context(), "../../solver/testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m, err := model.Load(c, 0)
	if err != nil {
		t.Fatal(err)
	}
	tr := whole.Subset([]int{2, 11, 20, 29, 38, 47, 56, 65})
	addLookAhead(t, tr, m)
	return tr, m
}

func addLookAhead(t *testing.T, tr *trace.Trace, m *model.Model) {
	t.Helper()
	var err error
	if tr.LookAhead, _, err = lookahead.Record(t.Context(), m, tr, lookahead.Options{Width: 16, Workers: 2}); err != nil {
		t.Fatal(err)
	}
}

// solvedPlan solves and writes a plan for attention tp.
func solvedPlan(t *testing.T, tr *trace.Trace, by solver.Forecast, ranks, redundant int) (string, *solver.Plan) {
	t.Helper()
	s, err := solver.Solve(t.Context(), tr, solver.Options{
		Ranks: ranks, Attention: placement.TensorParallel, Algorithm: placement.Auto, Forecast: by, TrainPercent: 60, Seed: 1, RedundantSlots: redundant,
	})
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Encode(s.Plan)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "plan")
	if err := plan.Write(dir, a, []byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	return dir, s.Plan
}

// The tables of a plan select the same rank for every token and layer as the evaluation of the solver. The outputs
// equal those without a plan.
func TestShuffleByPlan(t *testing.T) {
	tr, m := foreseen(t)
	for _, test := range []struct {
		by        solver.Forecast
		redundant int
		least     float64
	}{{solver.Table, 0, 0.26}, {solver.LookAhead, 0, 0.4}, {solver.LookAhead, 1, 0.4}, {solver.RawLookAhead, 0, 0.4}} {
		t.Run(fmt.Sprint(test), func(t *testing.T) {
			dir, p := solvedPlan(t, tr, test.by, shuffleRanks, test.redundant)
			e := start(t, func(o *Options) {
				o.TPSize, o.EPSize, o.ShufflePlan, o.EnableReturnRoutedExperts, o.ChunkedPrefillSize = shuffleRanks, shuffleRanks, dir, true, 100
			})
			// Long enough for prices to change, and split into chunks.
			prompt := append(append([]int32(nil), tr.Request(0)...), tr.Request(1)[:100]...)
			var out generated
			e.post(t, "/generate", map[string]any{
				"input_ids": prompt, "sampling_params": map[string]any{"max_new_tokens": 20, "ignore_eos": true}, "return_routed_experts": true,
			}).into(t, &out)
			served := servedTrace(t, tr.Model, append(prompt, out.OutputIDs[:19]...), out.MetaInfo.RoutedExperts)
			addLookAhead(t, served, m)
			want := expectedLAR(t, served, p)
			if got := e.observedLAR(t); got-want > 1e-9 || want-got > 1e-9 || got < test.least {
				t.Errorf("the engine counts a local activation rate of %v; the plan's evaluation has %v", got, want)
			}
			for _, g := range golden(t)[:4] {
				var out generated
				e.post(t, "/generate", map[string]any{"text": g.Text, "sampling_params": map[string]any{"max_new_tokens": 40, "ignore_eos": true}}).into(t, &out)
				if out.Text != g.GreedyText {
					t.Errorf("%s: with a plan the output is %q, without %q", g.Name, out.Text, g.GreedyText)
				}
			}
		})
	}
}

// servedTrace returns a trace of one request from the response of the engine.
func servedTrace(t *testing.T, m trace.Model, tokens []int32, wire string) *trace.Trace {
	t.Helper()
	tr := &trace.Trace{Model: m, Tokens: tokens, Offsets: []int64{0, int64(len(tokens))}, Documents: []int32{0}}
	for _, token := range decodeRoutes(t, wire, len(m.Layers), m.TopK) {
		for _, chosen := range token {
			for _, expert := range chosen {
				tr.Experts = append(tr.Experts, uint16(expert))
			}
		}
	}
	if err := tr.Validate(); err != nil {
		t.Fatal(err)
	}
	return tr
}

func expectedLAR(t *testing.T, tr *trace.Trace, p *solver.Plan) float64 {
	t.Helper()
	o := solver.DefaultEvaluation()
	o.Requests, o.Shards, o.WithoutBounds = []int{0}, cost.FreeShards, true
	report, err := solver.Evaluate(t.Context(), tr, p, o)
	if err != nil {
		t.Fatal(err)
	}
	return report.LAR
}

// observedLAR reads the engine's counters of activations.
func (e *running) observedLAR(t *testing.T) float64 {
	t.Helper()
	count := map[string]float64{}
	for rank := range shuffleRanks {
		for _, locality := range []string{"local", "remote"} {
			count[locality] += e.metric(t, fmt.Sprintf(`semmoe_engine_activations_total{locality="%s",rank="%d"}`, locality, rank))
		}
	}
	return count["local"] / (count["local"] + count["remote"])
}

func TestShuffleRefuses(t *testing.T) {
	tr, _ := foreseen(t)
	table, _ := solvedPlan(t, tr, solver.Table, shuffleRanks, 0)
	decode, _ := solvedPlan(t, tr, solver.Decode, shuffleRanks, 0)
	tr.Model.Digest = strings.Repeat("0", 64)
	foreign, _ := solvedPlan(t, tr, solver.Table, shuffleRanks, 0)
	for name, test := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"attention dp":    {func(o *Options) { o.EnableDPAttention, o.DPSize, o.ShufflePlan = true, shuffleRanks, table }, "--enable-dp-attention exclude each other"},
		"expert map":      {func(o *Options) { o.InitExpertLocation, o.ShufflePlan = "map.json", table }, "remove --init-expert-location"},
		"other EP size":   {func(o *Options) { o.TPSize, o.EPSize, o.ShufflePlan = 2, 2, table }, "the plan is for 4 ranks, --ep-size is 2"},
		"other forecast":  {func(o *Options) { o.ShufflePlan = decode }, "the plan has the forecast decode"},
		"other model":     {func(o *Options) { o.ShufflePlan = foreign }, "the plan is for the model with digest 0000"},
		"no plan":         {func(o *Options) { o.ShufflePlan = t.TempDir() }, "manifest.json is missing"},
		"redundant slots": {func(o *Options) { o.RedundantExperts, o.ShufflePlan = 4, table }, "and --ep-num-redundant-experts"},
	} {
		o := DefaultOptions()
		o.ModelPath, o.TPSize, o.EPSize = tinyModel, shuffleRanks, shuffleRanks
		test.change(&o)
		err := o.Validate()
		if err == nil {
			_, err = load(o)
		}
		if !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
}
