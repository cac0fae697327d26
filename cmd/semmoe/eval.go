// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// maxOrders is the maximum number of arrival orders: all of them are in memory until they are scored.
const maxOrders = 1000

// maxHeld is the maximum number of waiting requests of the policy late: each decision evaluates all of them.
const maxHeld = 1024

// evalFlags are the flags of semmoe eval.
type evalFlags struct {
	trace, plan, requests, forecast, shards, policy, workload, weights, hardware string
	held, orders, ranksPerNode, cacheTokens, scorePercent                        int
	batchTokens                                                                  []int
	cap, minimumGain                                                             float64
	output                                                                       string
	// given reports whether a flag is set on the command line, nonDefault whether it is set to a value other than its
	// default.
	given, nonDefault func(name string) bool
}

func newEvalCommand() *cobra.Command {
	var flags evalFlags
	defaults := solver.DefaultEvaluation()
	cmd := &cobra.Command{
		Use:   "eval --trace FILE --plan DIR",
		Short: "Score a plan on a routing trace",
		Long: "Evaluate a plan on a routing trace and print the metrics as one JSON object. Only the plan and the trace are read.\n" +
			"Exit codes: 2 the command line is invalid; 3 the trace or the plan is invalid; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags.given, flags.nonDefault = cmd.Flags().Changed, cli.NonDefault(cmd)
			report, err := flags.run(cmd.Context())
			if err != nil {
				return err
			}
			if asTable(flags.output, cmd.OutOrStdout()) {
				return report.table(cmd.OutOrStdout())
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.StringVar(&flags.plan, "plan", "", "directory of the plan (required)")
	f.StringVar(&flags.requests, "requests", "test", "requests to evaluate: test (held out by the plan's split) or all")
	f.StringVar(&flags.forecast, "forecast", "", "input of the scores: table, transition or lookahead-raw (default: the plan's forecast)")
	f.StringVar(&flags.shards, "shards", string(defaults.Shards), "attention tp: number of tokens per rank in a batch: equal or free")
	f.IntSliceVar(&flags.batchTokens, "batch-tokens", []int{defaults.BatchTokens}, "batch sizes in tokens over all ranks: times are means over all sizes, other metrics use the first size")
	f.Float64Var(&flags.minimumGain, "minimum-gain-percent", solver.DefaultMinimumGainPercent, "minimum saving of a layer's modelled time for the verdict Gain, in percent")
	f.StringVarP(&flags.output, "output", "o", "", "output format: json or table (default: table on a terminal, json elsewhere)")
	f.StringVar(&flags.policy, "policy", string(defaults.Policy), "attention dp: dispatch policy: price, masked, window, late, round-robin, least-loaded or prefix")
	f.Float64Var(&flags.cap, "cap", defaults.Cap, "attention dp: maximum load of a rank over the last 128 requests, as a multiple of its fair share (policies price, late and prefix)")
	f.IntVar(&flags.held, "held", 0, "attention dp: maximum number of requests waiting for their best rank (policy late); 0 means one per rank")
	f.IntVar(&flags.orders, "orders", defaults.Orders, fmt.Sprintf("attention dp: number of seeded arrival orders, up to %d", maxOrders))
	f.StringVar(&flags.weights, "weights", "", "attention dp: scoring weights, for example affinity=1,prefix=1,load=1; 1 is the modelled cost, 0 ignores the component (policies price and late)")
	f.StringVar(&flags.workload, "workload", string(defaults.Workload), "attention dp: requests to serve: recorded (unchanged), shared-prefix (groups with a common system prompt) or multi-turn (conversations)")
	f.IntVar(&flags.cacheTokens, "cache-tokens", dispatch.DefaultCacheTokens, "attention dp: KV cache capacity per rank in tokens (workloads shared-prefix and multi-turn)")
	f.IntVar(&flags.scorePercent, "score-percent", 0, "attention dp: additional evaluation with scores from only this percentage of each request's first tokens; 0 disables it")
	planHardwareFlag(f, &flags.hardware)
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", defaults.RanksPerNode, "number of ranks per node, for node_lar and remote_nodes_per_token; plans made for nodes override the default")
	return cmd
}

// evalReport is the output of eval.
type evalReport struct {
	cost.Report
	solver.Worth
	// BaselineVolume is the traffic of the default placement with round-robin assignment of tokens or requests.
	BaselineVolume *cost.VolumeReport `json:"baseline_volume"`
	Seconds        float64            `json:"seconds"`
}

func (f *evalFlags) run(ctx context.Context) (*evalReport, error) {
	begin := time.Now()
	o, err := f.options()
	if err != nil {
		return nil, err
	}
	p, _, err := plan.Read(f.plan)
	if err != nil {
		return nil, cli.InputError(err)
	}
	if err := f.checkPlan(p); err != nil {
		return nil, err
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return nil, cli.InputError(err)
	}
	if o.Requests, err = pickRequests(t, p, f.requests); err != nil {
		return nil, cli.InputError(err)
	}
	o.Seed = p.Seed
	profile, err := readPlanHardware(f.hardware, p)
	if err != nil {
		return nil, err
	}
	o.Machines = cost.NodeOf(profile)
	if p.RanksPerNode > 0 && !f.given("ranks-per-node") {
		o.RanksPerNode = p.RanksPerNode
	}
	t, o.Requests = o.Workload.Build(t, o.Requests, o.Seed)
	o.Volume = true
	report, err := solver.Evaluate(ctx, t, p, o)
	var dealt cost.Report
	if err == nil {
		dealt, err = cost.EvaluateBaseline(ctx, t, p.Attention, p.Placement.Ranks, o)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, cli.WithCode(err, cli.ExitInvalidFile)
	}
	trial, err := solver.NewTimeTrial(ctx, t, p, solver.TrialOptions{Hardware: profile, Evaluation: o, BatchTokens: f.batchTokens})
	if err != nil {
		return nil, cli.WithCode(err, cli.ExitInvalidFile)
	}
	return &evalReport{report, trial.Worth(f.minimumGain, f.batchTokens...), dealt.Volume, time.Since(begin).Seconds()}, nil
}

// defaultBatch returns the batch size of all metrics except times.
func defaultBatch(sizes []int) int {
	if len(sizes) == 0 {
		return 0
	}
	return sizes[0]
}

// table prints an evaluation as a table.
func (r *evalReport) table(to io.Writer) error {
	out := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	printWorth(out, &r.Worth)
	fmt.Fprintf(out, "local activations\t%.1f%% (no plan %.1f%%)\n", 100*r.LAR, 100*r.BaselineLAR)
	fmt.Fprintf(out, "expert load\t%.3f times the mean on the busiest rank of a window or batch\n", r.ExpertWindowImbalance)
	return out.Flush()
}

func (f *evalFlags) options() (cost.Options, error) {
	o := solver.DefaultEvaluation()
	o.Shards, o.BatchTokens, o.Cap, o.Orders, o.RanksPerNode = cost.ShardRule(f.shards), defaultBatch(f.batchTokens), f.cap, f.orders, f.ranksPerNode
	switch {
	case f.trace == "":
		return o, cli.UsageErrorf("--trace is missing: name a routing trace")
	case f.plan == "":
		return o, cli.UsageErrorf("--plan is missing: name the directory of a plan")
	case f.requests != "test" && f.requests != "all":
		return o, cli.UsageErrorf("--requests is %q; allowed is test, all", f.requests)
	case o.Shards != cost.EqualShards && o.Shards != cost.FreeShards:
		return o, cli.UsageErrorf("--shards is %q; allowed is equal, free", f.shards)
	case solver.CheckBatchTokens(f.batchTokens) != nil:
		return o, cli.UsageErrorf("--batch-tokens: %w", solver.CheckBatchTokens(f.batchTokens))
	case !(f.cap >= 1):
		return o, cli.UsageErrorf("--cap is %v; it must be at least 1", f.cap)
	case f.orders < 1 || f.orders > maxOrders:
		return o, cli.UsageErrorf("--orders is %d; allowed is 1 to %d", f.orders, maxOrders)
	case f.held < 0 || f.held > maxHeld:
		return o, cli.UsageErrorf("--held is %d; allowed is 0 to %d", f.held, maxHeld)
	case f.held > 0 && f.policy != string(dispatch.Late):
		return o, cli.UsageErrorf("--held does not apply with --policy %s; it requires %s", f.policy, dispatch.Late)
	case f.cacheTokens < 1:
		return o, cli.UsageErrorf("--cache-tokens is %d; it must be at least 1", f.cacheTokens)
	case f.scorePercent < 0 || f.scorePercent > 100:
		return o, cli.UsageErrorf("--score-percent is %d; allowed is 0 to 100", f.scorePercent)
	case f.ranksPerNode < 1:
		return o, cli.UsageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	}
	o.CacheTokens, o.ScorePercent, o.MaxWaiting = f.cacheTokens, f.scorePercent, f.held
	if err := checkOutput(f.minimumGain, f.output); err != nil {
		return o, err
	}
	var err error
	if o.Workload, err = trace.ParseWorkload(f.workload); err != nil {
		return o, cli.UsageErrorf("--workload: %w", err)
	}
	if o.Weights, err = dispatch.ParseWeights(f.weights); err != nil {
		return o, cli.UsageErrorf("--weights: %w", err)
	}
	if strings.Contains(f.weights, "wait=") {
		return o, cli.UsageErrorf("--weights is %q, but the weight wait has no effect: a trace contains no times; use semmoe-lab simulate", f.weights)
	}
	if o.Policy, err = dispatch.ParsePolicy(f.policy); err != nil {
		return o, cli.UsageErrorf("--policy: %w", err)
	}
	if o.Policy == dispatch.Late && o.Workload == trace.MultiTurn {
		return o, cli.UsageErrorf("--policy is %s, which may reorder the turns of a conversation; --workload %s requires a policy that keeps the order", o.Policy, o.Workload)
	}
	if f.forecast != "" {
		if _, err := solver.ParseForecast(f.forecast); err != nil {
			return o, cli.UsageErrorf("--forecast: %w", err)
		}
	}
	return o, nil
}

// checkPlan returns an error for flags that do not apply to the plan.
func (f *evalFlags) checkPlan(p *solver.Plan) error {
	if by := solver.Forecast(f.forecast); by != "" && by != p.Forecast {
		if by.Trained() || by != solver.Table && p.Attention == placement.DataParallel {
			return cli.UsageErrorf("--forecast is %s; this plan contains the tables of %s", by, p.Forecast)
		}
		p.Forecast = by
	}
	idle := []string{"shards"}
	if p.Attention == placement.TensorParallel {
		idle = []string{"policy", "cap", "held", "orders", "weights", "workload", "cache-tokens", "score-percent"}
	}
	for _, name := range idle {
		if f.nonDefault(name) {
			return cli.UsageErrorf("--%s does not apply to this plan with attention %s", name, p.Attention)
		}
	}
	return nil
}

// pickRequests returns the requests to evaluate: all, or those held out by the plan's split.
func pickRequests(t *trace.Trace, p *solver.Plan, which string) ([]int, error) {
	if which == "all" {
		return t.AllRequests(), nil
	}
	_, test, err := trace.Split(t, p.TrainPercent, p.Seed)
	return test, err
}
