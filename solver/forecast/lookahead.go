// SPDX-License-Identifier: Apache-2.0

package forecast

import (
	"fmt"
	"math"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// rawSlope is the slope of probabilities in margins without training: an expert twice as probable as the last
	// activated one is activated in four of five cases.
	rawSlope = 2
	// minMargin is the margin of every expert that is far from being activated, including experts that are not
	// recorded.
	minMargin = -4
)

// LookAhead predicts a token's experts from the output of the layer's gate before attention. The margin of an expert is
// the logarithm of its probability relative to the threshold between the last activated and the first non-activated
// expert. A logistic function converts margins into chances. Small linear maps correct them, from the margins of the
// most probable experts and from the experts that the token activated in the previous MoE layer. The model predicts
// experts, not ranks, so it fits every placement.
type LookAhead struct {
	// Layers (MoE layers), Experts and TopK are the model's shape. Width is the number of most probable experts used as
	// input.
	Layers, Experts, TopK, Width int
	// Slope is the weight of an expert's own margin [layers], Bias a constant per expert [layers, experts]. Gate is the
	// contribution of each of the Width most probable experts to all experts, times its margin above minMargin, and
	// Earlier the contribution of each expert of the previous MoE layer [layers, experts, experts]. A raw look-ahead
	// has only Slope.
	Slope, Bias, Gate, Earlier []float32
}

// RawLookAhead returns a look-ahead without corrections.
func RawLookAhead(m *trace.Model) *LookAhead {
	l := &LookAhead{Layers: len(m.Layers), Experts: m.Experts, TopK: m.TopK, Width: min(m.TopK+1, m.Experts), Slope: make([]float32, len(m.Layers))}
	for i := range l.Slope {
		l.Slope[i] = rawSlope
	}
	return l
}

// Raw reports whether the look-ahead has no corrections.
func (m *LookAhead) Raw() bool { return m.Bias == nil }

// Validate checks that the shapes are consistent and the weights finite.
func (m *LookAhead) Validate() error {
	square := m.Layers * m.Experts * m.Experts
	switch {
	case m.Layers < 1 || m.TopK < 1 || m.TopK > m.Experts || m.Width < m.TopK || m.Width > m.Experts:
		return fmt.Errorf("the look-ahead is for %d layers and %d most probable of %d experts, top-%d", m.Layers, m.Width, m.Experts, m.TopK)
	case len(m.Slope) != m.Layers || !m.Raw() && (len(m.Bias) != m.Layers*m.Experts || len(m.Gate) != square || len(m.Earlier) != square):
		return fmt.Errorf("the look-ahead's weights do not match %d layers and %d experts", m.Layers, m.Experts)
	}
	for _, values := range [][]float32{m.Slope, m.Bias, m.Gate, m.Earlier} {
		for _, v := range values {
			if !(math.Abs(float64(v)) < largestWeight) {
				return fmt.Errorf("a weight of the look-ahead is %v", v)
			}
		}
	}
	return nil
}

// Fits returns an error if the trace lacks the input of the look-ahead.
func (m *LookAhead) Fits(t *trace.Trace) error {
	switch {
	case t.LookAhead == nil:
		return fmt.Errorf("the trace has no look-ahead (tensor lookahead_experts); add it with semmoe-lab lookahead")
	case t.LookAhead.Width < m.Width:
		return fmt.Errorf("the trace has %d experts per look-ahead (tensor lookahead_experts); the forecast needs %d", t.LookAhead.Width, m.Width)
	case m.Layers != len(t.Model.Layers) || m.Experts != t.Model.Experts || m.TopK != t.Model.TopK:
		return fmt.Errorf("the look-ahead is for %d layers and top-%d of %d experts, the trace has %d layers and top-%d of %d",
			m.Layers, m.TopK, m.Experts, len(t.Model.Layers), t.Model.TopK, t.Model.Experts)
	}
	return nil
}

// Observation contains the information about a token after a layer's look-ahead has run.
type Observation struct {
	// Experts are at least Width experts, the most probable first. Scores are their probabilities times
	// trace.LookAheadScale.
	Experts, Scores []uint16
	// Earlier are the experts that the token activated in the previous MoE layer; none in the first layer.
	Earlier []uint16
}

// Ranks scores ranks in one layer of a placement. It has internal buffers and must be used by one goroutine only.
type Ranks struct {
	model *LookAhead
	layer int
	hosts affinity.Hosts
	inputs
	chance []float32
}

// Ranks returns the scores of the look-ahead for the hosts of a layer's experts.
func (m *LookAhead) Ranks(layer int, hosts affinity.Hosts) *Ranks {
	return &Ranks{model: m, layer: layer, hosts: hosts, inputs: newInputs(m.Experts), chance: make([]float32, m.Experts)}
}

// Score fills dst with the expected local share of a token on each rank.
func (r *Ranks) Score(dst []float32, o Observation) {
	w := r.model.layer(r.layer)
	r.observe(r.model, o)
	w.chances(r.chance, &r.inputs)
	clear(dst)
	total := float32(0)
	for expert, chance := range r.chance {
		total += chance
		for _, rank := range r.hosts[expert] {
			dst[rank] += chance
		}
	}
	for rank := range dst {
		dst[rank] = min(dst[rank]/max(total, 1e-9), 1)
	}
}

// lookAheadWeights are the weights of one layer. slope points to a number that training changes.
type lookAheadWeights struct {
	slope               *float32
	bias, gate, earlier []float32
}

func (m *LookAhead) layer(l int) lookAheadWeights {
	w := lookAheadWeights{slope: &m.Slope[l]}
	if !m.Raw() {
		n, square := m.Experts, m.Experts*m.Experts
		w.bias, w.gate, w.earlier = m.Bias[l*n:(l+1)*n], m.Gate[l*square:(l+1)*square], m.Earlier[l*square:(l+1)*square]
	}
	return w
}

// inputs are the regressors of a layer's weights.
type inputs struct {
	// margin contains the margin of every expert [experts].
	margin []float32
	// probable are the most probable experts, value their margins above minMargin as a share of -minMargin.
	probable []uint16
	value    []float32
	earlier  []uint16
}

func newInputs(experts int) inputs { return inputs{margin: make([]float32, experts)} }

func (in *inputs) observe(m *LookAhead, o Observation) {
	threshold := logScore(o.Scores[m.TopK-1])
	if m.TopK < m.Width {
		threshold = (threshold + logScore(o.Scores[m.TopK])) / 2
	}
	for expert := range in.margin {
		in.margin[expert] = minMargin
	}
	in.probable, in.value, in.earlier = o.Experts[:m.Width], in.value[:0], o.Earlier
	for i, expert := range in.probable {
		margin := max(logScore(o.Scores[i])-threshold, minMargin)
		in.margin[expert] = margin
		in.value = append(in.value, margin/-minMargin+1)
	}
}

// logScore returns the logarithm of score + 1, which is finite for a score of 0.
func logScore(score uint16) float32 { return float32(math.Log(float64(score) + 1)) }

// chances fills dst with the probability that each expert is activated.
func (w *lookAheadWeights) chances(dst []float32, in *inputs) {
	for expert, margin := range in.margin {
		dst[expert] = *w.slope * margin
	}
	if w.bias != nil {
		n := len(dst)
		add(dst, w.bias, 1)
		for i, expert := range in.probable {
			add(dst, w.gate[int(expert)*n:(int(expert)+1)*n], in.value[i])
		}
		for _, expert := range in.earlier {
			add(dst, w.earlier[int(expert)*n:(int(expert)+1)*n], 1)
		}
	}
	for expert, v := range dst {
		dst[expert] = float32(1 / (1 + math.Exp(-float64(v))))
	}
}

// LookAheadForecast scores the tokens of a trace. Only one goroutine at a time may score positions of one layer.
type LookAheadForecast struct {
	trace *trace.Trace
	ranks []*Ranks
}

// Bind returns the scores of the look-ahead for a trace accepted by Fits. hosts are the placement's, by layer.
func (m *LookAhead) Bind(hosts []affinity.Hosts, of *trace.Trace) *LookAheadForecast {
	f := &LookAheadForecast{trace: of}
	for l := range m.Layers {
		f.ranks = append(f.ranks, m.Ranks(l, hosts[l]))
	}
	return f
}

// Score fills dst with the expected local share on each rank of the token at a position of the trace, in a MoE layer
// (index among the MoE layers).
func (f *LookAheadForecast) Score(dst []float32, layer, position int) {
	f.ranks[layer].Score(dst, observation(f.trace, layer, position))
}

// observation returns the information of the trace about a position before a layer's gate has run.
func observation(t *trace.Trace, layer, position int) Observation {
	var o Observation
	o.Experts, o.Scores = t.LookAheadRow(position, layer)
	if layer > 0 {
		o.Earlier = t.Row(position, layer-1)
	}
	return o
}
