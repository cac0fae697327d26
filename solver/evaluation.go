// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"context"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// DefaultEvaluation returns the default options for scoring plans. The caller sets Requests and Seed.
func DefaultEvaluation() cost.Options {
	return cost.Options{
		BatchTokens: 4096, Shards: cost.EqualShards, Policy: dispatch.Price, Cap: 1.15, Orders: 5, RanksPerNode: 8, Machines: cost.NodeOf(hardware.DefaultProfile()),
		Weights: dispatch.DefaultWeights, Workload: trace.Recorded,
	}
}

// Evaluate scores a plan on requests of a trace.
func Evaluate(ctx context.Context, t *trace.Trace, plan *Plan, o cost.Options) (cost.Report, error) {
	if err := plan.matches(t); err != nil {
		return cost.Report{}, err
	}
	o.RankCapacity = plan.RankCapacity
	if plan.Attention == placement.DataParallel {
		return cost.DataParallel(ctx, t, plan.Placement, plan.Ranks.Forecast(t), o)
	}
	tokens, err := plan.tokenForecast(t)
	if err != nil {
		return cost.Report{}, err
	}
	return cost.TensorParallel(ctx, t, plan.Placement, tokens, o)
}
