// SPDX-License-Identifier: Apache-2.0

package refengine

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine/sglang"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/lookahead"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/internal/refengine/shuffle"
	"github.com/semmoe/operator/solver"
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
	return solvedPlanFor(t, tr, placement.TensorParallel, by, ranks, redundant)
}

func solvedPlanFor(t *testing.T, tr *trace.Trace, attention placement.Attention, by solver.Forecast, ranks, redundant int) (string, *solver.Plan) {
	t.Helper()
	s, err := solver.Solve(t.Context(), tr, solver.Options{
		Ranks: ranks, Attention: attention, Algorithm: placement.Auto, Forecast: by, TrainPercent: 60, Seed: 1, RedundantSlots: redundant,
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

// planned starts an engine with attention over all ranks, under the plan in a directory.
func planned(t *testing.T, dir string, p *solver.Plan, change func(*Options)) *running {
	t.Helper()
	return start(t, func(o *Options) {
		o.TPSize, o.EPSize = shuffleRanks, shuffleRanks
		o.InitExpertLocation = filepath.Join(dir, plan.MapFile(sglang.Adapter()))
		o.RedundantExperts = p.Placement.Ranks*p.Placement.SlotsPerRank - p.Placement.Experts
		o.Getenv = environment(t, dir)
		if change != nil {
			change(o)
		}
	})
}

// environment returns the variables of a consumer of the plan in a directory.
func environment(t *testing.T, dir string) func(string) string {
	t.Helper()
	digest, err := plan.DigestOf(dir)
	if err != nil {
		t.Fatal(err)
	}
	return func(name string) string {
		return map[string]string{
			semmoev1.TablesVariable: filepath.Join(dir, plan.TablesFile), semmoev1.PlacementVariable: filepath.Join(dir, plan.PlacementFile), semmoev1.PlanDigestVariable: digest,
		}[name]
	}
}

// The tables of a plan select the same rank for every token and layer as the evaluation of the solver, in equal shards.
// The outputs equal those without a plan.
func TestShuffleByPlan(t *testing.T) {
	tr, m := foreseen(t)
	const chunk, tokens = 100, 400 // of the prompt: the evaluation has the same batches
	for _, test := range []struct {
		by        solver.Forecast
		redundant int
		least     float64
	}{{solver.Table, 0, 0.26}, {solver.Transition, 0, 0.26}, {solver.LookBack, 0, 0.26}, {solver.LookAhead, 0, 0.35}, {solver.LookAhead, 1, 0.35}, {solver.RawLookAhead, 0, 0.35}} {
		t.Run(fmt.Sprint(test), func(t *testing.T) {
			dir, p := solvedPlan(t, tr, test.by, shuffleRanks, test.redundant)
			e := planned(t, dir, p, func(o *Options) { o.EnableReturnRoutedExperts, o.ChunkedPrefillSize = true, chunk })
			prompt := append(append([]int32(nil), tr.Request(0)...), tr.Request(1)...)[:tokens]
			var out generated
			e.post(t, "/generate", map[string]any{
				"input_ids": prompt, "sampling_params": map[string]any{"max_new_tokens": 1, "ignore_eos": true}, "return_routed_experts": true,
			}).into(t, &out)
			served := servedTrace(t, tr.Model, prompt, out.MetaInfo.RoutedExperts)
			addLookAhead(t, served, m)
			want := expectedLAR(t, served, p, chunk)
			if got := e.observedLAR(t); got-want > 1e-9 || want-got > 1e-9 || got < test.least {
				t.Errorf("the engine counts a local activation rate of %v; the plan's evaluation has %v", got, want)
			}
			for rank := range shuffleRanks {
				const share = float64(tokens / shuffleRanks)
				if got := e.activations(t, "local", rank) + e.activations(t, "remote", rank); got != share*float64(len(tr.Model.Layers)*tr.Model.TopK) {
					t.Errorf("rank %d: %v activations; want those of a quarter of the tokens", rank, got)
				}
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

func expectedLAR(t *testing.T, tr *trace.Trace, p *solver.Plan, batch int) float64 {
	t.Helper()
	o := solver.DefaultEvaluation()
	o.Requests, o.BatchTokens, o.WithoutBounds = []int{0}, batch, true
	report, err := solver.Evaluate(t.Context(), tr, p, o)
	if err != nil {
		t.Fatal(err)
	}
	return report.LAR
}

// observedLAR reads the engine's counters of activations.
func (e *running) observedLAR(t *testing.T) float64 {
	t.Helper()
	count, metrics := map[string]float64{}, e.get(t, "/metrics").body
	for rank := range shuffleRanks {
		for _, locality := range []string{"local", "remote"} {
			count[locality] += activations(t, metrics, locality, rank)
		}
	}
	return count["local"] / (count["local"] + count["remote"])
}

// withOtherTables writes a plan with other tables for the placement of the plan in a directory, in its place.
func withOtherTables(t *testing.T, dir string) (digest string) {
	t.Helper()
	p, current, err := plan.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	p.Tokens.Score[0]++
	if err := plan.OnLayoutOf(p, current); err != nil {
		t.Fatal(err)
	}
	a, err := plan.Encode(p)
	if err != nil {
		t.Fatal(err)
	}
	if err := plan.Write(dir, a, []byte("{}\n")); err != nil {
		t.Fatal(err)
	}
	return a.Digest
}

// Tables for the same placement replace others without a restart. Files that do not fit are named, and change nothing.
func TestTablesAreSwapped(t *testing.T) {
	tr, _ := foreseen(t)
	dir, p := solvedPlan(t, tr, solver.Table, shuffleRanks, 0)
	e := planned(t, dir, p, nil)
	uses := func(digest string) {
		t.Helper()
		e.until(t, "using the tables of plan "+digest, func() bool {
			return bytes.Contains(e.get(t, "/metrics").body, []byte(`semmoe_engine_tables_info{plan_digest="`+digest+`"} 1`))
		})
	}
	first, err := plan.DigestOf(dir)
	if err != nil {
		t.Fatal(err)
	}
	uses(first)
	second := withOtherTables(t, dir)
	uses(second)
	if err := os.WriteFile(filepath.Join(dir, plan.ManifestFile), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	e.until(t, "refusing the files", func() bool {
		return bytes.Contains(e.get(t, "/metrics").body, []byte(`semmoe_engine_tables_refused{reason="Damaged"} 1`))
	})
	uses(second)
	g := golden(t)[0]
	var out generated
	e.post(t, "/generate", map[string]any{"text": g.Text, "sampling_params": map[string]any{"max_new_tokens": 40, "ignore_eos": true}}).into(t, &out)
	if out.Text != g.GreedyText {
		t.Errorf("the output is %q, want %q", out.Text, g.GreedyText)
	}
}

// rotated returns the expert map in a file with each expert on the next rank.
func rotated(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var experts struct {
		Rows [][]int `json:"physical_to_logical_map"`
	}
	if err := json.Unmarshal(text, &experts); err != nil {
		t.Fatal(err)
	}
	for l, row := range experts.Rows {
		by := len(row) / shuffleRanks
		experts.Rows[l] = append(row[by:len(row):len(row)], row[:by]...)
	}
	text, err = json.Marshal(experts)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Files that do not fit are refused with a reason, and the engine serves.
func TestTablesRefused(t *testing.T) {
	tr, m := foreseen(t)
	table, p := solvedPlan(t, tr, solver.Table, shuffleRanks, 0)
	decode, _ := solvedPlan(t, tr, solver.Decode, shuffleRanks, 0)
	requests, _ := solvedPlanFor(t, tr, placement.DataParallel, solver.Table, shuffleRanks, 0)
	digestOf := tr.Model.Digest
	tr.Model.Digest = strings.Repeat("0", 64)
	foreign, _ := solvedPlan(t, tr, solver.Table, shuffleRanks, 0)
	tr.Model.Digest = digestOf
	remove := func(name string) func(string) error {
		return func(dir string) error { return os.Remove(filepath.Join(dir, name)) }
	}
	truncate := func(name string) func(string) error {
		return func(dir string) error { return os.Truncate(filepath.Join(dir, name), 100) }
	}
	replace := func(name string, by func(path string) error) func(string) error {
		return func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, name)), by(filepath.Join(dir, name)))
		}
	}
	for name, test := range map[string]struct {
		dir          string
		digest       string
		ranks        int
		change       func(dir string) error
		reason, want string
	}{
		"none":              {dir: table, change: os.RemoveAll, reason: shuffle.ReasonAbsent, want: "manifest.json: no such file"},
		"no manifest":       {dir: table, change: remove(plan.ManifestFile), reason: shuffle.ReasonAbsent, want: "manifest.json"},
		"no tables":         {dir: table, change: remove(plan.TablesFile), reason: shuffle.ReasonAbsent, want: "tables.safetensors"},
		"truncated":         {dir: table, change: truncate(plan.TablesFile), reason: shuffle.ReasonDamaged, want: "tables.safetensors is damaged"},
		"placement changed": {dir: table, change: truncate(plan.PlacementFile), reason: shuffle.ReasonDamaged, want: "placement.json is damaged"},
		"manifest damaged":  {dir: table, change: truncate(plan.ManifestFile), reason: shuffle.ReasonDamaged, want: "manifest.json"},
		"a pipe":            {dir: table, change: replace(plan.TablesFile, func(path string) error { return syscall.Mkfifo(path, 0o600) }), reason: shuffle.ReasonUnreadable, want: "not a regular file"},
		"other digest":      {dir: table, digest: strings.Repeat("1", 64), reason: shuffle.ReasonOtherPlan, want: "the engine serves under plan 1111"},
		"other model":       {dir: foreign, reason: shuffle.ReasonOtherModel, want: "the plan is for the model with digest 0000"},
		"other EP size":     {dir: table, ranks: 2, reason: shuffle.ReasonOtherParallelism, want: "the plan is for 4 ranks, --ep-size is 2"},
		"attention dp":      {dir: requests, reason: shuffle.ReasonOtherParallelism, want: "the plan is for attention dp"},
		"other forecast":    {dir: decode, reason: shuffle.ReasonUnsupportedForecast, want: "the plan has the forecast decode"},
		"other placement":   {dir: table, reason: shuffle.ReasonOtherPlacement, want: "Start the engine with the expert map of the plan"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "plan")
			if err := os.CopyFS(dir, os.DirFS(test.dir)); err != nil {
				t.Fatal(err)
			}
			getenv, mapped := environment(t, dir), filepath.Join(test.dir, plan.MapFile(sglang.Adapter()))
			if test.digest != "" {
				original := getenv
				getenv = func(name string) string {
					if name == semmoev1.PlanDigestVariable {
						return test.digest
					}
					return original(name)
				}
			}
			if test.change != nil {
				if err := test.change(dir); err != nil {
					t.Fatal(err)
				}
			}
			switch {
			case test.reason == shuffle.ReasonOtherPlacement:
				mapped = rotated(t, mapped)
			case test.ranks != 0:
				mapped = locality.Trivial
			}
			ranks := cmp.Or(test.ranks, shuffleRanks)
			experts, err := locality.Parse(mapped, locality.Shape{MoE: m.MoE, Experts: m.Experts, Ranks: ranks})
			if err != nil {
				t.Fatal(err)
			}
			c := shuffle.FromEnvironment(getenv, shuffle.Engine{Model: m, Experts: experts, Ranks: ranks, ModelDigest: p.ModelDigest})
			for range 2 { // the second poll has the same result
				c.Poll(logr.Discard())
				state := c.State()
				if c.Current() != nil || state.Plan != "" || state.Refused == nil || state.Refused.Reason != test.reason || !strings.Contains(state.Refused.Message, test.want) {
					t.Fatalf("state %+v; want %s, %q", state.Refused, test.reason, test.want)
				}
			}
		})
	}
	if c := shuffle.FromEnvironment(func(string) string { return "" }, shuffle.Engine{}); c != nil {
		t.Error("a consumer without variables")
	}
}
