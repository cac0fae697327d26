// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"fmt"
	"slices"
)

// inspect checks a finished placement against the constraints, with independent counts. Violated hard constraints are
// errors; loads above their limits are recorded in Result.Unmet.
func (p *Problem) inspect(ctx context.Context, result *Result) error {
	c, to := &p.Constraints, result.Placement
	for _, pin := range c.Pins {
		l := slices.Index(p.Layers, pin.Layer)
		if !slices.Contains(to.Hosts(l)[pin.Expert], pin.Rank) {
			return fmt.Errorf("pin %v conflicts with the other constraints", pin)
		}
	}
	if c.MoveBudget != nil {
		for l, moves := range layerMoves(p.Current, to) {
			if moves > *c.MoveBudget {
				return fmt.Errorf("layer %d: at least %d experts move; the move budget is %d", p.Layers[l], moves, *c.MoveBudget)
			}
		}
	}
	if err := p.inspectExperts(result); err != nil {
		return err
	}
	p.inspectTokens(ctx, result)
	return nil
}

// inspectExperts records the layers in which the experts of a rank exceed the activation limit.
func (p *Problem) inspectExperts(result *Result) error {
	allowed := p.Constraints.ExpertLoadLimit
	if allowed == 0 {
		return nil
	}
	for l := range p.Layers {
		loads, err := p.expertLoads(l)
		if err != nil {
			return err
		}
		mean, load := sum(loads)/float64(p.Ranks), make([]float64, p.Ranks)
		for e, ranks := range result.Placement.Hosts(l) {
			load[ranks[0]] += loads[e]
		}
		if most := slices.Max(load); most > mean*allowed/100*(1+1e-6) {
			result.Unmet = append(result.Unmet, fmt.Sprintf("layer %d: the experts of rank %d have %.1f%% of the mean load; the limit is %v%%",
				p.Layers[l], slices.Index(load, most), 100*most/mean, allowed))
		}
	}
	return nil
}

// inspectTokens records a rank that exceeds the token limit, with requests assigned as in the search. A long request
// can make this unavoidable. With tensor parallelism, tokens are assigned in exact shares.
func (p *Problem) inspectTokens(ctx context.Context, result *Result) {
	allowed := p.Constraints.TokenLoadLimit
	if allowed == 0 || p.Attention != DataParallel {
		return
	}
	rankOf, copies := make([][]int, len(p.Layers)), make([]extras, len(p.Layers))
	for l := range rankOf {
		rankOf[l], copies[l] = make([]int, p.experts()), make(extras, p.experts())
		for e, ranks := range result.Placement.Hosts(l) {
			rankOf[l][e], copies[l][e] = ranks[0], ranks[1:]
		}
	}
	s := newJointSearch(p, limit{ctx: ctx})
	ranks, _ := s.bestRequests(rankOf, copies)
	load := make([]float64, p.Ranks)
	for r, rank := range ranks {
		load[rank] += float64(p.Requests.Tokens[r])
	}
	for rank, share := range s.balance.Limits {
		if load[rank] > share*allowed/100*(1+1e-6) {
			result.Unmet = append(result.Unmet, fmt.Sprintf("rank %d has %.1f%% of its share of the tokens; the limit is %v%%",
				rank, 100*load[rank]/share, allowed))
		}
	}
}
