// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"context"
	"encoding/hex"
	"slices"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Score holds the figures of a plan on the requests that it is evaluated on.
type Score struct {
	// Requests and Tokens are the numbers of evaluated requests and tokens. Origin describes whether the plan was
	// solved from them.
	Requests, Tokens int
	Origin           string
	TraceDigest      string
	// Before and After are the local activation rates today and with the plan. Oracle and Bound are as in cost.Report.
	Before, After, Oracle, Bound float64
	// Documents is true if the errors include the spread over documents. It is false if there are too few documents.
	Documents bool
	// GainError is the standard error of After - Before over documents. It is 0 if there are too few documents, or if
	// the gain of all documents is equal.
	GainError float64
	// ImbalanceBefore and ImbalanceAfter are the expert load of the busiest rank over the mean load, within batches or
	// windows.
	ImbalanceBefore, ImbalanceAfter float64
	Layers                          []Layer
	// Ranks holds means over layers.
	Ranks []Rank
	// LoadBefore and LoadAfter are the activations that each rank computes, relative to a fair share [layers × ranks].
	// LoadBefore may have fewer ranks.
	LoadBefore, LoadAfter [][]float64
	// Kinds are the kinds of text that occur. It is empty if the trace names none.
	Kinds []Kind
	// KindLayer is the layer that Kind.Ranks refers to. It is 0 with attention DP, where a request has one rank for all
	// layers.
	KindLayer int
	// Pictures holds the heat maps of the layers with the highest, the median and the lowest gain.
	Pictures []Picture
	// Times is nil if the trace lacks the sizes of the model.
	Times *Times
}

// Layer is one MoE layer.
type Layer struct {
	// Layer is the model's layer index.
	Layer int
	// Before and After are local activation rates; Oracle and Bound are as in cost.LayerDetail.
	Before, After, Oracle, Bound float64
	// CoactivationBefore and CoactivationAfter are how many times as often as by chance experts that share a rank are
	// activated together.
	CoactivationBefore, CoactivationAfter float64
}

// Gain returns the increase of the layer's local activation rate.
func (l *Layer) Gain() float64 { return l.After - l.Before }

// Rank holds the loads of one rank, relative to an equal share. The loads before are 0 for a rank that does not exist
// today.
type Rank struct {
	TokensBefore, TokensAfter, ServedBefore, ServedAfter float64
}

// Kind is one kind of text.
type Kind struct {
	Name string
	// Activations is the kind's share of all activations. Before and After are its local activation rates.
	Activations, Before, After float64
	// Ranks are the shares of the kind's tokens on each rank, with the plan.
	Ranks []float64
}

// mainRank returns the rank with the largest share of the kind's tokens.
func (k *Kind) mainRank() int { return slices.Index(k.Ranks, slices.Max(k.Ranks)) }

// evaluation returns the options of the evaluation.
func (in *Input) evaluation() cost.Options {
	o := solver.DefaultEvaluation()
	o.Requests, o.Seed, o.BatchTokens = in.Requests, in.Plan.Seed, in.BatchTokens
	o.RanksPerNode = cmp.Or(in.Plan.RanksPerNode, o.RanksPerNode)
	return o
}

// evaluate evaluates the placement of today and the plan.
func (in *Input) evaluate(ctx context.Context, o cost.Options) (before, after cost.Report, err error) {
	if after, err = solver.Evaluate(ctx, in.Trace, in.Plan, o); err != nil {
		return before, after, err
	}
	o.WithoutBounds = true
	if in.Current != nil {
		before, err = solver.Evaluate(ctx, in.Trace, in.Current, o)
	} else {
		before, err = cost.EvaluateBaseline(ctx, in.Trace, in.Plan.Attention, in.Plan.Placement.Ranks, o)
	}
	return before, after, err
}

func (in *Input) score(ctx context.Context, today *placement.Placement) (*Score, error) {
	o := in.evaluation()
	o.Detail = true
	before, after, err := in.evaluate(ctx, o)
	if err != nil {
		return nil, err
	}
	s := &Score{
		Requests: len(in.Requests), TraceDigest: hex.EncodeToString(in.Trace.Digest[:]),
		Before: before.LAR, After: after.LAR, Oracle: after.OracleLAR, Bound: after.UpperBound,
		ImbalanceBefore: before.ExpertWindowImbalance, ImbalanceAfter: after.ExpertWindowImbalance,
	}
	if s.Origin, err = in.origin(); err != nil {
		return nil, err
	}
	for _, request := range in.Requests {
		s.Tokens += in.Trace.Length(request)
	}
	for l, layer := range after.PerLayer {
		d := after.Detail.Layers[l]
		s.Layers = append(s.Layers, Layer{Layer: layer.Layer, Before: before.PerLayer[l].LAR, After: layer.LAR, Oracle: d.OracleLAR, Bound: d.UpperBound})
		s.LoadBefore = append(s.LoadBefore, before.Detail.Layers[l].Served)
		s.LoadAfter = append(s.LoadAfter, d.Served)
	}
	s.Ranks = ranksOf(before.Detail, after.Detail)
	s.addKinds(in, before.Detail, after.Detail)
	if err := s.addPictures(ctx, in, today); err != nil {
		return nil, err
	}
	return s, s.addTimes(ctx, in)
}

// origin describes whether the plan was solved from the evaluated requests.
func (in *Input) origin() (string, error) {
	if in.Trace.Digest != in.Plan.TraceDigest {
		return "of a different trace than the one that the plan was solved from", nil
	}
	training, _, err := trace.Split(in.Trace, in.Plan.TrainPercent, in.Plan.Seed)
	if err != nil {
		return "", err
	}
	for _, request := range in.Requests {
		if _, found := slices.BinarySearch(training, request); found {
			return "that include training requests of the plan, so the figures are too optimistic", nil
		}
	}
	return "that the plan was not solved from", nil
}

func ranksOf(before, after *cost.Detail) []Rank {
	ranks := make([]Rank, len(after.Layers[0].Tokens))
	weight := 1 / float64(len(after.Layers))
	for l := range after.Layers {
		for rank := range before.Layers[l].Tokens {
			ranks[rank].TokensBefore += weight * before.Layers[l].Tokens[rank]
			ranks[rank].ServedBefore += weight * before.Layers[l].Served[rank]
		}
		for rank := range after.Layers[l].Tokens {
			ranks[rank].TokensAfter += weight * after.Layers[l].Tokens[rank]
			ranks[rank].ServedAfter += weight * after.Layers[l].Served[rank]
		}
	}
	return ranks
}

// addKinds adds the figures by kind of text. It does nothing if the trace names no kinds. With attention TP the ranks
// of a token differ by layer, so the ranks of the layer with the highest gain are shown.
func (s *Score) addKinds(in *Input, before, after *cost.Detail) {
	if in.Trace.Domains == nil {
		return
	}
	shown := 0
	if in.Plan.Attention == placement.TensorParallel {
		shown = s.byGain()[0]
		s.KindLayer = s.Layers[shown].Layer
	}
	weight := 1 / float64(len(after.Layers))
	for i, name := range in.Trace.Model.Domains {
		k := Kind{Name: name, Activations: after.Layers[0].Kinds[i].Activations, Ranks: after.Layers[shown].Kinds[i].Ranks}
		for l := range after.Layers {
			k.Before += weight * before.Layers[l].Kinds[i].LAR
			k.After += weight * after.Layers[l].Kinds[i].LAR
		}
		if k.Activations > 0 {
			s.Kinds = append(s.Kinds, k)
		}
	}
	// Kinds with the same main rank are adjacent.
	slices.SortStableFunc(s.Kinds, func(a, b Kind) int { return cmp.Compare(a.mainRank(), b.mainRank()) })
}

// byGain returns the indices of layers in descending order of gain.
func (s *Score) byGain() []int {
	order := make([]int, len(s.Layers))
	for l := range order {
		order[l] = l
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(s.Layers[b].Gain(), s.Layers[a].Gain()) })
	return order
}
