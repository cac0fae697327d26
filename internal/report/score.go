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

// Score is what a plan is worth on the requests that judge it.
type Score struct {
	// Requests and Tokens are how many judge, Origin says in words what they are to the plan.
	Requests, Tokens int
	Origin           string
	TraceDigest      string
	// Before and After are the rates today and with the plan; Oracle and Bound are as in cost.Report.
	Before, After, Oracle, Bound float64
	// Documents is set where the spread over documents is part of the errors; else there are too few.
	Documents bool
	// GainError is the standard error of After less Before over documents; 0 where these are too few to tell, or the gain is the same of all.
	GainError float64
	// ImbalanceBefore and ImbalanceAfter are the load of the experts of the busiest rank over the mean, as batches or windows see it.
	ImbalanceBefore, ImbalanceAfter float64
	Layers                          []Layer
	// Ranks are means over layers.
	Ranks []Rank
	// LoadBefore and LoadAfter are what each rank's experts compute, layer by layer, in fair shares [layers × ranks]; before there may be
	// fewer ranks.
	LoadBefore, LoadAfter [][]float64
	// Kinds are the kinds of text that occur; empty where the trace names none.
	Kinds []Kind
	// KindLayer is the layer that the ranks of kinds are about; 0 with attention DP, where they are those of all layers.
	KindLayer int
	// Pictures show some layers: those of the highest, the median and the lowest gain.
	Pictures []Picture
	// Times are nil where the trace does not tell the sizes of the model.
	Times *Times
}

// Layer is one MoE layer.
type Layer struct {
	// Layer is the model's layer index.
	Layer int
	// Before and After are local activation rates; Oracle and Bound are as in cost.LayerDetail.
	Before, After, Oracle, Bound float64
	// TogetherBefore and TogetherAfter say how many times as often as chance experts that share a rank fire together.
	TogetherBefore, TogetherAfter float64
}

// Gain is what the plan adds to the layer's local activation rate.
func (l *Layer) Gain() float64 { return l.After - l.Before }

// Rank are the loads of one rank, in equal shares; those before are 0 for ranks that there are none of today.
type Rank struct {
	TokensBefore, TokensAfter, ServedBefore, ServedAfter float64
}

// Kind is one kind of text.
type Kind struct {
	Name string
	// Activations is its share of all activations, Before and After are its local activation rates.
	Activations, Before, After float64
	// Ranks are the shares of its tokens on each rank, with the plan.
	Ranks []float64
}

// mostly is the rank that has most of the kind's tokens.
func (k *Kind) mostly() int { return slices.Index(k.Ranks, slices.Max(k.Ranks)) }

// evaluation is how the plan is scored.
func (in *Input) evaluation() cost.Options {
	o := solver.DefaultEvaluation()
	o.Requests, o.Seed, o.BatchTokens = in.Requests, in.Plan.Seed, in.BatchTokens
	o.RanksPerNode = cmp.Or(in.Plan.RanksPerNode, o.RanksPerNode)
	return o
}

// evaluate scores what serves today, and the plan.
func (in *Input) evaluate(ctx context.Context, o cost.Options) (before, after cost.Report, err error) {
	if after, err = solver.Evaluate(ctx, in.Trace, in.Plan, o); err != nil {
		return before, after, err
	}
	o.WithoutBounds = true
	if in.Current != nil {
		before, err = solver.Evaluate(ctx, in.Trace, in.Current, o)
	} else {
		before, err = cost.Dealt(ctx, in.Trace, in.Plan.Attention, in.Plan.Placement.Ranks, o)
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

// origin says whether the plan has learnt from the requests that judge it.
func (in *Input) origin() (string, error) {
	if in.Trace.Digest != in.Plan.TraceDigest {
		return "of another trace than the plan was solved from", nil
	}
	learnt, _, err := trace.Split(in.Trace, in.Plan.TrainPercent, in.Plan.Seed)
	if err != nil {
		return "", err
	}
	for _, request := range in.Requests {
		if _, found := slices.BinarySearch(learnt, request); found {
			return "some of which the plan was solved from, so that the figures are too good", nil
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

// addKinds needs the names of kinds: numbers would tell nobody anything. With attention TP ranks differ from layer to layer: those of the
// layer of the highest gain are taken.
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
	// Kinds that share a rank stand together.
	slices.SortStableFunc(s.Kinds, func(a, b Kind) int { return cmp.Compare(a.mostly(), b.mostly()) })
}

// byGain are the layers' places, that of the highest gain first.
func (s *Score) byGain() []int {
	order := make([]int, len(s.Layers))
	for l := range order {
		order[l] = l
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(s.Layers[b].Gain(), s.Layers[a].Gain()) })
	return order
}
