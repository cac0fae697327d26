// Package shuffle chooses the rank of each token in each layer with attention tensor parallelism, by the tables of a plan:
// what an engine does between a layer's attention and its experts.
//
// Invariants:
//   - A choice uses what is known before the layer's gate runs: the token, its look-ahead, its experts in earlier layers.
//   - Ranks are logical: a choice decides what is counted as local, never what is computed.
package shuffle

import (
	"fmt"
	"slices"

	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/dispatch"
	"github.com/semmoe/operator/solver/forecast"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// Shuffle assigns tokens one by one. Prices even the load of the ranks out over time, not within a step. It serves one
// goroutine.
type Shuffle struct {
	// tokens scores by token id; nil where the look-ahead does.
	tokens *affinity.TokenTable
	// width is how many experts of each look-ahead are looked at, topK how many experts a token activates.
	width, topK int
	layers      []layer
	scores      []uint16
	shares      []float32
}

// layer is one MoE layer.
type layer struct {
	// index is the model's, earlier that of the MoE layer before, or -1.
	index, earlier int
	ahead          *forecast.Ranks
	stream         *dispatch.Stream
}

// New returns a shuffle for a plan and the model that it must be for.
func New(p *solver.Plan, m *model.Model, ranks int) (*Shuffle, error) {
	if err := check(p, m, ranks); err != nil {
		return nil, err
	}
	s := &Shuffle{topK: m.TopK, shares: make([]float32, ranks)}
	var ahead *forecast.LookAhead
	switch p.Forecast {
	case solver.Table:
		s.tokens = p.Tokens
	case solver.LookAhead:
		ahead = p.LookAhead
	case solver.RawLookAhead:
		ahead = forecast.RawLookAhead(&trace.Model{Experts: m.Experts, TopK: m.TopK, Layers: moeLayers(m)})
	default:
		return nil, fmt.Errorf("the plan's forecast is %s; this engine applies %s, %s and %s", p.Forecast, solver.Table, solver.LookAhead, solver.RawLookAhead)
	}
	if ahead != nil {
		s.width, s.scores = ahead.Width, make([]uint16, ahead.Width)
	}
	earlier := -1
	for l, placed := range p.Placement.Layers {
		at := layer{index: placed.Layer, earlier: earlier, stream: dispatch.NewStream(ranks)}
		if ahead != nil {
			at.ahead = ahead.Ranks(l, p.Placement.Hosts(l))
		}
		s.layers = append(s.layers, at)
		earlier = placed.Layer
	}
	return s, nil
}

// check compares the shapes of plan, model and engine.
func check(p *solver.Plan, m *model.Model, ranks int) error {
	var layers []int
	for _, l := range p.Placement.Layers {
		layers = append(layers, l.Layer)
	}
	switch {
	case p.Attention != placement.TensorParallel:
		return fmt.Errorf("the plan is for attention %s; tokens are shuffled with attention %s", p.Attention, placement.TensorParallel)
	case p.Placement.Ranks != ranks:
		return fmt.Errorf("the plan is for %d ranks, --ep-size is %d", p.Placement.Ranks, ranks)
	case p.Placement.Experts != m.Experts || p.Vocabulary != m.Vocab || p.HiddenLayers != m.Layers || !slices.Equal(layers, moeLayers(m)):
		return fmt.Errorf("the plan has %d experts in layers %v of %d and a vocabulary of %d; the model has %d experts in layers %v of %d and a vocabulary of %d",
			p.Placement.Experts, layers, p.HiddenLayers, p.Vocabulary, m.Experts, moeLayers(m), m.Layers, m.Vocab)
	case p.LookAhead != nil && p.LookAhead.TopK != m.TopK:
		return fmt.Errorf("the plan's look-ahead is for top-%d, the model activates %d experts", p.LookAhead.TopK, m.TopK)
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

// Width is how many experts of each look-ahead Assign wants; 0 for none.
func (s *Shuffle) Width() int { return s.width }

// Assign chooses the rank of one token in every layer, in the order of the layers: own [layers of the model], dense layers
// are left alone. routes are the token's experts [layers, top-k]; ahead holds its look-ahead from row i on, if Width asks for one.
func (s *Shuffle) Assign(own []int, token int32, routes []uint16, ahead *model.LookAhead, i int) {
	for l, layer := range s.layers {
		if s.tokens != nil {
			s.tokens.ScoreToken(s.shares, l, token)
		} else {
			layer.ahead.Score(s.shares, s.observe(layer, routes, ahead, i*len(own)))
		}
		own[layer.index] = layer.stream.Assign(s.shares)
	}
}

// observe is what is known of the token before the layer's gate runs; row is the token's first among the look-ahead's.
func (s *Shuffle) observe(l layer, routes []uint16, ahead *model.LookAhead, row int) forecast.Observation {
	at := (row + l.index) * s.width
	for k, p := range ahead.Probability[at : at+s.width] {
		s.scores[k] = model.Score(p)
	}
	o := forecast.Observation{Experts: ahead.Experts[at : at+s.width], Scores: s.scores}
	if l.earlier >= 0 {
		o.Earlier = routes[l.earlier*s.topK : (l.earlier+1)*s.topK]
	}
	return o
}
