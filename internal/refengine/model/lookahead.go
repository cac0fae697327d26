// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"math"
)

// LookAhead receives the look-ahead of a chunk: the result of an MoE layer's norm and gate, applied to the residual
// stream before the layer's attention is added to it. It does not change outputs.
type LookAhead struct {
	// Width is the number of experts per token and layer, at most all experts.
	Width int
	// Experts are the most probable experts in descending order, and Probability their probabilities among all experts:
	// [tokens of the chunk][Layers][Width], with zeros for dense layers.
	Experts     []uint16
	Probability []float32
}

// NewLookAhead returns a LookAhead for a chunk with the given number of tokens.
func (m *Model) NewLookAhead(width, tokens int) *LookAhead {
	a := &LookAhead{Width: width}
	a.Resize(m, tokens)
	return a
}

// Resize changes the number of tokens of a LookAhead. Its content is lost.
func (a *LookAhead) Resize(m *Model, tokens int) {
	grow(&a.Experts, tokens*m.Layers*a.Width)
	grow(&a.Probability, tokens*m.Layers*a.Width)
}

// Score converts a probability to the format of routing traces, in units of 1/65,535.
func Score(probability float32) uint16 {
	return uint16(math.Round(float64(probability) * math.MaxUint16))
}

func (a *LookAhead) clear() {
	if a != nil {
		clear(a.Experts)
		clear(a.Probability)
	}
}

func (m *Model) checkLookAhead(c *Chunk) error {
	a := c.LookAhead
	if a.Width < 1 || a.Width > m.Experts {
		return fmt.Errorf("look-ahead for %d experts; allowed is 1 to %d", a.Width, m.Experts)
	}
	if want := len(c.Tokens) * m.Layers * a.Width; len(a.Experts) != want || len(a.Probability) != want {
		return fmt.Errorf("look-ahead has length %d and %d, want %d", len(a.Experts), len(a.Probability), want)
	}
	return nil
}

// lookAhead applies the norm and gate of layer l to the present residual stream, and writes the result to the chunks
// that request a look-ahead.
func (r *Runner) lookAhead(l int) {
	m, s, layer := r.model, &r.moe, &r.model.layers[l]
	r.normalise(layer.postNorm)
	grow(&s.logits, len(r.rows)*m.Experts)
	r.linear(s.logits, r.normed, len(r.rows), *layer.gate)
	r.eachBlock(len(r.rows), func(ws *workspace, from, to int) {
		for i := from; i < to; i++ {
			a := r.rows[i].chunk.LookAhead
			if a == nil {
				continue
			}
			at := (r.rows[i].index*m.Layers + l) * a.Width
			chosen := ws.chosen[:a.Width]
			topExperts(s.logits[i*m.Experts:][:m.Experts], chosen, a.Probability[at:at+a.Width])
			for k, expert := range chosen {
				a.Experts[at+k] = uint16(expert)
			}
		}
	})
}
