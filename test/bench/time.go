// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// timeResult compares the modelled layer times of plans of several methods.
type timeResult struct {
	Cells []timeCell `json:"cells"`
	// Splits is the number of splits into train and test documents over which each cell is averaged. Placements of
	// equal quality differ by several percent in a single split, because experts are loaded differently by the test
	// documents.
	Splits int `json:"splits"`
	// GainCells is the number of cells in which ours has the verdict Gain in at least half of the splits. SlowerGains is
	// the number of cells in which ours has the verdict Gain in any split and is slower than no plan on average.
	GainCells   int `json:"gain_cells"`
	SlowerGains int `json:"slower_gain_cells"`
	// Within is the share of cells in which ours is at most 0.5% slower than the best baseline, by means over the
	// splits. Exceptions lists the other cells. SingleWithin is the share of all splits of all cells.
	Within       float64  `json:"within_half_percent"`
	Exceptions   []string `json:"exceptions"`
	SingleWithin float64  `json:"single_split_within_half_percent"`
	// MeanSaved is the saved time of each method over the gain cells, in percent, from the geometric mean of the ratios
	// to the time without a plan.
	MeanSaved map[string]float64 `json:"geometric_mean_saved_percent"`
}

// timeCell is one combination of a trace, a width, an EP size, an attention mode, a hardware profile and a batch size.
type timeCell struct {
	Trace     string              `json:"trace"`
	Shape     string              `json:"shape"`
	Ranks     int                 `json:"ep_size"`
	Attention placement.Attention `json:"attention"`
	Hardware  string              `json:"hardware"`
	PerNode   int                 `json:"ranks_per_node"`
	Tokens    int                 `json:"batch_tokens"`
	// BaselineUS is the modelled time of a layer without a plan, as a mean over the splits.
	BaselineUS float64                `json:"baseline_layer_us"`
	Methods    map[string]*timeMethod `json:"methods"`
}

// timeMethod is the result of the plans of one method in one cell.
type timeMethod struct {
	// Saved is the time saved relative to no plan, as a mean over the splits. BySplit are the values.
	Saved   float64   `json:"saved_percent"`
	BySplit []float64 `json:"saved_percent_by_split"`
	// Gains is the number of splits with the verdict Gain. Only ours has a verdict.
	Gains int `json:"gain_splits,omitempty"`
	// LAR is the mean local activation rate.
	LAR float64 `json:"lar"`
}

// ours is the name of the method that is compared with the others.
const ours = "time"

// timeShape is the width of a model.
type timeShape struct{ hidden, expert int }

// timeShapes holds the modelled widths by name: the hidden size and the width of an expert. An empty shape keeps the
// width of the trace.
var timeShapes = map[string]timeShape{
	"own": {}, "dsv2-lite": {2048, 1408}, "qwen3-30b": {2048, 768}, "dsv3": {7168, 2048},
}

// timeBench holds the flags of the benchmark.
type timeBench struct {
	traces, shapes, ranks, attention, tokens, hardware string
	train, perNode, splits, copies                     int
}

func benchTime(ctx context.Context, args []string) (*timeResult, error) {
	var b timeBench
	flags := flag.NewFlagSet("time", flag.ContinueOnError)
	flags.StringVar(&b.traces, "traces", metisTrace, "routing traces, separated by commas")
	flags.StringVar(&b.shapes, "shapes", "qwen3-30b", "widths: own (of the trace), dsv2-lite, qwen3-30b, dsv3")
	flags.StringVar(&b.ranks, "ep", "4,8,16", "EP sizes; those that do not divide the experts are skipped")
	flags.StringVar(&b.attention, "attention", "dp,tp", "attention modes")
	flags.StringVar(&b.tokens, "tokens", "4096,16384,65536", "sizes of batches, in tokens over all ranks")
	flags.StringVar(&b.hardware, "hardware", hardware.Default, "names of built-in hardware profiles, or "+pcie)
	flags.IntVar(&b.train, "train-percent", 80, "percent of the documents to learn from")
	flags.IntVar(&b.splits, "splits", 8, "number of splits into train and test documents, with seeds from 1")
	flags.IntVar(&b.copies, "copies", 1, "1 also compares plans with one redundant slot per rank, 0 does not")
	flags.IntVar(&b.perNode, "ranks-per-node", 8, "ranks that share a node")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	sizes, err := numbers(b.tokens)
	if err != nil {
		return nil, fmt.Errorf("-tokens: %w", err)
	}
	ranks, err := numbers(b.ranks)
	if err != nil {
		return nil, fmt.Errorf("-ep: %w", err)
	}
	if b.splits < 1 || b.copies < 0 || b.copies > 1 {
		return nil, fmt.Errorf("-splits is %d, -copies %d; allowed is at least 1, and 0 or 1", b.splits, b.copies)
	}
	var shapes []string
	for name := range strings.SplitSeq(b.shapes, ",") {
		if _, known := timeShapes[name]; !known {
			return nil, fmt.Errorf("-shapes: %q is invalid: allowed is own, dsv2-lite, qwen3-30b, dsv3", name)
		}
		shapes = append(shapes, name)
	}
	profiles := map[string]*hardware.Profile{}
	for name := range strings.SplitSeq(b.hardware, ",") {
		if profiles[name], err = machinesNamed(name); err != nil {
			return nil, fmt.Errorf("-hardware: %w", err)
		}
	}
	r := &timeResult{Exceptions: []string{}, Splits: b.splits}
	for path := range strings.SplitSeq(b.traces, ",") {
		t, err := trace.Open(ctx, path)
		if err != nil {
			return nil, err
		}
		for attention := range strings.SplitSeq(b.attention, ",") {
			for _, n := range ranks {
				if placement.CheckRanks(n, t.Model.Experts) != nil || n == t.Model.Experts {
					continue
				}
				m := timeMeasurement{timeBench: &b, trace: t, name: filepath.Base(path), shapes: shapes, profiles: profiles, cells: map[string]*timeCell{}}
				for seed := range b.splits {
					err := m.add(ctx, solver.Options{
						Ranks: n, Attention: placement.Attention(attention), Forecast: solver.Table, TrainPercent: b.train, Seed: 1 + uint64(seed),
						RanksPerNode: b.perNode, BatchTokens: sizes,
					})
					if err != nil {
						return nil, err
					}
				}
				for _, cell := range m.order {
					fmt.Fprintf(os.Stderr, "%s %s EP %d %s %s %d tokens: %+.1f%%\n", cell.Trace, cell.Shape, cell.Ranks, cell.Attention, cell.Hardware, cell.Tokens, cell.Methods[ours].Saved)
					r.Cells = append(r.Cells, *cell)
				}
			}
		}
	}
	r.summarize()
	return r, nil
}

// pcie is the name of the built-in profile with the bandwidth of GPUs connected by PCIe 5.0 x16: 64 GB/s in each
// direction, of which collectives reach about three quarters.
const (
	pcie                    = "h200-pcie"
	pcieBytesPerMicrosecond = 48e3
)

func machinesNamed(name string) (*hardware.Profile, error) {
	if name != pcie {
		return hardware.BuiltIn(name)
	}
	p, err := hardware.BuiltIn(hardware.Default)
	if err != nil {
		return nil, err
	}
	slow := *p
	slow.Name = pcie
	for _, e := range []*hardware.Exchange{&slow.AllToAll, &slow.AllReduce, &slow.ReduceScatter, &slow.AllGather} {
		e.PerMicrosecond, e.Large = min(e.PerMicrosecond, pcieBytesPerMicrosecond), nil
	}
	return &slow, slow.Check()
}

func numbers(list string) ([]int, error) {
	var out []int
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is invalid: positive numbers, separated by commas, are allowed", list)
		}
		out = append(out, n)
	}
	return out, nil
}

// widen changes the width of the trace's model. The routes are unchanged.
func (s timeShape) widen(t *trace.Trace) error {
	if s.hidden == 0 {
		return nil
	}
	fields := map[string]any{}
	if err := json.Unmarshal([]byte(t.Model.Config), &fields); err != nil {
		return err
	}
	fields["hidden_size"], fields["moe_intermediate_size"] = s.hidden, s.expert
	text, err := json.Marshal(fields)
	t.Model.Config, t.Model.HiddenSize = string(text), s.hidden
	return err
}

// timeMethods returns the compared placement methods. Published algorithms have the same names as in semmoe solve.
func (b *timeBench) timeMethods(o solver.Options) map[string]solver.Options {
	with := func(by placement.Algorithm, objective placement.Objective, slots int) solver.Options {
		o := o
		o.Algorithm, o.Objective, o.RedundantSlots = by, objective, slots
		return o
	}
	methods := map[string]solver.Options{"activation": with(placement.Auto, placement.Activation, 0)}
	if b.copies > 0 {
		methods["eplb+1"] = with(placement.EPLB, placement.Activation, 1)
	}
	for _, by := range []placement.Algorithm{
		placement.ContiguousAlgorithm, placement.EPLB, placement.MoETuner, placement.KMeans2D, placement.Alternating, placement.CrossEntropy,
	} {
		methods[string(by)] = with(by, placement.Activation, 0)
	}
	return methods
}

// timeMeasurement measures the cells of one trace, EP size and attention mode.
type timeMeasurement struct {
	*timeBench
	trace    *trace.Trace
	name     string
	shapes   []string
	profiles map[string]*hardware.Profile
	cells    map[string]*timeCell
	order    []*timeCell
}

// cell returns the cell of a width, a hardware profile and a batch size.
func (m *timeMeasurement) cell(o *solver.Options, shape, machines string, tokens int) *timeCell {
	key := fmt.Sprint(shape, machines, tokens)
	if m.cells[key] == nil {
		m.cells[key] = &timeCell{
			Trace: m.name, Shape: shape, Ranks: o.Ranks, Attention: o.Attention, Hardware: machines, PerNode: o.RanksPerNode, Tokens: tokens,
			Methods: map[string]*timeMethod{},
		}
		m.order = append(m.order, m.cells[key])
	}
	return m.cells[key]
}

// add adds the result of a method in one split.
func (c *timeCell) add(name string, w *solver.Worth, lar float64, splits int) {
	m := c.Methods[name]
	if m == nil {
		m = &timeMethod{}
		c.Methods[name] = m
	}
	m.BySplit = append(m.BySplit, w.SavedPercent)
	m.Saved += w.SavedPercent / float64(splits)
	m.LAR += lar / float64(splits)
	if name == ours {
		c.BaselineUS += w.BaselineLayerUS / float64(splits)
		if w.Verdict == solver.Gain {
			m.Gains++
		}
	}
}

// add solves a plan by every method in one split, and evaluates all plans on the same held-out requests. Plans by
// activations do not depend on the width of the model or the hardware, and are solved once. Plans by time are solved for
// each width, hardware profile and batch size.
func (m *timeMeasurement) add(ctx context.Context, o solver.Options) error {
	solve := func(name string, t *trace.Trace, o solver.Options) (*solver.Solution, error) {
		solved, err := solver.Solve(ctx, t, o)
		if err != nil {
			return nil, fmt.Errorf("%s on %s, EP %d, attention %s: %w", name, m.name, o.Ranks, o.Attention, err)
		}
		return solved, nil
	}
	others, lar := map[string]*solver.TimeTrial{}, map[string]float64{}
	for name, o := range m.timeMethods(o) {
		solved, err := solve(name, m.trace, o)
		if err != nil {
			return err
		}
		if others[name], err = solver.TrialOf(ctx, m.trace, solved, o); err != nil {
			return err
		}
		lar[name] = solved.Report.LAR
	}
	for _, shape := range m.shapes {
		wide := *m.trace
		if err := timeShapes[shape].widen(&wide); err != nil {
			return err
		}
		for _, machines := range slices.Sorted(maps.Keys(m.profiles)) {
			for _, tokens := range o.BatchTokens {
				cell := m.cell(&o, shape, machines, tokens)
				for name, trial := range others {
					on := *trial // the scores of the routes do not depend on the machines
					on.Machines = cost.MachinesOf(m.profiles[machines], o.Ranks, o.RanksPerNode)
					on.From = cost.LayerOf(&wide.Model, on.Machines, trial.From.Ranks, trial.From.SlotsPerRank)
					on.To = cost.LayerOf(&wide.Model, on.Machines, trial.To.Ranks, trial.To.SlotsPerRank)
					w := on.Worth(solver.DefaultMinimumGainPercent, tokens)
					cell.add(name, &w, lar[name], m.splits)
				}
				for slots, name := range []string{ours, ours + "+1"}[:1+m.copies] {
					o := o
					o.Algorithm, o.Objective, o.RedundantSlots = placement.Auto, placement.Time, slots
					o.BatchTokens, o.Hardware = []int{tokens}, m.profiles[machines]
					solved, err := solve(name, &wide, o)
					if err != nil {
						return err
					}
					trial, err := solver.TrialOf(ctx, &wide, solved, o)
					if err != nil {
						return err
					}
					w := trial.Worth(solver.DefaultMinimumGainPercent, tokens)
					cell.add(name, &w, solved.Report.LAR, m.splits)
				}
			}
		}
	}
	return nil
}

// maxBehind is the maximum slowdown of ours, relative to the best baseline.
const maxBehind = 0.005

// behind returns the slowdown of ours relative to the fastest other method with the same amount of memory, and the name
// of this method. saved returns the time that a method saves, in percent.
func (c *timeCell) behind(saved func(*timeMethod) float64) (slowdown float64, by string) {
	slowdown = -1
	for name, m := range c.Methods {
		mine := ours
		if strings.HasSuffix(name, "+1") {
			mine += "+1"
		}
		if name == mine {
			continue
		}
		if s := (100-saved(c.Methods[mine]))/(100-saved(m)) - 1; s > slowdown || s == slowdown && name < by {
			slowdown, by = s, name
		}
	}
	return slowdown, by
}

// summarize compares ours with the other methods.
func (r *timeResult) summarize() {
	logs, within, single := map[string]float64{}, 0, 0
	for i := range r.Cells {
		c := &r.Cells[i]
		if slowdown, by := c.behind(func(m *timeMethod) float64 { return m.Saved }); slowdown <= maxBehind {
			within++
		} else {
			r.Exceptions = append(r.Exceptions, fmt.Sprintf("%s %s %s EP %d %s %d tokens: %.1f%% slower than %s", c.Trace, c.Shape, c.Hardware, c.Ranks, c.Attention, c.Tokens, 100*slowdown, by))
		}
		for split := range r.Splits {
			if slowdown, _ := c.behind(func(m *timeMethod) float64 { return m.BySplit[split] }); slowdown <= maxBehind {
				single++
			}
		}
		own := c.Methods[ours]
		if own.Gains > 0 && own.Saved < 0 {
			r.SlowerGains++
		}
		if 2*own.Gains < r.Splits {
			continue
		}
		r.GainCells++
		for name, m := range c.Methods {
			logs[name] += math.Log(1 - m.Saved/100)
		}
	}
	r.Within, r.SingleWithin, r.MeanSaved = float64(within)/float64(max(1, len(r.Cells))), float64(single)/float64(max(1, len(r.Cells)*r.Splits)), map[string]float64{}
	for name, sum := range logs {
		r.MeanSaved[name] = 100 * (1 - math.Exp(sum/float64(max(1, r.GainCells))))
	}
}
