// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func options(attention placement.Attention, ranks int) solver.Options {
	return solver.Options{
		Ranks: ranks, Attention: attention, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: 20, Seed: 1,
	}
}

func solve(t *testing.T, tr *trace.Trace, o solver.Options) *solver.Solution {
	t.Helper()
	solution, err := solver.Solve(t.Context(), tr, o)
	if err != nil {
		t.Fatal(err)
	}
	return solution
}

// figures skips tests of figures in short mode, because the race detector makes arithmetic about ten times slower.
// Other tests cover the same code on less data.
func figures(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("figures are checked without -short")
	}
}

func real(t *testing.T) *trace.Trace {
	t.Helper()
	tr, err := trace.Open(t.Context(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// TestGainOnRealRouting checks minimum held-out rates on a part of a recorded trace, with some margin. There are fewer
// requests than a window of the scheduler, which costs balance.
func TestGainOnRealRouting(t *testing.T) {
	figures(t)
	tr := real(t)
	for _, test := range []struct {
		attention placement.Attention
		forecast  solver.Forecast
		ranks     int
		least     float64
	}{
		{placement.TensorParallel, solver.Table, 4, 0.555},
		{placement.TensorParallel, solver.Table, 8, 0.42},
		{placement.TensorParallel, solver.Prefill, 8, 0.455},
		{placement.TensorParallel, solver.Decode, 8, 0.465},
		{placement.DataParallel, solver.Table, 4, 0.365},
		{placement.DataParallel, solver.Table, 8, 0.215},
	} {
		t.Run(fmt.Sprintf("%s, %s, EP %d", test.attention, test.forecast, test.ranks), func(t *testing.T) {
			t.Parallel()
			o := options(test.attention, test.ranks)
			o.TrainPercent, o.Forecast = 50, test.forecast
			s := solve(t, tr, o)
			if s.FallBack != "" || s.Report.LAR < test.least {
				t.Errorf("%s, EP %d: local activation rate %.3f, want at least %.3f %s", test.attention, test.ranks, s.Report.LAR, test.least, s.FallBack)
			}
			if want := 1 / float64(test.ranks); math.Abs(s.Report.BaselineLAR-want) > 0.02 {
				t.Errorf("%s, EP %d: baseline %.3f, want about %.3f", test.attention, test.ranks, s.Report.BaselineLAR, want)
			}
			if s.Report.OracleLAR < s.Report.LAR || s.Report.UpperBound < s.Report.OracleLAR {
				t.Errorf("%s, EP %d: %+v", test.attention, test.ranks, s.Report)
			}
			if test.attention == placement.DataParallel && *s.Report.WindowImbalance > 1.35 {
				t.Errorf("EP %d: window imbalance %v", test.ranks, *s.Report.WindowImbalance)
			}
			if s.TrainRequests+s.TestRequests != tr.Requests() || s.TrainRequests == 0 {
				t.Errorf("%d train and %d test of %d requests", s.TrainRequests, s.TestRequests, tr.Requests())
			}
		})
	}
}

func TestEvaluateRepeatsTheReport(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		s := solve(t, tr, options(attention, 4))
		o := solver.DefaultEvaluation()
		_, test, err := trace.Split(tr, s.Plan.TrainPercent, s.Plan.Seed)
		if err != nil {
			t.Fatal(err)
		}
		o.Requests, o.Seed = test, s.Plan.Seed
		got, err := solver.Evaluate(t.Context(), tr, s.Plan, o)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(s.Report, got); diff != "" {
			t.Errorf("%s: %s", attention, diff)
		}
	}
}

func TestSolveIsDeterministic(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		before := runtime.GOMAXPROCS(1)
		first := solve(t, tr, options(attention, 4))
		runtime.GOMAXPROCS(4)
		again := solve(t, tr, options(attention, 4))
		runtime.GOMAXPROCS(before)
		if diff := cmp.Diff(first, again); diff != "" {
			t.Errorf("%s: %s", attention, diff)
		}
	}
}

// TestNoGainIsReported uses traces of random routing without structure. The test requests are independent of the decision,
// so the plan may be below the default placement by chance, but not by more.
func TestNoGainIsReported(t *testing.T) {
	figures(t)
	shape := tracetest.Small
	shape.Noise, shape.DocumentsPerDomain = 100, 20
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		fallBacks, difference := 0, 0.0
		const seeds = 6
		for seed := range uint64(seeds) {
			tr := tracetest.Generate(shape, seed)
			o := options(attention, 4)
			got := solve(t, tr, o)
			o.Algorithm = placement.ContiguousAlgorithm
			plain := solve(t, tr, o)
			difference += (got.Report.LAR - plain.Report.LAR) / seeds
			if got.FallBack == "" {
				continue
			}
			fallBacks++
			if !strings.Contains(got.FallBack, "no gain expected") || got.Plan.Algorithm != placement.ContiguousAlgorithm {
				t.Errorf("fall-back %q by %s", got.FallBack, got.Plan.Algorithm)
			}
			if diff := cmp.Diff(plain.Plan.Placement, got.Plan.Placement); diff != "" {
				t.Error(diff)
			}
		}
		if fallBacks < seeds/2 || math.Abs(difference) > 0.01 {
			t.Errorf("%s: %d of %d times nothing to gain was seen; the plans are %+.4f from the default ones", attention, fallBacks, seeds, difference)
		}
	}
}

// TestSearchAndScoreAgree compares the search's value of a plan with its score on the train requests in one batch: both
// are the best balanced assignment of token IDs.
func TestSearchAndScoreAgree(t *testing.T) {
	for seed := range uint64(5) {
		tr := tracetest.Generate(tracetest.Small, seed)
		tokens, err := affinity.CountTokens(t.Context(), tr, tr.AllRequests())
		if err != nil {
			t.Fatal(err)
		}
		result, err := placement.Solve(t.Context(), placement.Problem{
			Attention: placement.TensorParallel, Ranks: 4, Layers: tr.Model.Layers, Tokens: tokens, Algorithm: placement.Auto, Seed: seed,
		})
		if err != nil {
			t.Fatal(err)
		}
		hosts := make([]affinity.Hosts, len(tokens))
		for l := range hosts {
			hosts[l] = result.Placement.Hosts(l)
		}
		table := affinity.NewTokenTable(tokens, hosts, 4, 4, affinity.Estimator{})
		o := solver.DefaultEvaluation()
		o.Requests, o.BatchTokens = tr.AllRequests(), len(tr.Tokens)
		report, err := cost.TensorParallel(t.Context(), tr, result.Placement, table.Forecast(tr), o)
		if err != nil {
			t.Fatal(err)
		}
		// For a token ID that is split over ranks, the search counts its expectation and the score its recorded routes.
		if math.Abs(report.LAR-result.TrainLAR) > 0.01 {
			t.Errorf("seed %d: the search values the plan %v, it scores %v", seed, result.TrainLAR, report.LAR)
		}
	}
}

func TestSolveRefuses(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	for name, test := range map[string]struct {
		change func(*solver.Options)
		want   string
	}{
		"EP size":       {func(o *solver.Options) { o.Ranks = 5 }, "EP size 5 does not divide the 16 experts"},
		"forecast":      {func(o *solver.Options) { o.Forecast = "oracle" }, "allowed is table prefill decode"},
		"algorithm":     {func(o *solver.Options) { o.Algorithm = "metis" }, `algorithm "metis" is unknown`},
		"attention":     {func(o *solver.Options) { o.Attention = "" }, "allowed is dp, tp"},
		"embeddings":    {func(o *solver.Options) { o.Forecast, o.Embeddings = solver.Prefill, &embedding.Table{Size: 1} }, "embeddings are not supported with forecast prefill"},
		"look-ahead":    {func(o *solver.Options) { o.Forecast = solver.LookAhead }, "the trace has no look-ahead"},
		"train percent": {func(o *solver.Options) { o.TrainPercent = 100 }, "allowed is 1 to 99"},
	} {
		o := options(placement.TensorParallel, 4)
		test.change(&o)
		if _, err := solver.Solve(t.Context(), tr, o); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := solver.Solve(cancelled, tr, options(placement.DataParallel, 4)); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v; want that of the context", err)
	}
}

func TestTimeBudgetCutsOff(t *testing.T) {
	o := options(placement.TensorParallel, 8)
	o.TimeBudget = time.Nanosecond
	s := solve(t, real(t), o)
	if !s.Truncated {
		t.Error("a nanosecond was enough")
	}
	if err := s.Plan.Placement.Validate(); err != nil {
		t.Error(err)
	}
}

func TestEvaluateRefusesAnotherModel(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	s := solve(t, tr, options(placement.TensorParallel, 4))
	o := solver.DefaultEvaluation()
	o.Requests = []int{0}
	other := tracetest.Small
	other.Vocabulary++
	if _, err := solver.Evaluate(t.Context(), tracetest.Generate(other, 1), s.Plan, o); err == nil || !strings.Contains(err.Error(), "vocabulary") {
		t.Errorf("error %v", err)
	}
	other = tracetest.Small
	other.Layers++
	if _, err := solver.Evaluate(t.Context(), tracetest.Generate(other, 1), s.Plan, o); err == nil || !strings.Contains(err.Error(), "MoE layers") {
		t.Errorf("error %v", err)
	}
}
