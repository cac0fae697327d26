// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/lab"
	"github.com/semmoe/operator/solver/lab/simulate"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// defaultStepTokens is the default maximum number of tokens of a batch. With attention DP, vLLM limits each rank's
// batch separately (--max-num-batched-tokens).
const defaultStepTokens = 8192

// minRate and maxScale bound --rates and --slo-scale. Below minRate, in requests per second, the time of a step is lost
// in the rounding of arrival times; above maxScale the objective is meaningless.
const minRate, maxScale = 1e-6, 1e6

// simulateFlags are the flags of semmoe-lab simulate.
type simulateFlags struct {
	trace, attention, forecast, objective, topology                 string
	policy, weights, prompts, outputs, collective, messages, output string
	methods                                                         []string
	// model contains the flags of the model's shape and of the hardware profile, as in semmoe-lab pipeline.
	model                            pipelineFlags
	ranks, ranksPerNode, requests    int
	trainPercent, redundantSlots     int
	stepTokens, running, cacheTokens int
	seed                             uint64
	rates                            []float64
	sloScale, sloPercent, cap        float64
	hold                             time.Duration
	dispatch                         string
}

// The topologies.
const (
	oneNode     = "node"
	pcieIslands = "pcie"
	manyNodes   = "nodes"
)

func newSimulateCommand() *cobra.Command {
	var flags simulateFlags
	cmd := &cobra.Command{
		Use:   "simulate --trace FILE --ep N [--attention dp|tp]",
		Short: "Simulate serving a routing trace on modelled hardware with several methods",
		Long: "Simulate serving requests of a routing trace on modelled hardware with continuous batching and chunked prefill. Print for each method the\n" +
			"highest request rate that meets a latency objective, and latencies and throughput at several rates. Methods are solved on a part of the\n" +
			"trace and serve the rest; all methods serve the same requests at the same times. All times are modelled with the hardware profile.\n" +
			"The model sizes come from the trace, or from a checkpoint's config.json; flags override both. Experts and top-k come from the trace.\n" +
			"Exit codes: 2 the command line is invalid; 3 a file is invalid; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return flags.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), cmd.Flags().Changed, cli.NonDefault(cmd))
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.IntVar(&flags.ranks, "ep", 8, "EP size: number of ranks of one replica")
	f.StringVar(&flags.attention, "attention", "dp", "attention mode: dp (one batch per rank) or tp (one batch for all ranks)")
	f.StringSliceVar(&flags.methods, "method", names(lab.ServingMethods), "methods to compare; the latency objective is relative to the first method")
	f.StringVar(&flags.forecast, "forecast", string(solver.Table), "attention tp: forecast of method "+string(lab.OurServing)+": table, prefill, decode or transition")
	f.StringVar(&flags.policy, "policy", string(dispatch.Price), "attention dp: dispatch policy of method "+string(lab.OurServing)+": price, masked, round-robin, least-loaded")
	f.StringVar(&flags.weights, "weights", "", "attention dp: scoring weights of method "+string(lab.OurServing)+", for example affinity=1,load=1,wait=1 (policy price, without prefix reuse)")
	f.Float64Var(&flags.cap, "cap", solver.DefaultEvaluation().Cap, "attention dp: maximum load of a rank over the last 128 requests, as a multiple of its fair share (policy price)")
	f.DurationVar(&flags.hold, "hold", 0, fmt.Sprintf("attention dp: maximum time that a request waits for the rank of its experts with method %s, up to %v, as in semmoe router; 0 disables waiting (policy price)", lab.OurServing, dispatch.MaxWait))
	f.StringVar(&flags.objective, "objective", string(placement.Activation), "objective of the placement of method "+string(lab.OurServing)+": "+cli.ListOf(placement.Objectives))
	f.IntVar(&flags.redundantSlots, "redundant-slots", 0, "number of extra slots per rank, for methods with copies")
	f.IntVar(&flags.trainPercent, "train-percent", 20, "percentage of the requests for training, by whole documents; the others are served")
	f.Uint64Var(&flags.seed, "seed", 1, "seed of the split, of the placements, of arrivals and of lengths")
	f.StringVar(&flags.topology, "topology", oneNode, "topology: node (all ranks connected as in the hardware profile), pcie (islands of 4 ranks, 63 GB/s within and 20.8 GB/s between)\nor nodes (nodes of --ranks-per-node ranks, 50 GB/s between)")
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", 8, "number of ranks per node (--topology nodes)")
	f.StringVar(&flags.model.hardware, "hardware", hardware.Default, "hardware profile: a built-in name ("+strings.Join(hardware.Names(), ", ")+") or a file written by semmoe-lab fit")
	f.StringVar(&flags.model.model, "model-path", "", "directory of a checkpoint with config.json, or the path of a config.json (default: the model of the trace)")
	f.IntVar(&flags.requests, "requests", 2000, "number of requests per rate")
	cli.NumbersVar(f, &flags.rates, "rates", nil, "rates for printed latencies, in `requests` per second (default: 0.25 to 1.5 times the goodput of the first method, or, without a\ngoodput, times the rate with one request per rank in service at light load)")
	f.StringVar(&flags.prompts, "prompts", "trace", "prompt lengths in tokens: "+simulate.LengthsUsage)
	f.StringVar(&flags.outputs, "outputs", "exp:64", "output lengths in tokens, in the syntax of --prompts without trace")
	f.IntVar(&flags.stepTokens, "step-tokens", 0, fmt.Sprintf("maximum number of tokens per step over all ranks (default: %d per batch; with attention dp one batch per rank)", defaultStepTokens))
	f.IntVar(&flags.running, "running", 1024, "maximum number of concurrent requests over all ranks")
	f.IntVar(&flags.cacheTokens, "cache-tokens", 0, fmt.Sprintf("KV cache capacity in tokens over all ranks (default: %d per rank; with attention tp per rank with separate KV heads, and for one rank\nwith latent attention, whose cache every rank holds)", dispatch.DefaultCacheTokens))
	f.StringVar(&flags.collective, "collective", string(simulate.ReduceScatter), "attention tp: collective: reduce-scatter (with dispatch to experts and all-gather) or all-reduce (without dispatch)")
	f.StringVar(&flags.messages, "messages", string(simulate.PerActivation), "messages per token: activation (one per expert) or rank (one per rank with experts of the token)")
	f.StringVar(&flags.dispatch, "dispatch", "bf16", "data type of tokens sent to experts: bf16 or fp8; results return in bf16")
	f.Float64Var(&flags.sloScale, "slo-scale", simulate.DefaultGoal.Scale, "latency objective, as a multiple of the first method's mean latency at light load")
	f.Float64Var(&flags.sloPercent, "slo-percent", 100*simulate.DefaultGoal.Share, "percentage of requests that must meet the objective")
	f.StringVarP(&flags.output, "output", "o", "text", "output format: text or json")
	for _, s := range flags.model.shapeFlags() {
		if s.name != "experts" && s.name != "top-k" {
			f.IntVar(s.into, s.name, 0, s.usage)
		}
	}
	return cmd
}

func names[T ~string](values []T) []string {
	var list []string
	for _, v := range values {
		list = append(list, string(v))
	}
	return list
}

func (f *simulateFlags) check() error {
	switch {
	case f.trace == "":
		return cli.UsageErrorf("--trace is missing: name a routing trace")
	case f.attention != string(placement.DataParallel) && f.attention != string(placement.TensorParallel):
		return cli.UsageErrorf("--attention is %q; allowed is dp, tp", f.attention)
	case len(f.methods) == 0:
		return cli.UsageErrorf("--method is empty; allowed are %v", lab.ServingMethods)
	case !slices.Contains([]string{oneNode, pcieIslands, manyNodes}, f.topology):
		return cli.UsageErrorf("--topology is %q; allowed is node, pcie, nodes", f.topology)
	case f.ranksPerNode < 1:
		return cli.UsageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	case f.requests < 1 || f.requests > 1<<20:
		return cli.UsageErrorf("--requests is %d; allowed is 1 to %d", f.requests, 1<<20)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return cli.UsageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	case f.stepTokens < 0:
		return cli.UsageErrorf("--step-tokens is %d; it must be above 0", f.stepTokens)
	case f.cacheTokens < 0:
		return cli.UsageErrorf("--cache-tokens is %d; it must be above 0", f.cacheTokens)
	case f.dispatch != "bf16" && f.dispatch != "fp8":
		return cli.UsageErrorf("--dispatch is %q; allowed is bf16, fp8", f.dispatch)
	case !(f.cap >= 1):
		return cli.UsageErrorf("--cap is %v; it must be at least 1", f.cap)
	case f.hold < 0 || f.hold > dispatch.MaxWait:
		return cli.UsageErrorf("--hold is %v; allowed is 0 to %v", f.hold, dispatch.MaxWait)
	case f.hold > 0 && f.policy != string(dispatch.Price):
		return cli.UsageErrorf("--hold does not apply with --policy %s; it requires %s", f.policy, dispatch.Price)
	case !(f.sloScale > 0 && f.sloScale <= maxScale):
		return cli.UsageErrorf("--slo-scale is %v; allowed is above 0 to %v", f.sloScale, float64(maxScale))
	case !(f.sloPercent > 0 && f.sloPercent <= 100):
		return cli.UsageErrorf("--slo-percent is %v; allowed is above 0 to 100", f.sloPercent)
	case f.output != "text" && f.output != "json":
		return cli.UsageErrorf("--output is %q; allowed is text, json", f.output)
	}
	for _, rate := range f.rates {
		if !(rate >= minRate) || math.IsInf(rate, 1) {
			return cli.UsageErrorf("--rates has %v; rates must be at least %v and finite", rate, minRate)
		}
	}
	return nil
}

// checkUnused returns an error for flags that do not apply to the kind of attention or the topology.
func (f *simulateFlags) checkUnused(nonDefault func(flag string) bool) error {
	idle := []string{"collective"}
	if f.attention == string(placement.TensorParallel) {
		idle = []string{"policy", "weights", "cap", "hold"}
	}
	for _, flag := range idle {
		if nonDefault(flag) {
			return cli.UsageErrorf("--%s does not apply with attention %s", flag, f.attention)
		}
	}
	if f.attention == string(placement.TensorParallel) && f.collective == string(simulate.AllReduce) {
		for _, flag := range []string{"messages", "dispatch", "forecast"} {
			if nonDefault(flag) {
				return cli.UsageErrorf("--%s does not apply with --collective %s: no tokens are dispatched", flag, f.collective)
			}
		}
	}
	if f.topology != manyNodes && nonDefault("ranks-per-node") {
		return cli.UsageErrorf("--ranks-per-node does not apply with --topology %s; it requires %s", f.topology, manyNodes)
	}
	return nil
}

// simulateReport is what is printed with -o json.
type simulateReport struct {
	Trace        string         `json:"trace"`
	Hardware     string         `json:"hardware"`
	Topology     string         `json:"topology"`
	Attention    string         `json:"attention"`
	Ranks        int            `json:"ep_size"`
	Shape        pipeline.Shape `json:"shape"`
	Requests     int            `json:"requests"`
	PromptTokens float64        `json:"mean_prompt_tokens"`
	OutputTokens float64        `json:"mean_output_tokens"`
	SLOScale     float64        `json:"slo_scale"`
	SLOPercent   float64        `json:"slo_percent"`
	*simulate.Report
}

func (f *simulateFlags) run(ctx context.Context, stdout, stderr io.Writer, changed, nonDefault func(flag string) bool) error {
	if err := f.check(); err != nil {
		return err
	}
	if err := f.checkUnused(nonDefault); err != nil {
		return err
	}
	methods, err := f.servingMethods()
	if err != nil {
		return err
	}
	policy, err := dispatch.ParsePolicy(f.policy)
	if err != nil || !policy.AtOnce() || policy == dispatch.Prefix {
		return cli.UsageErrorf("--policy is %q; allowed is price, masked, round-robin, least-loaded", f.policy)
	}
	workload, err := f.workload()
	if err != nil {
		return err
	}
	profile, err := cli.ReadHardware(f.model.hardware)
	if err != nil {
		return err
	}
	solving, err := f.solving(profile)
	if err != nil {
		return err
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return cli.InputError(err)
	}
	if err := placement.CheckRanks(f.ranks, t.Model.Experts); err != nil {
		return cli.UsageErrorf("--ep: %w", err)
	}
	if err := placement.CheckSlots(placement.Auto, f.ranks, t.Model.Experts, f.redundantSlots); err != nil {
		return cli.UsageErrorf("--redundant-slots: %w", err)
	}
	if err := f.readShape(&t.Model, changed); err != nil {
		return err
	}
	options, err := f.options(profile)
	if err != nil {
		return err
	}
	bar := cli.NewProgressBar(stderr)
	solving.Progress = bar.Show
	solved, heldOut, err := lab.SolveServing(ctx, t, methods, policy, solving)
	bar.Clear()
	if err != nil {
		return cli.InputError(err)
	}
	workload.Sources = heldOut
	requests, err := workload.Draw(t)
	if err != nil {
		return cli.UsageErrorf("%w", err)
	}
	compared, err := simulate.Compare(ctx, t, solved, requests, f.rates, simulate.Goal{Scale: f.sloScale, Share: f.sloPercent / 100}, options)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return cli.UsageErrorf("%w", err)
	}
	report := &simulateReport{
		Trace: fmt.Sprintf("%x", t.Digest), Hardware: profile.Name, Topology: options.Topology.Name, Attention: f.attention, Ranks: f.ranks, Shape: f.model.shape,
		Requests: len(requests), SLOScale: f.sloScale, SLOPercent: f.sloPercent, Report: compared,
	}
	for _, r := range requests {
		report.PromptTokens += float64(r.Prompt) / float64(len(requests))
		report.OutputTokens += float64(r.Output) / float64(len(requests))
	}
	if f.output == "json" {
		return json.NewEncoder(stdout).Encode(report)
	}
	return report.print(stdout)
}

func (f *simulateFlags) servingMethods() ([]lab.ServingMethod, error) {
	var methods []lab.ServingMethod
	for _, name := range f.methods {
		m, err := lab.ParseServingMethod(name)
		if err != nil {
			return nil, cli.UsageErrorf("--method: %w", err)
		}
		methods = append(methods, m)
	}
	return methods, nil
}

// solving returns the solver options of the methods, for the simulated hardware.
func (f *simulateFlags) solving(p *hardware.Profile) (solver.Options, error) {
	o := solver.Options{
		Ranks: f.ranks, Attention: placement.Attention(f.attention), RedundantSlots: f.redundantSlots, TrainPercent: f.trainPercent, Seed: f.seed,
		RanksPerNode: f.nodeRanks(), Hardware: p,
	}
	var err error
	if o.Objective, err = placement.ParseObjective(f.objective); err != nil {
		return o, cli.UsageErrorf("--objective: %w", err)
	}
	if o.Forecast, err = solver.ParseForecast(f.forecast); err != nil {
		return o, cli.UsageErrorf("--forecast: %w", err)
	}
	if o.Forecast != solver.Table && o.Attention == placement.DataParallel {
		return o, cli.UsageErrorf("--forecast is %s; attention dp scores a request by its tokens: use %s", o.Forecast, solver.Table)
	}
	return o, nil
}

// nodeRanks returns the number of ranks connected by the fastest links.
func (f *simulateFlags) nodeRanks() int {
	switch f.topology {
	case pcieIslands:
		return simulate.IslandRanks
	case manyNodes:
		return f.ranksPerNode
	default:
		return f.ranks
	}
}

func (f *simulateFlags) workload() (simulate.Workload, error) {
	w := simulate.Workload{Count: f.requests, Seed: f.seed}
	var err error
	if w.Prompts, err = simulate.ParseLengths(f.prompts); err != nil {
		return w, cli.UsageErrorf("--prompts: %w", err)
	}
	if w.Outputs, err = simulate.ParseLengths(f.outputs); err != nil {
		return w, cli.UsageErrorf("--outputs: %w", err)
	}
	if w.Outputs == simulate.Recorded {
		return w, cli.UsageErrorf("--outputs is trace, but a trace does not mark the beginning of an output; set a distribution")
	}
	return w, nil
}

func (f *simulateFlags) options(p *hardware.Profile) (*simulate.Options, error) {
	o := &simulate.Options{
		Attention: placement.Attention(f.attention), Shape: f.model.shape, Profile: p, DispatchBytes: 2, StepTokens: f.stepTokens, Running: f.running,
		CacheTokens: f.cacheTokens, Cap: f.cap, Hold: f.hold,
	}
	if f.dispatch == "fp8" {
		o.DispatchBytes = 1
	}
	if o.CacheTokens == 0 {
		o.CacheTokens = f.cacheParts() * dispatch.DefaultCacheTokens
	}
	switch f.topology {
	case pcieIslands:
		o.Topology = simulate.Islands(f.ranks, p)
	case manyNodes:
		o.Topology = simulate.Nodes(f.ranks, f.ranksPerNode, p)
	default:
		o.Topology = simulate.OneNode(f.ranks, p)
	}
	if o.StepTokens == 0 {
		o.StepTokens = o.Lanes() * defaultStepTokens
	}
	for _, of := range []struct {
		flag  string
		value int
	}{{"step-tokens", o.StepTokens}, {"running", o.Running}, {"cache-tokens", o.CacheTokens}} {
		if of.value < o.Lanes() {
			return nil, cli.UsageErrorf("--%s is %d; it must be at least %d, one for each batch of a step", of.flag, of.value, o.Lanes())
		}
	}
	var err error
	if o.Weights, err = dispatch.ParseWeights(f.weights); err != nil {
		return nil, cli.UsageErrorf("--weights: %w", err)
	}
	if o.Collective, err = simulate.ParseCollective(f.collective); err != nil {
		return nil, cli.UsageErrorf("--collective: %w", err)
	}
	if o.Messages, err = simulate.ParseMessages(f.messages); err != nil {
		return nil, cli.UsageErrorf("--messages: %w", err)
	}
	return o, nil
}

// cacheParts returns the number of distinct KV caches: caches of different tokens, or of different heads.
func (f *simulateFlags) cacheParts() int {
	if f.attention == string(placement.TensorParallel) {
		return f.model.shape.CacheParts(f.ranks)
	}
	return f.ranks
}

// readShape reads the model's sizes from the checkpoint, or from the trace without a checkpoint; flags override both.
func (f *simulateFlags) readShape(m *trace.Model, changed func(flag string) bool) error {
	if f.model.model != "" {
		if err := f.model.readShape(changed); err != nil {
			return err
		}
		if s := f.model.shape; s.Experts != m.Experts || s.TopK != m.TopK {
			return cli.UsageErrorf("--model-path has %d experts, top-%d, the trace %d, top-%d; they must be equal", s.Experts, s.TopK, m.Experts, m.TopK)
		}
		return nil
	}
	shape, err := pipeline.ShapeOf(m)
	if err != nil {
		return cli.WithCode(fmt.Errorf("--trace: model_config: %w", err), cli.ExitInvalidFile)
	}
	values := map[string]int{}
	for _, s := range f.model.shapeFlags() {
		if changed(s.name) {
			values[s.name] = *s.into
		}
	}
	f.model.shape = shape
	for _, s := range f.model.shapeFlags() {
		if value, ok := values[s.name]; ok {
			*s.into = value
		}
	}
	if err := f.model.shape.Check(); err != nil {
		return cli.UsageErrorf("the sizes of the model, partly from the trace, are invalid: %w; set --model-path to a checkpoint, or set the flags of the sizes", err)
	}
	return nil
}

func (r *simulateReport) print(out io.Writer) error {
	fmt.Fprintf(out, "Modelled with hardware profile %s, %s: %d MoE layers of %d, %d experts, top-%d, on %d ranks, attention %s.\n", r.Hardware, r.Topology,
		r.Shape.MoELayers, r.Shape.HiddenLayers, r.Shape.Experts, r.Shape.TopK, r.Ranks, r.Attention)
	fmt.Fprintf(out, "%d requests with a mean of %.0f prompt and %.0f output tokens. Light load: TTFT %.1f ms, TPOT %.2f ms. Objective: %.1f and %.2f ms, for %g%% of the requests.\n\n",
		r.Requests, r.PromptTokens, r.OutputTokens, r.Light.TTFT, r.Light.TPOT, r.Objective.TTFT, r.Objective.TPOT, r.SLOPercent)
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "METHOD\tGOODPUT REQ/S\tOVER FIRST\tTOKENS/S\tLAR\tSTEP MS\tATTENTION\tCOLLECTIVES\tEXCHANGE\tEXPERTS\tOTHER")
	for _, c := range r.Curves {
		over := "-"
		if first := r.Curves[0].Goodput; first > 0 && !c.Unbounded {
			over = fmt.Sprintf("%.3f", c.Goodput/first)
		}
		switch {
		case c.Unbounded:
			fmt.Fprintf(table, "%s\tnone: too few requests%s\n", c.Method, strings.Repeat("\t-", 9))
			continue
		case c.Served == nil:
			fmt.Fprintf(table, "%s\t0\t%s%s\n", c.Method, over, strings.Repeat("\t-", 8))
			continue
		}
		lar := "-"
		if c.Served.LAR != nil {
			lar = fmt.Sprintf("%.3f", *c.Served.LAR)
		}
		s := c.Served.Step
		fmt.Fprintf(table, "%s\t%.4g\t%s\t%.0f\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\n", c.Method, c.Goodput, over, c.Served.Tokens, lar, s.Total(), s.Attention,
			s.Collectives, s.Dispatch+s.Combine, s.Products, s.Dense+s.Gate)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if slices.ContainsFunc(r.Curves, func(c simulate.Curve) bool { return c.Unbounded }) {
		fmt.Fprintf(out, "%d requests are too few for a goodput: the objective is met even if all arrive at once. Use a larger --requests.\n", r.Requests)
	}
	fmt.Fprintln(out)
	fmt.Fprintln(table, "METHOD\tRATE REQ/S\tWITHIN\tTOKENS/S\tTTFT MS MEAN\tP50\tP90\tP99\tTPOT MS MEAN\tP50\tP90\tP99\tTBT P90")
	for _, c := range r.Curves {
		for _, x := range c.Rates {
			fmt.Fprintf(table, "%s\t%.4g\t%.1f%%\t%.0f\t%.1f\t%.1f\t%.1f\t%.1f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\n", c.Method, x.Rate, 100*x.Within, x.Tokens,
				x.TTFT.Mean, x.TTFT.P50, x.TTFT.P90, x.TTFT.P99, x.TPOT.Mean, x.TPOT.P50, x.TPOT.P90, x.TPOT.P99, x.TBT90)
		}
	}
	return table.Flush()
}
