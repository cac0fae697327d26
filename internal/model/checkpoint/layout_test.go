// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestClassify(t *testing.T) {
	for _, test := range []struct {
		modelType, name string
		want            Part
	}{
		{"qwen3_moe", "model.layers.3.mlp.experts.17.up_proj.weight", Part{Role: Expert, Layer: 3, Expert: 17, Name: "up_proj.weight"}},
		{"qwen3_moe", "model.layers.3.mlp.experts.17", Part{Role: Expert, Layer: 3, Expert: 17}},
		{"qwen3_moe", "model.layers.3.mlp.gate.weight", Part{Role: Gate, Layer: 3, Name: "weight"}},
		{"qwen3_moe", "model.layers.3.mlp.gate_proj.weight", Part{Role: Unrecognised, Layer: 3, Name: "gate_proj.weight"}},
		{"qwen3_moe", "model.layers.3.mlp.experts.07.up_proj.weight", Part{Role: Unrecognised, Layer: 3, Name: "experts.07.up_proj.weight"}},
		{"qwen3_moe", "model.layers.x.mlp.gate.weight", Part{}},
		{"qwen3_moe", "model.layers.3.self_attn.q_proj.weight", Part{}},
		{"qwen3_moe", "model.embed_tokens.weight", Part{}},
		{"qwen3_moe", "model.visual.layers.3.mlp.gate.weight", Part{}},
		{"qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight", Part{Role: Shared, Layer: 0, Name: "shared_expert_gate.weight"}},
		{"deepseek_v3", "model.layers.4.mlp.gate.e_score_correction_bias", Part{Role: Gate, Layer: 4, Name: "e_score_correction_bias"}},
		{"deepseek_v3", "model.layers.61.mlp.experts.255.down_proj.weight_scale_inv", Part{Role: Expert, Layer: 61, Expert: 255, Name: "down_proj.weight_scale_inv"}},
		{"deepseek_v3", "model.layers.4.mlp.shared_experts.up_proj.weight", Part{Role: Shared, Layer: 4, Name: "shared_experts.up_proj.weight"}},
		{"qwen3_next", "mtp.layers.0.mlp.experts.2.up_proj.weight", Part{Role: Expert, Layer: 8, Expert: 2, Name: "up_proj.weight"}},
		{"qwen3_vl_moe_text", "model.language_model.layers.5.mlp.experts.gate_up_proj", Part{Role: Fused, Layer: 5, Name: "experts.gate_up_proj"}},
		{"kimi_k2", "language_model.model.layers.5.mlp.gate.weight", Part{Role: Gate, Layer: 5, Name: "weight"}},
		{"deepseek_v2", "language.model.layers.5.mlp.gate.weight", Part{Role: Gate, Layer: 5, Name: "weight"}},
		{"mixtral", "model.layers.1.block_sparse_moe.experts.7.w2.weight", Part{Role: Expert, Layer: 1, Expert: 7, Name: "w2.weight"}},
		{"mixtral", "model.layers.1.mlp.experts.7.w2.weight", Part{}},
		{"gpt_oss", "model.layers.1.mlp.experts.down_proj_blocks", Part{Role: Fused, Layer: 1, Name: "experts.down_proj_blocks"}},
		{"gpt_oss", "model.layers.1.mlp.router.bias", Part{Role: Gate, Layer: 1, Name: "bias"}},
	} {
		c := &Config{ModelType: test.modelType, Layers: 8}
		got := c.Classify(test.name)
		if diff := cmp.Diff(test.want, got, cmpopts.IgnoreUnexported(Part{})); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
		if got.Role == Expert && got.ExpertName(got.Expert) != test.name {
			t.Errorf("%s is written back as %s", test.name, got.ExpertName(got.Expert))
		}
	}
}

func TestParseConfigOfLaterFamilies(t *testing.T) {
	const base = `"num_hidden_layers":4,"num_experts_per_tok":2,"hidden_size":64,"vocab_size":512`
	for name, test := range map[string]struct {
		text   string
		layers []int
		groups int
	}{
		"qwen3_next":                  {`{"model_type":"qwen3_next","num_experts":16,"decoder_sparse_step":1,` + base + `}`, []int{0, 1, 2, 3}, 1},
		"qwen3_vl_moe":                {`{"model_type":"qwen3_vl_moe","text_config":{"model_type":"qwen3_vl_moe_text","num_experts":16,"mlp_only_layers":[2],` + base + `}}`, []int{0, 1, 3}, 1},
		"deepseek_v3, groups not set": {`{"model_type":"deepseek_v3","n_routed_experts":16,"first_k_dense_replace":1,` + base + `}`, []int{1, 2, 3}, 8},
		"deepseek_v3, without groups": {`{"model_type":"deepseek_v3","n_routed_experts":16,"n_group":1,"topk_group":1,` + base + `}`, []int{0, 1, 2, 3}, 1},
	} {
		c, err := ParseConfig([]byte(test.text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if diff := cmp.Diff(test.layers, c.MoELayers); diff != "" || c.Groups != test.groups || c.Experts != 16 {
			t.Errorf("%s: %d groups, %d experts, layers %s", name, c.Groups, c.Experts, diff)
		}
	}
}

func TestMoELayersOfTinyModel(t *testing.T) {
	c, err := Open(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	layers, err := c.MoELayers()
	if err != nil || len(layers) != 4 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	axes, err := c.ExpertAxes(layers[2])
	if axis := axes["model.layers.2.mlp.gate.weight"]; err != nil || len(axes) != 1 || !axis.Rows() || axis.Bits != 8*2*128 {
		t.Errorf("%+v, %v", axes, err)
	}
}

// TestWriteIndex reproduces the index of transformers byte for byte.
func TestWriteIndex(t *testing.T) {
	c, err := Open(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want, err := c.ReadIndex()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, shard := range c.Shards {
		names = append(names, shard.Names()...)
	}
	var got bytes.Buffer
	if err := WriteIndex(&got, want, names, func(name string) string {
		shard, _ := c.Shard(name)
		return shard.Name()
	}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Error(diff)
	}
}

// TestEncodeHeader reproduces the headers of transformers byte for byte.
func TestEncodeHeader(t *testing.T) {
	c, err := Open(tinyModel)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, shard := range c.Shards {
		want, err := shard.ReadHeaderText()
		if err != nil {
			t.Fatal(err)
		}
		text, err := EncodeHeader(&shard.Header, shard.HeaderBytes())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(text)); diff != "" {
			t.Errorf("%s: %s", shard.Path, diff)
		}
		framed, err := os.ReadFile(shard.Path)
		if err != nil || !bytes.HasPrefix(framed, FrameHeader(text)) {
			t.Errorf("%s does not begin with its framed header (%v)", filepath.Base(shard.Path), err)
		}
	}
}

func FuzzEncodeHeader(f *testing.F) {
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F4","shape":[2],"data_offsets":[24,25]}}`), 200)
	f.Add([]byte(`{"__metadata__":{"<a>":"\u2028"},"s\"":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}  `), 0)
	f.Add([]byte(`{}`), 8)
	f.Fuzz(func(t *testing.T, text []byte, size int) {
		h, err := ParseHeader(text)
		if err != nil {
			return
		}
		size %= 1 << 16
		encoded, err := EncodeHeader(h, size)
		if err != nil {
			t.Fatal(err)
		}
		if len(encoded) < size || strings.TrimRight(string(encoded), " ") == "" {
			t.Fatalf("%d bytes, want at least %d", len(encoded), size)
		}
		again, err := ParseHeader(encoded)
		if err != nil {
			t.Fatalf("%v: %s", err, encoded)
		}
		if diff := cmp.Diff(h, again, cmpopts.EquateEmpty()); diff != "" {
			t.Fatal(diff)
		}
	})
}
