// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"slices"
	"time"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
)

// Names of forecasts that exist only in comparisons.
const (
	// withoutForecast gives all ranks the same score: tokens are assigned round-robin.
	withoutForecast = "none"
	// domainLabel scores a request by its domain only.
	domainLabel = "domain label"
	// prefixHash sends requests with the same first tokens to the same rank.
	prefixHash = "hash of the first 64 tokens"
	// promptClusters scores a request by the nearest cluster of prompts.
	promptClusters = "k-means of prompt embeddings"
)

// methods scores the study's algorithm with every forecast and policy of its attention mode.
func (s *study) methods(ctx context.Context, o *CompareOptions) ([]Comparison, error) {
	if s.options.Attention == placement.DataParallel {
		return s.requestMethods(ctx, o)
	}
	forecasts := o.Baselines
	if s.options.Algorithm == placement.Auto {
		forecasts = o.Forecasts
	}
	var scored []Comparison
	placed := map[bool]placed{}
	for _, forecast := range forecasts {
		options := s.options
		options.Forecast = forecast
		part := s.with(options)
		// With only the token table, Auto places for the mean occurrence of a token. Other algorithms use no forecast.
		means := forecast == solver.Table && s.options.Algorithm == placement.Auto
		if means {
			part.steps = part.steps.WithoutPairs()
		}
		p, known := placed[means]
		if !known {
			var err error
			if p, err = part.placed(ctx); err != nil {
				return nil, err
			}
			placed[means] = p
		}
		more, err := part.tokenMethods(ctx, p)
		if err != nil {
			return nil, err
		}
		scored = append(scored, more...)
	}
	return scored, nil
}

// placed is a solved placement with its solve time.
type placed struct {
	placement *placement.Placement
	// rowRanks is the same as in placement.Result.
	rowRanks [][]int
	seconds  float64
}

func (s *study) placed(ctx context.Context) (placed, error) {
	begin := time.Now()
	result, err := s.steps.Place(ctx)
	return placed{result.Placement, result.RowRanks, time.Since(begin).Seconds()}, err
}

// tokenMethods scores a placement of attention TP with one forecast.
func (s *study) tokenMethods(ctx context.Context, p placed) ([]Comparison, error) {
	plan, err := s.steps.Plan(ctx, p.placement)
	if err != nil {
		return nil, err
	}
	var scored []Comparison
	var labels cost.TokenForecast
	for _, shards := range []cost.ShardRule{cost.FreeShards, cost.EqualShards} {
		evaluation := s.steps.Evaluation()
		evaluation.Shards = shards
		report, err := solver.Evaluate(ctx, s.trace, plan, evaluation)
		if err != nil {
			return nil, err
		}
		scored = append(scored, s.comparison(p, string(s.options.Forecast), string(shards), report))
		if p.rowRanks == nil || s.options.Forecast != solver.Table {
			continue
		}
		if labels == nil {
			labels = s.layerLabels(s.options.Algorithm, p.rowRanks)
		}
		if report, err = cost.TensorParallel(ctx, s.trace, plan.Placement, labels, evaluation); err != nil {
			return nil, err
		}
		scored = append(scored, s.comparison(p, tokenLabels, string(shards), report))
	}
	if s.options.Forecast == solver.Table && slices.Contains([]placement.Algorithm{placement.Auto, placement.ContiguousAlgorithm}, s.options.Algorithm) {
		report, err := cost.TensorParallel(ctx, s.trace, plan.Placement, cost.NoForecast{}, s.steps.Evaluation())
		if err != nil {
			return nil, err
		}
		scored = append(scored, s.comparison(p, withoutForecast, string(cost.EqualShards), report))
	}
	return scored, nil
}

// requestMethods scores the algorithm's placement under the policies of attention DP.
func (s *study) requestMethods(ctx context.Context, o *CompareOptions) ([]Comparison, error) {
	p, err := s.placed(ctx)
	if err != nil {
		return nil, err
	}
	plan, err := s.steps.Plan(ctx, p.placement)
	if err != nil {
		return nil, err
	}
	var scored []Comparison
	score := func(name string, forecast cost.RequestForecast, policy dispatch.Policy) error {
		evaluation := s.steps.Evaluation()
		evaluation.Policy = policy
		report, err := cost.DataParallel(ctx, s.trace, plan.Placement, forecast, evaluation)
		if err == nil {
			scored = append(scored, s.comparison(p, name, string(policy), report))
		}
		return err
	}
	policies := []dispatch.Policy{dispatch.Price, dispatch.Masked, dispatch.RoundRobin}
	if s.options.Algorithm == placement.Auto {
		policies = dispatch.Policies
	}
	for _, policy := range policies {
		if err := score(string(solver.Table), plan.Ranks.Forecast(s.trace), policy); err != nil {
			return nil, err
		}
	}
	if p.rowRanks != nil {
		table := s.labels(s.options.Algorithm, 0, p.rowRanks[0])
		for _, name := range []string{labelVotes, labelShares} {
			if err := score(name, requestLabels{s.trace, table, name == labelVotes}, dispatch.Masked); err != nil {
				return nil, err
			}
		}
	}
	if s.options.Algorithm != placement.Auto {
		return scored, nil
	}
	for _, baseline := range s.requestBaselines(plan, o) {
		if err := score(baseline.name, baseline.forecast, dispatch.Price); err != nil {
			return nil, err
		}
	}
	return scored, nil
}

// comparison returns one seed's report of a method.
func (s *study) comparison(p placed, forecast, dispatched string, r cost.Report) Comparison {
	c := Comparison{
		Attention: s.options.Attention, Ranks: s.options.Ranks, Algorithm: s.options.Algorithm,
		RedundantSlots: s.options.RedundantSlots, SlotsPerRank: p.placement.SlotsPerRank, Forecast: forecast, Dispatch: dispatched,
		TokenImbalance: r.TokenImbalance, ExpertImbalance: r.ExpertImbalance, ExpertWindowImbalance: r.ExpertWindowImbalance,
		RemoteRanksPerToken: r.RemoteRanksPerToken, PlacementSeconds: p.seconds,
	}
	c.Part = c.part()
	c.LAR.add(r.LAR)
	if r.WindowImbalance != nil {
		c.WindowImbalance = *r.WindowImbalance
	}
	if r.BatchImbalance != nil {
		c.BatchImbalance = *r.BatchImbalance
	}
	return c
}

// informed reports whether the dispatch policy uses the forecast.
func (c *Comparison) informed() bool {
	if c.Attention == placement.TensorParallel {
		return c.Forecast != withoutForecast
	}
	return slices.Contains([]dispatch.Policy{dispatch.Price, dispatch.Masked, dispatch.Window, dispatch.Late}, dispatch.Policy(c.Dispatch))
}

// part returns the part of co-scheduling that a comparison measures. It is empty for placements of other algorithms.
func (c *Comparison) part() Part {
	switch {
	case c.Algorithm == placement.Auto && c.informed():
		return BothParts
	case c.Algorithm == placement.Auto:
		return PlacementPart
	case c.Algorithm != placement.ContiguousAlgorithm:
		return ""
	case c.informed():
		return RoutingPart
	default:
		return NeitherPart
	}
}
