// SPDX-License-Identifier: Apache-2.0

package reshuffle

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/model/family"
	"github.com/semmoe/operator/test/tier"
)

// published is a family as its checkpoints are published. Names are spelled out as in the sources that the table of
// package family names, so that the tests do not derive them from the table.
type published struct {
	modelType string
	config    map[string]any
	// wrappers are the members of config.json around the language model's configuration, outermost first.
	wrappers []string
	// prefix is the prefix of the layers. dense lists the layers without experts.
	prefix string
	dense  []int
	// block, gate and projections are the names of the tensors of an MoE layer. fused lists tensors with the experts in
	// dimension 0, in place of projections.
	block, gate string
	projections []string
	fused       []string
	// rows lists further tensors with a value per expert, as [experts], matrices of one row, as [1, experts].
	rows, matrices []string
	// others lists tensors in the layer that do not depend on the experts. zero is the number of zero experts.
	others []string
	zero   int
	// numbers is a tensor of expert numbers in the layers before the last.
	numbers string
	groups  int
	// root lists further tensors of the model, and rename changes the names of the common tensors.
	root []string
}

var threeProjections = []string{"gate_proj", "up_proj", "down_proj"}

// qwenConfig returns the configuration of a family that spells the number of experts as num_experts.
func qwenConfig(more map[string]any) map[string]any {
	config := map[string]any{"num_experts": testExperts}
	maps.Copy(config, more)
	return config
}

// deepseekConfig returns the configuration of a family that spells the number of experts as n_routed_experts.
func deepseekConfig(more map[string]any) map[string]any {
	config := map[string]any{"n_routed_experts": testExperts, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
	maps.Copy(config, more)
	return config
}

var (
	longcat = map[string]any{"n_routed_experts": testExperts, "zero_expert_num": 4, "moe_topk": 2, "num_experts_per_tok": nil, "num_layers": testLayers, "num_hidden_layers": nil}
	// nemotron5 is the configuration of transformers 5, without the number of layers.
	nemotron5 = map[string]any{"n_routed_experts": testExperts, "layers_block_type": []string{"linear_attention", "moe", "moe"}, "mtp_layers_block_type": []string{"full_attention", "moe"}, "num_hidden_layers": nil}
	local     = map[string]any{"num_local_experts": testExperts}
)

var fusedMLP = []string{"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}

var publishedFamilies = []published{
	{modelType: "deepseek_v32", config: map[string]any{"n_routed_experts": testExperts, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}, groups: 4, dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight", "self_attn.indexer.wq_b.weight"}},
	{
		modelType: "deepseek_v4", config: map[string]any{"n_routed_experts": testExperts, "num_hash_layers": 2, "compress_ratios": []int{0, 4, 8}}, prefix: "layers.%d.", block: "ffn.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"},
		rows: []string{"ffn.gate.bias"}, numbers: "ffn.gate.tid2eid", others: []string{"ffn.shared_experts.w1.weight", "attn.wq_a.weight", "attn.attn_sink", "attn_norm.weight", "ffn_norm.weight", "hc_attn_fn", "hc_ffn_scale"},
		root: []string{"embed.weight", "head.weight", "norm.weight", "hc_head_fn"},
	},
	{modelType: "kimi_linear", config: map[string]any{"num_experts": testExperts, "num_experts_per_token": 2, "num_experts_per_tok": nil, "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1}, dense: []int{0}, block: "block_sparse_moe.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"}, rows: []string{"block_sparse_moe.gate.e_score_correction_bias"}, others: []string{"block_sparse_moe.shared_experts.up_proj.weight", "self_attn.A_log", "self_attn.f_a_proj.weight"}},
	{modelType: "glm4_moe_lite", config: deepseekConfig(nil), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{modelType: "glm4v_moe_text", wrappers: []string{"text_config"}, config: deepseekConfig(nil), dense: []int{0}, prefix: "model.language_model.layers.%d.", block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}, root: []string{"model.visual.blocks.0.mlp.gate_proj.weight"}},
	{modelType: "glm_moe_dsa", config: map[string]any{"n_routed_experts": testExperts, "mlp_layer_types": []string{"dense", "dense", "sparse"}}, dense: []int{0, 1}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight", "self_attn.indexer.wk.weight"}},
	{modelType: "qwen3_5_moe_text", wrappers: []string{"text_config"}, config: qwenConfig(nil), prefix: "model.language_model.layers.%d.", block: "mlp.", gate: "gate.weight", fused: []string{"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}, others: []string{"mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight", "linear_attn.A_log"}},
	{modelType: "qwen3_omni_moe_text", wrappers: []string{"thinker_config", "text_config"}, config: qwenConfig(nil), prefix: "thinker.model.layers.%d.", block: "mlp.", gate: "gate.weight", projections: threeProjections, root: []string{"thinker.lm_head.weight", "talker.model.layers.0.mlp.experts.0.up_proj.weight", "code2wav.decoder.0.conv.weight"}},
	{modelType: "minimax_m2", config: map[string]any{"num_local_experts": testExperts}, block: "block_sparse_moe.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"}, rows: []string{"block_sparse_moe.e_score_correction_bias"}},
	{modelType: "mimo_v2_flash", config: map[string]any{"n_routed_experts": testExperts, "moe_layer_freq": []int{0, 1, 1}, "hybrid_layer_pattern": []int{0, 1, 1}}, dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"self_attn.attention_sink_bias"}},
	{modelType: "mimo_v2", config: map[string]any{"n_routed_experts": testExperts, "moe_layer_freq": []int{0, 1, 1}}, dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}},
	{modelType: "dots1", config: deepseekConfig(nil), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{modelType: "solar_open", config: map[string]any{"n_routed_experts": testExperts, "n_group": 1}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{modelType: "bailing_moe", config: qwenConfig(map[string]any{"first_k_dense_replace": 0}), block: "mlp.", gate: "gate.weight", projections: threeProjections, others: []string{"mlp.shared_experts.up_proj.weight", "attention.query_key_value.weight", "attention.dense.weight"}, root: []string{"model.word_embeddings.weight"}},
	{modelType: "bailing_moe_v2", config: qwenConfig(map[string]any{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}), groups: 4, dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.expert_bias"}, others: []string{"mlp.shared_experts.up_proj.weight", "attention.query_layernorm.weight"}, root: []string{"model.word_embeddings.weight"}},
	{modelType: "ernie4_5_moe", config: map[string]any{"moe_num_experts": testExperts, "moe_k": 2, "num_experts_per_tok": nil, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, matrices: []string{"mlp.moe_statics.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{modelType: "hunyuan_v1_moe", config: map[string]any{"num_experts": testExperts, "moe_topk": []int{2, 2, 2}, "num_experts_per_tok": nil}, block: "mlp.", gate: "gate.wg.weight", projections: threeProjections, others: []string{"mlp.shared_mlp.up_proj.weight", "self_attn.query_layernorm.weight"}},
	{modelType: "exaone_moe", config: qwenConfig(map[string]any{"mlp_layer_types": []string{"dense", "sparse", "sparse"}}), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{modelType: "afmoe", config: qwenConfig(map[string]any{"num_dense_layers": 1}), dense: []int{0}, block: "mlp.", gate: "router.gate.weight", projections: threeProjections, rows: []string{"mlp.expert_bias"}, others: []string{"mlp.shared_experts.up_proj.weight", "self_attn.gate_proj.weight", "post_mlp_layernorm.weight"}},
	{modelType: "longcat_flash", config: longcat, zero: 4, block: "mlp.", gate: "router.classifier.weight", projections: threeProjections, rows: []string{"mlp.router.e_score_correction_bias"}, others: []string{"mlps.0.up_proj.weight", "self_attn.1.q_a_proj.weight", "input_layernorm.1.weight"}, root: []string{"model.mtp.layers.0.eh_proj.weight"}},
	{modelType: "longcat_flash", config: longcat, zero: 4, block: "mlp.", gate: "router.classifier.weight", projections: threeProjections, rows: []string{"mlp.router.e_score_correction_bias"}, others: []string{"mlp.experts.12.up_proj.weight", "mlp.experts.15.up_proj.weight"}},
	{modelType: "llama4_text", wrappers: []string{"text_config"}, config: map[string]any{"num_local_experts": testExperts, "interleave_moe_layer_step": 2, "no_rope_layers": []int{1, 1, 0}}, dense: []int{0, 2}, prefix: "language_model.model.layers.%d.", block: "feed_forward.", gate: "router.weight", fused: []string{"feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"}, others: []string{"feed_forward.shared_expert.up_proj.weight"}, root: []string{"vision_model.model.layers.0.mlp.fc1.weight", "multi_modal_projector.linear_1.weight"}},
	{modelType: "llama4_text", config: map[string]any{"num_local_experts": testExperts, "moe_layers": []int{0, 2}}, dense: []int{1}, block: "feed_forward.", gate: "router.weight", projections: threeProjections},
	{modelType: "phimoe", config: map[string]any{"num_local_experts": testExperts}, block: "block_sparse_moe.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"}, others: []string{"self_attn.o_proj.bias", "input_layernorm.bias"}},
	{modelType: "granitemoe", config: map[string]any{"num_local_experts": testExperts}, block: "block_sparse_moe.", gate: "router.layer.weight", fused: []string{"block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"}},
	{modelType: "granitemoeshared", config: map[string]any{"num_local_experts": testExperts}, block: "block_sparse_moe.", gate: "router.layer.weight", fused: []string{"block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"}, others: []string{"shared_mlp.input_linear.weight"}},
	{modelType: "granitemoehybrid", config: map[string]any{"num_local_experts": testExperts, "layer_types": []string{"mamba", "attention", "mamba"}}, block: "block_sparse_moe.", gate: "router.layer.weight", fused: []string{"block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"}, others: []string{"shared_mlp.input_linear.weight", "mamba.A_log"}},
	{modelType: "step3p5", config: map[string]any{"moe_num_experts": testExperts, "moe_top_k": 2, "num_experts_per_tok": nil, "moe_layers_enum": "1,2"}, dense: []int{0}, block: "moe.", gate: "gate.weight", fused: []string{"moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight"}, rows: []string{"moe.router_bias"}, others: []string{"share_expert.up_proj.weight", "self_attn.g_proj.weight"}},
	{modelType: "nemotron_h", config: map[string]any{"n_routed_experts": testExperts, "hybrid_override_pattern": "MEE"}, prefix: "backbone.layers.%d.", dense: []int{0}, block: "mixer.", gate: "gate.weight", projections: []string{"up_proj", "down_proj"}, rows: []string{"mixer.gate.e_score_correction_bias"}, others: []string{"mixer.shared_experts.up_proj.weight", "mixer.fc1_latent_proj.weight", "norm.weight"}, root: []string{"backbone.embeddings.weight", "backbone.norm_f.weight"}},
	{modelType: "gemma4_text", wrappers: []string{"text_config"}, config: map[string]any{"num_experts": testExperts, "top_k_experts": 2, "num_experts_per_tok": nil, "enable_moe_block": true}, prefix: "model.language_model.layers.%d.", gate: "router.proj.weight", fused: []string{"experts.gate_up_proj", "experts.down_proj"}, rows: []string{"router.per_expert_scale"}, others: []string{"router.scale", "mlp.gate_proj.weight", "layer_scalar", "post_feedforward_layernorm_1.weight"}, root: []string{"model.embed_vision.embedding_projection.weight"}},
	{modelType: "lfm2_moe", config: qwenConfig(map[string]any{"num_dense_layers": 1}), dense: []int{0}, block: "feed_forward.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"}, rows: []string{"feed_forward.expert_bias"}, others: []string{"conv.in_proj.weight", "operator_norm.weight", "ffn_norm.weight"}, root: []string{"model.embedding_norm.weight"}},
	// Older families.
	{modelType: "deepseek_v2", config: deepseekConfig(nil), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{modelType: "deepseek_v3", config: deepseekConfig(map[string]any{"n_group": 4, "topk_group": 2}), groups: 4, dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}},
	{modelType: "kimi_k2", wrappers: []string{"text_config"}, config: deepseekConfig(nil), prefix: "language_model.model.layers.%d.", dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}},
	{modelType: "glm4_moe", config: deepseekConfig(nil), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}},
	{modelType: "qwen2_moe", config: qwenConfig(nil), block: "mlp.", gate: "gate.weight", projections: threeProjections, others: []string{"mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight"}},
	{modelType: "qwen3_moe", config: qwenConfig(nil), block: "mlp.", gate: "gate.weight", projections: threeProjections},
	{modelType: "qwen3_moe", config: local, block: "mlp.", gate: "gate.weight", fused: fusedMLP},
	{modelType: "qwen3_next", config: qwenConfig(nil), block: "mlp.", gate: "gate.weight", projections: threeProjections, others: []string{"linear_attn.A_log"}},
	{modelType: "qwen3_vl_moe_text", wrappers: []string{"text_config"}, config: qwenConfig(nil), prefix: "model.language_model.layers.%d.", block: "mlp.", gate: "gate.weight", fused: fusedMLP},
	{modelType: "mixtral", config: local, block: "block_sparse_moe.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"}},
	{modelType: "olmoe", config: qwenConfig(nil), block: "mlp.", gate: "gate.weight", projections: threeProjections},
	{modelType: "gpt_oss", config: local, block: "mlp.", gate: "router.weight", fused: fusedMLP, rows: []string{"mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}},
	// The names of transformers 5 (save_original_format=False).
	{modelType: "nemotron_h", config: nemotron5, prefix: "backbone.layers.%d.", dense: []int{0}, block: "mixer.", gate: "gate.weight", projections: []string{"up_proj", "down_proj"}},
	{modelType: "nemotron_h", config: nemotron5, dense: []int{0}, block: "mixer.", gate: "gate.weight", fused: []string{"mixer.experts.up_proj", "mixer.experts.down_proj"}, rows: []string{"mixer.gate.e_score_correction_bias"}, root: []string{"model.embeddings.weight", "model.norm_f.weight"}},
	{modelType: "mixtral", config: local, block: "mlp.", gate: "gate.weight", fused: fusedMLP},
	{modelType: "minimax_m2", config: local, block: "mlp.", gate: "gate.weight", fused: fusedMLP, rows: []string{"mlp.e_score_correction_bias"}},
	{modelType: "phimoe", config: local, block: "mlp.", gate: "router.weight", fused: fusedMLP},
	{modelType: "granitemoe", config: local, block: "block_sparse_moe.", gate: "router.weight", fused: []string{"block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"}},
	{modelType: "kimi_linear", config: qwenConfig(map[string]any{"mlp_layer_types": []string{"dense", "sparse", "sparse"}}), dense: []int{0}, block: "mlp.", gate: "gate.weight", fused: fusedMLP, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"self_attn.forget_gate.A_log"}},
	{modelType: "step3p5", wrappers: []string{"text_config"}, config: deepseekConfig(map[string]any{"mlp_layer_types": []string{"dense", "sparse", "sparse"}}), prefix: "model.language_model.layers.%d.", dense: []int{0}, block: "mlp.", gate: "gate.weight", fused: fusedMLP, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"mlp.shared_experts.up_proj.weight"}},
	{
		modelType: "deepseek_v4", config: map[string]any{"n_routed_experts": testExperts, "mlp_layer_types": []string{"hash_moe", "hash_moe", "moe"}}, block: "mlp.", gate: "gate.weight", fused: fusedMLP,
		rows: []string{"mlp.gate.e_score_correction_bias"}, numbers: "mlp.gate.tid2eid", others: []string{"attn_hc.fn", "ffn_hc.scale"}, root: []string{"model.hc_head.hc_fn"},
	},
}

// quantizedForms are the forms in which checkpoints are published, with the tensors of a projection in each.
var quantizedForms = map[string]map[string]checkpoint.DType{
	"plain":              plain,
	"FP8 blocks":         fp8,
	"FP8 of DeepSeek-V4": {"weight": "U8", "scale": "F8_E8M0"},
	"packed int4":        packed,
	"packed NVFP4":       {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32", "input_global_scale": "F32"},
	"NVFP4 of ModelOpt":  {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"},
	"GPTQ":               gptq,
	"AWQ":                {"qweight": "I32", "qzeros": "I32", "scales": "F16"},
	"msModelSlim":        {"weight": "I8", "weight_scale": "F32", "weight_offset": "F32"},
}

// fusedForms are the quantized forms of tensors with all experts of a layer: the type and the further dimensions of
// each.
var fusedForms = map[string]map[string]fusedTensor{
	"plain":             {"": {"BF16", []int64{3, testHidden}}},
	"FP8 blocks":        {"": {"F8_E4M3", []int64{3, testHidden}}, "_scale_inv": {"F32", []int64{2, 2}}},
	"MXFP4":             {"_blocks": {"U8", []int64{6, 2, 16}}, "_scales": {"U8", []int64{6, 2}}},
	"packed int4":       {".weight_packed": {"I32", []int64{3, 1}}, ".weight_scale": {"BF16", []int64{3, 1}}, ".weight_shape": {"I64", []int64{2}}},
	"packed NVFP4":      {".weight_packed": {"U8", []int64{3, 4}}, ".weight_scale": {"F8_E4M3", []int64{3, 1}}, ".weight_global_scale": {"F32", nil}, ".input_global_scale": {"F32", nil}},
	"NVFP4 of ModelOpt": {"": {"U8", []int64{3, 4}}, "_weight_scale": {"F8_E4M3", []int64{3, 1}}, "_weight_scale_2": {"F32", nil}, "_input_scale": {"F32", nil}},
}

// fusedTensor is the type and the dimensions after that of the experts.
type fusedTensor struct {
	dtype checkpoint.DType
	shape []int64
}

// generate returns a checkpoint of the family in a quantized form.
func (p published) generate(seed uint64, form string) *model {
	m := newModel(seed, p.modelType, p.config)
	maps.DeleteFunc(m.config, func(_ string, value any) bool { return value == nil })
	for _, wrapper := range slices.Backward(p.wrappers) {
		m.config = map[string]any{"model_type": "wrapper_of_" + p.modelType, wrapper: m.config}
	}
	m.groups = max(p.groups, 1)
	prefix := p.prefix
	if prefix == "" {
		prefix = "model.layers.%d."
	}
	for _, name := range p.root {
		m.add(name, "BF16", testExperts, 2)
	}
	for l := range testLayers {
		prefix := fmt.Sprintf(prefix, l)
		m.add(prefix+"self_attn.q_proj.weight", "BF16", testExperts, testHidden)
		m.add(prefix+"input_layernorm.weight", "BF16", testHidden)
		for _, name := range p.others {
			if block := p.block == "" || strings.HasPrefix(name, p.block); !block || !slices.Contains(p.dense, l) {
				m.add(prefix+name, "BF16", sizeOf(name), 2)
			}
		}
		if slices.Contains(p.dense, l) {
			m.add(prefix+p.denseFFN(), "BF16", testExperts, testHidden)
			continue
		}
		m.layers = append(m.layers, l)
		m.add(prefix+p.block+p.gate, "BF16", int64(testExperts+p.zero), testHidden)
		for _, name := range p.rows {
			m.add(prefix+name, "F32", int64(testExperts+p.zero))
		}
		for _, name := range p.matrices {
			m.add(prefix+name, "F32", 1, testExperts)
		}
		if p.numbers != "" && l < testLayers-1 {
			m.addNumbers(prefix + p.numbers)
		}
		m.experts(prefix+p.block, quantizedForms[form], p.projections...)
		for _, name := range p.fused {
			// Granite and Step name the plain tensor of a fused module weight.
			base, isModule := strings.CutSuffix(name, ".weight")
			for suffix, x := range fusedForms[form] {
				if isModule && !strings.HasPrefix(suffix, ".weight") {
					suffix = ".weight" + suffix
				}
				m.add(prefix+base+suffix, x.dtype, append([]int64{testExperts}, x.shape...)...)
			}
		}
	}
	return m
}

// sizeOf returns the first dimension of a tensor that does not depend on the experts. It equals the number of experts,
// as it may by chance, except in a gate.
func sizeOf(name string) int64 {
	if name == "router.scale" {
		return testHidden
	}
	return testExperts
}

// denseFFN returns the name of a tensor of a layer without experts.
func (p published) denseFFN() string {
	switch p.block {
	case "block_sparse_moe.", "moe.", "ffn.":
		return "mlp.up_proj.weight"
	case "mixer.":
		return "mixer.in_proj.weight"
	}
	return p.block + "up_proj.weight"
}

// addNumbers adds a table of expert numbers.
func (m *model) addNumbers(name string) {
	m.add(name, "I64", 16, 2)
	data := m.tensors[name].data
	for i := range data {
		data[i] = 0
		if i%8 == 0 {
			data[i] = byte(m.rng.IntN(testExperts))
		}
	}
}

// moved returns the expected tensor of the output for a tensor of a layer, from the definition of a permutation.
func (p published) moved(m *model, prefix, name string, newToOld []int) tensor {
	in := m.tensors[prefix+name]
	if rest, ok := strings.CutPrefix(name, p.block+"experts."); ok && len(p.projections) > 0 {
		number, tail, _ := strings.Cut(rest, ".")
		var expert int
		if _, err := fmt.Sscan(number, &expert); err == nil && expert < testExperts {
			return m.tensors[fmt.Sprintf("%s%sexperts.%d.%s", prefix, p.block, newToOld[expert], tail)]
		}
	}
	if name == p.numbers {
		out := tensor{in.dtype, in.shape, slices.Clone(in.data)}
		for i := 0; i < len(out.data); i += 8 {
			out.data[i] = byte(slices.Index(newToOld, int(in.data[i])))
		}
		return out
	}
	fused := slices.ContainsFunc(p.fused, func(base string) bool { return strings.HasPrefix(name, strings.TrimSuffix(base, ".weight")) })
	if name != p.block+p.gate && !slices.Contains(p.rows, name) && !slices.Contains(p.matrices, name) && !fused {
		return in
	}
	lanes := testExperts
	if !fused {
		lanes += p.zero
	}
	rows := slices.Collect(slices.Chunk(in.data, len(in.data)/lanes))
	var data []byte
	for _, old := range newToOld {
		data = append(data, rows[old]...)
	}
	for _, fixed := range rows[testExperts:] {
		data = append(data, fixed...)
	}
	return tensor{in.dtype, in.shape, data}
}

// TestPublishedFamilies permutes every added family in each of its published forms, byte for byte, and restores the
// original by the inverse permutation. The commit tier takes two forms of each family, and all forms of the families
// together.
func TestPublishedFamilies(t *testing.T) {
	seen := map[string]bool{}
	for i, p := range publishedFamilies {
		seen[p.modelType] = true
		forms := slices.Sorted(maps.Keys(quantizedForms))
		if len(p.projections) == 0 {
			forms = slices.Sorted(maps.Keys(fusedForms))
			if strings.HasSuffix(p.fused[0], ".weight") {
				forms = slices.DeleteFunc(forms, func(form string) bool { return form == "MXFP4" || form == "NVFP4 of ModelOpt" })
			}
		}
		for j, form := range forms {
			if !tier.IsNightly() && form != "plain" && j != i%len(forms) {
				continue
			}
			t.Run(p.modelType+" "+form, func(t *testing.T) {
				m := p.generate(uint64(len(form)), form)
				p.permute(t, m, "")
			})
		}
	}
	for _, known := range family.Types() {
		if !seen[known] {
			t.Errorf("no generated checkpoint of %s", known)
		}
	}
}

// TestForms compares the forms of the tests with the documented ones.
func TestForms(t *testing.T) {
	separate, fused := 0, 0
	for _, form := range family.Forms {
		if form.Separate != nil {
			separate++
		}
		if form.Fused != nil {
			fused++
		}
		for _, suffix := range form.Separate {
			if _, ok := quantizedForms[form.Name][strings.TrimPrefix(suffix, ".")]; !ok || len(form.Separate) != len(quantizedForms[form.Name]) {
				t.Errorf("%s: the tests have %v", form.Name, quantizedForms[form.Name])
			}
		}
		for _, suffix := range form.Fused {
			if _, ok := fusedForms[form.Name][suffix]; !ok || len(form.Fused) != len(fusedForms[form.Name]) {
				t.Errorf("%s, fused: the tests have %v", form.Name, fusedForms[form.Name])
			}
		}
	}
	if separate != len(quantizedForms) || fused != len(fusedForms) {
		t.Errorf("%d and %d forms are documented, %d and %d tested", separate, fused, len(quantizedForms), len(fusedForms))
	}
}

// permute permutes the layers of a generated checkpoint and checks every tensor.
func (p published) permute(t *testing.T, m *model, layoutAs string) {
	t.Helper()
	dir, permutation := m.write(t, 40), m.permutation(m.layers...)
	report, err := checkpoint.InspectAs(dir, layoutAs)
	if err != nil || report.Unpermutable != "" || !slices.Equal(report.MoELayers, m.layers) || report.Experts != testExperts || report.Groups != m.groups {
		t.Fatalf("report %+v, error %v", report, err)
	}
	out, back := t.TempDir()+"/out", t.TempDir()+"/back"
	mustRun(t, Options{Model: dir, LayoutAs: layoutAs, Permutation: permutation, Out: out, Verify: true})
	want := maps.Clone(m.tensors)
	prefix := p.prefix
	if prefix == "" {
		prefix = "model.layers.%d."
	}
	moved := 0
	for _, layer := range permutation.Layers {
		prefix := fmt.Sprintf(prefix, layer.Layer)
		for name := range m.tensors {
			if rest, ok := strings.CutPrefix(name, prefix); ok {
				want[name] = p.moved(m, prefix, rest, layer.NewToOld)
				moved++
			}
		}
	}
	if moved == 0 {
		t.Fatal("no tensor is in a permuted layer: the test checks nothing")
	}
	sameTensors(t, want, readAllAs(t, out, layoutAs))
	mustRun(t, Options{Model: out, LayoutAs: layoutAs, Permutation: inverseOf(permutation), Out: back})
	sameTensors(t, m.tensors, readAllAs(t, back, layoutAs))
}

// TestLayoutAs permutes checkpoints of unknown model types that are laid out as a known one, and refuses a tensor that
// the layout does not describe.
func TestLayoutAs(t *testing.T) {
	for _, test := range []struct {
		published
		as string
	}{
		{published{modelType: "sarvam_moe", config: qwenConfig(map[string]any{"first_k_dense_replace": 1}), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.expert_bias"}, others: []string{"attention.dense.weight", "mlp.shared_experts.up_proj.weight"}}, "bailing_moe"},
		{published{modelType: "hy_v3", config: qwenConfig(nil), dense: []int{0}, block: "mlp.", gate: "router.gate.weight", projections: threeProjections, rows: []string{"mlp.expert_bias"}, others: []string{"mlp.shared_mlp.up_proj.weight"}}, "afmoe"},
		{published{modelType: "axk1", config: deepseekConfig(nil), dense: []int{0}, block: "mlp.", gate: "gate.weight", projections: threeProjections, rows: []string{"mlp.gate.e_score_correction_bias"}, others: []string{"post_mlp_layernorm.weight"}}, "deepseek_v3"},
		{published{modelType: "minimax", config: map[string]any{"num_local_experts": testExperts}, block: "block_sparse_moe.", gate: "gate.weight", projections: []string{"w1", "w2", "w3"}}, "mixtral"},
		{published{modelType: "flex_olmo", config: qwenConfig(nil), block: "mlp.", gate: "gate.weight", projections: threeProjections}, "olmoe"},
		{published{modelType: "mellum", config: qwenConfig(map[string]any{"mlp_layer_types": []string{"sparse", "dense", "sparse"}}), dense: []int{1}, block: "mlp.", gate: "gate.weight", projections: threeProjections}, "qwen3_moe"},
	} {
		t.Run(test.modelType, func(t *testing.T) {
			m := test.generate(3, "plain")
			dir := m.write(t, 1<<20)
			served, err := checkpoint.Inspect(dir)
			if err != nil || served.Family != checkpoint.UnknownFamily || served.ModelType != test.modelType || !strings.Contains(served.Unprofilable, "layoutAs") {
				t.Errorf("without layoutAs: %+v, error %v", served, err)
			}
			if _, err := checkpoint.Open(dir); !checkpoint.IsInvalid(err) {
				t.Errorf("without layoutAs: %v", err)
			}
			m.groups = 1
			if test.as == "deepseek_v3" {
				m.config["n_group"] = 1
			}
			test.permute(t, m, test.as)
			for _, unknown := range []string{"%smodel.layers.2." + test.block + "balance", "%smodel.layers.2.router_state.weight", "%smodel.expert_order"} {
				changed := test.generate(3, "plain")
				name := fmt.Sprintf(unknown, "")
				changed.add(name, "F32", testExperts)
				dir := changed.write(t, 1<<20)
				report, err := checkpoint.InspectAs(dir, test.as)
				if err != nil || !strings.Contains(report.Unprofilable, name) || report.Unmappable == "" || report.Unpermutable == "" {
					t.Errorf("%s: %+v, error %v", name, report, err)
				}
				if _, err := Run(t.Context(), Options{Model: dir, LayoutAs: test.as, Permutation: m.permutation(2), Out: t.TempDir() + "/out"}); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), name) {
					t.Errorf("%s: error %v", name, err)
				}
			}
			if report, err := checkpoint.InspectAs(dir, "gemma4_text"); err != nil || report.Unprofilable == "" {
				t.Errorf("another layout: %+v, error %v", report, err)
			}
		})
	}
	if _, err := checkpoint.InspectAs(t.TempDir(), "qwen9"); !checkpoint.IsInvalid(err) || !strings.Contains(err.Error(), "qwen3_moe") {
		t.Errorf("unknown layout: %v", err)
	}
}
