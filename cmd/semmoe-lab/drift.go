// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// maxRuns is the maximum number of runs: all delays are in memory until the last run ends.
const maxRuns = 100_000

// driftFlags are the flags of semmoe-lab drift.
type driftFlags struct {
	trace, plan              string
	domains                  []string
	otherDocuments           bool
	runs, steps              int
	drops                    []float64
	sticky, rate, percentage float64
	cap                      float64
	seed                     uint64
}

func newDriftCommand() *cobra.Command {
	var flags driftFlags
	cmd := &cobra.Command{
		Use:   "drift --trace FILE --plan DIR",
		Short: "Evaluate a plan's drift test on simulated traffic",
		Long: "Draw requests of a routing trace in random order and in runs of one domain, dispatch them by the plan, and print as one JSON object the\n" +
			"number of false alarms of its drift test, and the number of sampled requests until it detects a drop of the local activation rate and,\n" +
			"with --domains, a switch to requests of these domains. Baseline traffic consists of the requests of all other domains that are held out\n" +
			"by the plan's split, which the drift test was calibrated on. With --other-documents, the test is calibrated on half of their documents\n" +
			"and evaluated on the other half.\n" +
			"Exit codes: 2 the command line is invalid; 3 the trace or the plan is invalid; 1 any other error, which a retry may fix.",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := flags.run(cmd.Context())
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
		},
	}
	cmd.SetFlagErrorFunc(cli.FlagError)
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.StringVar(&flags.plan, "plan", "", "directory of the plan (required)")
	f.StringSliceVar(&flags.domains, "domains", nil, "domains of the trace to switch to; solve the plan without them (semmoe solve --without-domains)")
	f.BoolVar(&flags.otherDocuments, "other-documents", false, "evaluation on other documents: calibrate on half of the held-out documents and draw from the other half")
	f.IntVar(&flags.runs, "runs", 300, fmt.Sprintf("number of runs with a change, up to %d", maxRuns))
	f.IntVar(&flags.steps, "steps", 1_000_000, "number of requests without a change per order, for counting false alarms")
	f.Float64Var(&flags.sticky, "sticky", 0.9, "probability that a request has the domain of the previous request, in the second order; the first order is random")
	cli.NumbersVar(f, &flags.drops, "drop", []float64{10}, "relative drops of the local activation rate to detect, in `percent`, separated by commas")
	f.Float64Var(&flags.cap, "cap", drift.LoadCap, "attention dp: maximum load of a rank over the last 128 requests, as a multiple of its fair share, as in the request router; use the\n--token-load-limit of the plan divided by 100, if it has one")
	f.Float64Var(&flags.rate, "rate", 10, "requests per second, for delays in seconds")
	f.Float64Var(&flags.percentage, "sample-percent", 5, "percentage of sampled requests, for delays in seconds")
	f.Uint64Var(&flags.seed, "seed", 2, "seed of the traffic; use another seed than the plan's, which simulated its thresholds")
	return cmd
}

func (f *driftFlags) check() error {
	switch {
	case f.trace == "":
		return cli.UsageErrorf("--trace is missing: name a routing trace")
	case f.plan == "":
		return cli.UsageErrorf("--plan is missing: name the directory of a plan")
	case f.runs < 1 || f.runs > maxRuns:
		return cli.UsageErrorf("--runs is %d; allowed is 1 to %d", f.runs, maxRuns)
	case f.steps < 0:
		return cli.UsageErrorf("--steps is %d; it must be at least 0", f.steps)
	case !(f.sticky >= 0 && f.sticky < 1):
		return cli.UsageErrorf("--sticky is %v; it must be from 0 to below 1", f.sticky)
	case !(f.cap >= 1):
		return cli.UsageErrorf("--cap is %v; it must be at least 1", f.cap)
	case !(f.rate > 0):
		return cli.UsageErrorf("--rate is %v; it must be above 0", f.rate)
	case !(f.percentage > 0 && f.percentage <= 100):
		return cli.UsageErrorf("--sample-percent is %v; it must be above 0 and at most 100", f.percentage)
	}
	for _, drop := range f.drops {
		if !(drop > 0 && drop <= 100) {
			return cli.UsageErrorf("--drop is %v; it must be above 0 and at most 100", drop)
		}
	}
	return nil
}

// driftReport is the output of drift.
type driftReport struct {
	PlanDigest string `json:"plan_digest"`
	// Usual and Switched are the numbers of requests that traffic is drawn from before and after a switch. Calibration
	// is the evaluated test.
	Usual       int                `json:"usual_requests"`
	Switched    int                `json:"switched_requests,omitempty"`
	Calibration *drift.Calibration `json:"calibration"`
	Orders      []driftOrder       `json:"orders"`
}

// driftOrder contains the results for one order of requests.
type driftOrder struct {
	Sticky      float64     `json:"sticky"`
	Steps       int         `json:"steps"`
	FalseAlarms int         `json:"false_alarms"`
	Drops       []driftDrop `json:"drops"`
	Switch      *driftDelay `json:"switch,omitempty"`
}

// driftDrop is the detection delay of a drop.
type driftDrop struct {
	Percent float64 `json:"percent"`
	driftDelay
}

// driftDelay contains quantiles of a detection delay, in sampled requests and in seconds. Unfound is the number of runs
// without an alarm within maxDelay requests, which count as maxDelay in the quantiles.
type driftDelay struct {
	Requests driftQuantiles `json:"requests"`
	Seconds  driftQuantiles `json:"seconds"`
	Runs     int            `json:"runs"`
	Unfound  int            `json:"unfound"`
}

type driftQuantiles struct {
	Median float64 `json:"median"`
	P95    float64 `json:"p95"`
	Most   float64 `json:"most"`
}

// maxDelay is the number of sampled requests after which a run ends.
const maxDelay = 20_000

func (f *driftFlags) run(ctx context.Context) (*driftReport, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	p, files, err := plan.Read(f.plan)
	if err != nil {
		return nil, cli.InputError(err)
	}
	if p.Drift == nil {
		return nil, cli.WithCode(cli.UsageErrorf("--plan: the plan has no %s: it was solved by an earlier version, or with fewer than %d held-out requests within %d tokens times MoE layers",
			plan.DriftFile, drift.MinRequests, drift.MaxRows), cli.ExitInvalidFile)
	}
	if p.Attention == placement.TensorParallel && f.cap != drift.LoadCap {
		return nil, cli.UsageErrorf("--cap does not apply to this plan with attention %s", p.Attention)
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return nil, cli.InputError(err)
	}
	trial, err := f.trial(ctx, t, p)
	if err != nil {
		return nil, err
	}
	report := &driftReport{PlanDigest: files.Digest, Usual: len(trial.usual), Switched: len(trial.switched), Calibration: trial.test}
	for _, sticky := range []float64{0, f.sticky} {
		order := driftOrder{Sticky: sticky, Steps: f.steps}
		by := drift.Order{Sticky: sticky, Cap: f.cap, Seed: f.seed}
		if order.FalseAlarms, err = trial.test.Alarms(ctx, trial.usual, by, f.steps); err != nil {
			return nil, err
		}
		for _, drop := range f.drops {
			found, err := f.delay(ctx, trial, drift.Change{Drop: drop / 100}, by)
			if err != nil {
				return nil, err
			}
			order.Drops = append(order.Drops, driftDrop{drop, found})
		}
		if len(trial.switched) > 0 {
			found, err := f.delay(ctx, trial, drift.Change{To: trial.switched}, by)
			if err != nil {
				return nil, err
			}
			order.Switch = &found
		}
		report.Orders = append(report.Orders, order)
	}
	return report, nil
}

// driftTrial contains a drift test and the requests before and after a switch, as the plan serves them.
type driftTrial struct {
	test            *drift.Calibration
	usual, switched []drift.Request
}

func (f *driftFlags) trial(ctx context.Context, t *trace.Trace, p *solver.Plan) (*driftTrial, error) {
	to, err := t.DomainIndices(f.domains)
	if err != nil {
		return nil, cli.UsageErrorf("--domains: %w", err)
	}
	held, others, err := solver.HeldOut(t, p, to)
	if err != nil {
		return nil, cli.InputError(err)
	}
	if len(held) == 0 {
		return nil, cli.UsageErrorf("--domains contains all domains; at least one must remain as baseline traffic")
	}
	trial := &driftTrial{test: p.Drift}
	if f.otherDocuments {
		if trial.test, held, err = otherDocuments(ctx, t, p, held, f.cap); err != nil {
			return nil, err
		}
	}
	if trial.usual, err = solver.DriftRequests(ctx, t, p, held); err == nil && len(others) > 0 {
		trial.switched, err = solver.DriftRequests(ctx, t, p, others)
	}
	return trial, mismatch(ctx, err)
}

// mismatch adds the exit code of invalid files to an error about a trace that does not match the plan's model; all
// input has been read.
func mismatch(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	return cli.WithCode(err, cli.ExitInvalidFile)
}

// otherDocuments calibrates a drift test on half of the documents of the held-out requests, and returns it with the
// requests of the other half.
func otherDocuments(ctx context.Context, t *trace.Trace, p *solver.Plan, heldOut []int, loadCap float64) (*drift.Calibration, []int, error) {
	const half = 50
	seen, unseen, err := trace.Split(t.Subset(heldOut), half, p.Seed)
	if err != nil {
		return nil, nil, cli.InputError(err)
	}
	for _, part := range [][]int{seen, unseen} {
		for i, at := range part {
			part[i] = heldOut[at]
		}
	}
	test, err := solver.CalibrateDrift(ctx, t, p, seen, loadCap)
	if err == nil && test == nil {
		return nil, nil, cli.UsageErrorf("--other-documents: half of the documents have %d held-out requests; a drift test needs %d, within %d tokens times MoE layers",
			len(seen), drift.MinRequests, drift.MaxRows)
	}
	return test, unseen, mismatch(ctx, err)
}

func (f *driftFlags) delay(ctx context.Context, trial *driftTrial, change drift.Change, order drift.Order) (driftDelay, error) {
	delays, err := trial.test.Delays(ctx, trial.usual, change, order, f.runs, maxDelay)
	if err != nil {
		return driftDelay{}, err
	}
	quantile := func(q float64) float64 { return float64(delays[int(q*float64(len(delays)-1)+0.5)]) }
	d := driftDelay{Requests: driftQuantiles{quantile(0.5), quantile(0.95), quantile(1)}, Runs: len(delays)}
	perSecond := f.rate * f.percentage / 100
	d.Seconds = driftQuantiles{d.Requests.Median / perSecond, d.Requests.P95 / perSecond, d.Requests.Most / perSecond}
	if first := slices.Index(delays, maxDelay); first >= 0 {
		d.Unfound = len(delays) - first
	}
	return d, nil
}
