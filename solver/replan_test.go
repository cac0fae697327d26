// SPDX-License-Identifier: Apache-2.0

package solver_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/solver/trace/tracetest"
)

// drifting returns a trace in two halves: the requests of the old plan, and later requests of other domains without
// names.
func drifting(seed uint64) (old, recent *trace.Trace) {
	shape := tracetest.Shape{
		Experts: 32, TopK: 2, Layers: 2, Vocabulary: 200, Domains: 4, DocumentsPerDomain: 25, RequestsPerDocument: 2, TokensPerRequest: 40, Noise: 10, Groups: 4,
	}
	all := tracetest.Generate(shape, seed)
	var before, after []int
	for r, domain := range all.Domains {
		if domain < 2 {
			before = append(before, r)
		} else {
			after = append(after, r)
		}
	}
	old, recent = all.Subset(before), all.Subset(after)
	old.Domains, recent.Domains = nil, nil
	return old, recent
}

// bigBatches returns options with batches in which exchanges take most of the time.
func bigBatches() solver.ReplanOptions {
	return solver.ReplanOptions{
		Options:         solver.Options{TrainPercent: 60, Seed: 1},
		MoveGainPercent: solver.DefaultMoveGainPercent,
		PriorPercent:    solver.DefaultPriorPercent,
		ReplanPolicy:    solver.ReplanPolicy{BatchTokens: []int{1 << 17}, MinimumGainPercent: 5},
	}
}

func replan(t *testing.T, recent, prior *trace.Trace, current *solver.Plan, o solver.ReplanOptions) *solver.Replanned {
	t.Helper()
	found, err := solver.Replan(t.Context(), recent, prior, current, o)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// heldOut scores a plan like Replan.
func heldOut(t *testing.T, recent *trace.Trace, p *solver.Plan, o solver.ReplanOptions) cost.Report {
	t.Helper()
	_, test, err := trace.Split(recent, o.TrainPercent, o.Seed)
	if err != nil {
		t.Fatal(err)
	}
	e := solver.DefaultEvaluation()
	e.Requests, e.Seed, e.WithoutBounds, e.BatchTokens = test, o.Seed, true, o.ReplanPolicy.BatchTokens[0]
	report, err := solver.Evaluate(t.Context(), recent, p, e)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestReplanAfterDomainShift(t *testing.T) {
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		t.Run(string(attention), func(t *testing.T) {
			t.Parallel()
			old, recent := drifting(1)
			o := options(attention, 4)
			o.TrainPercent = 80
			current := solve(t, old, o).Plan
			before := solve(t, old, o).Plan // solve again with the same inputs
			got := replan(t, recent, old, current, bigBatches())
			if diff := cmp.Diff(before, current); diff != "" || got.Current.Plan != current || got.Current.Moves != 0 {
				t.Error("the plan in service has changed: ", diff)
			}
			if got.Tables.Plan.Placement != current.Placement || got.Tables.Moves != 0 {
				t.Error("a plan of only new tables moves experts")
			}
			if err := got.Layout.Plan.Placement.Validate(); err != nil {
				t.Error(err)
			}
			for name, c := range map[string]solver.Candidate{"current": got.Current, "tables": got.Tables, "layout": got.Layout} {
				if want := heldOut(t, recent, c.Plan, bigBatches()); want.LAR != c.Score.LAR || want.ExpertWindowImbalance != c.Score.ExpertImbalance {
					t.Errorf("%s: score %+v; evaluated separately the rate is %v", name, c.Score, want.LAR)
				}
				if c.Plan != current && (c.Plan.TraceDigest != recent.Digest || c.Plan.TrainPercent != 60 || c.Plan.Attention != attention) {
					t.Errorf("%s: %+v", name, c.Plan)
				}
			}
			t.Logf("LAR %.3f, tables %.3f, layout %.3f (%d moves): %s", got.Current.Score.LAR, got.Tables.Score.LAR, got.Layout.Score.LAR, got.Layout.Moves, got.Reason)
			if got.Tier != solver.LayoutTier || got.Verdict != solver.Gain || got.Layout.Score.LAR < 1.2*got.Current.Score.LAR || got.Layout.Score.LAR < got.Tables.Score.LAR {
				t.Errorf("tier %s: %s", got.Tier, got.Reason)
			}
		})
	}
}

// TestReplanKeepsGoodPlan replans for requests of the domains from which the plan was solved.
func TestReplanKeepsGoodPlan(t *testing.T) {
	old, _ := drifting(2)
	train, test, err := trace.Split(old, 60, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(attention, 4)
		o.TrainPercent = 80
		current := solve(t, old.Subset(train), o).Plan
		r := bigBatches()
		r.MinimumGainPercent = 10 // training on the new requests also has some gain
		got := replan(t, old.Subset(test), old.Subset(train), current, r)
		if got.Tier != solver.NoTier || got.Verdict != solver.NoGainExpected || !strings.Contains(got.Reason, "the minimum is 10%") {
			t.Errorf("%s: %+v", attention, got.Decision)
		}
		if got.Trust < 16 {
			t.Errorf("%s: old rows weigh at most %v occurrences although nothing has changed", attention, got.Trust)
		}
	}
}

// The new plan keeps ranks, groups, copies and objective of the plan in service.
func TestReplanKeepsTheShapeOfThePlan(t *testing.T) {
	old, recent := drifting(3)
	for name, change := range map[string]func(*solver.Options, *solver.ReplanOptions){
		"redundant slots": func(o *solver.Options, _ *solver.ReplanOptions) { o.RedundantSlots = 2 },
		"capacity":        func(o *solver.Options, _ *solver.ReplanOptions) { o.Constraints.RankCapacity = []float64{1, 1, 1, .5} },
		"objective":       func(o *solver.Options, _ *solver.ReplanOptions) { o.Objective = placement.RankDedup },
		"forecast":        func(o *solver.Options, _ *solver.ReplanOptions) { o.Forecast = solver.Prefill },
		"groups": func(o *solver.Options, r *solver.ReplanOptions) {
			o.PreserveGroups, r.PreserveGroups = true, true
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, r := options(placement.TensorParallel, 4), bigBatches()
			o.TrainPercent = 80
			change(&o, &r)
			current := solve(t, old, o).Plan
			got := replan(t, recent, old, current, r)
			for _, p := range []*solver.Plan{got.Tables.Plan, got.Layout.Plan} {
				if p.Placement.SlotsPerRank != current.Placement.SlotsPerRank || p.Objective != current.Objective || p.RanksPerNode != current.RanksPerNode || p.Forecast != current.Forecast {
					t.Errorf("%+v", p)
				}
				if diff := cmp.Diff(current.RankCapacity, p.RankCapacity); diff != "" {
					t.Error(diff)
				}
			}
			if o.PreserveGroups && !wholeGroups(got.Layout.Plan.Placement, 4) {
				t.Error("groups are torn apart")
			}
		})
	}
}

// wholeGroups reports whether each run of slots with the size of a group contains one group.
func wholeGroups(p *placement.Placement, groups int) bool {
	size := p.Experts / groups
	for _, layer := range p.Layers {
		for run := range slices.Chunk(layer.Slots, size) {
			for _, e := range run {
				if e/size != run[0]/size {
					return false
				}
			}
		}
	}
	return true
}

func TestMovesHaveACost(t *testing.T) {
	old, recent := drifting(4)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		o := options(attention, 4)
		current := solve(t, old, o).Plan
		last := 0
		for i, percent := range []float64{0, 20, 1e6} {
			r := bigBatches()
			r.MoveGainPercent = percent
			got := replan(t, recent, nil, current, r)
			if i > 0 && got.Layout.Moves > last {
				t.Errorf("%s: %d experts move at a price of %v%%, fewer did at a lower one: %d", attention, got.Layout.Moves, percent, last)
			}
			last = got.Layout.Moves
			if i == 0 && last == 0 {
				t.Errorf("%s: nothing moves for nothing", attention)
			}
		}
		if last != 0 {
			t.Errorf("%s: %d experts move at any price", attention, last)
		}
	}
}

// A placement that concentrates load is replaced by a more balanced one if only the latter pays.
func TestReplanBalancesLoad(t *testing.T) {
	all := real(t)
	half := all.Requests() / 2
	old, recent := all.Subset(all.AllRequests()[:half]), all.Subset(all.AllRequests()[half:])
	current := solve(t, old, options(placement.TensorParallel, 8)).Plan
	r := bigBatches()
	r.MinimumGainPercent = 0
	r.Constraints.ExpertLoadLimit = 800 // all load on one of eight ranks: no limit
	local := replan(t, recent, nil, current, r)
	for _, least := range []float64{max(local.LayoutGainPercent, 0), max(local.LayoutGainPercent, 0) + 1} {
		r.MinimumGainPercent, r.Constraints.ExpertLoadLimit = least, 0
		got := replan(t, recent, nil, current, r)
		t.Logf("wanted %.1f%%: load %.2f of the mean, LAR %.3f, gain %.1f%%; without limits load %.2f, LAR %.3f, gain %.1f%%", least,
			got.Layout.Score.ExpertImbalance, got.Layout.Score.LAR, got.LayoutGainPercent, local.Layout.Score.ExpertImbalance, local.Layout.Score.LAR, local.LayoutGainPercent)
		pays := local.LayoutGainPercent >= least
		if kept := got.Layout.Score.LAR == local.Layout.Score.LAR; kept != pays {
			t.Errorf("wanted %.1f%%: the most local placement gains %.1f%%, and whether it was kept is %t", least, local.LayoutGainPercent, kept)
		}
		if !pays && got.Layout.Score.Total() >= local.Layout.Score.Total() {
			t.Errorf("another placement was taken, with modelled time %v instead of %v", got.Layout.Score.Total(), local.Layout.Score.Total())
		}
	}
}

func TestReplanIsDeterministic(t *testing.T) {
	old, recent := drifting(5)
	for _, attention := range []placement.Attention{placement.TensorParallel, placement.DataParallel} {
		current := solve(t, old, options(attention, 4)).Plan
		before := runtime.GOMAXPROCS(1)
		first := replan(t, recent, old, current, bigBatches())
		runtime.GOMAXPROCS(4)
		again := replan(t, recent, old, current, bigBatches())
		runtime.GOMAXPROCS(before)
		if diff := cmp.Diff(first, again); diff != "" {
			t.Errorf("%s: %s", attention, diff)
		}
	}
}

func TestReplanRefuses(t *testing.T) {
	old, recent := drifting(6)
	current := solve(t, old, options(placement.TensorParallel, 4)).Plan
	few := recent.Subset(recent.AllRequests()[:10])
	oneDocument := recent.Subset(recent.AllRequests())
	for i := range oneDocument.Documents {
		oneDocument.Documents[i] = int32(min(i/90, 1))
	}
	oneDocument = oneDocument.Subset(slices.Concat(oneDocument.AllRequests()[:60], oneDocument.AllRequests()[97:]))
	halves := recent.Subset(recent.AllRequests())
	for i := range halves.Documents {
		halves.Documents[i] = int32(i % 2)
	}
	other := *old
	other.Model.Vocabulary++
	foreign, digests := *current, *recent
	foreign.ModelDigest, digests.Model.Digest = "a", "b"
	for name, test := range map[string]struct {
		recent, prior *trace.Trace
		current       *solver.Plan
		change        func(*solver.ReplanOptions)
		want          string
	}{
		"few requests":  {recent: few, want: "there are 10, at least 20 are needed"},
		"other model":   {prior: &other, want: "of different models"},
		"other digest":  {recent: &digests, current: &foreign, want: "the plan is for model a, the trace is of model b"},
		"vocabulary":    {recent: &other, want: "vocabulary of 200, the trace's is 201"},
		"prior percent": {change: func(o *solver.ReplanOptions) { o.PriorPercent = 101 }, want: "prior percent is 101; allowed is 0 to 100"},
		"batch":         {change: func(o *solver.ReplanOptions) { o.ReplanPolicy.BatchTokens = nil }, want: "batch tokens is empty"},
		"batch size":    {change: func(o *solver.ReplanOptions) { o.ReplanPolicy.BatchTokens = []int{0} }, want: "batch tokens is 0"},
		"gain":          {change: func(o *solver.ReplanOptions) { o.MinimumGainPercent = 100 }, want: "minimum gain percent is 100"},
		"target":        {change: func(o *solver.ReplanOptions) { o.TargetLAR = 2 }, want: "target LAR is 2"},
		"moves":         {change: func(o *solver.ReplanOptions) { o.MoveGainPercent = -1 }, want: "move gain percent is -1"},
		"train percent": {change: func(o *solver.ReplanOptions) { o.TrainPercent = 0 }, want: "train percent is 0"},
		"one document to learn from, and a prior": {recent: halves, prior: old, want: "at least two are needed"},
		"one document": {
			recent: oneDocument, want: "at least 4 are needed",
			change: func(o *solver.ReplanOptions) {
				for { // until the long document is in the train part
					if _, test, err := trace.Split(oneDocument, o.TrainPercent, o.Seed); err != nil || len(test) < 4 {
						return
					}
					o.Seed++
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := bigBatches()
			if test.change != nil {
				test.change(&o)
			}
			if test.recent == nil {
				test.recent = recent
			}
			if test.current == nil {
				test.current = current
			}
			_, err := solver.Replan(t.Context(), test.recent, test.prior, test.current, o)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v; want %q", err, test.want)
			}
			if errors.Is(err, solver.ErrTooFewRequests) != strings.Contains(test.want, "needed") {
				t.Errorf("error %v is or is not about too few requests", err)
			}
		})
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := solver.Replan(cancelled, recent, old, current, bigBatches()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v; want that of the context", err)
	}
}

func TestChoose(t *testing.T) {
	score := func(lar, us float64) solver.Score {
		return solver.Score{LAR: lar, LayerTime: cost.LayerTime{Exchange: us / 2, Compute: us / 2}}
	}
	current := score(.2, 100)
	for _, test := range []struct {
		name           string
		tables, layout solver.Score
		local, target  float64
		tier           solver.Tier
		verdict        solver.Verdict
	}{
		{"latency dominates", score(.3, 98), score(.5, 96.5), 96, 0, solver.NoTier, solver.LocalityDoesNotPay},
		{"a layout that pays", score(.25, 97), score(.3, 90), 50, 0, solver.LayoutTier, solver.Gain},
		{"the layout gains little more than tables", score(.3, 90.4), score(.3, 90), 50, 0, solver.TablesTier, solver.Gain},
		{"the layout gains more than tables", score(.3, 92), score(.3, 90), 50, 0, solver.LayoutTier, solver.Gain},
		{"tables that restore the target", score(.28, 94), score(.3, 80), 50, .28, solver.TablesTier, solver.Gain},
		{"tables short of the target", score(.27, 94), score(.3, 80), 50, .28, solver.LayoutTier, solver.Gain},
		{"tables on target that gain no time", score(.28, 99), score(.3, 80), 50, .28, solver.LayoutTier, solver.Gain},
		{"tables better than the layout", score(.3, 90), score(.2, 101), 50, 0, solver.TablesTier, solver.Gain},
		{"nothing gains enough", score(.21, 97), score(.22, 95.1), 50, 0, solver.NoTier, solver.NoGainExpected},
		{"everything is worse", score(.1, 120), score(.1, 110), 50, 0, solver.NoTier, solver.NoGainExpected},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := solver.ReplanPolicy{BatchTokens: []int{1}, MinimumGainPercent: 5, TargetLAR: test.target}
			got := c.Choose(current, test.tables, test.layout, test.local)
			if got.Tier != test.tier || got.Verdict != test.verdict || got.Reason == "" {
				t.Errorf("%+v; want %s, %s", got, test.tier, test.verdict)
			}
			if want := 100 - test.local; fmt.Sprintf("%.6f", got.MaxGainPercent) != fmt.Sprintf("%.6f", want) {
				t.Errorf("most gain %v; want %v", got.MaxGainPercent, want)
			}
		})
	}
}

// TestSmallBatchesDoNotPay replans for batches in which latency dominates the exchange.
func TestSmallBatchesDoNotPay(t *testing.T) {
	old, recent := drifting(7)
	o := bigBatches()
	o.ReplanPolicy.BatchTokens = []int{64}
	got := replan(t, recent, old, solve(t, old, options(placement.DataParallel, 4)).Plan, o)
	if got.Verdict != solver.LocalityDoesNotPay || got.Tier != solver.NoTier {
		t.Errorf("%+v", got.Decision)
	}
}

// TestReplanRecoversOnRealRouting solves a plan from program code and serves prose. It compares new tables and a new
// placement from part of the prose with a plan solved only from that part, on the rest of the prose. docs/replanning.md
// contains the figures for larger traces.
func TestReplanRecoversOnRealRouting(t *testing.T) {
	figures(t)
	all := real(t)
	kinds := func(names ...string) (of []int) {
		for r, domain := range all.Domains {
			if slices.Contains(names, all.Model.Domains[domain]) {
				of = append(of, r)
			}
		}
		return of
	}
	code, prose := all.Subset(kinds("c", "go", "js", "python", "sql", "yamljson")), all.Subset(kinds("chinese", "english", "french", "german", "japanese", "russian", "spanish"))
	learnt, test, err := trace.Split(prose, 60, 1)
	if err != nil {
		t.Fatal(err)
	}
	recent := prose.Subset(learnt)
	code.Domains, recent.Domains = nil, nil
	o := options(placement.TensorParallel, 8)
	o.TrainPercent = 75
	current, scratch := solve(t, code, o).Plan, solve(t, recent, o).Plan
	r := bigBatches()
	r.TrainPercent = 75
	got := replan(t, recent, code, current, r)
	e := solver.DefaultEvaluation()
	e.Requests, e.Seed, e.WithoutBounds = test, 1, true
	rate := func(p *solver.Plan) float64 {
		report, err := solver.Evaluate(t.Context(), prose, p, e)
		if err != nil {
			t.Fatal(err)
		}
		return report.LAR
	}
	before, best := rate(current), rate(scratch)
	tables, layout := (rate(got.Tables.Plan)-before)/(best-before), (rate(got.Layout.Plan)-before)/(best-before)
	t.Logf("%d tokens: LAR %.3f, from scratch %.3f; new tables recover %.2f, a new placement %.2f; trust %v; %s: %s", len(recent.Tokens), before, best, tables, layout, got.Trust, got.Tier, got.Reason)
	if tables < 0.5 || layout < 0.95 || best < before*1.1 {
		t.Errorf("LAR %.3f, from scratch %.3f: new tables recover %.2f of the loss, a new placement %.2f", before, best, tables, layout)
	}
}
