// SPDX-License-Identifier: Apache-2.0

package shuffle

import (
	"slices"

	"github.com/semmoe/operator/internal/refengine/locality"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/internal/refengine/scheduler"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Shuffle assigns the tokens of steps to ranks. It is not safe for concurrent use.
type Shuffle struct {
	plan *solver.Plan
	// shards assign the tokens of each MoE layer.
	shards []*dispatch.Shards
	// width is the number of experts of each look-ahead that the forecast reads; 0 for none.
	width int
	// step contains the tokens of the current step in the form that forecasts read.
	step   trace.Trace
	scores []float32
}

// New returns a shuffle for a plan, a model, and the experts of the engine's ranks. It returns a *Refusal if the plan
// does not fit.
func New(p *solver.Plan, m *model.Model, experts *locality.Map, ranks int) (*Shuffle, error) {
	if err := check(p, m, experts, ranks); err != nil {
		return nil, err
	}
	s := &Shuffle{
		plan: p,
		step: trace.Trace{Model: trace.Model{Experts: m.Experts, TopK: m.TopK, Vocabulary: m.Vocab, Layers: moeLayers(m), HiddenLayers: m.Layers}},
	}
	for range p.Placement.Layers {
		s.shards = append(s.shards, dispatch.NewWeightedShards(ranks, p.RankCapacity))
	}
	switch p.Forecast {
	case solver.Table, solver.Transition, solver.LookBack:
	case solver.LookAhead:
		s.width = p.LookAhead.Width
	case solver.RawLookAhead:
		s.width = forecast.RawLookAhead(&s.step.Model).Width
	default:
		return nil, refuse(ReasonUnsupportedForecast, "the plan has the forecast %s; this engine supports %s, %s, %s, %s and %s",
			p.Forecast, solver.Table, solver.Transition, solver.LookBack, solver.LookAhead, solver.RawLookAhead)
	}
	s.reset()
	if _, err := p.TokenForecast(&s.step); err != nil {
		return nil, refuse(ReasonDamaged, "%v", err)
	}
	return s, nil
}

// check compares the plan with the model and the engine.
func check(p *solver.Plan, m *model.Model, experts *locality.Map, ranks int) error {
	var layers []int
	for _, l := range p.Placement.Layers {
		layers = append(layers, l.Layer)
	}
	switch {
	case p.Attention != placement.TensorParallel:
		return refuse(ReasonOtherParallelism, "the plan is for attention %s; token shuffling needs attention %s", p.Attention, placement.TensorParallel)
	case p.Placement.Ranks != ranks:
		return refuse(ReasonOtherParallelism, "the plan is for %d ranks, --ep-size is %d", p.Placement.Ranks, ranks)
	case p.Placement.Experts != m.Experts || p.Vocabulary != m.Vocab || p.HiddenLayers != m.Layers || !slices.Equal(layers, moeLayers(m)):
		return refuse(ReasonOtherModel, "the plan has %d experts in layers %v of %d and a vocabulary of %d; the model has %d experts in layers %v of %d and a vocabulary of %d",
			p.Placement.Experts, layers, p.HiddenLayers, p.Vocabulary, m.Experts, moeLayers(m), m.Layers, m.Vocab)
	case p.LookAhead != nil && p.LookAhead.TopK != m.TopK:
		return refuse(ReasonOtherModel, "the plan's look-ahead is for top-%d, the model activates %d experts", p.LookAhead.TopK, m.TopK)
	}
	for i, layer := range layers {
		for expert, hosts := range p.Placement.Hosts(i) {
			for rank := range ranks {
				if want, is := slices.Contains(hosts, rank), experts.Holds(layer, rank, expert); want != is {
					return refuse(ReasonOtherPlacement, "layer %d: the engine has expert %d on rank %d: %t; placement.json: %t. Start the engine with the expert map of the plan", layer, expert, rank, is, want)
				}
			}
		}
	}
	return nil
}

func moeLayers(m *model.Model) []int {
	var layers []int
	for l, moe := range m.MoE {
		if moe {
			layers = append(layers, l)
		}
	}
	return layers
}

// reset empties the step.
func (s *Shuffle) reset() {
	s.step.Tokens, s.step.Experts = s.step.Tokens[:0], s.step.Experts[:0]
	switch {
	case s.width == 0:
	case s.step.LookAhead == nil:
		s.step.LookAhead = &trace.LookAhead{Width: s.width}
	default:
		s.step.LookAhead.Experts, s.step.LookAhead.Scores = s.step.LookAhead.Experts[:0], s.step.LookAhead.Scores[:0]
	}
}

// Visit receives the rank of a token in a layer of the model, and the experts that the layer has chosen for it.
type Visit func(layer, rank int, experts []uint16)

// Assign selects the rank of each token of a step in each MoE layer. It returns false, and visits nothing, if the step
// lacks the look-ahead that the forecast reads.
func (s *Shuffle) Assign(step []scheduler.Computed, visit Visit) bool {
	s.reset()
	for _, computed := range step {
		if s.width > 0 && (computed.LookAhead == nil || computed.LookAhead.Width != s.width) {
			return false
		}
		s.add(computed)
	}
	forecast, err := s.plan.TokenForecast(&s.step)
	if err != nil { // New has bound the same forecast
		return false
	}
	ranks, tokens := s.plan.Placement.Ranks, len(s.step.Tokens)
	rows := (tokens + ranks - 1) / ranks * ranks // padding has no preference
	s.scores = slices.Grow(s.scores[:0], rows*ranks)[:rows*ranks]
	clear(s.scores[tokens*ranks:])
	for l, layer := range s.step.Model.Layers {
		for position := range tokens {
			forecast.Score(s.scores[position*ranks:][:ranks], l, position)
		}
		for position, rank := range s.shards[l].Assign(s.scores)[:tokens] {
			visit(layer, rank, s.step.Row(position, l))
		}
	}
	return true
}

// add appends the tokens of a request to the step.
func (s *Shuffle) add(c scheduler.Computed) {
	t, perToken := &s.step, s.plan.HiddenLayers
	t.Tokens = append(t.Tokens, c.Tokens...)
	for i := range c.Tokens {
		for _, layer := range t.Model.Layers {
			row := i*perToken + layer
			t.Experts = append(t.Experts, c.Routes[row*t.Model.TopK:][:t.Model.TopK]...)
			if s.width == 0 {
				continue
			}
			t.LookAhead.Experts = append(t.LookAhead.Experts, c.LookAhead.Experts[row*s.width:][:s.width]...)
			for _, p := range c.LookAhead.Probability[row*s.width:][:s.width] {
				t.LookAhead.Scores = append(t.LookAhead.Scores, model.Score(p))
			}
		}
	}
}
