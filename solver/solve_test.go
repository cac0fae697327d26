// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"math"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

func options(attention placement.Attention, ranks int) Options {
	return Options{Ranks: ranks, Attention: attention, Algorithm: placement.Auto, Forecast: Table, TrainPercent: 30, Seed: 1}
}

// On clustered routing, a solved plan clearly beats the default placement, all figures are consistent, and the same
// inputs yield the same plan (on generated traces, which are faster to solve).
func TestSolve(t *testing.T) {
	shape := tracetest.Small
	// With fewer and shorter requests, chance decides whether their placement has a gain.
	shape.DocumentsPerDomain, shape.TokensPerRequest = 24, 100
	generated := map[placement.Attention]*trace.Trace{placement.TensorParallel: tracetest.Generate(shape, 3)}
	shape.Groups = 4 // domains have separate tokens, so whole requests share experts that can be placed together
	generated[placement.DataParallel] = tracetest.Generate(shape, 1)
	real, err := trace.Open(t.Context(), "testdata/tiny-32e-top4.safetensors.zst")
	if err != nil {
		t.Fatal(err)
	}
	for name, traces := range map[string]map[placement.Attention]*trace.Trace{
		"generated": generated, "recorded": {placement.TensorParallel: real, placement.DataParallel: real},
	} {
		for attention, tr := range traces {
			t.Run(name+" "+string(attention), func(t *testing.T) {
				if name == "recorded" && testing.Short() {
					t.Skip("only without -short")
				}
				solution, err := Solve(t.Context(), tr, options(attention, 4))
				if err != nil {
					t.Fatal(err)
				}
				r := solution.Report
				if solution.FallBack != "" || r.LAR < 1.2*r.BaselineLAR {
					t.Errorf("LAR %.3f, baseline %.3f: want at least 1.2 times that %s", r.LAR, r.BaselineLAR, solution.FallBack)
				}
				if math.Abs(r.BaselineLAR-0.25) > 0.05 {
					t.Errorf("the baseline is %.3f, want about a quarter at four ranks", r.BaselineLAR)
				}
				if r.LAR > r.OracleLAR+1e-9 || r.OracleLAR > r.UpperBound+1e-9 || r.UpperBound > 1+1e-9 {
					t.Errorf("LAR %.4f, oracle %.4f, upper bound %.4f: each must be at most the next", r.LAR, r.OracleLAR, r.UpperBound)
				}
				if r.TokenImbalance < 1 || r.ExpertImbalance < 1 || r.RemoteRanksPerToken <= 0 || r.RemoteRanksPerToken > 3 || r.NodeLAR != 1 {
					t.Errorf("figures %+v", r)
				}
				if (r.WindowImbalance == nil) != (attention == placement.TensorParallel) || (r.BatchImbalance == nil) != (attention == placement.DataParallel) {
					t.Errorf("window imbalance %v, batch imbalance %v for attention %s", r.WindowImbalance, r.BatchImbalance, attention)
				}
				if name == "recorded" {
					return
				}
				again, err := Solve(t.Context(), tr, options(attention, 4))
				if err != nil {
					t.Fatal(err)
				}
				if again.Report.LAR != r.LAR || again.Plan.Placement.Layers[0].Slots[0] != solution.Plan.Placement.Layers[0].Slots[0] {
					t.Error("two solves with the same seed differ")
				}
			})
		}
	}
}

// The score of a plan with known scores (contiguous experts and round-robin requests) equals an independent count.
func TestEvaluateAgreesWithCounting(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 5)
	o := options(placement.DataParallel, 4)
	o.Algorithm = placement.ContiguousAlgorithm
	solution, err := Solve(t.Context(), tr, o)
	if err != nil {
		t.Fatal(err)
	}
	evaluation := DefaultEvaluation()
	evaluation.Requests, evaluation.Seed, evaluation.Policy = tr.AllRequests(), 1, "round-robin"
	report, err := Evaluate(t.Context(), tr, solution.Plan, evaluation)
	if err != nil {
		t.Fatal(err)
	}
	// Requests are spread equally over ranks only on average over many orders. The expected share is that of a rank's
	// experts: a quarter, summed over ranks.
	perRank := tr.Model.Experts / 4
	shares := [4]float64{}
	activations := 0.0
	for position := range tr.Tokens {
		for layer := range tr.Model.Layers {
			for _, expert := range tr.Row(position, layer) {
				shares[int(expert)/perRank]++
				activations++
			}
		}
	}
	busiest := 0.0
	for _, share := range shares {
		busiest = max(busiest, share/activations*4)
	}
	if math.Abs(report.LAR-0.25) > 0.03 {
		t.Errorf("LAR %.3f of round-robin requests, want about .25", report.LAR)
	}
	// The overall expert imbalance weighs layers equally: it is at least the imbalance of the layers' mean.
	if report.ExpertImbalance < busiest-1e-9 {
		t.Errorf("expert imbalance %.4f, below that of the sums %.4f", report.ExpertImbalance, busiest)
	}
	if report.MaxSend < 1-report.LAR-1e-9 {
		t.Errorf("the busiest rank sends %.4f, less than the mean of %.4f", report.MaxSend, 1-report.LAR)
	}
}

func TestInvalidOptionsAreRejected(t *testing.T) {
	tr := tracetest.Generate(tracetest.Small, 1)
	o := options(placement.TensorParallel, 3)
	if tr.Model.Experts%3 == 0 {
		o.Ranks = 5
	}
	if _, err := Solve(t.Context(), tr, o); err == nil {
		t.Error("an EP size that does not divide the experts is accepted")
	}
	o = options(placement.TensorParallel, 4)
	o.Forecast = "oracle"
	if _, err := Solve(t.Context(), tr, o); err == nil {
		t.Error("an unknown forecast is accepted")
	}
	solution, err := Solve(t.Context(), tr, options(placement.TensorParallel, 4))
	if err != nil {
		t.Fatal(err)
	}
	other := tracetest.Generate(tracetest.Small, 1)
	other.Model.Layers = other.Model.Layers[1:]
	if _, err := Evaluate(t.Context(), other, solution.Plan, cost.Options{Requests: []int{0}}); err == nil {
		t.Error("a plan for other layers is accepted")
	}
}

// If the time budget is exhausted before validation, the placement stays, and the solution is marked as truncated.
func TestUnvalidatedPlacementIsTruncated(t *testing.T) {
	s, err := newSearch(tracetest.Generate(tracetest.Small, 1), options(placement.TensorParallel, 4))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.count(t.Context()); err != nil {
		t.Fatal(err)
	}
	solved, err := s.place(t.Context(), placement.Auto, time.Time{})
	if err != nil || solved.Truncated {
		t.Fatal(solved.Truncated, err)
	}
	for name, test := range map[string]struct {
		deadline  time.Time
		truncated bool
	}{
		"no budget":    {time.Time{}, false},
		"spent by now": {time.Now(), true},
	} {
		solution := &Solution{}
		if _, _, err := s.placementOrDefault(t.Context(), solved, solution, test.deadline); err != nil {
			t.Fatal(err)
		}
		if solution.Truncated != test.truncated || test.truncated && solution.FallBack != "" {
			t.Errorf("%s: truncated %t, fall-back %q; want truncated %t", name, solution.Truncated, solution.FallBack, test.truncated)
		}
	}
}
