package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// maxRuns bounds the runs: the delay of each is kept until all are done.
const maxRuns = 100_000

// driftFlags are the flags of semmoe drift.
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
		Short: "Try a plan's drift test on simulated traffic",
		Long: "Draw requests of a routing trace at random and in runs of one domain, dispatch them by the plan, and print as one JSON object how\n" +
			"often its drift test gives a false alarm, and how many sampled requests it needs to find a drop of the local activation rate and,\n" +
			"where --domains names some, a switch to requests of these. Usual traffic are the requests that the plan's split holds back, of\n" +
			"all other domains: those that its drift test was made from. With --other-documents the test is made anew from half of their\n" +
			"documents, and tried on the other half.\n" +
			"Exit code 2: the command line must be changed; 3: the trace or the plan is invalid; 1: try again.",
		Args: usageArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := flags.run(cmd.Context())
			if err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	f := cmd.Flags()
	f.StringVar(&flags.trace, "trace", "", "routing trace, .safetensors or .safetensors.zst (required)")
	f.StringVar(&flags.plan, "plan", "", "directory of the plan (required)")
	f.StringSliceVar(&flags.domains, "domains", nil, "domains of the trace to switch to; the plan is best made without them (semmoe solve --without-domains)")
	f.BoolVar(&flags.otherDocuments, "other-documents", false, "try the test on documents that it was not made from: make it from half of those held back, and draw from the others")
	f.IntVar(&flags.runs, "runs", 300, fmt.Sprintf("runs in which a change is to be found, at most %d", maxRuns))
	f.IntVar(&flags.steps, "steps", 1_000_000, "undisturbed requests in each order in which false alarms are counted")
	f.Float64Var(&flags.sticky, "sticky", 0.9, "probability that a request has the domain of the one before it, in the order that is tried beside a random one")
	numbersVar(f, &flags.drops, "drop", []float64{10}, "drops of the local activation rate, in `percent` of it, separated by commas")
	f.Float64Var(&flags.cap, "cap", drift.LoadCap, "attention dp: largest load of a rank over the last 128 requests, in fair shares, as the request router is told; the --token-load-limit\nof the plan over 100, where it had one")
	f.Float64Var(&flags.rate, "rate", 10, "requests per second, for delays in seconds")
	f.Float64Var(&flags.percentage, "sample-percent", 5, "percent of the requests that are sampled, for delays in seconds")
	f.Uint64Var(&flags.seed, "seed", 2, "seed of the traffic; best another than the plan's, with which its thresholds were simulated")
	return cmd
}

func (f *driftFlags) check() error {
	switch {
	case f.trace == "":
		return usageErrorf("--trace is missing: name a routing trace")
	case f.plan == "":
		return usageErrorf("--plan is missing: name the directory of a plan")
	case f.runs < 1 || f.runs > maxRuns:
		return usageErrorf("--runs is %d; allowed is 1 to %d", f.runs, maxRuns)
	case f.steps < 0:
		return usageErrorf("--steps is %d; it cannot be negative", f.steps)
	case !(f.sticky >= 0 && f.sticky < 1):
		return usageErrorf("--sticky is %v; it must be from 0 to below 1", f.sticky)
	case !(f.cap >= 1):
		return usageErrorf("--cap is %v; it must be at least 1", f.cap)
	case !(f.rate > 0):
		return usageErrorf("--rate is %v; it must be above 0", f.rate)
	case !(f.percentage > 0 && f.percentage <= 100):
		return usageErrorf("--sample-percent is %v; it must be above 0 and at most 100", f.percentage)
	}
	for _, drop := range f.drops {
		if !(drop > 0 && drop <= 100) {
			return usageErrorf("--drop is %v; it must be above 0 and at most 100", drop)
		}
	}
	return nil
}

// driftReport is what drift prints.
type driftReport struct {
	PlanDigest string `json:"plan_digest"`
	// Usual and Switched are the numbers of requests that traffic is drawn from, Calibration the test that is tried on it.
	Usual       int                `json:"usual_requests"`
	Switched    int                `json:"switched_requests,omitempty"`
	Calibration *drift.Calibration `json:"calibration"`
	Orders      []driftOrder       `json:"orders"`
}

// driftOrder is what was found in one order of requests.
type driftOrder struct {
	Sticky      float64     `json:"sticky"`
	Steps       int         `json:"steps"`
	FalseAlarms int         `json:"false_alarms"`
	Drops       []driftDrop `json:"drops"`
	Switch      *driftDelay `json:"switch,omitempty"`
}

// driftDrop is how soon a drop is found.
type driftDrop struct {
	Percent float64 `json:"percent"`
	driftDelay
}

// driftDelay are quantiles of a delay, in sampled requests and in seconds. Unfound counts the runs without an alarm within maxDelay
// requests; these stand for it in the quantiles.
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
		return nil, inputError(err)
	}
	if p.Drift == nil {
		return nil, codedError{usageErrorf("--plan: the plan has no %s: it was solved with fewer than %d held-out requests, or with such long ones that fewer are within %d tokens times MoE layers, or by an earlier version",
			plan.DriftFile, drift.LeastRequests, drift.MaxRows), exitInvalidFile}
	}
	if p.Attention == placement.TensorParallel && f.cap != drift.LoadCap {
		return nil, usageErrorf("--cap has no meaning for this plan: it is for attention %s", p.Attention)
	}
	t, err := trace.Open(ctx, f.trace)
	if err != nil {
		return nil, inputError(err)
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

// driftTrial is a drift test, and the requests before and after a switch, as the plan serves them.
type driftTrial struct {
	test            *drift.Calibration
	usual, switched []drift.Request
}

func (f *driftFlags) trial(ctx context.Context, t *trace.Trace, p *solver.Plan) (*driftTrial, error) {
	to, err := domainIndices(t, f.domains)
	if err != nil {
		return nil, usageErrorf("--domains: %w", err)
	}
	held, others, err := solver.HeldOut(t, p, to)
	if err != nil {
		return nil, inputError(err)
	}
	if len(held) == 0 {
		return nil, usageErrorf("--domains names all domains; some must be left for usual traffic")
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

// mismatch gives faults of a trace that is not of the plan's model their exit code: nothing is read by now.
func mismatch(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	return codedError{err, exitInvalidFile}
}

// otherDocuments makes a plan's drift test anew from half of the documents of held-out requests; the requests of the other half are what
// it has not seen.
func otherDocuments(ctx context.Context, t *trace.Trace, p *solver.Plan, heldOut []int, loadCap float64) (*drift.Calibration, []int, error) {
	const half = 50
	seen, unseen, err := trace.Split(t.Subset(heldOut), half, p.Seed)
	if err != nil {
		return nil, nil, inputError(err)
	}
	for _, part := range [][]int{seen, unseen} {
		for i, at := range part {
			part[i] = heldOut[at]
		}
	}
	test, err := solver.CalibrateDrift(ctx, t, p, seen, loadCap)
	if err == nil && test == nil {
		return nil, nil, usageErrorf("--other-documents: half of the documents have %d held-out requests; a drift test needs %d, within %d tokens times MoE layers",
			len(seen), drift.LeastRequests, drift.MaxRows)
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

// domainIndices are the numbers of named domains of a trace.
func domainIndices(t *trace.Trace, names []string) ([]uint8, error) {
	var indices []uint8
	for _, name := range names {
		at := slices.Index(t.Model.Domains, name)
		switch {
		case t.Domains == nil || len(t.Model.Domains) == 0:
			return nil, fmt.Errorf("%q: the trace names no domains", name)
		case at < 0:
			return nil, fmt.Errorf("the trace has no domain %q; it has %s", name, strings.Join(t.Model.Domains, ", "))
		}
		indices = append(indices, uint8(at))
	}
	return indices, nil
}

// without are the requests of a trace that are of none of the domains.
func without(t *trace.Trace, domains []uint8) *trace.Trace {
	var others []int
	for r := range t.Requests() {
		if !slices.Contains(domains, t.Domains[r]) {
			others = append(others, r)
		}
	}
	part := t.Subset(others)
	part.Digest = t.Digest // the split of its documents is that of the whole trace
	return part
}
