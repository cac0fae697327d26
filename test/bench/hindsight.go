// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/lab/hindsight"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// hindsightResult compares the local activation rates of request dispatch (attention DP) with the rates of assignments
// in hindsight, under a limit of the window imbalance. All values are means over seeds.
type hindsightResult struct {
	Trace string  `json:"trace"`
	Ranks int     `json:"ep_size"`
	Seeds int     `json:"seeds"`
	Limit float64 `json:"window_imbalance_limit"`
	// Table is the result of the policy price with the plan's token table, for each cap.
	Table []rated `json:"table"`
	// Solved is the result for the plan's placement, Fitted the result for a placement that was solved on the served
	// requests.
	Solved hindsightFigures `json:"solved"`
	Fitted hindsightFigures `json:"fitted_to_test"`
}

// hindsightFigures holds the figures of one placement.
type hindsightFigures struct {
	// Routes is the result of the policy price if the real routes of each request are known at its arrival, but later
	// requests are unknown.
	Routes []rated `json:"real_routes"`
	// Hindsight is the best assignment found with all arrivals and routes known, in the first arrival order. Bound is
	// an upper bound for every dispatcher in this order.
	Hindsight rated   `json:"hindsight"`
	Bound     float64 `json:"bound"`
}

type rated struct {
	// Cap is the cap of the policy. The search in hindsight has no cap.
	Cap             float64 `json:"cap,omitempty"`
	LAR             float64 `json:"lar"`
	WindowImbalance float64 `json:"window_imbalance"`
}

func (r *rated) add(lar, imbalance, weight float64) {
	r.LAR += weight * lar
	r.WindowImbalance += weight * imbalance
}

// ratedFor returns an empty entry for each cap.
func ratedFor(caps []float64) []rated {
	r := make([]rated, len(caps))
	for i, c := range caps {
		r[i].Cap = c
	}
	return r
}

// hindsightBench holds the flags of the benchmark.
type hindsightBench struct {
	trace, caps                 string
	ranks, seeds, train, sweeps int
	limit                       float64
}

func benchHindsight(ctx context.Context, args []string) (*hindsightResult, error) {
	var b hindsightBench
	flags := flag.NewFlagSet("hindsight", flag.ContinueOnError)
	flags.StringVar(&b.trace, "trace", metisTrace, "routing trace")
	flags.IntVar(&b.ranks, "ep", 8, "EP size")
	flags.IntVar(&b.seeds, "seeds", 5, "number of splits")
	flags.IntVar(&b.train, "train-percent", 20, "percent of the documents to learn from")
	flags.StringVar(&b.caps, "caps", "1.15", "caps of the policy price")
	flags.Float64Var(&b.limit, "limit", 1.14, "maximum window imbalance of an assignment in hindsight")
	flags.IntVar(&b.sweeps, "sweeps", 2000, "moves for each request in the search for the assignment in hindsight")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	var caps []float64
	for _, text := range strings.Split(b.caps, ",") {
		c, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("-caps: %w", err)
		}
		caps = append(caps, c)
	}
	t, err := trace.Open(ctx, b.trace)
	if err != nil {
		return nil, err
	}
	r := &hindsightResult{
		Trace: b.trace, Ranks: b.ranks, Seeds: b.seeds, Limit: b.limit, Table: ratedFor(caps),
		Solved: hindsightFigures{Routes: ratedFor(caps)}, Fitted: hindsightFigures{Routes: ratedFor(caps)},
	}
	for seed := range uint64(b.seeds) {
		if err := r.add(ctx, t, &b, seed+1); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// add runs one split and adds its results.
func (r *hindsightResult) add(ctx context.Context, t *trace.Trace, b *hindsightBench, seed uint64) error {
	solved, err := solver.Solve(ctx, t, solver.Options{
		Ranks: b.ranks, Attention: placement.DataParallel, Algorithm: placement.Auto, Forecast: solver.Table, TrainPercent: b.train, Seed: seed,
	})
	if err != nil {
		return err
	}
	o := solver.DefaultEvaluation()
	o.Requests, o.Seed, o.WithoutBounds = solved.HeldOut, seed, true
	if err := b.dispatch(ctx, t, solved.Plan.Placement, solved.Plan.Ranks.Forecast(t), o, r.Table); err != nil {
		return err
	}
	if err := r.Solved.add(ctx, t, solved.Plan.Placement, b, o); err != nil {
		return err
	}
	requests, err := affinity.CountRequests(ctx, t, o.Requests)
	if err != nil {
		return err
	}
	fitted, err := placement.Solve(ctx, placement.Problem{
		Attention: placement.DataParallel, Ranks: b.ranks, Layers: t.Model.Layers, Requests: requests, Algorithm: placement.Auto, Seed: seed,
	})
	if err != nil {
		return err
	}
	return r.Fitted.add(ctx, t, fitted.Placement, b, o)
}

// dispatch adds the results of the policy price under each cap.
func (b *hindsightBench) dispatch(
	ctx context.Context, t *trace.Trace, p *placement.Placement, forecast cost.RequestForecast, o cost.Options, reached []rated,
) error {
	for i := range reached {
		o.Cap = reached[i].Cap
		report, err := cost.DataParallel(ctx, t, p, forecast, o)
		if err != nil {
			return err
		}
		reached[i].add(report.LAR, *report.WindowImbalance, 1/float64(b.seeds))
	}
	return nil
}

// add evaluates a placement on the requests of an evaluation, and adds the figures.
func (f *hindsightFigures) add(ctx context.Context, t *trace.Trace, p *placement.Placement, b *hindsightBench, o cost.Options) error {
	shares, err := cost.DataParallelShares(ctx, t, p, realRoutes{}, o)
	if err != nil {
		return err
	}
	routes := realRoutes{}
	for i, request := range o.Requests {
		routes[request] = shares[i].Local
	}
	if err := b.dispatch(ctx, t, p, routes, o, f.Routes); err != nil {
		return err
	}
	weight := 1 / float64(b.seeds)
	run := &hindsight.Run{}
	for _, request := range trace.Shuffled(o.Requests, o.Seed) {
		run.Local, run.Tokens = append(run.Local, routes[request]), append(run.Tokens, t.Length(request))
	}
	f.Bound += weight * run.Bound(b.limit)
	own, found := run.Search(b.limit, b.sweeps, o.Seed)
	if !found {
		return fmt.Errorf("EP %d, seed %d: found no assignment with a window imbalance of at most %v", b.ranks, o.Seed, b.limit)
	}
	f.Hindsight.add(run.LAR(own), run.Imbalance(own), weight)
	return nil
}

// realRoutes is a forecast that returns the real activations of each request of the trace on each rank.
type realRoutes map[int][]float64

func (r realRoutes) Score(dst []float32, request int) {
	for rank, share := range r[request] {
		dst[rank] = float32(share)
	}
}
