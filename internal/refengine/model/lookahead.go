package model

import (
	"fmt"
	"math"
)

// LookAhead receives what the gates say one step early: an MoE layer's own norm and gate, applied to the residual stream
// before the layer's attention is added to it. It changes nothing of what is computed.
type LookAhead struct {
	// Width is how many experts are wanted of each token and layer, at most all.
	Width int
	// Experts are the most probable experts, the most probable first, and Probability their probabilities among all experts:
	// [tokens of the chunk][Layers][Width], dense layers zero.
	Experts     []uint16
	Probability []float32
}

// NewLookAhead returns a LookAhead for a chunk of that many tokens.
func (m *Model) NewLookAhead(width, tokens int) *LookAhead {
	a := &LookAhead{Width: width}
	a.Resize(m, tokens)
	return a
}

// Resize makes a LookAhead fit a chunk of another number of tokens; what it held is lost.
func (a *LookAhead) Resize(m *Model, tokens int) {
	grow(&a.Experts, tokens*m.Layers*a.Width)
	grow(&a.Probability, tokens*m.Layers*a.Width)
}

// Score is a probability as routing traces store it, in 65,535ths.
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

// lookAhead applies layer l's norm and gate to the residual stream as it is, and reports to the chunks that ask for it.
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
			mostProbable(s.logits[i*m.Experts:][:m.Experts], chosen, a.Probability[at:at+a.Width])
			for k, expert := range chosen {
				a.Experts[at+k] = uint16(expert)
			}
		}
	})
}
