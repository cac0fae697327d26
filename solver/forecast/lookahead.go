package forecast

import (
	"fmt"
	"math"

	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// rawSlope makes chances of margins where no profile has told anything: an expert that is twice as probable as the last
	// one to be activated is activated in four of five cases.
	rawSlope = 2
	// leastMargin stands for every expert that is far from being activated, those that are not kept among them.
	leastMargin = -4
)

// LookAhead forecasts a token's experts from what the layer's gate says before attention: each expert's margin (the
// logarithm of its probability over that between the last expert to be activated and the first not to be) becomes a chance
// by a logistic function, corrected by small linear maps from the margins of the most probable experts and from the experts
// that the token activated in the MoE layer before. It knows experts, not ranks: it fits every placement.
type LookAhead struct {
	// Layers (MoE layers), Experts and TopK are the model's; Width is how many of the most probable experts are looked at.
	Layers, Experts, TopK, Width int
	// Slope weighs an expert's own margin [layers], Bias is what is added for an expert [layers, experts], Gate what each of
	// the Width most probable experts adds to all experts, times its margin above leastMargin, Earlier what each expert of the
	// MoE layer before adds [layers, experts, experts]. A raw look-ahead has a Slope alone.
	Slope, Bias, Gate, Earlier []float32
}

// RawLookAhead is a look-ahead without any correction.
func RawLookAhead(m *trace.Model) *LookAhead {
	l := &LookAhead{Layers: len(m.Layers), Experts: m.Experts, TopK: m.TopK, Width: min(m.TopK+1, m.Experts), Slope: make([]float32, len(m.Layers))}
	for i := range l.Slope {
		l.Slope[i] = rawSlope
	}
	return l
}

// Raw reports whether the look-ahead is without corrections.
func (m *LookAhead) Raw() bool { return m.Bias == nil }

// Validate checks the shapes against one another.
func (m *LookAhead) Validate() error {
	square := m.Layers * m.Experts * m.Experts
	switch {
	case m.Layers < 1 || m.TopK < 1 || m.TopK > m.Experts || m.Width < m.TopK || m.Width > m.Experts:
		return fmt.Errorf("the look-ahead is for %d layers and %d most probable of %d experts, top-%d", m.Layers, m.Width, m.Experts, m.TopK)
	case len(m.Slope) != m.Layers || !m.Raw() && (len(m.Bias) != m.Layers*m.Experts || len(m.Gate) != square || len(m.Earlier) != square):
		return fmt.Errorf("the look-ahead's weights do not fit %d layers and %d experts", m.Layers, m.Experts)
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

// Fits checks that a trace has what the look-ahead looks at.
func (m *LookAhead) Fits(t *trace.Trace) error {
	switch {
	case t.LookAhead == nil:
		return fmt.Errorf("the trace has no look-ahead (tensor lookahead_experts): semmoe lookahead adds it")
	case t.LookAhead.Width < m.Width:
		return fmt.Errorf("the trace keeps %d experts of each look-ahead (tensor lookahead_experts); the forecast needs %d", t.LookAhead.Width, m.Width)
	case m.Layers != len(t.Model.Layers) || m.Experts != t.Model.Experts || m.TopK != t.Model.TopK:
		return fmt.Errorf("the look-ahead is for %d layers and top-%d of %d experts, the trace has %d layers and top-%d of %d",
			m.Layers, m.TopK, m.Experts, len(t.Model.Layers), t.Model.TopK, t.Model.Experts)
	}
	return nil
}

// Observation is what is known of a token when a layer's look-ahead has run.
type Observation struct {
	// Experts are at least Width experts, the most probable first, and Scores their probabilities times
	// trace.LookAheadScale.
	Experts, Scores []uint16
	// Earlier are the experts that the token activated in the MoE layer before; none in the first.
	Earlier []uint16
}

// Ranks scores ranks in one layer of a placement. It has memory of its own, and serves one goroutine.
type Ranks struct {
	model *LookAhead
	layer int
	hosts affinity.Hosts
	inputs
	chance []float32
}

// Ranks binds the look-ahead to the hosts of a layer's experts.
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

// lookAheadWeights are those of one layer; slope is one number that training may change.
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

// inputs are what a layer's weights are multiplied with.
type inputs struct {
	// margin is that of every expert [experts].
	margin []float32
	// probable are the most probable experts and value their margins above leastMargin, as a share of it.
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
		in.margin[expert] = leastMargin
	}
	in.probable, in.value, in.earlier = o.Experts[:m.Width], in.value[:0], o.Earlier
	for i, expert := range in.probable {
		margin := max(logScore(o.Scores[i])-threshold, leastMargin)
		in.margin[expert] = margin
		in.value = append(in.value, margin/-leastMargin+1)
	}
}

// logScore is finite for a score of 0.
func logScore(score uint16) float32 { return float32(math.Log(float64(score) + 1)) }

// chances fills dst with each expert's chance to be activated.
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

// LookAheadForecast scores the tokens of a trace. Positions of one layer must be asked for by one goroutine at a time.
type LookAheadForecast struct {
	trace *trace.Trace
	ranks []*Ranks
}

// Bind readies the look-ahead for a trace that Fits has found to fit. hosts are the placement's, layer by layer.
func (m *LookAhead) Bind(hosts []affinity.Hosts, of *trace.Trace) *LookAheadForecast {
	f := &LookAheadForecast{trace: of}
	for l := range m.Layers {
		f.ranks = append(f.ranks, m.Ranks(l, hosts[l]))
	}
	return f
}

// Score fills dst with the expected local share, on each rank, of the token at a position of the trace in a MoE layer
// (counted among the MoE layers).
func (f *LookAheadForecast) Score(dst []float32, layer, position int) {
	f.ranks[layer].Score(dst, observation(f.trace, layer, position))
}

// observation is what the trace tells of a position before a layer's gate has run.
func observation(t *trace.Trace, layer, position int) Observation {
	var o Observation
	o.Experts, o.Scores = t.LookAheadRow(position, layer)
	if layer > 0 {
		o.Earlier = t.Row(position, layer-1)
	}
	return o
}
