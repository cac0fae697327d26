// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// solveFlags are the flags of semmoe solve.
type solveFlags struct {
	trace, out, current, attention, algorithm, forecast, embeddings, objective string
	hardware                                                                   string
	copyRule                                                                   string
	redundantSlots, redundantMemory                                            string
	ranks, ranksPerNode, trainPercent                                          int
	withoutDomains                                                             []string
	constraints                                                                constraintFlags
	preserveGroups                                                             bool
	batchTokens                                                                []int
	minimumGain                                                                float64
	output                                                                     string
	seed                                                                       uint64
	timeBudget                                                                 time.Duration
}

func newSolveCommand() *cobra.Command {
	var flags solveFlags
	cmd := &cobra.Command{
		Use:   "solve --trace FILE --ep N --attention tp|dp --out DIR",
		Short: "Solve a placement plan from a routing trace",
		Long: "Compute from a routing trace which expert is on which rank, and the tables that route tokens or requests. A part of the documents\n" +
			"is held out to evaluate the plan. Writes the plan directory and prints the score as one JSON object.\n" +
			"Exit codes: 2 the command line is invalid; 3 the trace is invalid; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			options, err := flags.options(cmd.Context())
			if err != nil {
				return err
			}
			return flags.run(cmd.Context(), options, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.IntVar(&flags.ranks, "ep", 0, "EP size: number of ranks, a divisor of the number of experts (required)")
	f.StringVar(&flags.attention, "attention", "", "attention mode: tp (one rank per token and layer) or dp (one rank per request) (required)")
	f.StringVar(&flags.out, "out", "", "directory for the plan; an existing plan is replaced (required)")
	f.StringVar(&flags.current, "current", "", "directory of the plan in service: start of the search by algorithm auto, which is faster and moves few experts")
	f.StringVar(&flags.algorithm, "algorithm", string(placement.Auto), "placement algorithm: "+cli.ListOf(placement.Algorithms))
	f.StringVar(&flags.forecast, "forecast", string(solver.Table), "input of the scores: table (token id); with attention tp also transition (token id and ranks of earlier layers,\nmerged as in the papers), lookback (the same with fitted weights), prefill (token id, prompt and experts of\nearlier layers), decode (as prefill, with earlier routes but without later tokens), lookahead-raw (the layer's\ngate before attention) or lookahead (the same with corrections learnt from the profile); auto compares table, transition,\nlookback and lookahead by modelled time on held-out documents of the profile")
	f.StringVar(&flags.embeddings, "embeddings", "", ".npy file with a float16 or float32 vector per token id, or directory of the checkpoint: a token missing in the train\nrequests gets the mean score of its 8 nearest neighbours there, unless held-out requests show that this is worse\n(default: the mean of all tokens; not with the forecasts prefill and decode)")
	f.StringVar(&flags.redundantSlots, "redundant-slots", "0", "number of extra slots per rank for copies of experts (algorithms auto, eplb, contiguous, round-robin), or auto: the number\nwith the lowest modelled time that fits into --redundant-memory")
	f.StringVar(&flags.redundantMemory, "redundant-memory", "", "memory per rank for copies over all layers, in bytes or with a unit such as 8GiB (with --redundant-slots auto)")
	f.StringVar(&flags.copyRule, "copy-rule", placement.CopyRules[0], "copy of an expert that the engine uses on a rank: nearest (the rank's own copy, as in SGLang) or rank-modulo (copy number\nrank mod copies, as in vllm-ascend with attention dp)")
	f.BoolVar(&flags.preserveGroups, "preserve-groups", false, "keep the gate's expert groups (n_group) whole, so that semmoe reshuffle can apply the plan (algorithms auto and\ncontiguous; EP size and number of groups must divide one another)")
	f.IntVar(&flags.trainPercent, "train-percent", 20, "percentage of the requests for training, by whole documents")
	f.StringSliceVar(&flags.withoutDomains, "without-domains", nil, "domains of the trace to exclude, for example as targets of a switch in semmoe-lab drift")
	f.Uint64Var(&flags.seed, "seed", 1, "seed of the split, the search and the evaluation")
	f.StringVar(&flags.objective, "objective", string(placement.Time), "objective to minimise: time (modelled time of an MoE layer), activation (remote activations), rank-dedup (other ranks per\ntoken), node-dedup (other nodes per token) or hierarchical (both, weighted by message cost); used by the search of\nalgorithm auto and by all tables")
	f.IntSliceVar(&flags.batchTokens, "batch-tokens", solver.DefaultBatchTokens, "sizes of the served batches, in tokens over all ranks; all sizes have equal weight")
	f.Float64Var(&flags.minimumGain, "minimum-gain-percent", solver.DefaultMinimumGainPercent, "minimum saving of a layer's modelled time for the verdict Gain, in percent")
	f.StringVarP(&flags.output, "output", "o", "", "output format: json or table (default: table on a terminal, json elsewhere)")
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", solver.DefaultEvaluation().RanksPerNode, "number of ranks per node")
	flags.constraints.add(cmd)
	cli.HardwareFlag(f, &flags.hardware)
	f.DurationVar(&flags.timeBudget, "time-budget", time.Minute, "time limit of the search; 0 means no limit")
	return cmd
}

// invalidArgs is cli.NoArgs for commands that run in Jobs and pods, where an invalid command line has the exit code of
// errors that no retry can fix.
func invalidArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return cli.WithCode(err, cli.ExitInvalidFile)
	}
	return nil
}

func (f *solveFlags) options(ctx context.Context) (solver.Options, error) {
	o := solver.Options{
		Ranks: f.ranks, Attention: placement.Attention(f.attention), TrainPercent: f.trainPercent, Seed: f.seed, TimeBudget: f.timeBudget,
		PreserveGroups: f.preserveGroups, RanksPerNode: f.ranksPerNode,
	}
	switch {
	case f.trace == "":
		return o, cli.UsageErrorf("--trace is missing: name a routing trace")
	case f.out == "":
		return o, cli.UsageErrorf("--out is missing: name a directory for the plan")
	case f.ranks < 1:
		return o, cli.UsageErrorf("--ep is %d; give the number of ranks, at least 1", f.ranks)
	case o.Attention != placement.TensorParallel && o.Attention != placement.DataParallel:
		return o, cli.UsageErrorf("--attention is %q; allowed is tp, dp", f.attention)
	case f.ranksPerNode < 1:
		return o, cli.UsageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, cli.UsageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	case f.timeBudget < 0:
		return o, cli.UsageErrorf("--time-budget is %v; it must be at least 0", f.timeBudget)
	}
	if err := f.copies(&o); err != nil {
		return o, err
	}
	o.BatchTokens = f.batchTokens
	if err := solver.CheckBatchTokens(o.BatchTokens); err != nil {
		return o, cli.UsageErrorf("--batch-tokens: %w", err)
	}
	if err := checkOutput(f.minimumGain, f.output); err != nil {
		return o, err
	}
	var err error
	if o.Algorithm, err = placement.ParseAlgorithm(f.algorithm); err != nil {
		return o, cli.UsageErrorf("--algorithm: %w", err)
	}
	if f.forecast == string(solver.AutoForecast) {
		o.Forecast = solver.AutoForecast
	} else if o.Forecast, err = solver.ParseForecast(f.forecast); err != nil {
		return o, cli.UsageErrorf("--forecast: %w, %s", err, solver.AutoForecast)
	}
	if o.Objective, err = placement.ParseObjective(f.objective); err != nil {
		return o, cli.UsageErrorf("--objective: %w", err)
	}
	if err := placement.CheckObjective(o.Objective, o.Ranks, o.RanksPerNode); err != nil {
		return o, cli.UsageErrorf("--objective: %w", err)
	}
	if o.CopyRule, err = placement.ParseCopyRule(f.copyRule); err != nil {
		return o, cli.UsageErrorf("--copy-rule: %w", err)
	}
	if o.CopyRule != placement.NearestCopy && o.Attention != placement.DataParallel {
		return o, cli.UsageErrorf("--copy-rule %s is for attention dp", o.CopyRule)
	}
	if o.Constraints, err = f.constraints.constraints(); err != nil {
		return o, err
	}
	if o.Forecast != solver.Table && o.Forecast != solver.AutoForecast && o.Attention == placement.DataParallel {
		return o, cli.UsageErrorf("--forecast %s is for attention tp; attention dp scores a request by its tokens: table", o.Forecast)
	}
	if f.embeddings != "" && o.Forecast.Contextual() {
		return o, cli.UsageErrorf("--embeddings cannot be combined with --forecast %s, whose weights are trained for unseen tokens without embeddings", o.Forecast)
	}
	if f.embeddings != "" {
		if o.Embeddings, err = cli.OpenEmbeddings(ctx, f.embeddings); err != nil {
			return o, err
		}
	}
	if f.current == "" {
		return o, nil
	}
	if o.Algorithm != placement.Auto {
		return o, cli.UsageErrorf("--current requires algorithm auto; %s does not use a current placement", o.Algorithm)
	}
	current, _, err := plan.Read(f.current)
	if err != nil {
		return o, cli.InputError(err)
	}
	if current.Placement.Ranks != o.Ranks {
		return o, cli.UsageErrorf("--current: the plan is for EP size %d, --ep is %d", current.Placement.Ranks, o.Ranks)
	}
	o.Current = current.Placement
	return o, nil
}

// copies reads the flags of redundant slots.
func (f *solveFlags) copies(o *solver.Options) (err error) {
	if f.redundantSlots != "auto" {
		if o.RedundantSlots, err = strconv.Atoi(f.redundantSlots); err != nil {
			return cli.UsageErrorf("--redundant-slots is %q; allowed is a number, or auto", f.redundantSlots)
		}
		switch {
		case o.RedundantSlots < 0:
			return cli.UsageErrorf("--redundant-slots is %d; it must be at least 0", o.RedundantSlots)
		case f.redundantMemory != "":
			return cli.UsageErrorf("--redundant-memory is for --redundant-slots auto, not for %s", f.redundantSlots)
		}
		return nil
	}
	if f.redundantMemory == "" {
		return cli.UsageErrorf("--redundant-slots auto requires --redundant-memory, the memory per rank for copies")
	}
	amount, err := resource.ParseQuantity(strings.TrimSuffix(f.redundantMemory, "B"))
	if err != nil || amount.Sign() <= 0 {
		return cli.UsageErrorf("--redundant-memory is %q; allowed is a number of bytes above 0, such as 8GiB", f.redundantMemory)
	}
	o.RedundantMemory = amount.Value()
	return nil
}

// solveReport is the output of solve: the score on the held-out requests and its origin.
type solveReport struct {
	cost.Report
	solver.Worth
	// Front are the candidate placements of a search by time. Chosen is the name of the placement in the plan.
	Front  []solver.FrontPoint `json:"front,omitempty"`
	Chosen string              `json:"chosen,omitempty"`
	// Copies describes how the number of redundant slots was chosen from memory; absent if the number was given.
	Copies *solver.Copies `json:"copies,omitempty"`
	// Neighbours compares tables with and without neighbours of unseen tokens; absent without embeddings.
	Neighbours *solver.NeighbourTrial `json:"neighbours,omitempty"`
	// Forecasts compares the forecasts of --forecast auto; absent if another one is given.
	Forecasts     *solver.ForecastChoice `json:"forecasts,omitempty"`
	PlanDigest    string                 `json:"plan_digest"`
	LayoutDigest  string                 `json:"layout_digest"`
	Algorithm     placement.Algorithm    `json:"algorithm"`
	FallBack      string                 `json:"fall_back,omitempty"`
	Truncated     bool                   `json:"truncated"`
	Objective     placement.Objective    `json:"objective"`
	LimitsMet     bool                   `json:"limits_met"`
	LimitsUnmet   []string               `json:"limits_unmet,omitempty"`
	Moves         *int                   `json:"moves,omitempty"`
	TrainRequests int                    `json:"train_requests"`
	TestRequests  int                    `json:"test_requests"`
	Seconds       float64                `json:"seconds"`
}

func (f *solveFlags) run(ctx context.Context, o solver.Options, stdout, stderr io.Writer) (err error) {
	if o.Hardware, err = cli.ReadHardware(f.hardware); err != nil {
		return err
	}
	if err := plan.CheckDirectory(f.out); err != nil {
		return cli.UsageErrorf("--out: %w", err)
	}
	begin := time.Now()
	t, err := f.open(ctx)
	if err != nil {
		return err
	}
	if err := checkAgainst(t, o); err != nil {
		return err
	}
	bar := cli.NewProgressBar(stderr)
	o.Progress = bar.Show
	solution, err := solver.Solve(ctx, t, o)
	bar.Clear()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case trace.IsInvalid(err):
		return cli.InputError(err)
	case err != nil: // all input is read: the options contradict each other or the plan in service
		return cli.WithCode(err, cli.ExitUsage)
	}
	if solution.Plan.Drift, err = solver.CalibrateDrift(ctx, t, solution.Plan, solution.HeldOut, o.Constraints.TokenLoadLimit/100); err != nil {
		return err
	}
	if solution.Plan.Schedule, err = solver.ScheduleLayers(&t.Model, solution.Plan, solution.Report.LAR, o.Hardware, o.RanksPerNode); err != nil {
		return err
	}
	artifact, err := plan.Encode(solution.Plan)
	if err != nil {
		return err
	}
	worth, err := solver.WorthOf(ctx, t, solution, o, f.minimumGain)
	if err != nil {
		return err
	}
	result := solveReport{
		Report: solution.Report, Worth: *worth, Front: solution.Plan.Front, Chosen: solution.Plan.Chosen, Copies: solution.Plan.Copies, Neighbours: solution.Neighbours, Forecasts: solution.Forecasts,
		PlanDigest: artifact.Digest, LayoutDigest: artifact.Manifest.LayoutDigest,
		Algorithm: solution.Plan.Algorithm, FallBack: solution.FallBack, Truncated: solution.Truncated,
		Objective: o.Objective, LimitsMet: len(solution.Unmet) == 0, LimitsUnmet: solution.Unmet, Moves: moves(&o, solution),
		TrainRequests: solution.TrainRequests, TestRequests: solution.TestRequests, Seconds: time.Since(begin).Seconds(),
	}
	report, err := json.Marshal(result)
	if err != nil {
		return err
	}
	report = append(report, '\n')
	if err := plan.Write(f.out, artifact, report); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	if asTable(f.output, stdout) {
		return result.table(stdout)
	}
	_, err = stdout.Write(report)
	return err
}

// open reads the trace without the excluded domains.
func (f *solveFlags) open(ctx context.Context) (*trace.Trace, error) {
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return nil, cli.InputError(err)
	}
	leave, err := t.DomainIndices(f.withoutDomains)
	if err != nil {
		return nil, cli.UsageErrorf("--without-domains: %w", err)
	}
	if len(leave) == 0 {
		return t, nil
	}
	part := t.Without(leave)
	if part.Requests() == 0 {
		return nil, cli.UsageErrorf("--without-domains excludes all domains; at least one must remain for training")
	}
	return part, f.checkSplit(t, part, leave)
}

// checkSplit returns an error if excluding the domains changes the split of the other documents. semmoe eval and drift
// split the whole trace, and would then evaluate the plan on its own train requests.
func (f *solveFlags) checkSplit(whole, part *trace.Trace, leave []uint8) error {
	learnt, _, err := trace.Split(part, f.trainPercent, f.seed)
	if err != nil {
		return cli.InputError(err)
	}
	ofWhole, _, err := trace.Split(whole, f.trainPercent, f.seed)
	if err != nil {
		return cli.InputError(err)
	}
	var same []int
	left := 0
	for r, domain := range whole.Domains {
		if slices.Contains(leave, domain) {
			continue
		}
		if _, taken := slices.BinarySearch(ofWhole, r); taken {
			same = append(same, left)
		}
		left++
	}
	if !slices.Equal(learnt, same) {
		return cli.UsageErrorf("--without-domains is %s, which changes the split of the other domains' documents, so that semmoe eval and drift would use train requests; a remaining domain must have two documents, and each document one domain",
			strings.Join(f.withoutDomains, ","))
	}
	return nil
}

// checkAgainst returns an error for options that the model of the trace does not support.
func checkAgainst(t *trace.Trace, o solver.Options) error {
	if err := placement.CheckRanks(o.Ranks, t.Model.Experts); err != nil {
		return cli.UsageErrorf("--ep: %w", err)
	}
	redundant := o.RedundantSlots
	if o.RedundantMemory > 0 {
		redundant = 1 // any number above 0: options that exclude copies also exclude an automatic number
	}
	if err := placement.CheckSlots(o.Algorithm, o.Ranks, t.Model.Experts, redundant); err != nil {
		return cli.UsageErrorf("--redundant-slots: %w", err)
	}
	if err := solver.CheckForecast(o.Forecast, o.Ranks, t); err != nil {
		return cli.UsageErrorf("--forecast %s: %w", o.Forecast, err)
	}
	if err := cli.CheckEmbeddings(o.Embeddings, t.Model.Vocabulary); err != nil {
		return err
	}
	if err := placement.CheckConstraints(o.Algorithm, o.Constraints, t.Model.Layers, t.Model.Experts, o.Ranks, redundant, o.Current != nil); err != nil {
		return cli.WithCode(err, cli.ExitUsage)
	}
	if !o.PreserveGroups {
		return nil
	}
	groups, err := t.Model.Groups()
	if err != nil {
		return cli.InputError(err)
	}
	if err := placement.CheckGroups(o.Algorithm, o.Ranks, t.Model.Experts, redundant, groups); err != nil {
		return cli.UsageErrorf("--preserve-groups: %w", err)
	}
	return nil
}
