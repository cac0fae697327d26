// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/json"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

func TestLoadRefuses(t *testing.T) {
	base := map[string]any{
		"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 4, "vocab_size": 5,
		"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "moe_intermediate_size": 3, "rms_norm_eps": 1e-6,
		"max_position_embeddings": 8, "hidden_act": "silu", "rope_theta": 100.0, "tie_word_embeddings": true,
	}
	parse := func(t *testing.T, change map[string]any) (map[string]any, *Config, error) {
		t.Helper()
		config := maps.Clone(base)
		maps.Copy(config, change)
		text, err := json.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		c, err := checkpoint.ParseConfig(text)
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := parseConfig(c)
		return config, parsed, err
	}
	for name, test := range map[string]struct {
		change map[string]any
		want   string
	}{
		"family":         {map[string]any{"model_type": "mixtral"}, `model_type "mixtral": this engine runs qwen3_moe only`},
		"activation":     {map[string]any{"hidden_act": "gelu"}, `hidden_act "gelu"`},
		"bias":           {map[string]any{"attention_bias": true}, "attention_bias"},
		"sliding window": {map[string]any{"use_sliding_window": true}, "use_sliding_window"},
		"rope scaling":   {map[string]any{"rope_scaling": map[string]any{"type": "yarn"}}, "rope_scaling"},
		"rope type":      {map[string]any{"rope_parameters": map[string]any{"rope_type": "yarn", "rope_theta": 1}}, `rope_type "yarn"`},
		"quantization":   {map[string]any{"quantization_config": map[string]any{"bits": 4}}, "quantization_config"},
		"no heads":       {map[string]any{"num_attention_heads": 0}, "num_attention_heads is 0"},
		"heads":          {map[string]any{"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads 2 does not divide num_attention_heads 3"},
		"odd head":       {map[string]any{"head_dim": 3}, "head_dim 3 is odd"},
		"rope theta":     {map[string]any{"rope_theta": 0}, "rope_theta is 0"},
		"epsilon":        {map[string]any{"rms_norm_eps": 0}, "rms_norm_eps is 0"},
		"expert width":   {map[string]any{"moe_intermediate_size": nil}, "moe_intermediate_size is 0"},
		"dense width":    {map[string]any{"num_hidden_layers": 2, "mlp_only_layers": []int{0}}, "intermediate_size is 0"},
		"wrong type":     {map[string]any{"head_dim": "2"}, "head_dim"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := parse(t, test.change); err == nil || !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want %q", err, test.want)
			}
		})
	}
	for name, change := range map[string]map[string]any{
		"none":                   {"rope_scaling": nil},
		"scaling, type":          {"rope_scaling": map[string]any{"type": "default"}},
		"scaling, rope_type":     {"rope_scaling": map[string]any{"rope_type": "default"}},
		"parameters":             {"rope_theta": nil, "rope_parameters": map[string]any{"rope_type": "default", "rope_theta": 100}},
		"parameters, of no type": {"rope_theta": nil, "rope_parameters": map[string]any{"rope_theta": 100}},
	} {
		if _, parsed, err := parse(t, change); err != nil || parsed.RopeTheta != 100 {
			t.Errorf("rope, %s: %+v, %v", name, parsed, err)
		}
	}
	for name, test := range map[string]struct {
		change  func(shapes map[string][]int)
		context int
		want    string
	}{
		"tensor missing": {func(s map[string][]int) { delete(s, "model.layers.0.mlp.experts.1.up_proj.weight") }, 0, `no tensor "model.layers.0.mlp.experts.1.up_proj.weight"`},
		"wrong shape":    {func(s map[string][]int) { s["model.layers.0.mlp.gate.weight"] = []int{3, 4} }, 0, `"model.layers.0.mlp.gate.weight" has shape [3 4], config.json implies [2 4]`},
		"context":        {func(map[string][]int) {}, 9, "context length 9 is above the model's max_position_embeddings 8"},
	} {
		t.Run(name, func(t *testing.T) {
			config, parsed, err := parse(t, nil)
			if err != nil {
				t.Fatal(err)
			}
			shapes := shapesOf(parsed)
			test.change(shapes)
			dir, _ := synthetic(t, rand.New(rand.NewPCG(1, 1)), config, shapes)
			c, err := checkpoint.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := Load(c, test.context); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want %q", err, test.want)
			}
		})
	}
}
