// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/semmoe/operator/internal/model/npy"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// replanResult is the share of the lost local activation rate that re-plans recover after a change of the kinds of
// text, as means over seeds.
type replanResult struct {
	Trace     string              `json:"trace"`
	Attention placement.Attention `json:"attention"`
	Forecast  solver.Forecast     `json:"forecast"`
	Shards    cost.ShardRule      `json:"shards"`
	Ranks     int                 `json:"ep_size"`
	Seeds     int                 `json:"seeds"`
	// Own is the rate of the old plan on held-out requests of the learnt kinds of text, Served on the kinds of text
	// that are served now. Scratch is the rate of a plan from PoolTokens tokens of the served kinds only.
	Own        float64 `json:"own_lar"`
	Served     float64 `json:"served_lar"`
	Scratch    float64 `json:"scratch_lar"`
	PoolTokens int     `json:"pool_tokens"`
	// Live are the re-plans from fewer tokens.
	Live []liveResult `json:"live"`
}

// liveResult is the result of a re-plan that learns from Tokens recent tokens, not including the held-out tokens for
// its evaluation. Tables and Layout are the shares of Scratch - Served that new tables and a new placement recover: the
// mean, and the value of every seed.
type liveResult struct {
	Tokens      int       `json:"tokens"`
	Tables      float64   `json:"tables_recovered"`
	Layout      float64   `json:"layout_recovered"`
	TablesSeeds []float64 `json:"tables_seeds"`
	LayoutSeeds []float64 `json:"layout_seeds"`
	// Moved is the share of all experts that the new placement moves.
	Moved float64 `json:"moved"`
	// Trust holds the maximum weights of old rows, in occurrences, in the order of the seeds.
	Trust []float64 `json:"trust"`
}

// replanBench holds the flags of the benchmark.
type replanBench struct {
	trace, attention, forecast, shards, learnt, served, tokens string
	ranks, seeds, train                                        int
	counts                                                     bool
	embeddings                                                 *embedding.Table
}

func benchReplan(ctx context.Context, args []string) (*replanResult, error) {
	var b replanBench
	flags := flag.NewFlagSet("replan", flag.ContinueOnError)
	flags.StringVar(&b.trace, "trace", metisTrace, "routing trace whose requests have kinds of text")
	flags.StringVar(&b.attention, "attention", string(placement.TensorParallel), "tp or dp")
	flags.StringVar(&b.forecast, "forecast", string(solver.Table), "as for semmoe solve; with -counts table alone")
	flags.StringVar(&b.shards, "shards", string(cost.EqualShards), "with tp: equal or free, as for semmoe eval")
	flags.IntVar(&b.ranks, "ep", 8, "EP size")
	flags.IntVar(&b.seeds, "seeds", 5, "number of splits")
	flags.IntVar(&b.train, "train-percent", solver.DefaultReplanTrainPercent, "percent of the recent requests to learn from")
	flags.StringVar(&b.learnt, "learnt", "c,go,js,python,sql,yamljson", "kinds of text that the old plan is made from")
	flags.StringVar(&b.served, "served", "chinese,english,french,german,japanese,russian,spanish", "kinds of text that are served")
	flags.StringVar(&b.tokens, "tokens", "10000,25000,50000,100000", "numbers of recent tokens")
	flags.BoolVar(&b.counts, "counts", false, "plan from counts of the recent tokens; the final plan learns from all of them, so that token numbers include held-out ones")
	embeddings := flags.String("embeddings", "", "as for semmoe solve, for all plans; not with -counts")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if *embeddings != "" {
		if b.counts {
			return nil, errors.New("-embeddings: plans from counts do not use any; leave out -counts")
		}
		m, err := npy.Open(*embeddings)
		if err != nil {
			return nil, fmt.Errorf("-embeddings: %w", err)
		}
		b.embeddings = &embedding.Table{Tokens: m.Rows, Size: m.Columns, Values: m.Values}
	}
	t, err := trace.Open(ctx, b.trace)
	if err != nil {
		return nil, err
	}
	r := &replanResult{
		Trace: b.trace, Attention: placement.Attention(b.attention), Forecast: solver.Forecast(b.forecast), Shards: cost.ShardRule(b.shards),
		Ranks: b.ranks, Seeds: b.seeds,
	}
	for _, text := range strings.Split(b.tokens, ",") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("-tokens: %w", err)
		}
		r.Live = append(r.Live, liveResult{Tokens: n})
	}
	for seed := range uint64(b.seeds) {
		if err := r.add(ctx, t, &b, seed+1); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// halves splits the requests of some kinds of text into two parts, by whole documents.
func halves(t *trace.Trace, kinds string, seed uint64) (first, second *trace.Trace, err error) {
	var requests []int
	for request := range t.Requests() {
		if slices.Contains(strings.Split(kinds, ","), t.Model.Domains[t.Domains[request]]) {
			requests = append(requests, request)
		}
	}
	of := t.Subset(requests)
	a, b, err := trace.Split(of, 50, seed)
	if err != nil {
		return nil, nil, err
	}
	return of.Subset(a), of.Subset(b), nil
}

// add runs one split and adds its results.
func (r *replanResult) add(ctx context.Context, t *trace.Trace, b *replanBench, seed uint64) error {
	learnt, own, err := halves(t, b.learnt, seed)
	if err != nil {
		return err
	}
	pool, served, err := halves(t, b.served, seed)
	if err != nil {
		return err
	}
	// The kinds of text of live requests are unknown.
	learnt.Domains, pool.Domains = nil, nil
	options := solver.Options{
		Ranks: b.ranks, Attention: r.Attention, Algorithm: placement.Auto, Forecast: solver.Forecast(b.forecast), TrainPercent: 99, Seed: seed,
		Embeddings: b.embeddings,
	}
	old, err := solver.Solve(ctx, learnt, options)
	if err != nil {
		return err
	}
	scratch, err := solver.Solve(ctx, pool, options)
	if err != nil {
		return err
	}
	rates := make([]float64, 3)
	for i, of := range []struct {
		on   *trace.Trace
		plan *solver.Plan
	}{{own, old.Plan}, {served, old.Plan}, {served, scratch.Plan}} {
		if rates[i], err = b.rateOf(ctx, of.on, of.plan); err != nil {
			return err
		}
	}
	share := 1 / float64(b.seeds)
	r.Own += share * rates[0]
	r.Served += share * rates[1]
	r.Scratch += share * rates[2]
	r.PoolTokens += len(pool.Tokens) / b.seeds
	options.TrainPercent = b.train
	for i := range r.Live {
		live := &r.Live[i]
		found, err := b.replan(ctx, pool, learnt, live.Tokens, old.Plan, solver.ReplanOptions{
			Options: options, MoveGainPercent: solver.DefaultMoveGainPercent, PriorPercent: solver.DefaultPriorPercent, ReplanPolicy: solver.ReplanPolicy{BatchTokens: []int{4096}},
		})
		if err != nil {
			return err
		}
		recovered := func(p *solver.Plan) (float64, error) {
			rate, err := b.rateOf(ctx, served, p)
			return (rate - rates[1]) / (rates[2] - rates[1]), err
		}
		tables, err := recovered(found.Tables.Plan)
		if err != nil {
			return err
		}
		layout := 0.0
		if found.Layout.Plan != nil { // with counts only, there may be no layout
			if layout, err = recovered(found.Layout.Plan); err != nil {
				return err
			}
		}
		live.Tables += share * tables
		live.Layout += share * layout
		live.TablesSeeds, live.LayoutSeeds = append(live.TablesSeeds, tables), append(live.LayoutSeeds, layout)
		live.Moved += share * float64(found.Layout.Moves) / float64(len(t.Model.Layers)*t.Model.Experts)
		live.Trust = append(live.Trust, min(float64(found.Trust), 1e9)) // JSON has no infinity
	}
	return nil
}

// replan solves a re-plan from a sample of the pool.
func (b *replanBench) replan(ctx context.Context, pool, learnt *trace.Trace, tokens int, old *solver.Plan, o solver.ReplanOptions) (*solver.Replanned, error) {
	if !b.counts {
		recent := pool.Subset(trace.Sample(pool, pool.AllRequests(), tokens*100/b.train, o.Seed))
		return solver.Replan(ctx, recent, learnt, old, o)
	}
	recent, err := affinity.CountTokens(ctx, pool, trace.Sample(pool, pool.AllRequests(), tokens, o.Seed))
	if err != nil {
		return nil, err
	}
	before, err := affinity.CountTokens(ctx, learnt, learnt.AllRequests())
	if err != nil {
		return nil, err
	}
	return solver.ReplanCounts(ctx, solver.CountedProfile{Layers: recent}, before, old, o)
}

// rateOf returns the local activation rate of a plan on all requests of a trace.
func (b *replanBench) rateOf(ctx context.Context, t *trace.Trace, p *solver.Plan) (float64, error) {
	o := solver.DefaultEvaluation()
	o.Shards = cost.ShardRule(b.shards)
	o.Requests, o.Seed, o.WithoutBounds = t.AllRequests(), p.Seed, true
	report, err := solver.Evaluate(ctx, t, p, o)
	return report.LAR, err
}
