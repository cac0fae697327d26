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
	// GainCells is the number of cells in which ours has the verdict Gain, SlowerGains the number of these in which
	// ours is slower than no plan.
	GainCells   int `json:"gain_cells"`
	SlowerGains int `json:"slower_gain_cells"`
	// WithinHalfPercent is the share of cells in which ours is at most 0.5% slower than the best baseline. Exceptions
	// lists the other cells.
	WithinHalfPercent float64  `json:"within_half_percent"`
	Exceptions        []string `json:"exceptions"`
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
	// BaselineUS is the modelled time of a layer without a plan. Methods are relative to BaselineUS.
	BaselineUS float64               `json:"baseline_layer_us"`
	Methods    map[string]timeMethod `json:"methods"`
	// lar is the local activation rate of the methods that are solved once for all cells.
	lar map[string]float64
}

// timeMethod is the result of a plan of one method.
type timeMethod struct {
	Saved   float64        `json:"saved_percent"`
	Low     float64        `json:"saved_percent_low"`
	High    float64        `json:"saved_percent_high"`
	Verdict solver.Verdict `json:"verdict"`
	LAR     float64        `json:"lar"`
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
	train, perNode                                     int
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
	r := &timeResult{Exceptions: []string{}}
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
				o := solver.Options{
					Ranks: n, Attention: placement.Attention(attention), Forecast: solver.Table, TrainPercent: b.train, Seed: 1,
					RanksPerNode: b.perNode, BatchTokens: sizes,
				}
				cell := timeCell{Trace: filepath.Base(path), Ranks: n, Attention: o.Attention, PerNode: b.perNode, lar: map[string]float64{}}
				cells, err := cell.measure(ctx, t, o, shapes, profiles)
				if err != nil {
					return nil, err
				}
				r.Cells = append(r.Cells, cells...)
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
func timeMethods(o solver.Options) map[string]solver.Options {
	with := func(by placement.Algorithm, objective placement.Objective, slots int) solver.Options {
		o := o
		o.Algorithm, o.Objective, o.RedundantSlots = by, objective, slots
		return o
	}
	methods := map[string]solver.Options{
		"activation": with(placement.Auto, placement.Activation, 0),
		"eplb+1":     with(placement.EPLB, placement.Activation, 1),
	}
	for _, by := range []placement.Algorithm{
		placement.ContiguousAlgorithm, placement.EPLB, placement.MoETuner, placement.KMeans2D, placement.Alternating, placement.CrossEntropy,
	} {
		methods[string(by)] = with(by, placement.Activation, 0)
	}
	return methods
}

// measure solves a plan by every method and evaluates all plans on the same held-out requests. Plans by activations do
// not depend on the width of the model or the hardware, and are solved once. Plans by time are solved for each width,
// hardware profile and batch size.
func (c timeCell) measure(ctx context.Context, t *trace.Trace, o solver.Options, shapes []string, profiles map[string]*hardware.Profile) ([]timeCell, error) {
	solve := func(name string, t *trace.Trace, o solver.Options) (*solver.Solution, error) {
		solved, err := solver.Solve(ctx, t, o)
		if err != nil {
			return nil, fmt.Errorf("%s on %s, EP %d, attention %s: %w", name, c.Trace, o.Ranks, o.Attention, err)
		}
		return solved, nil
	}
	others := map[string]*solver.TimeTrial{}
	for name, o := range timeMethods(o) {
		solved, err := solve(name, t, o)
		if err != nil {
			return nil, err
		}
		if others[name], err = solver.TrialOf(ctx, t, solved, o); err != nil {
			return nil, err
		}
		c.lar[name] = solved.Report.LAR
	}
	var cells []timeCell
	for _, shape := range shapes {
		wide := *t
		if err := timeShapes[shape].widen(&wide); err != nil {
			return nil, err
		}
		for _, machines := range slices.Sorted(maps.Keys(profiles)) {
			for _, tokens := range o.BatchTokens {
				cell := c
				cell.Shape, cell.Hardware, cell.Tokens, cell.Methods = shape, machines, tokens, map[string]timeMethod{}
				judge := func(name string, trial *solver.TimeTrial, lar float64) {
					w := trial.Worth(solver.DefaultMinimumGainPercent, tokens)
					cell.BaselineUS = w.BaselineLayerUS
					cell.Methods[name] = timeMethod{w.SavedPercent, w.Low, w.High, w.Verdict, lar}
				}
				for name, trial := range others {
					on := *trial // the scores of the routes do not depend on the machines
					on.Machines = cost.MachinesOf(profiles[machines], o.Ranks, o.RanksPerNode)
					on.From = cost.LayerOf(&wide.Model, on.Machines, trial.From.Ranks, trial.From.SlotsPerRank)
					on.To = cost.LayerOf(&wide.Model, on.Machines, trial.To.Ranks, trial.To.SlotsPerRank)
					judge(name, &on, c.lar[name])
				}
				for slots, name := range []string{ours, ours + "+1"} {
					o := o
					o.Algorithm, o.Objective, o.RedundantSlots = placement.Auto, placement.Time, slots
					o.BatchTokens, o.Hardware = []int{tokens}, profiles[machines]
					solved, err := solve(name, &wide, o)
					if err != nil {
						return nil, err
					}
					trial, err := solver.TrialOf(ctx, &wide, solved, o)
					if err != nil {
						return nil, err
					}
					judge(name, trial, solved.Report.LAR)
				}
				fmt.Fprintf(os.Stderr, "%s %s EP %d %s %s %d tokens: %+.1f%%\n", cell.Trace, shape, o.Ranks, o.Attention, machines, tokens, cell.Methods[ours].Saved)
				cells = append(cells, cell)
			}
		}
	}
	return cells, nil
}

// summarize compares ours with the other methods that use the same amount of memory.
func (r *timeResult) summarize() {
	logs, within := map[string]float64{}, 0
	for i := range r.Cells {
		c := &r.Cells[i]
		us := func(name string) float64 { return c.BaselineUS * (1 - c.Methods[name].Saved/100) }
		ahead := true
		for name := range c.Methods {
			mine := ours
			if strings.HasSuffix(name, "+1") {
				mine += "+1"
			}
			if us(mine) > 1.005*us(name) {
				ahead = false
				r.Exceptions = append(r.Exceptions, fmt.Sprintf("%s %s EP %d %s %d tokens: %s is %.1f%% slower than %s", c.Trace, c.Shape, c.Ranks, c.Attention, c.Tokens, mine, 100*(us(mine)/us(name)-1), name))
			}
		}
		if ahead {
			within++
		}
		if c.Methods[ours].Verdict != solver.Gain {
			continue
		}
		r.GainCells++
		if c.Methods[ours].Saved < 0 {
			r.SlowerGains++
		}
		for name, m := range c.Methods {
			logs[name] += math.Log(1 - m.Saved/100)
		}
	}
	r.WithinHalfPercent, r.MeanSaved = float64(within)/float64(max(1, len(r.Cells))), map[string]float64{}
	for name, sum := range logs {
		r.MeanSaved[name] = 100 * (1 - math.Exp(sum/float64(max(1, r.GainCells))))
	}
}
