// SPDX-License-Identifier: Apache-2.0

package model

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// synthetic writes a checkpoint of random float32 weights, and returns the weights for the oracle.
func synthetic(t *testing.T, rng *rand.Rand, config map[string]any, shapes map[string][]int) (dir string, weights map[string][]float64) {
	t.Helper()
	dir, weights = t.TempDir(), map[string][]float64{}
	header := map[string]any{}
	var data []byte
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		n := 1
		for _, d := range shapes[name] {
			n *= d
		}
		begin := len(data)
		for range n {
			v := float32(rng.NormFloat64() * 0.4)
			weights[name] = append(weights[name], float64(v))
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
		}
		header[name] = map[string]any{"dtype": "F32", "shape": shapes[name], "data_offsets": []int{begin, len(data)}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	configText, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"model.safetensors": append(file, data...), "config.json": configText} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir, weights
}

// oracle is a direct implementation of the forward pass, in float64 and token by token.
type oracle struct {
	*Config
	w            map[string][]float64
	keys, values [][][]float64 // [layers][positions][KVHeads*HeadDim]
	ahead        [][]float64   // what the gates say of the last token before attention [layers][Experts]
}

func (o *oracle) linear(name string, x []float64) []float64 {
	w := o.w[name]
	y := make([]float64, len(w)/len(x))
	for i := range y {
		for k, v := range x {
			y[i] += w[i*len(x)+k] * v
		}
	}
	return y
}

func (o *oracle) norm(name string, x []float64) []float64 {
	var squares float64
	for _, v := range x {
		squares += v * v
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = v / math.Sqrt(squares/float64(len(x))+float64(o.RMSNormEps)) * o.w[name][i]
	}
	return y
}

func (o *oracle) heads(name string, x []float64, position int) []float64 {
	var out []float64
	for head := range slices.Chunk(x, o.HeadDim) {
		head = o.norm(name, head)
		turned := make([]float64, o.HeadDim)
		for i := range o.HeadDim / 2 {
			angle := float64(position) / math.Pow(o.RopeTheta, 2*float64(i)/float64(o.HeadDim))
			a, b := head[i], head[i+o.HeadDim/2]
			turned[i], turned[i+o.HeadDim/2] = a*math.Cos(angle)-b*math.Sin(angle), b*math.Cos(angle)+a*math.Sin(angle)
		}
		out = append(out, turned...)
	}
	return out
}

func probabilities(x []float64) []float64 {
	out, sum := make([]float64, len(x)), 0.0
	for i, v := range x {
		out[i] = math.Exp(v - slices.Max(x))
		sum += out[i]
	}
	for i := range out {
		out[i] /= sum
	}
	return out
}

func (o *oracle) ffn(prefix string, x []float64) []float64 {
	gate, up := o.linear(prefix+"gate_proj.weight", x), o.linear(prefix+"up_proj.weight", x)
	for i, g := range gate {
		gate[i] = g / (1 + math.Exp(-g)) * up[i]
	}
	return o.linear(prefix+"down_proj.weight", gate)
}

func (o *oracle) token(id int32, position int) []float64 {
	x := slices.Clone(o.w["model.embed_tokens.weight"][int(id)*o.Hidden:][:o.Hidden])
	addTo := func(y []float64, scale float64) {
		for i := range x {
			x[i] += scale * y[i]
		}
	}
	for l := range o.Layers {
		prefix := fmt.Sprintf("model.layers.%d.", l)
		if o.MoE[l] {
			o.ahead[l] = probabilities(o.linear(prefix+"mlp.gate.weight", o.norm(prefix+"post_attention_layernorm.weight", x)))
		}
		in := o.norm(prefix+"input_layernorm.weight", x)
		query := o.heads(prefix+"self_attn.q_norm.weight", o.linear(prefix+"self_attn.q_proj.weight", in), position)
		o.keys[l] = append(o.keys[l], o.heads(prefix+"self_attn.k_norm.weight", o.linear(prefix+"self_attn.k_proj.weight", in), position))
		o.values[l] = append(o.values[l], o.linear(prefix+"self_attn.v_proj.weight", in))
		mixed := make([]float64, len(query))
		for h := range o.Heads {
			at := h / (o.Heads / o.KVHeads) * o.HeadDim
			var scores []float64
			for _, key := range o.keys[l] {
				var s float64
				for d := range o.HeadDim {
					s += query[h*o.HeadDim+d] * key[at+d]
				}
				scores = append(scores, s/math.Sqrt(float64(o.HeadDim)))
			}
			for j, p := range probabilities(scores) {
				for d := range o.HeadDim {
					mixed[h*o.HeadDim+d] += p * o.values[l][j][at+d]
				}
			}
		}
		addTo(o.linear(prefix+"self_attn.o_proj.weight", mixed), 1)
		in = o.norm(prefix+"post_attention_layernorm.weight", x)
		if !o.MoE[l] {
			addTo(o.ffn(prefix+"mlp.", in), 1)
			continue
		}
		p := probabilities(o.linear(prefix+"mlp.gate.weight", in))
		order := make([]int, len(p))
		for e := range order {
			order[e] = e
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(p[b], p[a]) })
		total := 1.0
		if o.NormTopK {
			total = 0
			for _, e := range order[:o.TopK] {
				total += p[e]
			}
		}
		for _, e := range order[:o.TopK] {
			addTo(o.ffn(fmt.Sprintf("%smlp.experts.%d.", prefix, e), in), p[e]/total)
		}
	}
	x = o.norm("model.norm.weight", x)
	if o.TiedEmbeddings {
		return o.linear("model.embed_tokens.weight", x)
	}
	return o.linear("lm_head.weight", x)
}

// lookAhead returns the probabilities of the last token's look-ahead, by layer in descending order, with zeros for
// dense layers.
func (o *oracle) lookAhead() (all []float64) {
	for _, p := range o.ahead {
		row := make([]float64, o.Experts)
		copy(row, p)
		slices.SortFunc(row, func(a, b float64) int { return cmp.Compare(b, a) })
		all = append(all, row...)
	}
	return all
}

// Shapes that are no multiples of the kernel blocks, dense layers, separate heads, and gates without normalization.
func TestOddShapesMatchOracle(t *testing.T) {
	for name, change := range map[string]map[string]any{
		"all MoE, tied":             {"tie_word_embeddings": true, "norm_topk_prob": true},
		"dense layers, separate":    {"mlp_only_layers": []int{0, 2}, "intermediate_size": 21, "tie_word_embeddings": false, "norm_topk_prob": true},
		"weights as they are":       {"norm_topk_prob": false, "tie_word_embeddings": true, "num_experts_per_tok": 3},
		"one key-value head":        {"num_key_value_heads": 1, "norm_topk_prob": true, "tie_word_embeddings": true},
		"a head dimension above 16": {"head_dim": 18, "norm_topk_prob": true, "tie_word_embeddings": false},
		"rope_parameters":           {"rope_parameters": map[string]any{"rope_type": "default", "rope_theta": 333}, "norm_topk_prob": true},
	} {
		t.Run(name, func(t *testing.T) { compareWithOracle(t, change, nil) })
	}
}

// TestFusedExpertsMatchOracle reads checkpoints with one tensor for all experts of a layer, also with its last two
// dimensions transposed.
func TestFusedExpertsMatchOracle(t *testing.T) {
	for name, layout := range map[string]fusedLayout{"rows are outputs": {}, "rows are inputs": {transposed: true}} {
		t.Run(name, func(t *testing.T) {
			compareWithOracle(t, map[string]any{"mlp_only_layers": []int{1}, "intermediate_size": 21, "norm_topk_prob": true}, &layout)
		})
	}
}

// fusedLayout stores the experts of a layer as gate_up_proj and down_proj.
type fusedLayout struct{ transposed bool }

// fuse replaces the shapes of experts by those of fused tensors.
func (f fusedLayout) fuse(c *Config, shapes map[string][]int) {
	maps.DeleteFunc(shapes, func(name string, _ []int) bool { return strings.Contains(name, ".experts.") })
	for l := range c.Layers {
		if !c.MoE[l] {
			continue
		}
		gateUp, down := []int{c.Experts, 2 * c.MoEIntermediate, c.Hidden}, []int{c.Experts, c.Hidden, c.MoEIntermediate}
		if f.transposed {
			gateUp, down = []int{c.Experts, c.Hidden, 2 * c.MoEIntermediate}, []int{c.Experts, c.MoEIntermediate, c.Hidden}
		}
		prefix := fmt.Sprintf("model.layers.%d.mlp.experts.", l)
		shapes[prefix+"gate_up_proj"], shapes[prefix+"down_proj"] = gateUp, down
	}
}

// split adds the weights of each expert for the oracle.
func (f fusedLayout) split(c *Config, weights map[string][]float64) {
	// part returns the outputs from first up to last of an expert, of the given number of outputs and inputs.
	part := func(fused []float64, e, outputs, inputs, first, last int) (rows []float64) {
		of := fused[e*outputs*inputs : (e+1)*outputs*inputs]
		for out := first; out < last; out++ {
			for in := range inputs {
				at := out*inputs + in
				if f.transposed {
					at = in*outputs + out
				}
				rows = append(rows, of[at])
			}
		}
		return rows
	}
	for l := range c.Layers {
		prefix := fmt.Sprintf("model.layers.%d.mlp.experts.", l)
		gateUp, down := weights[prefix+"gate_up_proj"], weights[prefix+"down_proj"]
		for e := 0; e < c.Experts && c.MoE[l]; e++ {
			width := c.MoEIntermediate
			weights[fmt.Sprintf("%s%d.gate_proj.weight", prefix, e)] = part(gateUp, e, 2*width, c.Hidden, 0, width)
			weights[fmt.Sprintf("%s%d.up_proj.weight", prefix, e)] = part(gateUp, e, 2*width, c.Hidden, width, 2*width)
			weights[fmt.Sprintf("%s%d.down_proj.weight", prefix, e)] = part(down, e, c.Hidden, width, 0, c.Hidden)
		}
	}
}

// compareWithOracle compares the model with the oracle on random weights. change are changes of the configuration;
// layout is nil for a checkpoint with tensors of each expert.
func compareWithOracle(t *testing.T, change map[string]any, layout *fusedLayout) {
	t.Helper()
	config := map[string]any{
		"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 5, "num_experts_per_tok": 2, "hidden_size": 19, "vocab_size": 37,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "moe_intermediate_size": 11, "rms_norm_eps": 1e-6,
		"max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 10000.0,
	}
	maps.Copy(config, change)
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	base, err := checkpoint.ParseConfig(text)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := parseConfig(base)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(11, 12))
	shapes := shapesOf(parsed)
	if layout != nil {
		layout.fuse(parsed, shapes)
	}
	dir, weights := synthetic(t, rng, config, shapes)
	if layout != nil {
		layout.split(parsed, weights)
	}
	c, err := checkpoint.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m, err := Load(c, 0)
	if err != nil {
		t.Fatal(err)
	}
	want := &oracle{Config: parsed, w: weights, keys: make([][][]float64, 3), values: make([][][]float64, 3), ahead: make([][]float64, 3)}
	r := m.NewRunner(2)
	s := newSequence(m, 40)
	for position := range 40 {
		id := rng.Int32N(37)
		chunk := s.chunk(m, []int32{id})
		chunk.LookAhead = m.NewLookAhead(m.Experts, 1)
		if err := r.Step([]Chunk{chunk}); err != nil {
			t.Fatal(err)
		}
		logits := want.token(id, position)
		for i, v := range want.lookAhead() {
			got := float64(chunk.LookAhead.Probability[i])
			if l := i / m.Experts; math.Abs(got-v) > 1e-5 || m.MoE[l] && math.Abs(got-want.ahead[l][chunk.LookAhead.Experts[i]]) > 1e-5 {
				t.Fatalf("position %d: look-ahead %v of %v, want %v", position, chunk.LookAhead.Probability, chunk.LookAhead.Experts, want.ahead)
			}
		}
		for i, v := range logits {
			if math.Abs(v-float64(s.logits[i])) > 1e-4*max(1, math.Abs(v)) {
				t.Fatalf("position %d, logit %d: got %v, want %v", position, i, s.logits[i], v)
			}
		}
	}
}

func shapesOf(c *Config) map[string][]int {
	shapes := map[string][]int{"model.embed_tokens.weight": {c.Vocab, c.Hidden}, "model.norm.weight": {c.Hidden}}
	if !c.TiedEmbeddings {
		shapes["lm_head.weight"] = []int{c.Vocab, c.Hidden}
	}
	ffn := func(prefix string, width int) {
		shapes[prefix+"gate_proj.weight"] = []int{width, c.Hidden}
		shapes[prefix+"up_proj.weight"] = []int{width, c.Hidden}
		shapes[prefix+"down_proj.weight"] = []int{c.Hidden, width}
	}
	for l := range c.Layers {
		prefix := fmt.Sprintf("model.layers.%d.", l)
		for name, shape := range map[string][]int{
			"input_layernorm.weight": {c.Hidden}, "post_attention_layernorm.weight": {c.Hidden},
			"self_attn.q_proj.weight": {c.Heads * c.HeadDim, c.Hidden}, "self_attn.k_proj.weight": {c.KVHeads * c.HeadDim, c.Hidden},
			"self_attn.v_proj.weight": {c.KVHeads * c.HeadDim, c.Hidden}, "self_attn.o_proj.weight": {c.Hidden, c.Heads * c.HeadDim},
			"self_attn.q_norm.weight": {c.HeadDim}, "self_attn.k_norm.weight": {c.HeadDim},
		} {
			shapes[prefix+name] = shape
		}
		if !c.MoE[l] {
			ffn(prefix+"mlp.", c.Intermediate)
			continue
		}
		shapes[prefix+"mlp.gate.weight"] = []int{c.Experts, c.Hidden}
		for e := range c.Experts {
			ffn(fmt.Sprintf("%smlp.experts.%d.", prefix, e), c.MoEIntermediate)
		}
	}
	return shapes
}
