package solver

import (
	"context"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/trace"
)

// LayerTimes are the modelled times of a MoE layer: under a plan, and without one, which is contiguous experts with tokens or requests in
// turn.
type LayerTimes struct{ Planned, Unplanned cost.LayerTime }

// CompareTimes models a layer on the requests that judge a solution, in batches of DefaultEvaluation.
func CompareTimes(ctx context.Context, t *trace.Trace, s *Solution, o Options) (*LayerTimes, error) {
	e := DefaultEvaluation()
	e.Requests, e.Seed, e.RanksPerNode, e.Machines = s.HeldOut, o.Seed, o.ranksPerNode(), cost.NodeOf(o.profile())
	none, err := cost.Dealt(ctx, t, o.Attention, o.Ranks, e)
	if err != nil {
		return nil, err
	}
	machines := cost.MachinesOf(o.profile(), o.Ranks, o.ranksPerNode())
	time := func(slots int, r *cost.Report) cost.LayerTime {
		return cost.LayerOf(&t.Model, machines, o.Ranks, slots).TimeOf(e.BatchTokens, r)
	}
	return &LayerTimes{time(s.Plan.Placement.SlotsPerRank, &s.Report), time(t.Model.Experts/o.Ranks, &none)}, nil
}
