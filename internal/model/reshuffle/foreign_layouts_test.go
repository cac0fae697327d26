// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
)

// foreign returns a checkpoint of an invented family that is laid out as qwen3_moe, under a prefix of its own.
func foreign(name, prefix string) published {
	return published{
		modelType: name, config: qwenConfig(nil), prefix: prefix, block: "mlp.", gate: "gate.weight", projections: threeProjections,
		others: []string{"mlp.shared_expert.up_proj.weight", "post_attention_layernorm.weight"},
	}
}

// TestForeignPrefixes permutes invented families whose layers have a prefix that no known family has, in each form.
func TestForeignPrefixes(t *testing.T) {
	for i, test := range []struct {
		prefix string
		root   []string
	}{
		{"transformer.h.%d.", []string{"transformer.wte.weight", "transformer.ln_f.weight"}},
		{"model.decoder.layers.%d.", []string{"model.decoder.embed_tokens.weight", "model.decoder.final_layernorm.weight"}},
		{"model.text_model.layers.%d.", []string{"model.text_model.norm.weight", "model.vision_tower.layers.0.mlp.fc1.weight"}},
		{"llm.model.layers.%d.", []string{"llm.lm_head.weight", "talker.model.layers.0.mlp.gate.weight"}},
		{"blocks.%d.", []string{"tok_embeddings.weight", "output.weight"}},
	} {
		forms := slices.Sorted(maps.Keys(quantizedForms))
		form := forms[i%len(forms)]
		t.Run(test.prefix+" "+form, func(t *testing.T) {
			p := foreign("zephyr_moe", test.prefix)
			p.root = test.root
			p.permute(t, p.generate(5, form), "qwen3_moe")
		})
	}
}

// TestForeignLayouts has invented families with content whose dependence on the order of the experts cannot be known.
// The inspection gives the reason, and nothing is written.
func TestForeignLayouts(t *testing.T) {
	config := func(name string, value any) func(m *model) { return func(m *model) { m.config[name] = value } }
	tensor := func(name string, dtype checkpoint.DType, shape ...int64) func(m *model) {
		return func(m *model) { m.add("model.layers.1."+name, dtype, shape...) }
	}
	each := func(value func(e int) any) []any {
		var list []any
		for e := range testExperts {
			list = append(list, value(e))
		}
		return list
	}
	for name, test := range map[string]struct {
		as     string
		change func(m *model)
		want   string
	}{
		// Gates.
		"scales of a gate in one row":          {"qwen3_moe", tensor("mlp.gate.weight_scale", "F32", 1, testExperts), "mlp.gate.weight_scale"},
		"offsets of a gate in one row":         {"qwen3_moe", tensor("mlp.gate.weight_offset", "F32", 1, testExperts), "mlp.gate.weight_offset"},
		"inputs of a gate by expert":           {"qwen3_moe", tensor("mlp.gate.pre_quant_scale", "F32", testExperts), "mlp.gate.pre_quant_scale"},
		"gate that reads the scores before":    {"qwen3_moe", tensor("mlp.gate.weight", "BF16", testExperts, testHidden+testExperts), "mlp.gate.weight"},
		"transposed gate":                      {"qwen3_moe", tensor("mlp.gate.weight", "BF16", testHidden, testExperts), "mlp.gate.weight"},
		"gate with a row of the shared expert": {"qwen3_moe", tensor("mlp.gate.weight", "BF16", testExperts+1, testHidden), "mlp.gate.weight"},
		"second gate":                          {"qwen3_moe", tensor("mlp.gate_2.weight", "BF16", testExperts, testHidden), "mlp.gate_2.weight"},
		"correction bias of another name":      {"qwen3_moe", tensor("mlp.gate.balance_bias", "F32", testExperts), "mlp.gate.balance_bias"},
		"correction bias as a row":             {"qwen3_moe", tensor("mlp.gate.e_score_correction_bias", "F32", 1, testExperts), "e_score_correction_bias"},
		"scale of Gemma's gate by expert":      {"gemma4_text", func(m *model) { m.add("model.layers.1.router.scale", "F32", testExperts) }, "router.scale"},
		"lookup table of a gate":               {"qwen3_moe", tensor("mlp.gate.tid2eid", "I64", 16, 2), "mlp.gate.tid2eid"},
		// Experts.
		"expert numbers in experts":            {"qwen3_moe", func(m *model) { perExpert(m, "expert_id", "I64", 1) }, "expert_id"},
		"successors of experts":                {"qwen3_moe", func(m *model) { perExpert(m, "successor", "I64", 1) }, "successor"},
		"ranks in experts":                     {"qwen3_moe", func(m *model) { perExpert(m, "home_rank", "I32", 1) }, "home_rank"},
		"experts of another width":             {"qwen3_moe", tensor("mlp.experts.3.up_proj.weight", "BF16", 6, 4), "expert 3"},
		"experts of another type":              {"qwen3_moe", tensor("mlp.experts.3.up_proj.weight", "F8_E4M3", 2, 4), "expert 3"},
		"packed along the experts":             {"gpt_oss", func(m *model) { m.add("model.layers.1.mlp.experts.gate_up_proj", "I32", 2, testHidden, 6) }, "gate_up_proj"},
		"experts in the second dimension":      {"gpt_oss", func(m *model) { m.add("model.layers.1.mlp.experts.gate_up_proj", "BF16", testHidden, testExperts, 6) }, "gate_up_proj"},
		"fused without a dimension of experts": {"gpt_oss", func(m *model) { m.add("model.layers.1.mlp.experts.gate_up_proj", "BF16", testExperts, 6) }, "gate_up_proj"},
		"scales with experts second":           {"gpt_oss", func(m *model) { m.add("model.layers.1.mlp.experts.gate_up_proj_scale", "F32", 1, testExperts) }, "gate_up_proj_scale"},
		"experts from one":                     {"qwen3_moe", func(m *model) { renameExperts(m, func(e int) int { return e + 1 }) }, "experts."},
		"experts of the whole model":           {"qwen3_moe", func(m *model) { m.add("model.experts.0.up_proj.weight", "BF16", 2, 4) }, "model.experts.0"},
		"shared expert of another name":        {"qwen3_moe", tensor("mlp.common_ffn.up_proj.weight", "BF16", 2, 4), "mlp.common_ffn"},
		"experts of the attention":             {"qwen3_moe", tensor("self_attn.experts.0.q_proj.weight", "BF16", 2, 4), "self_attn.experts.0"},
		"gate of the attention's experts":      {"qwen3_moe", tensor("self_attn.router.weight", "BF16", testExperts, testHidden), "self_attn.router"},
		// Configuration.
		"groups under another name":             {"qwen3_moe", config("num_expert_groups", 4), "num_expert_groups"},
		"groups of a router":                    {"qwen3_moe", config("moe_router_num_groups", 4), "moe_router_num_groups"},
		"limit of groups":                       {"qwen3_moe", config("topk_groups", 2), "topk_groups"},
		"experts that are always active":        {"qwen3_moe", config("num_always_active_experts", 2), "num_always_active_experts"},
		"first experts of another kind":         {"qwen3_moe", config("n_vision_experts", 4), "n_vision_experts"},
		"width of each expert":                  {"qwen3_moe", config("moe_intermediate_size", each(func(e int) any { return 64 + e })), "moe_intermediate_size"},
		"key that names an expert":              {"qwen3_moe", config("expert_3_scale", 0.5), "expert_3_scale"},
		"value that names an expert":            {"qwen3_moe", config("fallback", "expert-7"), "expert-7"},
		"bits of each expert":                   {"qwen3_moe", config("quantization_config", map[string]any{"quant_method": "awq", "expert_bits": each(func(e int) any { return 4 + e%2*4 })}), "expert_bits"},
		"expert numbers in the quantisation":    {"qwen3_moe", config("quantization_config", map[string]any{"quant_method": "gptq", "fp16_experts": []int{3, 5}}), "fp16_experts"},
		"ranges of experts in the quantisation": {"qwen3_moe", config("quantization_config", map[string]any{"ignore": []string{"re:.*experts\\.(0|1|2)\\..*"}}), "exchanged"},
		"placement of experts":                  {"qwen3_moe", config("expert_to_rank", "0,0,1,1"), "expert_to_rank"},
	} {
		t.Run(name, func(t *testing.T) {
			p := foreign("boreas_moe", "model.layers.%d.")
			switch test.as {
			case "gpt_oss":
				p = published{modelType: "boreas_moe", config: qwenConfig(nil), block: "mlp.", gate: "router.weight", fused: fusedMLP, rows: []string{"mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}}
			case "gemma4_text":
				p = published{modelType: "boreas_moe", config: qwenConfig(map[string]any{"enable_moe_block": true}), gate: "router.proj.weight", fused: []string{"experts.gate_up_proj", "experts.down_proj"}}
			}
			m := p.generate(2, "plain")
			test.change(m)
			dir, parent := m.write(t, 1<<20), t.TempDir()
			report, err := checkpoint.InspectAs(dir, test.as)
			atRun := test.want == "exchanged" // patterns are compared with the names that change
			if err != nil || !atRun && (report.Family != checkpoint.UnknownFamily || !strings.Contains(report.Unprofilable, test.want) || report.Unpermutable == "") {
				t.Errorf("report %+v, error %v; want the reason %q", report, err, test.want)
			}
			_, err = Run(t.Context(), Options{Model: dir, LayoutAs: test.as, Permutation: m.permutation(m.layers...), Out: parent + "/out"})
			if !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if written, err := os.ReadDir(parent); err != nil || len(written) > 0 {
				t.Errorf("written: %v, %v", written, err)
			}
		})
	}
}

// perExpert adds a tensor to each expert of layer 1.
func perExpert(m *model, name string, dtype checkpoint.DType, shape ...int64) {
	for e := range testExperts {
		m.add(fmt.Sprintf("%s%d.%s", experts, e, name), dtype, shape...)
	}
}

// renameExperts renumbers the experts of layer 1.
func renameExperts(m *model, number func(e int) int) {
	renamed := map[string]tensor{}
	for name, x := range m.tensors {
		if rest, ok := strings.CutPrefix(name, experts); ok {
			var e int
			if _, err := fmt.Sscan(rest, &e); err == nil {
				_, tail, _ := strings.Cut(rest, ".")
				name = fmt.Sprintf("%s%d.%s", experts, number(e), tail)
			}
		}
		renamed[name] = x
	}
	m.tensors = renamed
}

// TestForeignForms permutes an invented family in every quantised form, and an invented family with fused experts.
func TestForeignForms(t *testing.T) {
	for _, form := range slices.Sorted(maps.Keys(quantizedForms)) {
		t.Run(form, func(t *testing.T) {
			p := foreign("boreas_moe", "model.layers.%d.")
			p.permute(t, p.generate(7, form), "qwen3_moe")
		})
	}
	for _, form := range slices.Sorted(maps.Keys(fusedForms)) {
		t.Run("fused "+form, func(t *testing.T) {
			p := published{modelType: "boreas_moe", config: qwenConfig(nil), block: "mlp.", gate: "gate.weight", fused: fusedMLP}
			p.permute(t, p.generate(7, form), "qwen3_moe")
		})
	}
}
