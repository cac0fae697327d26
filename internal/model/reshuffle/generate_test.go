// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// tensor is a tensor of a generated checkpoint.
type tensor struct {
	dtype checkpoint.DType
	shape []int64
	data  []byte
}

var elementBytes = map[checkpoint.DType]int64{"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "U8": 1, "I32": 4, "I64": 8, "F16": 2, "I8": 1, "F8_E8M0": 1}

// model is a small checkpoint of a family, with random bytes.
type model struct {
	config  map[string]any
	tensors map[string]tensor
	// moved lists the tensors of each permutable layer that depend on the order of the experts.
	layers []int
	groups int
	rng    *rand.Rand
	// metadata and indexMetadata are the metadata of the shards and of the index. nil means the default metadata.
	metadata      map[string]string
	indexMetadata map[string]any
}

const (
	testExperts = 12
	testHidden  = 8
	testLayers  = 3
)

func newModel(seed uint64, modelType string, config map[string]any) *model {
	m := &model{config: map[string]any{
		"model_type": modelType, "num_hidden_layers": testLayers, "num_experts_per_tok": 2, "hidden_size": testHidden, "vocab_size": 16,
	}, tensors: map[string]tensor{}, groups: 1, rng: rand.New(rand.NewPCG(seed, 1))}
	maps.Copy(m.config, config)
	m.add("model.embed_tokens.weight", "BF16", 16, testHidden)
	m.add("lm_head.weight", "BF16", 16, testHidden)
	return m
}

func (m *model) add(name string, dtype checkpoint.DType, shape ...int64) {
	size := elementBytes[dtype]
	for _, d := range shape {
		size *= d
	}
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(m.rng.Uint32())
	}
	m.tensors[name] = tensor{dtype, shape, data}
}

// experts adds tensors for every expert of a block. {e} in a name is replaced by the expert number.
func (m *model) experts(block string, dtypes map[string]checkpoint.DType, projections ...string) {
	for e := range testExperts {
		for _, projection := range projections {
			for suffix, dtype := range dtypes {
				m.add(fmt.Sprintf("%sexperts.%d.%s.%s", block, e, projection, suffix), dtype, 2, 4)
			}
		}
	}
}

// write stores the checkpoint in shards of the given number of tensors.
func (m *model) write(t *testing.T, perShard int) string {
	t.Helper()
	dir := t.TempDir()
	index := map[string]any{"metadata": map[string]any{"total_size": 0}}
	if m.indexMetadata != nil {
		index["metadata"] = m.indexMetadata
	}
	weightMap := map[string]string{}
	names := slices.Sorted(maps.Keys(m.tensors))
	// Tensors of an expert are in different files, as real writers place them.
	m.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	shard := 0
	for part := range slices.Chunk(names, perShard) {
		shard++
		file := fmt.Sprintf("model-%05d.safetensors", shard)
		writeFile(t, filepath.Join(dir, file), m.encode(t, part))
		for _, name := range part {
			weightMap[name] = file
		}
	}
	index["weight_map"] = weightMap
	text, err := json.MarshalIndent(index, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, checkpoint.IndexFile), append(text, '\n'))
	config, err := json.MarshalIndent(m.config, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, checkpoint.ConfigFile), config)
	return dir
}

func (m *model) encode(t *testing.T, names []string) []byte {
	t.Helper()
	header := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	if m.metadata != nil {
		header["__metadata__"] = m.metadata
	}
	var data []byte
	for _, name := range names {
		x := m.tensors[name]
		header[name] = map[string]any{"dtype": x.dtype, "shape": x.shape, "data_offsets": []int{len(data), len(data) + len(x.data)}}
		data = append(data, x.data...)
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, bytes.Repeat([]byte{' '}, (8-len(text)%8)%8)...)
	return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, data)
}

func writeFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
}

// readAll reads every tensor of a checkpoint.
func readAll(t *testing.T, dir string) map[string]tensor {
	t.Helper()
	return readAllAs(t, dir, "")
}

// readAllAs reads every tensor of a checkpoint with the layout of another model type.
func readAllAs(t *testing.T, dir, layoutAs string) map[string]tensor {
	t.Helper()
	c, err := checkpoint.OpenAs(dir, layoutAs)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all := map[string]tensor{}
	for _, shard := range c.Shards {
		for name, x := range shard.Tensors {
			data := make([]byte, x.End-x.Begin)
			if _, err := shard.Handle().ReadAt(data, shard.DataStart()+x.Begin); err != nil {
				t.Fatal(err)
			}
			all[name] = tensor{x.DType, x.Shape, data}
		}
	}
	return all
}

// permutation returns a random permutation of some of the model's layers that keeps its groups whole.
func (m *model) permutation(layers ...int) *Permutation {
	p := &Permutation{}
	size := testExperts / m.groups
	for _, layer := range layers {
		var newToOld []int
		for _, group := range m.rng.Perm(m.groups) {
			for _, member := range m.rng.Perm(size) {
				newToOld = append(newToOld, group*size+member)
			}
		}
		p.Layers = append(p.Layers, LayerPermutation{layer, newToOld})
	}
	return p
}

func gateAndAttention(m *model, prefix, block, gate string) {
	m.add(prefix+"self_attn.q_proj.weight", "BF16", testHidden, testHidden)
	m.add(prefix+"input_layernorm.weight", "BF16", testHidden)
	m.add(prefix+block+gate+".weight", "BF16", testExperts, testHidden)
}

var (
	plain     = map[string]checkpoint.DType{"weight": "BF16"}
	fp8       = map[string]checkpoint.DType{"weight": "F8_E4M3", "weight_scale_inv": "F32"}
	fp8Static = map[string]checkpoint.DType{"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"}
	gptq      = map[string]checkpoint.DType{"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"}
	packed    = map[string]checkpoint.DType{"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"}
)

// generators create a checkpoint of every family, in the layouts in which the family is published.
var generators = map[string]func(seed uint64) *model{
	"qwen3_moe": func(seed uint64) *model {
		m := newModel(seed, "qwen3_moe", map[string]any{"num_local_experts": testExperts})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.experts(prefix+"mlp.", plain, "gate_proj", "up_proj", "down_proj")
			m.layers = append(m.layers, l)
		}
		return m
	},
	"qwen3_moe without the model prefix": func(seed uint64) *model {
		m := newModel(seed, "qwen3_moe", map[string]any{"num_experts": testExperts})
		for l := range testLayers {
			prefix := fmt.Sprintf("layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.experts(prefix+"mlp.", fp8Static, "gate_proj", "up_proj", "down_proj")
			m.layers = append(m.layers, l)
		}
		return m
	},
	"qwen2_moe with a dense layer": func(seed uint64) *model {
		m := newModel(seed, "qwen2_moe", map[string]any{"num_experts": testExperts, "mlp_only_layers": []int{1}})
		for _, l := range []int{0, 2} {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.experts(prefix+"mlp.", plain, "gate_proj", "up_proj", "down_proj")
			m.add(prefix+"mlp.shared_expert.up_proj.weight", "BF16", testExperts, 4)
			m.add(prefix+"mlp.shared_expert_gate.weight", "BF16", 1, testHidden)
			m.layers = append(m.layers, l)
		}
		m.add("model.layers.1.mlp.gate_proj.weight", "BF16", testExperts, 4)
		m.add("model.layers.1.mlp.down_proj.weight", "BF16", 4, testExperts)
		return m
	},
	"qwen3_next with multi-token prediction": func(seed uint64) *model {
		m := newModel(seed, "qwen3_next", map[string]any{"num_experts": testExperts})
		for l := range testLayers + 1 {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			if l == testLayers {
				prefix = "mtp.layers.0."
			}
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.experts(prefix+"mlp.", plain, "gate_proj", "up_proj", "down_proj")
			m.add(prefix+"mlp.shared_expert_gate.weight", "BF16", 1, testHidden)
			m.layers = append(m.layers, l)
		}
		return m
	},
	"qwen3_vl_moe, fused": func(seed uint64) *model {
		m := newModel(seed, "qwen3_vl_moe_text", map[string]any{"num_experts": testExperts})
		m.config = map[string]any{"model_type": "qwen3_vl_moe", "text_config": m.config}
		m.add("model.visual.blocks.0.mlp.linear_fc1.weight", "BF16", testExperts, 4)
		for l := range testLayers {
			prefix := fmt.Sprintf("model.language_model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.add(prefix+"mlp.experts.gate_up_proj", "BF16", testExperts, testHidden, 6)
			m.add(prefix+"mlp.experts.down_proj", "BF16", testExperts, 3, testHidden)
			m.layers = append(m.layers, l)
		}
		return m
	},
	"deepseek_v2 without groups": func(seed uint64) *model {
		m := newModel(seed, "deepseek_v2", map[string]any{"n_routed_experts": testExperts, "n_group": 1, "topk_group": 1})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.experts(prefix+"mlp.", plain, "gate_proj", "up_proj", "down_proj")
			m.add(prefix+"mlp.shared_experts.up_proj.weight", "BF16", testExperts, 4)
			m.layers = append(m.layers, l)
		}
		return m
	},
	"deepseek_v3 in FP8, with groups and multi-token prediction": func(seed uint64) *model {
		m := newModel(seed, "deepseek_v3", map[string]any{
			"n_routed_experts": testExperts, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
		})
		m.groups = 4
		m.add("model.layers.0.mlp.gate_proj.weight", "F8_E4M3", 4, testHidden)
		for l := 1; l <= testLayers; l++ {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.add(prefix+"mlp.gate.e_score_correction_bias", "F32", testExperts)
			m.experts(prefix+"mlp.", fp8, "gate_proj", "up_proj", "down_proj")
			m.add(prefix+"mlp.shared_experts.up_proj.weight", "F8_E4M3", testExperts, 4)
			m.layers = append(m.layers, l)
		}
		return m
	},
	"kimi_k2 in a wrapper, packed": func(seed uint64) *model {
		m := newModel(seed, "kimi_k2", map[string]any{"n_routed_experts": testExperts, "n_group": 1, "first_k_dense_replace": 1})
		m.config = map[string]any{"model_type": "kimi_k25", "text_config": m.config}
		for l := 1; l < testLayers; l++ {
			prefix := fmt.Sprintf("language_model.model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.add(prefix+"mlp.gate.e_score_correction_bias", "F32", testExperts)
			m.experts(prefix+"mlp.", packed, "gate_proj", "up_proj", "down_proj")
			m.layers = append(m.layers, l)
		}
		return m
	},
	"glm4_moe": func(seed uint64) *model {
		m := newModel(seed, "glm4_moe", map[string]any{"n_routed_experts": testExperts, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.add(prefix+"mlp.gate.e_score_correction_bias", "F32", testExperts)
			m.experts(prefix+"mlp.", plain, "gate_proj", "up_proj", "down_proj")
			m.layers = append(m.layers, l)
		}
		return m
	},
	"mixtral in GPTQ": func(seed uint64) *model {
		m := newModel(seed, "mixtral", map[string]any{"num_local_experts": testExperts})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "block_sparse_moe.", "gate")
			m.experts(prefix+"block_sparse_moe.", gptq, "w1", "w2", "w3")
			m.layers = append(m.layers, l)
		}
		return m
	},
	"olmoe": func(seed uint64) *model {
		m := newModel(seed, "olmoe", map[string]any{"num_experts": testExperts})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "gate")
			m.experts(prefix+"mlp.", plain, "gate_proj", "up_proj", "down_proj")
			m.layers = append(m.layers, l)
		}
		return m
	},
	"gpt_oss": func(seed uint64) *model {
		m := newModel(seed, "gpt_oss", map[string]any{"num_local_experts": testExperts})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "router")
			m.add(prefix+"mlp.router.bias", "BF16", testExperts)
			m.add(prefix+"mlp.experts.gate_up_proj", "BF16", testExperts, testHidden, 6)
			m.add(prefix+"mlp.experts.gate_up_proj_bias", "BF16", testExperts, 6)
			m.add(prefix+"mlp.experts.down_proj", "BF16", testExperts, 3, testHidden)
			m.add(prefix+"mlp.experts.down_proj_bias", "BF16", testExperts, testHidden)
			m.layers = append(m.layers, l)
		}
		return m
	},
	"gpt_oss in MXFP4": func(seed uint64) *model {
		m := newModel(seed, "gpt_oss", map[string]any{
			"num_local_experts": testExperts,
			"quantization_config": map[string]any{"quant_method": "mxfp4", "modules_to_not_convert": []string{
				"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
			}},
		})
		for l := range testLayers {
			prefix := fmt.Sprintf("model.layers.%d.", l)
			gateAndAttention(m, prefix, "mlp.", "router")
			m.add(prefix+"mlp.router.bias", "BF16", testExperts)
			for _, projection := range []string{"gate_up_proj", "down_proj"} {
				m.add(prefix+"mlp.experts."+projection+"_blocks", "U8", testExperts, 6, 2, 16)
				m.add(prefix+"mlp.experts."+projection+"_scales", "U8", testExperts, 6, 2)
				m.add(prefix+"mlp.experts."+projection+"_bias", "BF16", testExperts, 6)
			}
			m.layers = append(m.layers, l)
		}
		return m
	},
}
