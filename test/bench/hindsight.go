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
	"github.com/semmoe/operator/solver/dispatch/hindsight"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// hindsightResult is what dispatch of requests (attention DP) under a limit of the window imbalance reaches, and what it could have,
// means over seeds.
type hindsightResult struct {
	Trace string  `json:"trace"`
	Ranks int     `json:"ep_size"`
	Seeds int     `json:"seeds"`
	Limit float64 `json:"window_imbalance_limit"`
	// Table is the policy price with the plan's token table, for each cap.
	Table []rated `json:"table"`
	// Solved is the plan's placement; Fitted is one that was solved on the very requests that are served.
	Solved hindsightFigures `json:"solved"`
	Fitted hindsightFigures `json:"fitted_to_test"`
}

// hindsightFigures are of one placement.
type hindsightFigures struct {
	// Routes is the policy price where the real routes of each request are known when it arrives, and nothing of later ones.
	Routes []rated `json:"real_routes"`
	// Hindsight is the best assignment found with all arrivals and routes known, in the first arrival order; no dispatcher exceeds
	// Bound there.
	Hindsight rated   `json:"hindsight"`
	Bound     float64 `json:"bound"`
}

type rated struct {
	// Cap is that of the policy; the search in hindsight has none.
	Cap             float64 `json:"cap,omitempty"`
	LAR             float64 `json:"lar"`
	WindowImbalance float64 `json:"window_imbalance"`
}

func (r *rated) add(lar, imbalance, weight float64) {
	r.LAR += weight * lar
	r.WindowImbalance += weight * imbalance
}

// ratedFor has an entry for each cap.
func ratedFor(caps []float64) []rated {
	r := make([]rated, len(caps))
	for i, c := range caps {
		r[i].Cap = c
	}
	return r
}

// hindsightBench are the flags of the measurement.
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
	flags.Float64Var(&b.limit, "limit", 1.14, "window imbalance that an assignment in hindsight may have")
	flags.IntVar(&b.sweeps, "sweeps", 2000, "moves for each request in the search for it")
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

// add measures one split.
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

// dispatch adds what the policy price reaches under each cap.
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

// add serves the requests of an evaluation with a placement.
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
		return fmt.Errorf("EP %d, seed %d: no assignment with a window imbalance of at most %v was found", b.ranks, o.Seed, b.limit)
	}
	f.Hindsight.add(run.LAR(own), run.Imbalance(own), weight)
	return nil
}

// realRoutes forecasts for each request of the trace what it really activates on each rank.
type realRoutes map[int][]float64

func (r realRoutes) Score(dst []float32, request int) {
	for rank, share := range r[request] {
		dst[rank] = float32(share)
	}
}
