// SPDX-License-Identifier: Apache-2.0

// Package shuffle selects the rank of each token in each layer with attention tensor parallelism, using the tables of a
// plan. An engine does this between the attention of a layer and its experts.
//
// Invariants:
//   - The selection only uses information that is available before the gate of the layer runs: the token, its
//     look-ahead, and its experts in earlier layers.
//   - Ranks are logical: the selection determines which activations count as local, and does not change outputs.
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

// Shuffle assigns tokens one by one. Prices balance the load of the ranks over time, not within a step. It is not safe
// for concurrent use.
type Shuffle struct {
	// tokens scores ranks by token ID. It is nil if the look-ahead scores them.
	tokens *affinity.TokenTable
	// width is the number of experts of each look-ahead that are used. topK is the number of experts that a token
	// activates.
	width, topK int
	layers      []layer
	scores      []uint16
	shares      []float32
}

// layer is one MoE layer.
type layer struct {
	// index is the layer index in the model. earlier is the index of the previous MoE layer, or -1.
	index, earlier int
	ahead          *forecast.Ranks
	stream         *dispatch.Stream
}

// New returns a shuffle for a plan and a model. It returns an error if the plan is for a different model.
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
		return nil, fmt.Errorf("the plan has the forecast %s; this engine supports %s, %s and %s", p.Forecast, solver.Table, solver.LookAhead, solver.RawLookAhead)
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
		return fmt.Errorf("the plan is for attention %s; token shuffling needs attention %s", p.Attention, placement.TensorParallel)
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

// Width returns the number of experts of each look-ahead that Assign needs; 0 for none.
func (s *Shuffle) Width() int { return s.width }

// Assign selects the rank of one token in every layer and writes it to own [layers of the model]. Entries of dense
// layers are not changed. routes are the experts of the token [layers, top-k]. ahead contains the token's look-ahead
// from row i, if Width is not 0.
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

// observe returns the information on the token before the gate of the layer runs. row is the first row of the token in
// the look-ahead.
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
