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

// Input is what a report is made of.
type Input struct {
	// Name is what people call the plan.
	Name string
	// Plan is the plan, Digest its digest. Current is the plan in service, nil for the default placement.
	Plan          *solver.Plan
	Digest        string
	Current       *solver.Plan
	CurrentDigest string
	// Hardware is what times are modelled by; nil is that of the plan.
	Hardware *hardware.Profile
	Trace    *trace.Trace
	// Requests are those of the trace that judge; not used without a trace.
	Requests []int
	// BatchTokens is the size of the batches that are served, over all ranks.
	BatchTokens int
	// Promise is what is known of the plan's worth without a trace; nil for nothing.
	Promise *Promise
	// Progress, where set, is told how much is done.
	Progress func(step string, done, total int)
}

// Check refuses inputs that do not belong together.
func (in *Input) Check() error {
	if in.BatchTokens < 1 {
		return fmt.Errorf("batch tokens is %d; it must be at least 1", in.BatchTokens)
	}
	p := in.Plan.Placement
	if c := in.Current; c != nil {
		if c.Attention != in.Plan.Attention {
			return fmt.Errorf("the plan in service is for attention %s, the plan for %s", c.Attention, in.Plan.Attention)
		}
		to := c.Placement
		if to.Ranks != p.Ranks || to.Experts != p.Experts || !slices.EqualFunc(to.Layers, p.Layers, func(a, b placement.Layer) bool { return a.Layer == b.Layer }) {
			return fmt.Errorf("the plan in service has %d experts in %d MoE layers on %d ranks, the plan %d in %d on %d: they must be alike, layer by layer",
				to.Experts, len(to.Layers), to.Ranks, p.Experts, len(p.Layers), p.Ranks)
		}
	}
	if in.Trace == nil {
		return nil
	}
	if len(in.Requests) == 0 {
		return fmt.Errorf("the trace has no request to judge by")
	}
	return cost.Matches(in.Trace, p)
}

// Data are the figures of a report.
type Data struct {
	Name, Digest string
	// Today is what the plan is compared with: the digest of the plan in service; empty for the default placement.
	Today     string
	Attention placement.Attention
	Algorithm placement.Algorithm
	Forecast  solver.Forecast
	Objective placement.Objective
	// Ranks, Experts, SlotsPerRank and Layers (MoE layers) are the placement's shape.
	Ranks, Experts, SlotsPerRank, Layers int
	ModelDigest                          string
	Change                               Change
	// Front are the placements that the plan was chosen from, Chosen is the name of the plan's; both are empty where the plan records none.
	Front  []solver.FrontPoint
	Chosen string
	// Copies is how the number of copies of experts was chosen from memory; nil where it was given.
	Copies *solver.Copies
	// Schedule is what the plan says about the work inside layers; nil where it says nothing.
	Schedule *schedule.Schedule
	// Score is what the plan is worth; nil without a trace. Promise is what is known of that otherwise; nil for nothing.
	Score   *Score
	Promise *Promise
}

// Promise is a plan's worth as its PlacementPlan states it. Figures that are 0 are unknown.
type Promise struct {
	// Verdict is a sentence.
	Verdict string
	// Against names what the plan was compared with, after a figure of that: "in the default placement". On names the requests.
	Against, On string
	// After, Before and Bound are local activation rates: of the plan, of what it was compared with, and the maximum of any plan.
	After, Before, Bound float64
	// RanksAfter and RanksBefore are numbers of other ranks that hold experts of a token, where tokens are not shuffled.
	RanksAfter, RanksBefore float64
	// LayerAfter and LayerBefore are modelled times of an MoE layer in microseconds, by the hardware profile Hardware.
	LayerAfter, LayerBefore float64
	Hardware                string
}

// figures are the promise's, for the glance.
func (p *Promise) figures() []figure {
	var out []figure
	if p.RanksBefore > 0 {
		out = append(out, figure{"Other ranks of a token", fmt.Sprintf("%.2f", p.RanksAfter), fmt.Sprintf("%.2f %s", p.RanksBefore, p.Against)})
	} else if p.After > 0 {
		rate := figure{"Local activations", percent(p.After), percent(p.Before) + " " + p.Against + p.On}
		if p.Bound > 0 {
			rate.Note += "; no plan exceeds " + percent(p.Bound)
		}
		out = append(out, rate)
	}
	if p.LayerBefore > 0 {
		out = append(out, figure{"Modelled time of a layer", points(100 * (p.LayerAfter/p.LayerBefore - 1)),
			fmt.Sprintf("%s, %s %s, by hardware profile %s", microseconds(p.LayerAfter), microseconds(p.LayerBefore), p.Against, p.Hardware)})
	}
	return out
}

// DataParallel reports whether requests have a rank, and not tokens.
func (d *Data) DataParallel() bool { return d.Attention == placement.DataParallel }

// Change is what has to change for the plan to serve.
type Change struct {
	// Moves are the experts that ranks are to hold and do not hold today, by layer; Total is their sum, Slots the number of slots over
	// all layers, and Rank the most that one rank has to take in.
	Moves                     []LayerMoves
	Total, Slots, BusiestRank int
	// ExpertWeights is the number of weights of an expert; 0 where it is not known.
	ExpertWeights int64
	// OtherRanks is set where today's default placement has fewer ranks, because the plan's do not divide the experts: then Moves is empty.
	OtherRanks bool
}

// LayerMoves are the moves in one of the model's layers.
type LayerMoves struct{ Layer, Moves int }

// Build computes the figures.
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

// today is the placement that serves without the plan.
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
