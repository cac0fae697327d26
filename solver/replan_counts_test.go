// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

func counted(t *testing.T, tr *trace.Trace) []affinity.Counts {
	t.Helper()
	counts, err := affinity.CountTokens(t.Context(), tr, tr.AllRequests())
	if err != nil {
		t.Fatal(err)
	}
	return counts
}

func replanCounts(t *testing.T, recent, prior []affinity.Counts, current *solver.Plan, o solver.ReplanOptions) *solver.Replanned {
	t.Helper()
	found, err := solver.ReplanCounts(t.Context(), solver.CountedProfile{Layers: recent, Digest: [32]byte{1}}, prior, current, o)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestReplanCountsServesRequests scores a plan from counts on held-out requests.
func TestReplanCountsServesRequests(t *testing.T) {
	old, recent := drifting(1)
	live, served, err := trace.Split(recent, 60, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		current := solve(t, old, options(attention, 4)).Plan
		got := replanCounts(t, counted(t, recent.Subset(live)), counted(t, old), current, bigBatches())
		o := solver.DefaultEvaluation()
		o.Requests, o.WithoutBounds = served, true
		rate := func(p *solver.Plan) float64 {
			report, err := solver.Evaluate(t.Context(), recent, p, o)
			if err != nil {
				t.Fatal(err)
			}
			return report.LAR
		}
		before, tables := rate(current), rate(got.Tables.Plan)
		t.Logf("%s: %.3f, tables %.3f: %+v", attention, before, tables, got.Decision)
		if got.Tables.Plan.Placement != current.Placement || tables < before*1.02 || got.Tables.Plan.TraceDigest != [32]byte{1} {
			t.Errorf("%s: new tables reach %.3f, those in service %.3f", attention, tables, before)
		}
		if attention == placement.DataParallel {
			if got.Layout.Plan != nil || got.Tier != solver.TablesTier || got.Tables.Score != (solver.Score{}) {
				t.Errorf("%+v", got)
			}
			continue
		}
		layout := rate(got.Layout.Plan)
		if got.Tier != solver.LayoutTier || layout < tables || got.Layout.Moves == 0 {
			t.Errorf("a new placement reaches %.3f, new tables %.3f: %+v", layout, tables, got.Decision)
		}
		// A table that contains almost none of the tokens is right or wrong by chance: its score is skipped.
		for _, c := range []struct{ counted, served float64 }{{got.Tables.Score.LAR, tables}, {got.Layout.Score.LAR, layout}} {
			if c.counted < c.served*0.9 || c.counted > c.served*1.2 {
				t.Errorf("counts say %.3f, requests reach %.3f", c.counted, c.served)
			}
		}
	}
}

// The final tables are trained on all counts, including the held-out ones.
func TestReplanCountsTrainsOnAll(t *testing.T) {
	old, recent := drifting(1)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		current := solve(t, old, options(attention, 4)).Plan
		counts := counted(t, recent)
		got := replanCounts(t, counts, nil, current, bigBatches())
		for name, p := range map[string]*solver.Plan{"tables": got.Tables.Plan, "layout": got.Layout.Plan} {
			if p == nil {
				continue
			}
			hosts := make([]affinity.Hosts, len(p.Placement.Layers))
			for l := range hosts {
				hosts[l] = p.Placement.Hosts(l)
			}
			estimator := affinity.Estimator{Shrinkage: 1}
			var diff string
			if attention == placement.DataParallel {
				diff = cmp.Diff(affinity.NewRankTable(counts, hosts, 4, estimator), p.Ranks)
			} else {
				diff = cmp.Diff(affinity.NewTokenTable(counts, hosts, 4, 4, estimator), p.Tokens)
			}
			if diff != "" {
				t.Errorf("%s, %s: not the table of all counts (-want +got):\n%.1000s", attention, name, diff)
			}
		}
	}
}

func TestReplanCountsKeepsGoodPlan(t *testing.T) {
	old, _ := drifting(2)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(attention, 4)
		o.TrainPercent = 99
		counts := counted(t, old)
		got := replanCounts(t, counts, counts, solve(t, old, o).Plan, bigBatches())
		if got.Tier != solver.NoTier {
			t.Errorf("%s: %+v", attention, got.Decision)
		}
	}
}

func TestReplanCountsIsDeterministic(t *testing.T) {
	old, recent := drifting(3)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		current := solve(t, old, options(attention, 4)).Plan
		before := runtime.GOMAXPROCS(1)
		first := replanCounts(t, counted(t, recent), counted(t, old), current, bigBatches())
		runtime.GOMAXPROCS(4)
		again := replanCounts(t, counted(t, recent), counted(t, old), current, bigBatches())
		runtime.GOMAXPROCS(before)
		if diff := cmp.Diff(first, again); diff != "" {
			t.Errorf("%s: %s", attention, diff)
		}
	}
}

// The new plan keeps copies, rank capacities and message objectives.
func TestReplanCountsKeepsTheShapeOfThePlan(t *testing.T) {
	old, recent := drifting(4)
	for name, change := range map[string]func(*solver.Options){
		"redundant slots": func(o *solver.Options) { o.RedundantSlots = 2 },
		"capacity":        func(o *solver.Options) { o.Constraints.RankCapacity = []float64{1, 1, 1, .5} },
		"objective":       func(o *solver.Options) { o.Objective = placement.RankDedup },
	} {
		o := options(placement.TensorParallel, 4)
		change(&o)
		current := solve(t, old, o).Plan
		got := replanCounts(t, counted(t, recent), nil, current, bigBatches())
		if (got.Layout.Plan == nil) != (o.Objective == placement.RankDedup) {
			t.Errorf("%s: layout %v", name, got.Layout.Plan)
		}
		for _, p := range []*solver.Plan{got.Tables.Plan, got.Layout.Plan} {
			if p == nil {
				continue
			}
			if p.Placement.SlotsPerRank != current.Placement.SlotsPerRank || p.Objective != current.Objective || !cmp.Equal(p.RankCapacity, current.RankCapacity) {
				t.Errorf("%s: %+v", name, p)
			}
		}
	}
	r := bigBatches()
	r.PreserveGroups = true
	current := solve(t, old, options(placement.TensorParallel, 4)).Plan
	grouped, err := solver.ReplanCounts(t.Context(), solver.CountedProfile{Layers: counted(t, recent), Groups: 4}, nil, current, r)
	if err != nil || !wholeGroups(grouped.Layout.Plan.Placement, 4) {
		t.Errorf("groups are torn apart: %v", err)
	}
}

func TestReplanCountsRefuses(t *testing.T) {
	old, recent := drifting(5)
	current := solve(t, old, options(placement.TensorParallel, 4)).Plan
	contextual := *current
	contextual.Forecast = solver.Prefill
	counts := counted(t, recent)
	for name, test := range map[string]struct {
		layers, prior []affinity.Counts
		current       *solver.Plan
		want          string
	}{
		"few tokens":  {layers: counted(t, recent.Subset([]int{0, 1, 2})), want: "at least 2000 counted tokens"},
		"no layers":   {layers: []affinity.Counts{}, want: "the recent counts do not match the plan's model"},
		"other model": {prior: counts[:1], want: "the prior counts do not match the plan's model"},
		"forecast":    {current: &contextual, want: "counts do not contain the order of tokens"},
	} {
		if test.layers == nil {
			test.layers = counts
		}
		if test.current == nil {
			test.current = current
		}
		_, err := solver.ReplanCounts(t.Context(), solver.CountedProfile{Layers: test.layers}, test.prior, test.current, bigBatches())
		if err == nil || !strings.Contains(err.Error(), test.want) || errors.Is(err, solver.ErrTooFewRequests) != (name == "few tokens") {
			t.Errorf("%s: error %v; want %q", name, err, test.want)
		}
	}
}
