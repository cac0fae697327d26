// SPDX-License-Identifier: Apache-2.0

package trace

import "slices"

// LookAheadScale is the quantisation of look-ahead scores: probability = stored score / LookAheadScale.
const LookAheadScale = 1<<16 - 1

// MaxLookAhead is the maximum number of experts per look-ahead.
const MaxLookAhead = 256

// LookAheadWidth returns the number of experts of each look-ahead worth recording for a gate that activates topK of
// experts: beyond four times topK, a forecast gains almost nothing.
func LookAheadWidth(topK, experts int) int { return min(4*topK, experts, MaxLookAhead) }

// LookAhead is the prediction of the gates one step early: each layer's own norm and gate, applied to the residual
// stream before the layer's attention has been added. It is available before the tokens of the layer are dispatched.
type LookAhead struct {
	// Width is the number of recorded experts per token and layer.
	Width int
	// Experts are expert ids [T, MoE layers, Width], the most probable first. Scores are their probabilities among all
	// experts, times LookAheadScale.
	Experts []uint16
	Scores  []uint16
}

// LookAheadRow returns the experts and scores of the token at a position of Tokens, in the MoE layer with the given
// index.
func (t *Trace) LookAheadRow(position, layer int) (experts, scores []uint16) {
	w := t.LookAhead.Width
	begin := (position*len(t.Model.Layers) + layer) * w
	return t.LookAhead.Experts[begin : begin+w : begin+w], t.LookAhead.Scores[begin : begin+w : begin+w]
}

// LookAheadOverlap returns the share of all activations of experts among the TopK most probable experts of the
// look-ahead.
func (t *Trace) LookAheadOverlap() float64 {
	same := 0
	for position := range t.Tokens {
		for l := range t.Model.Layers {
			experts, _ := t.LookAheadRow(position, l)
			for _, expert := range t.Row(position, l) {
				if slices.Contains(experts[:min(t.Model.TopK, len(experts))], expert) {
					same++
				}
			}
		}
	}
	return float64(same) / float64(len(t.Experts))
}

// appendPositions appends the positions from begin to end of another trace's look-ahead.
func (a *LookAhead) appendPositions(from *LookAhead, begin, end, layers int) {
	width := layers * a.Width
	a.Experts = append(a.Experts, from.Experts[begin*width:end*width]...)
	a.Scores = append(a.Scores, from.Scores[begin*width:end*width]...)
}

func (a *LookAhead) validate(t *Trace) error {
	layers := len(t.Model.Layers)
	if maxWidth := min(t.Model.Experts, MaxLookAhead); a.Width < 1 || a.Width > maxWidth {
		return invalidf("lookahead_experts keeps %d experts of each token and layer; allowed is 1 to %d", a.Width, maxWidth)
	}
	if want := len(t.Tokens) * layers * a.Width; len(a.Experts) != want || len(a.Scores) != want {
		return invalidf("lookahead_experts has %d entries and lookahead_scores %d; %d tokens, %d MoE layers and %d experts need %d",
			len(a.Experts), len(a.Scores), len(t.Tokens), layers, a.Width, want)
	}
	lastSeen := make([]int, t.Model.Experts)
	for begin, row := 0, 1; begin < len(a.Experts); begin, row = begin+a.Width, row+1 {
		position, layer := (row-1)/layers, t.Model.Layers[(row-1)%layers]
		for k := begin; k < begin+a.Width; k++ {
			expert := a.Experts[k]
			switch {
			case int(expert) >= t.Model.Experts:
				return invalidf("lookahead_experts: token %d, layer %d: expert %d; allowed is 0 to %d", position, layer, expert, t.Model.Experts-1)
			case lastSeen[expert] == row:
				return invalidf("lookahead_experts: token %d, layer %d: expert %d appears twice", position, layer, expert)
			case k > begin && a.Scores[k] > a.Scores[k-1]:
				return invalidf("lookahead_scores: token %d, layer %d: score %d after %d; scores must not ascend", position, layer, a.Scores[k], a.Scores[k-1])
			}
			lastSeen[expert] = row
		}
	}
	return nil
}
