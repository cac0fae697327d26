// SPDX-License-Identifier: Apache-2.0

package lab_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func compareOptions() lab.CompareOptions {
	return lab.CompareOptions{
		Attentions: []placement.Attention{placement.TensorParallel, placement.DataParallel}, Ranks: []int{4}, Seeds: []uint64{1, 2},
		Algorithms: []placement.Algorithm{placement.Auto, placement.EPLB, placement.ContiguousAlgorithm},
		Forecasts:  []solver.Forecast{solver.Table, solver.Prefill}, Baselines: []solver.Forecast{solver.Table, solver.Prefill}, TrainPercent: 30,
	}
}

// clustered is a trace in which each domain has separate tokens and experts.
func clustered() *trace.Trace {
	shape := tracetest.Small
	shape.Noise, shape.Groups, shape.Experts, shape.DocumentsPerDomain = 5, 4, 32, 20
	return tracetest.Generate(shape, 1)
}

// find returns the comparison of a method.
func find(t *testing.T, all []lab.Comparison, attention placement.Attention, ranks, slots int, a placement.Algorithm, forecast, dispatch string) lab.Comparison {
	t.Helper()
	at := slices.IndexFunc(all, func(c lab.Comparison) bool {
		return c.Attention == attention && c.Ranks == ranks && c.RedundantSlots == slots && c.Algorithm == a && c.Forecast == forecast && c.Dispatch == dispatch
	})
	if at < 0 {
		t.Fatalf("no row %s, EP %d, %d extra slots, %s, %s, %s", attention, ranks, slots, a, forecast, dispatch)
	}
	return all[at]
}

func TestCompareIsTheSameOnAnyNumberOfProcessorsAndCells(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	var first []lab.Comparison
	for i, run := range []struct{ processors, cells int }{{1, 1}, {4, 8}} {
		o := compareOptions()
		o.Cells = run.cells
		var calls atomic.Int64
		o.Progress = func(_ string, done, total int) {
			if calls.Add(1); done > total || total != 2*2*3 {
				t.Errorf("%d of %d cells", done, total)
			}
		}
		before := runtime.GOMAXPROCS(run.processors)
		got, err := lab.Compare(t.Context(), tr, o)
		runtime.GOMAXPROCS(before)
		if err != nil {
			t.Fatal(err)
		}
		if calls.Load() != 2*2*3 {
			t.Errorf("%d reports of progress", calls.Load())
		}
		if i == 0 {
			first = got
		}
		if diff := cmp.Diff(first, got, cmpopts.IgnoreFields(lab.Comparison{}, "PlacementSeconds")); diff != "" {
			t.Errorf("%+v: %s", run, diff)
		}
	}
}

// TestCompareRepeatsSolve compares a row of the comparison with separate solve and evaluation calls.
func TestCompareRepeatsSolve(t *testing.T) {
	tr := clustered()
	o := compareOptions()
	o.Seeds, o.TrainPercent = []uint64{1}, 50
	all, err := lab.Compare(t.Context(), tr, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		attention placement.Attention
		forecast  solver.Forecast
		dispatch  string
	}{{placement.TensorParallel, solver.Table, "equal"}, {placement.TensorParallel, solver.Prefill, "equal"}, {placement.DataParallel, solver.Table, "price"}} {
		so := options(test.attention, 4)
		so.TrainPercent, so.Forecast = 50, test.forecast
		want := solve(t, tr, so).Report
		got := find(t, all, test.attention, 4, 0, placement.Auto, string(test.forecast), test.dispatch)
		if got.LAR.Mean != want.LAR || got.TokenImbalance != want.TokenImbalance || got.RemoteRanksPerToken != want.RemoteRanksPerToken || got.Part != lab.BothParts {
			t.Errorf("%s, %s: %+v; solved %+v", test.attention, test.forecast, got, want)
		}
	}
	for row, part := range map[string]lab.Part{"auto": lab.PlacementPart, "contiguous": lab.NeitherPart, "eplb": ""} {
		if got := find(t, all, placement.DataParallel, 4, 0, placement.Algorithm(row), "table", "round-robin").Part; got != part {
			t.Errorf("%s with requests assigned round-robin is %q; want %q", row, got, part)
		}
	}
	if got := find(t, all, placement.TensorParallel, 4, 0, placement.ContiguousAlgorithm, "prefill", "equal").Part; got != lab.RoutingPart {
		t.Errorf("contiguous with a forecast is %q", got)
	}
	find(t, all, placement.TensorParallel, 4, 0, placement.Auto, "none", "equal")
}

// TestCompareRedundantSlots checks that algorithms with support for copies are compared at equal memory, and others
// without copies.
func TestCompareRedundantSlots(t *testing.T) {
	o := compareOptions()
	o.Attentions, o.RedundantSlots = []placement.Attention{placement.DataParallel}, []int{0, 1, 2}
	o.Algorithms = append(o.Algorithms, placement.KMeans2D)
	tr := clustered()
	all, err := lab.Compare(t.Context(), tr, o)
	if err != nil {
		t.Fatal(err)
	}
	last := 0.0
	for _, slots := range o.RedundantSlots {
		ours := find(t, all, placement.DataParallel, 4, slots, placement.Auto, "table", "price")
		theirs := find(t, all, placement.DataParallel, 4, slots, placement.EPLB, "table", "price")
		if ours.SlotsPerRank != 8+slots || theirs.SlotsPerRank != 8+slots || ours.LAR.Mean <= max(last, theirs.LAR.Mean) {
			t.Errorf("%d extra slots: ours %+v, eplb %+v, fewer slots %v", slots, ours, theirs, last)
		}
		last = ours.LAR.Mean
	}
	for _, c := range all {
		if c.Algorithm == placement.KMeans2D && c.RedundantSlots > 0 {
			t.Errorf("kmeans2d has %d extra slots", c.RedundantSlots)
		}
	}
	o.RedundantSlots = []int{25}
	if _, err := lab.Compare(t.Context(), tr, o); err == nil || !strings.Contains(err.Error(), "allow 0 to 24") {
		t.Errorf("error %v", err)
	}
}

// TestCompareClustersPrompts checks that, with embeddings that identify the domain, clusters of prompts are as good as
// the domain label.
func TestCompareClustersPrompts(t *testing.T) {
	tr := clustered()
	o := compareOptions()
	o.Attentions, o.Algorithms = []placement.Attention{placement.DataParallel}, []placement.Algorithm{placement.Auto}
	rates := func(table *embedding.Table) (clusters, label float64) {
		o.Embeddings = table
		all, err := lab.Compare(t.Context(), tr, o)
		if err != nil {
			t.Fatal(err)
		}
		return find(t, all, placement.DataParallel, 4, 0, placement.Auto, "k-means of prompt embeddings", "price").LAR.Mean,
			find(t, all, placement.DataParallel, 4, 0, placement.Auto, "domain label", "price").LAR.Mean
	}
	// Token IDs of a domain have the same remainder.
	labels := &embedding.Table{Tokens: tr.Model.Vocabulary, Size: 4, Values: make([]float32, tr.Model.Vocabulary*4)}
	for id := range tr.Model.Vocabulary {
		labels.Values[id*4+id%4] = 1
	}
	if clusters, label := rates(labels); clusters < label*0.99 {
		t.Errorf("clusters reach %v, the label %v", clusters, label)
	}
	blind := &embedding.Table{Tokens: tr.Model.Vocabulary, Size: 4, Values: make([]float32, tr.Model.Vocabulary*4)}
	if clusters, label := rates(blind); clusters > label*0.9 {
		t.Errorf("embeddings that say nothing reach %v, the label %v", clusters, label)
	}
}

func TestBaselineMargins(t *testing.T) {
	row := func(a placement.Algorithm, part lab.Part, forecast, dispatch string, balance float64, lar ...float64) lab.Comparison {
		return lab.Comparison{
			Attention: placement.DataParallel, Ranks: 4, Algorithm: a, Part: part, Forecast: forecast, Dispatch: dispatch, WindowImbalance: balance,
			LAR: lab.Spread{Seeds: lar},
		}
	}
	got := lab.BaselineMargins([]lab.Comparison{
		row(placement.Auto, lab.BothParts, "table", "price", 1.1, .5, .6),
		row(placement.Auto, lab.BothParts, "table", "masked", 1.2, .4, .5),
		row(placement.Auto, lab.BothParts, "domain label", "price", 1.1, .55, .5),
		row(placement.EPLB, "", "table", "price", 1.3, .3, .7),
		row(placement.EPLB, "", "table", "masked", 1.3, .3, .3),
		row(placement.EPLB, "", "table", "round-robin", 1.3, .9, .9),
		row(placement.ContiguousAlgorithm, lab.NeitherPart, "table", "round-robin", 1.4, .25, .25),
	})
	lead := func(baseline string, ahead, cells int, least float64, at string, mean, ours, theirs float64) lab.BaselineMargin {
		return lab.BaselineMargin{
			Attention: placement.DataParallel, Baseline: baseline, Ahead: ahead, Cells: cells, Min: least, MinAt: at, Mean: mean,
			OurImbalance: ours, BaselineImbalance: theirs,
		}
	}
	want := []lab.BaselineMargin{
		lead("our placement, dispatch masked", 2, 2, .1, "EP 4, split 1, table, masked", .1, 1.1, 1.2),
		lead("our placement, forecast domain label", 1, 2, -.05, "EP 4, split 1, domain label, price", .025, 1.1, 1.1),
		lead("placement eplb", 3, 4, -.1, "EP 4, split 2, table, price", .1, 1.15, 1.3),
		lead("placement contiguous, dispatch round-robin", 2, 2, .25, "EP 4, split 1, table, round-robin", .3, 1.1, 1.4),
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
		t.Error(diff)
	}
}

func TestCompareStops(t *testing.T) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := lab.Compare(cancelled, tracetest.Generate(tracetest.Small, 1), compareOptions()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v; want that of the context", err)
	}
}
