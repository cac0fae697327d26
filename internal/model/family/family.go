// SPDX-License-Identifier: Apache-2.0

// Package family contains what the operator knows about families of MoE models, as one table: the layout of their
// checkpoints, the rules of their configurations, and what engines support for them. A new family is an entry of the
// table and a generated checkpoint in the tests of reshuffle.
//
// Each entry names the source in which its layout was read. docs/model-families.md is generated from the table.
package family

import (
	"fmt"
	"slices"
)

// Family is a model type.
type Family struct {
	// Type is model_type in config.json, of the language model if a multimodal wrapper contains it.
	Type string
	Layout
	// OtherLayouts lists further layouts in which checkpoints of the family exist, such as that with the names of
	// transformers 5 (save_original_format=False).
	OtherLayouts []Layout
	// Groups and GroupsPerToken are the defaults of n_group and topk_group in the model's code. 0 means 1.
	Groups, GroupsPerToken int
	// DenseFirst is the number of dense layers before the first MoE layer, for a configuration without a layer rule.
	DenseFirst int
	// OptionalBlock reports that layers have experts only if the configuration sets enable_moe_block.
	OptionalBlock bool
	// Unprofilable and Unmappable are the reasons why no model of the family can be profiled, or served with an expert
	// map. They are empty without such a reason.
	Unprofilable, Unmappable string
	// SGLang is what SGLang supports.
	SGLang SGLang
	// TensorRTLLMMap is the oldest release of TensorRT-LLM that was read and that has a load balancer for the family
	// without wrapper (moe_model_arch_list), and thus reads an expert map. It is empty if no release that was read does.
	TensorRTLLMMap string
	// Source is the project, release and file in which the layout was read.
	Source string
}

// SGLang contains what SGLang supports for a family. An empty release means that no release that was read does.
type SGLang struct {
	// ReadsMap is the oldest release that was read and in which the model reports the location of its experts
	// (get_model_config_for_expert_location). In other releases --init-expert-location has no effect, without an error.
	ReadsMap string
	// MapWithoutEffect reports that the releases that were read load experts in the default order regardless of the
	// map, and cannot run the family with DeepEP.
	MapWithoutEffect bool
	// Block names the block of experts that families share, which determines the all-to-all backends that use a map.
	Block string
	// MicroBatches is the oldest release that was read and that splits a step into two micro-batches
	// (srt/batch_overlap/operations_strategy.py, which checks the class of the first decoder layer).
	MicroBatches string
	// ExpertsPerToken is the member of config.json with the number of experts per token, if the configuration does not
	// also have it as num_experts_per_tok. It is empty for other families. With --enable-return-routed-experts all
	// releases that were read need num_experts_per_tok (srt/state_capturer/routed_experts.py).
	ExpertsPerToken string
	// IgnoresTiedEmbeddings reports that SGLang never fills the output projection if tie_word_embeddings is set and the
	// checkpoint has no lm_head.weight.
	IgnoresTiedEmbeddings bool
}

// Layout describes the names and shapes of the tensors of an MoE layer.
type Layout struct {
	// Block is the path of the MoE block in a layer. It is empty if gate and experts are directly in the layer.
	Block string
	// Gate is the path of the gate's linear map in the block.
	Gate string
	// GateTensors contains further tensors of the gate by their path in the block, such as a correction bias outside of
	// the gate.
	GateTensors map[string]Form
	// Projections are the linear maps of one expert, if every expert has its own tensors in experts.N of the block.
	Projections []string
	// FusedIn is the path in the block of tensors with all experts of a layer in dimension 0. Fused lists the required
	// ones: the spellings of one entry are alternatives.
	FusedIn string
	Fused   [][]string
	// Around lists modules of the block that do not depend on the order of the experts, in addition to Shared.
	Around []string
	// Dense lists modules that the block contains in layers without experts, in addition to the projections of a dense
	// FFN.
	Dense []string
}

// Form is the dependence of a gate's tensor on the order of the experts.
type Form uint8

const (
	// Rows is a tensor with one row per expert, or a matrix of one row with one column per expert.
	Rows Form = iota
	// Inputs is a tensor that does not depend on the experts.
	Inputs
	// ExpertNumbers is a tensor whose values are expert numbers.
	ExpertNumbers
)

// Lookup returns the family of a model type, and nil if it is unknown.
func Lookup(modelType string) *Family { return byType[modelType] }

// Types returns the known model types, sorted.
func Types() []string {
	var types []string
	for _, f := range All {
		types = append(types, f.Type)
	}
	slices.Sort(types)
	return types
}

// CheckLayout returns an error for a value of spec.model.layoutAs that is not a known model type. An empty value is
// allowed.
func CheckLayout(layoutAs string) error {
	if layoutAs != "" && Lookup(layoutAs) == nil {
		return fmt.Errorf("%q is invalid: it must be a model type of the table in docs/model-families.md, such as qwen3_moe", layoutAs)
	}
	return nil
}

var byType = func() map[string]*Family {
	families := make(map[string]*Family, len(All))
	for i := range All {
		families[All[i].Type] = &All[i]
	}
	return families
}()

// Shared lists the modules of shared experts and of their gate in an MoE block. They do not depend on the order of the
// experts.
var Shared = []string{"shared_expert", "shared_experts", "shared_expert_gate", "shared_mlp", "share_expert"}

// LayerPrefixes are the prefixes of the list of layers in known checkpoints: a causal language model, the bare model,
// multimodal wrappers of both generations, DeepSeek-VL2, Qwen-Omni and Nemotron-H.
var LayerPrefixes = []string{
	"model.layers.", "layers.", "model.language_model.layers.", "language_model.model.layers.", "language.model.layers.",
	"thinker.model.layers.", "backbone.layers.", "language_model.backbone.layers.",
}

// PredictionPrefixes are the prefixes of multi-token-prediction layers that are not in the list of hidden layers.
var PredictionPrefixes = []string{"mtp.layers.", "mtp."}

// LayerModules lists the modules of a layer other than its MoE block and its norms.
var LayerModules = []string{
	"self_attn", "attention", "attn", "linear_attn", "mamba", "conv", "rotary_emb", "shared_mlp", "share_expert", "mlps",
	// Multi-token prediction.
	"eh_proj", "embed_tokens", "shared_head", "final_layernorm",
	// Residual streams of DeepSeek-V4.
	"hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale", "attn_hc", "ffn_hc",
	// Gemma 4.
	"layer_scalar", "per_layer_input_gate", "per_layer_projection", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2",
}

// RootModules lists the modules of a language model other than its layers.
var RootModules = []string{
	"embed_tokens", "word_embeddings", "norm", "norm_f", "embedding_norm", "lm_head", "rotary_emb", "score", "embed", "embeddings", "head",
	"hc_head_fn", "hc_head_base", "hc_head_scale", "hc_head", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm",
	"wte", "tok_embeddings", "ln_f", "output",
}

// OtherModels lists modules of encoders, speech models and multi-token prediction: separate models next to the language
// model.
var OtherModels = []string{
	"visual", "vision", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "multi_modal_projector", "mm_projector", "projector", "mlp1",
	"aligner", "image_newline", "view_seperator", "view_separator", "resampler", "talker", "code2wav", "token2wav", "mtp", "embed_vision", "embed_audio",
	"vit_large_projector",
}

// RootPrefixes lists modules that only contain other modules.
var RootPrefixes = []string{"model", "language_model", "language", "thinker", "backbone", "llm", "text_model", "decoder", "transformer"}

// SGLangWrappers maps the multimodal wrappers whose class reports the location of experts in SGLang to the oldest
// release that was read and does so. SGLang asks only the outermost model.
var SGLangWrappers = map[string]string{"dots_vlm": "0.5.12", "kimi_k25": "0.5.12", "qwen3_vl_moe": "0.5.12", "qwen3_5_moe": "0.5.23"}

// TensorRTLLMWrappers maps the multimodal wrappers for which TensorRT-LLM has a load balancer to the oldest release that
// was read and does. TensorRT-LLM asks only for the architecture of the outermost model.
var TensorRTLLMWrappers = map[string]string{"llama4": "1.0.0", "kimi_k25": "1.3.0", "qwen3_vl_moe": "1.3.0", "qwen3_5_moe": "1.3.0"}
