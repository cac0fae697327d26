// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
	"github.com/semmoe/operator/test/tier"
)

// expertBytes is the size of an expert of Qwen3-30B-A3B (hidden size 2048, width 768) in bfloat16.
const expertBytes = 3 * 2048 * 768 * 2

// openWide returns a recorded trace with the sizes of Qwen3-30B-A3B.
func openWide(t *testing.T) *trace.Trace {
	t.Helper()
	tr := openTiny(t)
	tr.Model.HiddenSize = 2048
	tr.Model.Config = strings.Replace(widened(t, tr.Model.Config, 2048, 768), "{", `{"torch_dtype":"bfloat16",`, 1)
	return tr
}

// Copies are used only if they pay by the time model and fit into memory.
func TestRedundantExpertsFromMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("figures are checked without -short")
	}
	tr := someLayers(openWide(t))
	layers := int64(len(tr.Model.Layers))
	for name, c := range map[string]struct {
		attention   placement.Attention
		memory      int64
		batchTokens int
		copyRule    placement.CopyRule
		numbers     []int // compared numbers
		chosen      []int // acceptable choices
		says        string
		nightly     bool // runs only in the nightly tier
	}{
		"room for nothing":       {placement.DataParallel, layers*expertBytes - 1, 65536, "", []int{0}, []int{0}, fmt.Sprintf("%[1]s per rank are too small for one expert in each of the %[2]d layers, %[1]s", BytesText(layers*expertBytes), layers), false},
		"room for all":           {placement.DataParallel, 1 << 40, 65536, "", []int{0, 1, 2, 4, 8, 16, 28}, []int{16, 28}, "28 copies per rank and layer", true},
		"room for some":          {placement.DataParallel, 5*layers*expertBytes + 1, 65536, "", []int{0, 1, 2, 4, 5}, []int{2, 4, 5}, "of at most 5 copies per rank and layer", false},
		"small batches":          {placement.DataParallel, 4 * layers * expertBytes, 16, "", []int{0, 1, 2, 4}, []int{0}, "up to 4 per rank and layer save too little", false},
		"small batches, by rule": {placement.DataParallel, layers * expertBytes, 16, placement.RankModuloCopy, []int{0, 1}, []int{0}, "save too little", true},
		"copies by rule":         {placement.DataParallel, 4 * layers * expertBytes, 65536, placement.RankModuloCopy, []int{0, 1, 2, 4}, []int{1, 2, 4}, "against none", true},
		"ranks of tokens":        {placement.TensorParallel, layers * expertBytes, 16, "", []int{0, 1}, []int{0}, "save too little", false},
	} {
		t.Run(name, func(t *testing.T) {
			if c.nightly {
				tier.Nightly(t)
			}
			o := options(c.attention, 8)
			o.Objective, o.RedundantMemory, o.CopyRule, o.BatchTokens = placement.Time, c.memory, c.copyRule, []int{c.batchTokens}
			solution, err := Solve(t.Context(), tr, o)
			if err != nil {
				t.Fatal(err)
			}
			copies, placed := solution.Plan.Copies, solution.Plan.Placement
			var numbers []int
			for _, p := range copies.Points {
				numbers = append(numbers, p.RedundantSlots)
				if p.MemoryBytes > c.memory || p.MemoryBytes != int64(p.RedundantSlots)*layers*expertBytes || p.LayerUS <= 0 || p.LAR <= 0 || p.ExpertImbalance < 1 {
					t.Errorf("point %+v", p)
				}
			}
			if !slices.Equal(numbers, c.numbers) || !slices.Contains(c.chosen, copies.Chosen) || !strings.Contains(copies.Text(), c.says) {
				t.Errorf("of %v copies %d were chosen; want one of %v of %v: %s", numbers, copies.Chosen, c.chosen, c.numbers, copies.Text())
			}
			if placed.SlotsPerRank != 4+copies.Chosen {
				t.Errorf("ranks have %d slots for 4 experts and %d copies", placed.SlotsPerRank, copies.Chosen)
			}
			if copies.Chosen > 0 {
				if placed.CopyRule != c.copyRule || solution.FallBack != "" {
					t.Errorf("copy rule %q, fall-back %q", placed.CopyRule, solution.FallBack)
				}
				return
			}
			// A choice of no copies yields the same plan as a solve without memory for copies.
			o.RedundantMemory, o.CopyRule = 0, placement.NearestCopy
			without, err := Solve(t.Context(), tr, o)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(without.Plan.Placement, placed) || without.Plan.Chosen != solution.Plan.Chosen {
				t.Errorf("the placement %q is not that of a solve without copies, %q", solution.Plan.Chosen, without.Plan.Chosen)
			}
		})
	}
}

// A larger number of copies is chosen if it is faster than a smaller one by more than chance, or, with a single split,
// by half a percent of the default placement's time.
func TestCopiesAheadByMoreThanChance(t *testing.T) {
	tried := func(slots int, times ...float64) trial {
		tr := trial{slots: slots, names: []string{"contiguous", placement.PointOfTime}, figures: map[string][]modelledTimes{}}
		for _, us := range times {
			tr.figures["contiguous"] = append(tr.figures["contiguous"], modelledTimes{mean: 1000})
			tr.figures[placement.PointOfTime] = append(tr.figures[placement.PointOfTime], modelledTimes{mean: us})
		}
		return tr
	}
	for name, c := range map[string]struct {
		trials []trial
		want   int
	}{
		"ahead by little":           {[]trial{tried(0, 900), tried(1, 896), tried(2, 896)}, 0},
		"ahead by little each time": {[]trial{tried(0, 900), tried(1, 896), tried(2, 893)}, 2},
		"the best is in the middle": {[]trial{tried(0, 900), tried(1, 850), tried(2, 870)}, 1},
		"worse, then better":        {[]trial{tried(0, 900), tried(1, 910), tried(2, 880)}, 2},
		"chance":                    {[]trial{tried(0, 900, 850, 900, 850), tried(1, 800, 940, 800, 900)}, 0},
		"beyond chance":             {[]trial{tried(0, 900, 850, 900, 850), tried(1, 850, 800, 850, 801)}, 1},
		"one number":                {[]trial{tried(0, 900)}, 0},
	} {
		if best := new(Copies).compare(c.trials); best == nil || best.slots != c.want {
			t.Errorf("%s: %+v was chosen; want %d", name, best, c.want)
		}
	}
	if best := new(Copies).compare(nil); best != nil {
		t.Errorf("of nothing %+v was chosen", best)
	}
}

// An exhausted time budget yields a plan without copies, and the solution reports it.
func TestCopiesWithinTheTimeBudget(t *testing.T) {
	o := options(placement.DataParallel, 8)
	o.Objective, o.RedundantMemory, o.TimeBudget = placement.Time, 1<<40, time.Nanosecond
	solution, err := Solve(t.Context(), openWide(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if !solution.Truncated || solution.Plan.Copies.Chosen != 0 || len(solution.Plan.Copies.Points) != 0 || !strings.Contains(solution.Plan.Copies.Text(), "time budget") {
		t.Errorf("truncated %v, %+v: %s", solution.Truncated, solution.Plan.Copies, solution.Plan.Copies.Text())
	}
}

func TestCopiesOptionsAreValidated(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Options, *trace.Trace)
		says   string
	}{
		"negative memory":  {func(o *Options, _ *trace.Trace) { o.RedundantMemory = -1 }, "must not be negative"},
		"a number as well": {func(o *Options, _ *trace.Trace) { o.RedundantSlots = 1 }, "mutually exclusive"},
		"other objective":  {func(o *Options, _ *trace.Trace) { o.Objective = placement.Activation }, "objective time and algorithm auto"},
		"other algorithm":  {func(o *Options, _ *trace.Trace) { o.Algorithm = placement.EPLB }, "objective time and algorithm auto"},
		"no copies known":  {func(o *Options, _ *trace.Trace) { o.Algorithm = placement.MoETuner }, "does not support redundant slots"},
		"a load limit":     {func(o *Options, _ *trace.Trace) { o.Constraints.ExpertLoadLimit = 110 }, "an expert load limit is not supported with redundant slots"},
		"one rank":         {func(o *Options, _ *trace.Trace) { o.Ranks = 1 }, "allow 0 to 0"},
		"unknown sizes":    {func(_ *Options, tr *trace.Trace) { tr.Model.Config = "{}" }, "the size of an expert is unknown"},
		"absurd sizes":     {func(_ *Options, tr *trace.Trace) { tr.Model.Config = `{"moe_intermediate_size":4611686018427387904}` }, "the size of an expert is unknown"},
		"unknown weights": {func(_ *Options, tr *trace.Trace) {
			tr.Model.Config = `{"moe_intermediate_size":768,"quantization_config":{"quant_method":"secret"}}`
		}, `method "secret"`},
		"groups": {func(o *Options, tr *trace.Trace) {
			tr.Model.Config, o.PreserveGroups = `{"moe_intermediate_size":768,"n_group":8}`, true
		}, "split groups"},
	} {
		tr := openWide(t)
		o := options(placement.DataParallel, 8)
		o.Objective, o.RedundantMemory = placement.Time, 1<<40
		c.change(&o, tr)
		if err := Check(tr, o); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want an error with %q", name, err, c.says)
		}
	}
}
