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
		Short: "Plan again for recent traffic: new tables, a new layout, or neither",
		Long: "Make new tables for the placement of the plan in service, and a new placement, from a trace of recent requests, and judge both\n" +
			"and the plan in service on documents of it that are held back: by the modelled time of a layer, exchanges and experts. Writes\n" +
			"the plan directory of the cheapest that gains enough, if any, and prints scores, choice and reason as one JSON object.\n" +
			"Exit code 2: the command line must be changed; 3: a trace or the plan is invalid; 1: try again, with more requests where it\n" +
			"says that they are too few.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			options, err := flags.options()
			if err != nil {
				return err
			}
			return flags.run(cmd.Context(), options, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace of recent requests, .safetensors or .safetensors.zst (required)")
	f.StringVar(&flags.current, "current", "", "directory of the plan in service (required)")
	f.StringVar(&flags.out, "out", "", "directory for the plan that is chosen; a plan that is there is replaced (required)")
	f.StringVar(&flags.prior, "prior", "", "older routing trace of the same model, whose counts are used as far as the recent requests confirm them")
	f.IntVar(&flags.priorPercent, "prior-percent", solver.DefaultPriorPercent, "what the older counts weigh together when the placement is solved, in percent of the recent ones; 0 leaves them out")
	f.Float64Var(&flags.minimumGain, "minimum-gain-percent", solver.DefaultMinimumGainPercent, "by how much the modelled time of a layer must be below that of the plan in service")
	f.Float64Var(&flags.moveGain, "move-gain-percent", solver.DefaultMoveGainPercent, "what an expert must gain to change its rank, in local activations over the profile, in percent of those of the mean expert of a layer\n(other objectives: messages)")
	f.Float64Var(&flags.target, "target-lar", 0, "local activation rate at which new tables are good enough, whatever a new placement would gain; 0 is none")
	f.IntSliceVar(&flags.batchTokens, "batch-tokens", solver.DefaultBatchTokens, "tokens of a batch over all ranks, as served; each of several sizes is as frequent as the others")
	f.IntVar(&flags.ranksPerNode, "ranks-per-node", solver.DefaultEvaluation().RanksPerNode, "ranks that share a node; a plan made for nodes tells its own")
	ownHardwareFlag(f, &flags.hardware)
	f.IntVar(&flags.trainPercent, "train-percent", solver.DefaultReplanTrainPercent, "percent of the recent requests to learn from, by whole documents")
	f.StringVar(&flags.embeddings, "embeddings", "", "as for semmoe solve")
	f.BoolVar(&flags.preserveGroups, "preserve-groups", false, "as for semmoe solve")
	f.Uint64Var(&flags.seed, "seed", 1, "seed of the split, the search and the evaluation")
	f.DurationVar(&flags.timeBudget, "time-budget", time.Minute, "cut the search for a placement off after this time; 0 never does")
	return cmd
}

func (f *replanFlags) options() (solver.ReplanOptions, error) {
	o := solver.ReplanOptions{
		Options:         solver.Options{TrainPercent: f.trainPercent, Seed: f.seed, TimeBudget: f.timeBudget, PreserveGroups: f.preserveGroups, RanksPerNode: f.ranksPerNode},
		MoveGainPercent: f.moveGain,
		PriorPercent:    f.priorPercent,
		Choice:          solver.Choice{BatchTokens: f.batchTokens, MinimumGainPercent: f.minimumGain, TargetLAR: f.target},
	}
	for _, required := range []struct{ name, value, what string }{
		{"trace", f.trace, "a routing trace"}, {"current", f.current, "the directory of the plan in service"}, {"out", f.out, "a directory for the plan"},
	} {
		if required.value == "" {
			return o, usageErrorf("--%s is missing: name %s", required.name, required.what)
		}
	}
	switch {
	case f.priorPercent < 0 || f.priorPercent > 100:
		return o, usageErrorf("--prior-percent is %d; allowed is 0 to 100", f.priorPercent)
	case f.trainPercent < 1 || f.trainPercent > 99:
		return o, usageErrorf("--train-percent is %d; allowed is 1 to 99", f.trainPercent)
	case f.ranksPerNode < 1:
		return o, usageErrorf("--ranks-per-node is %d; it must be at least 1", f.ranksPerNode)
	case f.timeBudget < 0:
		return o, usageErrorf("--time-budget is %v; it cannot be negative", f.timeBudget)
	case !(f.moveGain >= 0) || math.IsInf(f.moveGain, 0):
		return o, usageErrorf("--move-gain-percent is %v; it cannot be negative", f.moveGain)
	}
	if err := o.Check(); err != nil {
		return o, usageErrorf("%w", err)
	}
	if f.embeddings == "" {
		return o, nil
	}
	var err error
	o.Embeddings, err = openEmbeddings(f.embeddings)
	return o, err
}

// replanReport is what replan prints.
type replanReport struct {
	// Hardware names the profile that times are modelled by.
	Hardware string      `json:"hardware"`
	Current  scoreReport `json:"current"`
	Tables   scoreReport `json:"tables"`
	Layout   scoreReport `json:"layout"`
	solver.Decision
	// PlanDigest is that of the plan that was written; absent where none was.
	PlanDigest string `json:"plan_digest,omitempty"`
	// Trust is what an old row of a token weighs at most, in occurrences; absent where it weighs as much as a recent one would.
	Trust         *float64 `json:"trust,omitempty"`
	Truncated     bool     `json:"truncated"`
	LimitsUnmet   []string `json:"limits_unmet,omitempty"`
	TrainRequests int      `json:"train_requests"`
	TestRequests  int      `json:"test_requests"`
	Seconds       float64  `json:"seconds"`
}

// scoreReport is what one plan is worth on the held-out requests.
type scoreReport struct {
	PlanDigest string `json:"plan_digest"`
	solver.Score
	ModelledUS float64 `json:"modelled_us"`
	Moves      int     `json:"moves"`
}

func (f *replanFlags) run(ctx context.Context, o solver.ReplanOptions, stdout, stderr io.Writer) error {
	begin := time.Now()
	if err := plan.CheckDirectory(f.out); err != nil {
		return usageErrorf("--out: %w", err)
	}
	current, artifact, err := plan.Read(f.current)
	if err != nil {
		return inputError(err)
	}
	if o.Hardware, err = readOwnHardware(f.hardware, current); err != nil {
		return err
	}
	recent, err := trace.Open(ctx, f.trace)
	if err != nil {
		return inputError(err)
	}
	var prior *trace.Trace
	if f.prior != "" {
		if prior, err = trace.Open(ctx, f.prior); err != nil {
			return inputError(fmt.Errorf("--prior: %w", err))
		}
	}
	if err := checkEmbeddings(o.Embeddings, recent.Model.Vocabulary); err != nil {
		return err
	}
	bar := newProgressBar(stderr)
	o.Progress = bar.show
	found, err := solver.Replan(ctx, recent, prior, current, o)
	bar.clear()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, solver.ErrTooFewRequests):
		return err
	case err != nil:
		return codedError{err, exitInvalidFile}
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

// report encodes the candidates, and returns the one that is chosen; nil where none is.
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
	return scoreReport{PlanDigest: a.Digest, Score: c.Score, ModelledUS: c.Score.Total(), Moves: c.Moves}
}
