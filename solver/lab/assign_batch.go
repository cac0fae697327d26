// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// AssignBatch assigns the tokens of a batch to ranks in each MoE layer of a plan and returns the ranks
// [MoE layers][tokens]. It solves the assignment problem (attention TP): it maximizes the sum of forecast scores under
// the constraint that every rank has equally many tokens. positions are the batch's tokens in the trace. by is the
// plan's forecast, or one that needs only the tables that every plan has.
func AssignBatch(ctx context.Context, t *trace.Trace, p *solver.Plan, by solver.Forecast, positions []int) ([][]int, error) {
	switch {
	case p.Attention != placement.TensorParallel:
		return nil, fmt.Errorf("assigning a batch requires attention %s; the plan has %s", placement.TensorParallel, p.Attention)
	case by != p.Forecast && by.Trained():
		return nil, fmt.Errorf("forecast is %s; the plan contains the tables of %s", by, p.Forecast)
	}
	plan := *p
	plan.Forecast = by
	forecast, err := plan.TokenForecast(t)
	if err != nil {
		return nil, err
	}
	return assignBatch(ctx, p.Placement, forecast, positions)
}

// AssignBatchByRoutes is AssignBatch with the recorded routes of the trace in place of a forecast. It is an upper bound
// for all forecasts under the plan's placement.
func AssignBatchByRoutes(ctx context.Context, t *trace.Trace, p *placement.Placement, positions []int) ([][]int, error) {
	if err := cost.Matches(t, p); err != nil {
		return nil, err
	}
	hosts := make([]affinity.Hosts, len(p.Layers))
	for l := range hosts {
		hosts[l] = p.Local(l)
	}
	return assignBatch(ctx, p, routeScores{t, hosts}, positions)
}

func assignBatch(ctx context.Context, p *placement.Placement, forecast cost.TokenForecast, positions []int) ([][]int, error) {
	ranks := make([][]int, len(p.Layers))
	err := affinity.Parallel(ctx, len(ranks), func(l int) {
		scores := make([]float32, len(positions)*p.Ranks)
		for i, position := range positions {
			forecast.Score(scores[i*p.Ranks:(i+1)*p.Ranks], l, position)
		}
		ranks[l] = dispatch.NewShards(p.Ranks).Assign(scores)
	})
	return ranks, err
}

// routeScores scores a token by the experts that it activates.
type routeScores struct {
	trace *trace.Trace
	hosts []affinity.Hosts
}

func (r routeScores) Score(dst []float32, layer, position int) {
	affinity.RankShares(dst, r.trace.Row(position, layer), r.hosts[layer])
}
