// SPDX-License-Identifier: Apache-2.0

package cost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// ShardRule defines how the tokens of a batch are divided in attention tensor parallelism.
type ShardRule string

// Supported shard rules.
const (
	// EqualShards gives every rank equally many tokens of each batch, as reduce-scatter requires.
	EqualShards ShardRule = "equal"
	// FreeShards balances the load over time, by prices.
	FreeShards ShardRule = "free"
)

// Options defines what is evaluated and how.
type Options struct {
	// Requests are the requests of the trace to score; at least one.
	Requests []int
	// Seed sets the order of the requests.
	Seed uint64
	// Layers are the indices of the MoE layers to evaluate with attention TP, ascending; nil means all.
	Layers []int
	// BatchTokens is the number of tokens in a batch (attention TP), or in a step of all ranks (for the modelled time).
	BatchTokens int
	// Shards is the shard rule of attention TP.
	Shards ShardRule
	// Policy and Cap define the request scheduling of attention DP. Orders is the number of arrival orders.
	Policy dispatch.Policy
	Cap    float64
	Orders int
	// MaxWaiting is the maximum number of waiting requests of the policy late; 0 means one per rank.
	MaxWaiting int
	// Weights scale the components of the policy price.
	Weights dispatch.Weights
	// Workload defines how Requests arrive; they are requests of its trace (see trace.Workload.Build). Except with
	// trace.Recorded, ranks cache what they have computed, CacheTokens each; 0 means dispatch.DefaultCacheTokens.
	Workload    trace.Workload
	CacheTokens int
	// ScorePercent, if positive, also requests figures for scores of only this percentage of each request.
	ScorePercent int
	// RankCapacity contains the ranks' shares of the tokens, in any unit; nil means equal shares. Token imbalances are
	// relative to them.
	RankCapacity []float64
	// RanksPerNode defines which ranks share a node.
	RanksPerNode int
	// Machines model the times of the exchanges.
	Machines Machines
	// Volume requests Report.Volume.
	Volume bool
	// Detail requests Report.Detail.
	Detail bool
	// ByRequest requests Report.ByRequest.
	ByRequest bool
	// WithoutBounds omits OracleLAR and UpperBound, which take most of the time.
	WithoutBounds bool
}

func (o *Options) validate(t *trace.Trace, p *placement.Placement) error {
	switch {
	case len(o.Requests) == 0:
		return fmt.Errorf("there are no requests to evaluate")
	case o.BatchTokens < 1:
		return fmt.Errorf("batch tokens is %d; it must be at least 1", o.BatchTokens)
	case o.RanksPerNode < 1:
		return fmt.Errorf("ranks per node is %d; it must be at least 1", o.RanksPerNode)
	case o.ScorePercent < 0 || o.ScorePercent > 100:
		return fmt.Errorf("score percent is %d; allowed is 0 to 100", o.ScorePercent)
	case o.MaxWaiting < 0:
		return fmt.Errorf("held is %d; it must be at least 0", o.MaxWaiting)
	case o.Policy == dispatch.Late && o.Workload == trace.MultiTurn:
		return fmt.Errorf("policy %s may reorder the turns of a conversation; workload %s requires a policy that keeps the order", o.Policy, o.Workload)
	case slices.ContainsFunc(o.Layers, func(l int) bool { return l < 0 || l >= len(p.Layers) }):
		return fmt.Errorf("layers are %d; allowed is 0 to %d", o.Layers, len(p.Layers)-1)
	case o.CacheTokens < 0:
		return fmt.Errorf("cache tokens is %d; it must be at least 0", o.CacheTokens)
	}
	if err := placement.CheckCapacity(o.RankCapacity, p.Ranks); err != nil {
		return err
	}
	if err := Matches(t, p); err != nil {
		return err
	}
	if scores, allowed := len(o.Requests)*p.Ranks, max(minScores, len(t.Experts)); scores > allowed {
		return fmt.Errorf("%d requests on %d ranks need %d scores; allowed are %d for %d activations: evaluate fewer requests",
			len(o.Requests), p.Ranks, scores, allowed, len(t.Experts))
	}
	return nil
}

// minScores is the number of scores of requests by rank, of up to 20 bytes each, that an evaluation may allocate for
// any trace: those of 64 Ki requests on 256 ranks. Larger traces may have one score for each activation, which matters
// for requests of a few tokens.
const minScores = 1 << 24

// Matches checks that a placement belongs to the model of a trace.
func Matches(t *trace.Trace, p *placement.Placement) error {
	if err := p.Validate(); err != nil {
		return err
	}
	if p.Experts != t.Model.Experts || len(p.Layers) != len(t.Model.Layers) {
		return fmt.Errorf("the placement has %d experts in %d MoE layers, the trace %d in %d",
			p.Experts, len(p.Layers), t.Model.Experts, len(t.Model.Layers))
	}
	for i, layer := range p.Layers {
		if layer.Layer != t.Model.Layers[i] {
			return fmt.Errorf("the placement's MoE layer %d is layer %d of the model, the trace's is %d", i, layer.Layer, t.Model.Layers[i])
		}
	}
	return nil
}

// TokenForecast scores the ranks for the token at a position of the trace in the layer'th MoE layer. Score is called
// with ascending layers for a position, and may use only information available before that layer's gate runs.
type TokenForecast interface {
	Score(dst []float32, layer, position int)
}

// RequestForecast scores the ranks for a request of the trace on arrival.
type RequestForecast interface {
	Score(dst []float32, request int)
}

// PartialForecast can also score a request by its first tokens only.
type PartialForecast interface {
	ScoreFirst(dst []float32, request, tokens int)
}

// TensorParallel scores a plan for attention tensor parallelism. Batches are consecutive tokens of the shuffled
// requests.
func TensorParallel(ctx context.Context, t *trace.Trace, p *placement.Placement, forecast TokenForecast, o Options) (Report, error) {
	if err := o.validate(t, p); err != nil {
		return Report{}, err
	}
	if o.Shards != EqualShards && o.Shards != FreeShards {
		return Report{}, fmt.Errorf("shards is %q; allowed is equal, free", o.Shards)
	}
	return tensorParallel(ctx, t, p, &o, func(run *layerRun, positions []int) error { return run.dispatch(ctx, forecast, positions) })
}

// tensorParallel scores a placement whose tokens are assigned by the function dispatch, layer by layer.
func tensorParallel(ctx context.Context, t *trace.Trace, p *placement.Placement, o *Options, dispatch func(run *layerRun, positions []int) error) (Report, error) {
	var positions []int
	for _, r := range trace.Shuffled(o.Requests, o.Seed) {
		for at := t.Offsets[r]; at < t.Offsets[r+1]; at++ {
			positions = append(positions, int(at))
		}
	}
	kinds := o.kindOfPositions(t)
	layers := o.layers(p)
	runs, failures := make([]*layerRun, len(layers)), make([]error, len(layers))
	err := affinity.Parallel(ctx, len(layers), func(i int) {
		run := newLayerRun(t, p, layers[i], o)
		run.kinds = kinds
		if failures[i] = dispatch(run, positions); failures[i] != nil {
			return
		}
		run.countBaseline(positions)
		if !o.WithoutBounds {
			run.bounds(positions)
		}
		runs[i] = run
	})
	if err = cmp.Or(err, errors.Join(failures...)); err != nil {
		return Report{}, err
	}
	return tensorReport(t, p, runs, o), nil
}

// layers returns the indices of the MoE layers to evaluate.
func (o *Options) layers(p *placement.Placement) []int {
	if o.Layers != nil {
		return o.Layers
	}
	all := make([]int, len(p.Layers))
	for l := range all {
		all[l] = l
	}
	return all
}

// baselineRanks returns the largest number of ranks up to the plan's that divides the number of experts. Engines reject
// other numbers without redundant experts, so the baseline is the next smaller deployment.
func baselineRanks(p *placement.Placement) int {
	ranks := p.Ranks
	for p.Experts%ranks != 0 {
		ranks--
	}
	return ranks
}

func tensorReport(t *trace.Trace, p *placement.Placement, runs []*layerRun, o *Options) Report {
	r := Report{BatchImbalance: new(float64)}
	tallies := make([]*tally, len(runs))
	n, scored := float64(len(runs)), 0.0
	for l, run := range runs {
		tallies[l] = run.tally
		*r.BatchImbalance += run.batchImbalance / n
		r.ExpertWindowImbalance += run.batchExpertImbalance / n
		addShare(&r.BaselineLAR, run.baseline/n)
		addShare(&r.OracleLAR, run.oracle/n)
		addShare(&r.UpperBound, run.upper/n)
		addShare(&scored, run.scored/n)
	}
	layers := make([]int, len(runs))
	for i, run := range runs {
		layers[i] = t.Model.Layers[run.layer]
	}
	r.fill([][]*tally{tallies}, layers)
	if !o.WithoutBounds {
		r.Gap = newGap(r.UpperBound, r.OracleLAR, scored, r.LAR)
	}
	r.model(t, p, [][]*tally{tallies}, o)
	if o.Volume {
		r.addVolume(t, p, [][]*tally{tallies}, o)
	}
	if o.Detail {
		r.Detail = newDetail([][]*tally{tallies})
		for l, run := range runs {
			r.Detail.Layers[l].OracleLAR, r.Detail.Layers[l].UpperBound = run.oracle, run.upper
		}
	}
	return r
}

// model sets the modelled time, if the trace contains the necessary sizes.
func (r *Report) model(t *trace.Trace, p *placement.Placement, runs [][]*tally, o *Options) {
	if t.Model.HiddenSize == 0 {
		return
	}
	us := layerMicroseconds(&o.Machines.Link, float64(o.BatchTokens)/float64(p.Ranks), exchange(runs), t.Model.TopK, t.Model.HiddenSize)
	r.ModelledUS, r.Hardware = &us, o.Machines.Profile
}
