// SPDX-License-Identifier: Apache-2.0

package solver

import (
	"cmp"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/pipeline"
	"github.com/semmoe/operator/solver/schedule"
	"github.com/semmoe/operator/solver/trace"
)

// ScheduleLayers computes the schedule inside the MoE layers of a plan for a local activation rate. The number of ranks
// per node is the plan's, else ranksPerNode, where 0 means that of DefaultEvaluation. It returns nil if the model's
// configuration lacks sizes, and for a single rank.
func ScheduleLayers(m *trace.Model, p *Plan, lar float64, machines *hardware.Profile, ranksPerNode int) (*schedule.Schedule, error) {
	shape := shapeOf(m)
	if shape == nil {
		return nil, nil
	}
	machines = cost.Spread(machines, p.Placement.Ranks, cmp.Or(p.RanksPerNode, ranksPerNode, DefaultEvaluation().RanksPerNode))
	return schedule.Of(shape, machines, schedule.Inputs{Ranks: p.Placement.Ranks, SlotsPerRank: p.Placement.SlotsPerRank, LAR: lar})
}

// shapeOf returns the shape of a model, or nil if its configuration does not contain it.
func shapeOf(m *trace.Model) *pipeline.Shape {
	s, err := pipeline.ShapeOf(m)
	if err != nil || s.Check() != nil {
		return nil
	}
	return &s
}
