// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
	"github.com/semmoe/operator/solver/trace"
)

// Input holds the inputs of a report.
type Input struct {
	// Name is the display name of the plan.
	Name string
	// Plan is the plan and Digest its digest. Current is the plan in service, or nil for the default placement.
	Plan          *solver.Plan
	Digest        string
	Current       *solver.Plan
	CurrentDigest string
	// Hardware is the hardware profile for modelled times. Nil selects the hardware profile of the plan.
	Hardware *hardware.Profile
	Trace    *trace.Trace
	// Requests are the indices of the requests of the trace that the plan is evaluated on. They are unused without a
	// trace.
	Requests []int
	// BatchTokens is the number of tokens per batch in service, over all ranks.
	BatchTokens int
	// Promise holds the figures of the plan's status, for a report without a trace. It may be nil.
	Promise *Promise
	// Progress, if set, is called with the progress of each step.
	Progress func(step string, done, total int)
}

// Check returns an error if the inputs are inconsistent.
func (in *Input) Check() error {
	if in.BatchTokens < 1 {
		return fmt.Errorf("batch tokens: %d is invalid: must be at least 1", in.BatchTokens)
	}
	p := in.Plan.Placement
	if c := in.Current; c != nil {
		if c.Attention != in.Plan.Attention {
			return fmt.Errorf("the plan in service has attention %s, and the plan %s: they must be equal", c.Attention, in.Plan.Attention)
		}
		to := c.Placement
		if to.Ranks != p.Ranks || to.Experts != p.Experts || !slices.EqualFunc(to.Layers, p.Layers, func(a, b placement.Layer) bool { return a.Layer == b.Layer }) {
			return fmt.Errorf("the plan in service has %d experts in %d MoE layers on %d ranks, and the plan %d in %d on %d: they must be equal, layer by layer",
				to.Experts, len(to.Layers), to.Ranks, p.Experts, len(p.Layers), p.Ranks)
		}
	}
	if in.Trace == nil {
		return nil
	}
	if len(in.Requests) == 0 {
		return fmt.Errorf("the trace has no requests to evaluate the plan on")
	}
	return cost.Matches(in.Trace, p)
}

// Data holds the figures of a report.
type Data struct {
	Name, Digest string
	// Today is the digest of the plan in service, which the plan is compared with. It is empty for the default
	// placement.
	Today     string
	Attention placement.Attention
	Algorithm placement.Algorithm
	Forecast  solver.Forecast
	Objective placement.Objective
	// Ranks, Experts, SlotsPerRank and Layers (MoE layers) are the shape of the placement.
	Ranks, Experts, SlotsPerRank, Layers int
	ModelDigest                          string
	Change                               Change
	// Front holds the candidate placements and Chosen the name of the selected one. Both are empty if the plan does not
	// record them.
	Front  []solver.FrontPoint
	Chosen string
	// Copies records how the number of copies of experts was selected for a memory budget. It is nil if the number was
	// given.
	Copies *solver.Copies
	// Schedule is the plan's schedule inside layers, or nil.
	Schedule *schedule.Schedule
	// Score holds the figures of the evaluation on the trace; nil without a trace. Promise holds the figures of the
	// plan's status, or nil.
	Score   *Score
	Promise *Promise
}

// Promise holds the expected gain of a plan from the status of its PlacementPlan. A figure of 0 is unknown.
type Promise struct {
	// Verdict is a sentence.
	Verdict string
	// Against names the baseline, and follows a figure of the baseline: "in the default placement". On names the
	// requests.
	Against, On string
	// After, Before and Bound are the local activation rates of the plan and of the baseline, and the upper bound of
	// all plans.
	After, Before, Bound float64
	// RanksAfter and RanksBefore are the mean numbers of remote ranks per token, for plans without token shuffling.
	RanksAfter, RanksBefore float64
	// LayerAfter and LayerBefore are modelled times of an MoE layer in microseconds, with the hardware profile
	// Hardware.
	LayerAfter, LayerBefore float64
	Hardware                string
}

// figures returns the key figures of the promise.
func (p *Promise) figures() []figure {
	var out []figure
	if p.RanksBefore > 0 {
		out = append(out, figure{"Remote ranks per token", fmt.Sprintf("%.2f", p.RanksAfter), fmt.Sprintf("%.2f %s", p.RanksBefore, p.Against)})
	} else if p.After > 0 {
		rate := figure{"Local activations", percent(p.After), percent(p.Before) + " " + p.Against + p.On}
		if p.Bound > 0 {
			rate.Note += "; the upper bound of all plans is " + percent(p.Bound)
		}
		out = append(out, rate)
	}
	if p.LayerBefore > 0 {
		out = append(out, figure{"Modelled time of a layer", points(100 * (p.LayerAfter/p.LayerBefore - 1)),
			fmt.Sprintf("%s, versus %s %s, hardware profile %s", microseconds(p.LayerAfter), microseconds(p.LayerBefore), p.Against, p.Hardware)})
	}
	return out
}

// DataParallel reports whether each request has a rank. Otherwise each token has a rank in each layer.
func (d *Data) DataParallel() bool { return d.Attention == placement.DataParallel }

// Change holds the changes of the placement that the plan makes.
type Change struct {
	// Moves are the numbers of experts that ranks must load, by layer. Total is their sum, Slots the number of slots
	// over all layers, and BusiestRank the maximum number of experts that one rank must load.
	Moves                     []LayerMoves
	Total, Slots, BusiestRank int
	// ExpertWeights is the number of weights of an expert; 0 if unknown.
	ExpertWeights int64
	// OtherRanks is true if today's default placement has fewer ranks than the plan, because the number of ranks does
	// not divide the number of experts. Then Moves is empty.
	OtherRanks bool
}

// LayerMoves is the number of experts that move in one layer of the model.
type LayerMoves struct{ Layer, Moves int }

// Build computes the figures of a report.
func Build(ctx context.Context, in Input) (*Data, error) {
	if err := in.Check(); err != nil {
		return nil, err
	}
	p := in.Plan.Placement
	d := &Data{
		Name: in.Name, Digest: in.Digest, Attention: in.Plan.Attention, Algorithm: in.Plan.Algorithm, Forecast: in.Plan.Forecast,
		Objective: cmp.Or(in.Plan.Objective, placement.Activation), Ranks: p.Ranks, Experts: p.Experts, SlotsPerRank: p.SlotsPerRank, Layers: len(p.Layers),
		ModelDigest: in.Plan.ModelDigest, Schedule: in.Plan.Schedule, Front: in.Plan.Front, Chosen: in.Plan.Chosen, Copies: in.Plan.Copies, Promise: in.Promise,
	}
	if in.Current != nil {
		d.Today = in.CurrentDigest
	}
	today := in.today()
	d.Change = changeOf(today, p)
	if in.Trace == nil {
		return d, nil
	}
	d.Change.ExpertWeights = cost.ExpertWeights(&in.Trace.Model)
	var err error
	d.Score, err = in.score(ctx, today)
	return d, err
}

// today returns the placement of the plan in service, or the default placement.
func (in *Input) today() *placement.Placement {
	if in.Current != nil {
		return in.Current.Placement
	}
	p := in.Plan.Placement
	layers := make([]int, len(p.Layers))
	for l, layer := range p.Layers {
		layers[l] = layer.Layer
	}
	return cost.DefaultPlacement(layers, p.Experts, p.Ranks)
}

func changeOf(from, to *placement.Placement) Change {
	c := Change{Slots: len(to.Layers) * to.Ranks * to.SlotsPerRank, OtherRanks: from.Ranks != to.Ranks}
	if c.OtherRanks {
		return c
	}
	byRank := make([]int, to.Ranks)
	for l, layer := range to.Layers {
		hosts, moves := from.Hosts(l), 0
		for slot, expert := range layer.Slots {
			if rank := slot / to.SlotsPerRank; !slices.Contains(hosts[expert], rank) {
				moves++
				byRank[rank]++
			}
		}
		c.Moves = append(c.Moves, LayerMoves{layer.Layer, moves})
		c.Total += moves
	}
	c.BusiestRank = slices.Max(byRank)
	return c
}
