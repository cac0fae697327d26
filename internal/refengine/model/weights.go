// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"math"
	"slices"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// matrix is a linear map of cols inputs to rows outputs.
type matrix struct {
	rows, cols int
	packed     operand
}

// ffn is a gated feed-forward network: down(silu(gate(x)) * up(x)).
type ffn struct{ gate, up, down matrix }

type layer struct {
	inputNorm, postNorm []float32
	query, key, value   matrix
	output              matrix
	queryNorm, keyNorm  []float32
	// gate scores the experts of an MoE layer. A dense layer has no gate and one network.
	gate    *matrix
	experts []ffn
}

// Model is a loaded model. It is immutable.
type Model struct {
	Config
	embedding []float32
	layers    []layer
	finalNorm []float32
	head      matrix
	// cos and sin are the rotary tables, [MaxPositions][HeadDim/2].
	cos, sin []float32
}

// Load reads all weights of a checkpoint. contextLength is the maximum sequence length, which determines the size of
// tables; 0 selects the maximum of the model.
func Load(c *checkpoint.Checkpoint, contextLength int) (*Model, error) {
	config, err := parseConfig(c.Config)
	if err != nil {
		return nil, err
	}
	if contextLength > config.MaxPositions {
		return nil, checkpoint.Invalidf("context length %d is above the model's max_position_embeddings %d", contextLength, config.MaxPositions)
	}
	if contextLength > 0 {
		config.MaxPositions = contextLength
	}
	m := &Model{Config: *config}
	r := reader{checkpoint: c}
	m.embedding = r.tensor("model.embed_tokens.weight", int64(m.Vocab), int64(m.Hidden))
	m.finalNorm = r.vector("model.norm.weight", m.Hidden)
	head := "model.embed_tokens.weight"
	if !m.TiedEmbeddings {
		head = "lm_head.weight"
	}
	m.head = r.matrix(head, m.Vocab, m.Hidden)
	for l := range m.Layers {
		m.layers = append(m.layers, r.layer(config, l))
	}
	if r.err != nil {
		return nil, r.err
	}
	m.buildRotary()
	return m, nil
}

// Misplaced returns a faulty copy of the model: the weights of each MoE layer's experts are in slot order, but the
// gates are not adapted. The copy computes expert slots(l)[e] if the gate of layer l selects e. slots must return at
// least Experts experts.
func (m *Model) Misplaced(slots func(l int) []int) *Model {
	out := *m
	out.layers = slices.Clone(m.layers)
	for l := range out.layers {
		if !m.MoE[l] {
			continue
		}
		out.layers[l].experts = make([]ffn, m.Experts)
		for e, expert := range slots(l)[:m.Experts] {
			out.layers[l].experts[e] = m.layers[l].experts[expert]
		}
	}
	return &out
}

// reader reads tensors and records the first error.
type reader struct {
	checkpoint *checkpoint.Checkpoint
	err        error
}

func (r *reader) layer(c *Config, l int) layer {
	prefix := fmt.Sprintf("model.layers.%d.", l)
	attention := prefix + "self_attn."
	out := layer{
		inputNorm: r.vector(prefix+"input_layernorm.weight", c.Hidden),
		postNorm:  r.vector(prefix+"post_attention_layernorm.weight", c.Hidden),
		query:     r.matrix(attention+"q_proj.weight", c.Heads*c.HeadDim, c.Hidden),
		key:       r.matrix(attention+"k_proj.weight", c.KVHeads*c.HeadDim, c.Hidden),
		value:     r.matrix(attention+"v_proj.weight", c.KVHeads*c.HeadDim, c.Hidden),
		output:    r.matrix(attention+"o_proj.weight", c.Hidden, c.Heads*c.HeadDim),
		queryNorm: r.vector(attention+"q_norm.weight", c.HeadDim),
		keyNorm:   r.vector(attention+"k_norm.weight", c.HeadDim),
	}
	if !c.MoE[l] {
		out.experts = []ffn{r.ffn(prefix+"mlp.", c.Hidden, c.Intermediate)}
		return out
	}
	gate := r.matrix(prefix+"mlp.gate.weight", c.Experts, c.Hidden)
	out.gate = &gate
	if _, fused := r.checkpoint.Tensor(prefix + "mlp.experts.gate_up_proj"); fused {
		out.experts = r.fused(prefix+"mlp.experts.", c)
		return out
	}
	for e := range c.Experts {
		out.experts = append(out.experts, r.ffn(fmt.Sprintf("%smlp.experts.%d.", prefix, e), c.Hidden, c.MoEIntermediate))
	}
	return out
}

// fused reads the experts of a layer from tensors that contain all experts: gate_up_proj [experts, 2*width, hidden],
// with the rows of gate_proj before those of up_proj, and down_proj [experts, hidden, width]. In both tensors the last
// two dimensions may be transposed.
func (r *reader) fused(prefix string, c *Config) []ffn {
	experts, hidden, width := int64(c.Experts), int64(c.Hidden), int64(c.MoEIntermediate)
	gateUp, down := []int64{experts, 2 * width, hidden}, []int64{experts, hidden, width}
	both := func(gateUp, down []int64) bool {
		a, _ := r.checkpoint.Tensor(prefix + "gate_up_proj")
		b, _ := r.checkpoint.Tensor(prefix + "down_proj")
		return slices.Equal(a.Shape, gateUp) && slices.Equal(b.Shape, down)
	}
	exchanged := !both(gateUp, down) && both([]int64{experts, hidden, 2 * width}, []int64{experts, width, hidden})
	if exchanged {
		gateUp, down = []int64{experts, hidden, 2 * width}, []int64{experts, width, hidden}
	}
	gateUps, downs := r.tensor(prefix+"gate_up_proj", gateUp...), r.tensor(prefix+"down_proj", down...)
	if r.err != nil {
		return nil
	}
	var all []ffn
	for e := range c.Experts {
		of := func(values []float32, shape []int64) []float32 {
			size := int(shape[1] * shape[2])
			part := values[e*size : (e+1)*size]
			if exchanged {
				part = transpose(part, int(shape[1]), int(shape[2]))
			}
			return part
		}
		both, size := of(gateUps, gateUp), c.MoEIntermediate*c.Hidden
		all = append(all, ffn{
			gate: matrix{c.MoEIntermediate, c.Hidden, pack(both[:size], c.MoEIntermediate, c.Hidden)},
			up:   matrix{c.MoEIntermediate, c.Hidden, pack(both[size:], c.MoEIntermediate, c.Hidden)},
			down: matrix{c.Hidden, c.MoEIntermediate, pack(of(downs, down), c.Hidden, c.MoEIntermediate)},
		})
	}
	return all
}

// transpose transposes a matrix.
func transpose(values []float32, rows, cols int) []float32 {
	out := make([]float32, len(values))
	for i := range rows {
		for j := range cols {
			out[j*rows+i] = values[i*cols+j]
		}
	}
	return out
}

func (r *reader) ffn(prefix string, hidden, width int) ffn {
	return ffn{
		gate: r.matrix(prefix+"gate_proj.weight", width, hidden),
		up:   r.matrix(prefix+"up_proj.weight", width, hidden),
		down: r.matrix(prefix+"down_proj.weight", hidden, width),
	}
}

func (r *reader) matrix(name string, rows, cols int) matrix {
	values := r.tensor(name, int64(rows), int64(cols))
	if r.err != nil {
		return matrix{}
	}
	return matrix{rows, cols, pack(values, rows, cols)}
}

func (r *reader) vector(name string, length int) []float32 {
	return r.tensor(name, int64(length))
}

func (r *reader) tensor(name string, shape ...int64) []float32 {
	if r.err != nil {
		return nil
	}
	if t, ok := r.checkpoint.Tensor(name); ok && !slices.Equal(t.Shape, shape) {
		r.err = checkpoint.Invalidf("tensor %q has shape %v, config.json implies %v", name, t.Shape, shape)
		return nil
	}
	values, err := r.checkpoint.Float32(name)
	r.err = err
	return values
}

// buildRotary computes angles in float32, as the reference implementation does.
func (m *Model) buildRotary() {
	half := m.HeadDim / 2
	m.cos = make([]float32, m.MaxPositions*half)
	m.sin = make([]float32, m.MaxPositions*half)
	for i := range half {
		frequency := float32(1 / math.Pow(m.RopeTheta, float64(2*i)/float64(m.HeadDim)))
		for position := range m.MaxPositions {
			angle := float64(float32(position) * frequency)
			m.cos[position*half+i] = float32(math.Cos(angle))
			m.sin[position*half+i] = float32(math.Sin(angle))
		}
	}
}
