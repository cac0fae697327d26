// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/trace"
)

// replanFlags are the flags of semmoe replan.
type replanFlags struct {
	trace, prior, current, out, embeddings, hardware string
	priorPercent, trainPercent, ranksPerNode         int
	batchTokens                                      []int
	minimumGain, moveGain, target                    float64
	preserveGroups                                   bool
	seed                                             uint64
	timeBudget                                       time.Duration
}

func newReplanCommand() *cobra.Command {
	var flags replanFlags
	cmd := &cobra.Command{
		Use:   "replan --trace RECENT --current DIR --out DIR",
		Short: "Re-plan for recent traffic: new tables, a new layout, or neither",
		Long: "Compute new tables for the placement of the plan in service, and a new placement, from a trace of recent requests. Compare both with the\n" +
			"plan in service on held-out documents, by the modelled time of a layer for exchanges and experts. Write the plan directory of the cheapest\n" +
			"change with enough gain, if any, and print scores, decision and reason as one JSON object.\n" +
			"Exit codes: 2 the command line is invalid; 3 a trace or the plan is invalid; 1 any other error, which a retry may fix, with more\n" +
			"requests if the message reports too few.",
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
	f.StringVar(&flags.trace, "trace", "", "routing trace of recent requests, .safetensors or .safetensors.zst (required)")
	f.StringVar(&flags.current, "current", "", "directory of the plan in service (required)")
	f.StringVar(&flags.out, "out", "", "directory for the selected plan; an existing plan is replaced (required)")
	f.StringVar(&flags.prior, "prior", "", "older routing trace of the same model; its counts are used to the extent that recent requests confirm them")
	f.IntVar(&flags.priorPercent, "prior-percent", solver.DefaultPriorPercent, "total weight of the older counts in the placement search, in percent of the recent counts; 0 ignores them")
	f.Float64Var(&flags.minimumGain, "minimum-gain-percent", solver.DefaultMinimumGainPercent, "minimum reduction of the modelled layer time relative to the plan in service, in percent")
	f.Float64Var(&flags.moveGain, "move-gain-percent", solver.DefaultMoveGainPercent, "minimum gain of a moved expert over the profile, in percent of the local activations of a layer's mean expert (other objectives:\nmessages)")
	f.Float64Var(&flags.target, "target-lar", 0, "local activation rate at which new tables suffice, independent of the gain of a new placement; 0 disables it")
	f.IntSliceVar(&flags.batchTokens, "batch-tokens", solver.DefaultBatchTokens, "sizes of the served batches, in tokens over all ranks; all sizes have equal weight")
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", solver.DefaultEvaluation().RanksPerNode, "number of ranks per node; plans made for nodes override the default")
	planHardwareFlag(f, &flags.hardware)
	f.IntVar(&flags.trainPercent, "train-percent", solver.DefaultReplanTrainPercent, "percentage of the recent requests for training, by whole documents")
	f.StringVar(&flags.embeddings, "embeddings", "", ".npy file with a vector per token id, or directory of the checkpoint, as in semmoe solve")
	f.BoolVar(&flags.preserveGroups, "preserve-groups", false, "keep the gate's expert groups whole, as in semmoe solve")
	f.Uint64Var(&flags.seed, "seed", 1, "seed of the split, the search and the evaluation")
	f.DurationVar(&flags.timeBudget, "time-budget", time.Minute, "time limit of the placement search; 0 means no limit")
	return cmd
}

func (f *replanFlags) options(ctx context.Context) (solver.ReplanOptions, error) {
	o := solver.ReplanOptions{
		Options:         solver.Options{TrainPercent: f.trainPercent, Seed: f.seed, TimeBudget: f.timeBudget, PreserveGroups: f.preserveGroups, RanksPerNode: f.ranksPerNode},
		MoveGainPercent: f.moveGain,
		PriorPercent:    f.priorPercent,
		ReplanPolicy:    solver.ReplanPolicy{BatchTokens: f.batchTokens, MinimumGainPercent: f.minimumGain, TargetLAR: f.target},
	}
	for _, required := range []struct{ name, value, what string }{
		{"trace", f.trace, "a routing trace"}, {"current", f.current, "the directory of the plan in service"}, {"out", f.out, "a directory for the plan"},
	} {
		if required.value == "" {
			return o, cli.UsageErrorf("--%s is missing: name %s", required.name, required.what)
		}
	}
	switch {
	case f.priorPercent < 0 || f.priorPercent > 100:
		return o, cli.UsageErrorf("--prior-percent is %d; allowed is 0 to 100", f.priorPercent)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, cli.UsageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	case f.ranksPerNode < 1:
		return o, cli.UsageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	case f.timeBudget < 0:
		return o, cli.UsageErrorf("--time-budget is %v; it must be at least 0", f.timeBudget)
	case !(f.moveGain >= 0) || math.IsInf(f.moveGain, 0):
		return o, cli.UsageErrorf("--move-gain-percent is %v; it must be at least 0", f.moveGain)
	}
	if err := o.Check(); err != nil {
		return o, cli.UsageErrorf("%w", err)
	}
	if f.embeddings == "" {
		return o, nil
	}
	var err error
	o.Embeddings, err = cli.OpenEmbeddings(ctx, f.embeddings)
	return o, err
}

// replanReport is the output of replan.
type replanReport struct {
	// Hardware is the name of the hardware profile of modelled times.
	Hardware string      `json:"hardware"`
	Current  scoreReport `json:"current"`
	Tables   scoreReport `json:"tables"`
	Layout   scoreReport `json:"layout"`
	solver.Decision
	// PlanDigest is the digest of the written plan; absent if none was written.
	PlanDigest string `json:"plan_digest,omitempty"`
	// Trust is the maximum weight of an older row of a token, in occurrences; absent if older rows weigh as much as
	// recent ones.
	Trust         *float64 `json:"trust,omitempty"`
	Truncated     bool     `json:"truncated"`
	LimitsUnmet   []string `json:"limits_unmet,omitempty"`
	TrainRequests int      `json:"train_requests"`
	TestRequests  int      `json:"test_requests"`
	Seconds       float64  `json:"seconds"`
}

// scoreReport is the score of one plan on the held-out requests.
type scoreReport struct {
	PlanDigest string `json:"plan_digest"`
	solver.Score
	ModelledUS float64 `json:"modelled_us"`
	Moves      int     `json:"moves"`
	// Neighbours compares tables with and without neighbours of unseen tokens; absent without embeddings.
	Neighbours *solver.NeighbourTrial `json:"neighbours,omitempty"`
}

func (f *replanFlags) run(ctx context.Context, o solver.ReplanOptions, stdout, stderr io.Writer) error {
	begin := time.Now()
	if err := plan.CheckDirectory(f.out); err != nil {
		return cli.UsageErrorf("--out: %w", err)
	}
	current, artifact, err := plan.Read(f.current)
	if err != nil {
		return cli.InputError(err)
	}
	if o.Hardware, err = readPlanHardware(f.hardware, current); err != nil {
		return err
	}
	recent, err := trace.Open(ctx, f.trace)
	if err != nil {
		return cli.InputError(err)
	}
	var prior *trace.Trace
	if f.prior != "" {
		if prior, err = trace.Open(ctx, f.prior); err != nil {
			return cli.InputError(fmt.Errorf("--prior: %w", err))
		}
	}
	if err := cli.CheckEmbeddings(o.Embeddings, recent.Model.Vocabulary); err != nil {
		return err
	}
	bar := cli.NewProgressBar(stderr)
	o.Progress = bar.Show
	found, err := solver.Replan(ctx, recent, prior, current, o)
	bar.Clear()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, solver.ErrTooFewRequests):
		return err
	case err != nil:
		return cli.WithCode(err, cli.ExitInvalidFile)
	}
	for _, of := range []*solver.Candidate{&found.Tables, &found.Layout} {
		if of.Plan.Drift, err = solver.CalibrateDrift(ctx, recent, of.Plan, found.HeldOut, 0); err != nil {
			return err
		}
		if of.Plan.Schedule, err = solver.ScheduleLayers(&recent.Model, of.Plan, of.Score.LAR, o.Hardware, o.RanksPerNode); err != nil {
			return err
		}
	}
	report, chosen, err := f.report(found, artifact)
	if err != nil {
		return err
	}
	report.Hardware, report.Seconds = o.Hardware.Name, time.Since(begin).Seconds()
	text, err := json.Marshal(report)
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if chosen != nil {
		if err := plan.Write(f.out, chosen, text); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
	}
	_, err = stdout.Write(text)
	return err
}

// report encodes the candidates and returns the selected one, or nil if none is selected.
func (f *replanFlags) report(found *solver.Replanned, current *plan.Artifact) (*replanReport, *plan.Artifact, error) {
	if err := plan.OnLayoutOf(found.Tables.Plan, current); err != nil {
		return nil, nil, err
	}
	tables, err := plan.Encode(found.Tables.Plan)
	if err != nil {
		return nil, nil, err
	}
	layout, err := plan.Encode(found.Layout.Plan)
	if err != nil {
		return nil, nil, err
	}
	r := &replanReport{
		Current: scoreOf(&found.Current, current), Tables: scoreOf(&found.Tables, tables), Layout: scoreOf(&found.Layout, layout), Decision: found.Decision,
		Truncated: found.Truncated, LimitsUnmet: found.Unmet, TrainRequests: found.TrainRequests, TestRequests: found.TestRequests,
	}
	if trust := float64(found.Trust); !math.IsInf(trust, 0) {
		r.Trust = &trust
	}
	var chosen *plan.Artifact
	switch found.Tier {
	case solver.TablesTier:
		chosen = tables
	case solver.LayoutTier:
		chosen = layout
	}
	if chosen != nil {
		r.PlanDigest = chosen.Digest
	}
	return r, chosen, nil
}

func scoreOf(c *solver.Candidate, a *plan.Artifact) scoreReport {
	return scoreReport{PlanDigest: a.Digest, Score: c.Score, ModelledUS: c.Score.Total(), Moves: c.Moves, Neighbours: c.Neighbours}
}
