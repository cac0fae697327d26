// SPDX-License-Identifier: Apache-2.0

// Package lookahead records a look-ahead for the tokens of a routing trace: the result of each gate if it is evaluated
// before the attention of its layer.
//
// Invariants:
//   - The routes of the trace are not changed. Only the look-ahead is added.
//   - A trace of a different model is rejected, by its shape or by its routes.
package lookahead

import (
	"context"
	"slices"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/refengine/model"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// chunkTokens is the number of tokens that are computed together.
	chunkTokens = 512
	// minAgreement is the minimum share of the trace's activations that the model must reproduce. Different arithmetic
	// changes a few percent, a different model nearly all.
	minAgreement = 0.8
	// agreementTokens is the number of tokens after which the agreement is first checked, so that a wrong model does
	// not process a whole trace.
	agreementTokens = 2048
)

// Options configure a recording.
type Options struct {
	// Width is the number of experts to record per token and layer.
	Width int
	// Workers is the number of goroutines. The result does not depend on it.
	Workers int
	// Progress, if set, is called after each request.
	Progress func(done, total int)
}

// Record returns the look-ahead of a trace, and the share of the trace's activations that the model reproduces.
func Record(ctx context.Context, m *model.Model, t *trace.Trace, o Options) (a *trace.LookAhead, agreement float64, err error) {
	if err := check(m, t, o.Width); err != nil {
		return nil, 0, err
	}
	r := &recorder{
		model: m, trace: t, runner: m.NewRunner(o.Workers), chunk: m.NewLookAhead(o.Width, chunkTokens), out: &trace.LookAhead{Width: o.Width},
	}
	for request := range t.Requests() {
		if err := ctx.Err(); err != nil {
			return nil, 0, err
		}
		if err := r.record(t.Request(request)); err != nil {
			return nil, 0, err
		}
		if r.tokens >= agreementTokens && r.agreement() < minAgreement {
			break
		}
		if o.Progress != nil {
			o.Progress(request+1, t.Requests())
		}
	}
	if agreement = r.agreement(); agreement < minAgreement {
		return nil, agreement, checkpoint.Invalidf("the trace is not of this model: of the activations of its first %d tokens the model repeats %.1f%%; at least %.0f%% are expected",
			r.tokens, 100*agreement, 100*minAgreement)
	}
	return r.out, agreement, nil
}

// check compares the shapes.
func check(m *model.Model, t *trace.Trace, width int) error {
	var layers []int
	for l, moe := range m.MoE {
		if moe {
			layers = append(layers, l)
		}
	}
	switch {
	case width < 1 || width > min(m.Experts, trace.MaxLookAhead):
		return checkpoint.Invalidf("%d experts of each look-ahead; allowed is 1 to %d", width, min(m.Experts, trace.MaxLookAhead))
	case t.Model.Experts != m.Experts || t.Model.TopK != m.TopK || t.Model.Vocabulary != m.Vocab || !slices.Equal(t.Model.Layers, layers):
		return checkpoint.Invalidf("the trace is not of this model: it has top-%d of %d experts in layers %v and a vocabulary of %d, the model top-%d of %d in layers %v and %d",
			t.Model.TopK, t.Model.Experts, t.Model.Layers, t.Model.Vocabulary, m.TopK, m.Experts, layers, m.Vocab)
	}
	for r := range t.Requests() {
		if n := t.Length(r); n > m.MaxPositions {
			return checkpoint.Invalidf("request %d of the trace has %d tokens; the model's context length is %d", r, n, m.MaxPositions)
		}
	}
	return nil
}

// recorder runs the requests of a trace one after the other.
type recorder struct {
	model  *model.Model
	trace  *trace.Trace
	runner *model.Runner
	routes []uint16
	chunk  *model.LookAhead
	out    *trace.LookAhead
	// tokens is the number of computed tokens. same is the number of their activations that equal those of the trace.
	tokens, same int
}

func (r *recorder) record(request []int32) error {
	cache := r.model.NewCache(len(request))
	for tokens := range slices.Chunk(request, chunkTokens) {
		r.routes = slices.Grow(r.routes[:0], len(tokens)*r.model.Layers*r.model.TopK)[:len(tokens)*r.model.Layers*r.model.TopK]
		r.chunk.Resize(r.model, len(tokens))
		if err := r.runner.Step([]model.Chunk{{Cache: cache, Tokens: tokens, Routes: r.routes, LookAhead: r.chunk}}); err != nil {
			return err
		}
		for i := range tokens {
			for l, layer := range r.trace.Model.Layers {
				r.add(i, l, layer)
			}
			r.tokens++
		}
	}
	return nil
}

// add records one token of the chunk in one layer.
func (r *recorder) add(i, l, layer int) {
	row := i*r.model.Layers + layer
	at := row * r.chunk.Width
	r.out.Experts = append(r.out.Experts, r.chunk.Experts[at:at+r.chunk.Width]...)
	for _, p := range r.chunk.Probability[at : at+r.chunk.Width] {
		r.out.Scores = append(r.out.Scores, model.Score(p))
	}
	recorded := r.trace.Row(r.tokens, l)
	for _, expert := range r.routes[row*r.model.TopK : (row+1)*r.model.TopK] {
		if slices.Contains(recorded, expert) {
			r.same++
		}
	}
}

func (r *recorder) agreement() float64 {
	return float64(r.same) / float64(max(r.tokens*len(r.trace.Model.Layers)*r.model.TopK, 1))
}
