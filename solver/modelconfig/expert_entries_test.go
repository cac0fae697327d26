// SPDX-License-Identifier: Apache-2.0

package modelconfig

import (
	"strings"
	"testing"
)

// TestCheckExpertEntries uses a model of 8 experts and 4 layers.
func TestCheckExpertEntries(t *testing.T) {
	for text, want := range map[string]string{
		// Entries of configurations of known models.
		`{"num_experts":8,"num_experts_per_tok":2,"moe_layer_freq":[0,1,1,1],"eos_token_id":[1,2],"n_routed_experts":8,"ep_size":1}`:      "",
		`{"layer_types":["full_attention","sliding_attention","full_attention","sliding_attention"],"router_aux_loss_coef":0}`:            "",
		`{"quantization_config":{"ignore":["a.b","c.d","e.f","g.h","i.j","k.l","m.n","lm_head"],"weight_block_size":[128,128],"bits":4}}`: "",
		`{"text_config":{"mlp_only_layers":[0,1]},"vision_config":{"deepstack_visual_indexes":[1,2,3],"experts":[1,2]}}`:                  "",
		`{"rope_scaling":{"short_factor":[1,1,1,1,1,1,1,1],"factor":4},"id2label":{"0":"A","1":"B"},"image_mean":[0,1,0]}`:                "",
		`{"layer_bits":{"0":4,"1":8},"time_step_limit":[0.0,Infinity],"window_sizes":[4,512]}`:                                            "",
		`{"moe":{"num_experts":8,"num_experts_per_tok":2},"routed_scaling_factor":1,"moe_intermediate_size":4,"shared_experts":1}`:        "",
		`{"router_dtype":"float32","norm_topk_prob":true,"moe_backend":"v2","output_router_logits":false,"moe_topk":2}`:                   "",
		`{"architectures":["GptOssForCausalLM"],"experts_per_token":4,"num_local_experts":8,"swiglu_limit":7.0,"initial_context_length":4096,"router_aux_loss_coef":0.9,
			"rope_scaling":{"beta_fast":32.0,"factor":32.0,"rope_type":"yarn","truncate":false},"sliding_window":128,"attention_bias":true,
			"quantization_config":{"modules_to_not_convert":["model.layers.*.self_attn","model.layers.*.mlp.router","model.embed_tokens","lm_head"],"quant_method":"mxfp4"}}`: "",
		`{"auto_map":{"AutoConfig":"configuration_deepseek.DeepseekV3Config"},"aux_loss_alpha":0.001,"first_k_dense_replace":3,"n_group":8,"topk_group":4,"topk_method":"noaux_tc",
			"quantization_config":{"activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8","weight_block_size":[128,128]},"scoring_func":"sigmoid","q_lora_rank":4,"kv_lora_rank":4}`: "",
		`{"media_placeholder_token_id":1,"text_config":{"n_routed_experts":8,"quantization_config":{"config_groups":{"group_0":{"input_activations":null,"weights":{"actorder":null,
			"block_structure":null,"group_size":32,"num_bits":4,"observer_kwargs":{},"symmetric":true},"targets":["Linear"]}},"format":"pack-quantized","kv_cache_scheme":null,
			"ignore":["lm_head","re:.*self_attn.*","re:.*shared_experts.*"],"quantization_status":"compressed"}},"vision_config":{"merge_kernel_size":[2,2],"patch_size":14}}`: "",
		`{"bits":4,"dynamic":{"-:.*shared_expert.*":{},"lm_head":{"bits":8}},"meta":{"quantizer":["gptqmodel:1.4"],"damp_percent":0.1},"modules_in_block_to_quantize":[["a.b","c"],["d"]],
			"sym":true,"group_size":-1,"desc_act":false,"true_sequential":true,"zero_point":true,"version":"gemm","modules_to_not_convert":null}`: "",
		`{"bos_token_id":1,"do_sample":true,"eos_token_id":[2,3],"pad_token_id":1,"temperature":0.6,"top_k":2,"top_p":0.95,"transformers_version":"4.51.0","suppress_tokens":[1,2]}`:     "",
		`{"attn_type_list":[1,1,1,0],"is_moe_layer":[0,1,1,1],"full_attn_idxs":[1,3],"swiglu_limits":[0,0,7,7],"partial_rotary_factors":[1,1,1,1,1],"attn_heads":[8,8,8,8,8,8,8]}`:       "",
		`{"code2wav_config":{"upsample_rates":[8,5,4,3],"upsampling_ratios":[2,2]},"talker_config":{"text_config":{"num_experts":4},"speakers":[1,2]}}`:                                  "",
		`{"global_ratio":"1:5","expert_mask_dim":7,"moe_permute_fusion":true,"experts_implementation":"e4m3","layer_bits":{"0-1":4},"vision_feature_layer":[-2,-1],"date":"2025-01-02"}`: "",
		// Entries that may refer to experts.
		`{"pinned":"3, 7"}`:                                   "pinned: ",
		`{"hot":"0-5"}`:                                       "hot: ",
		`{"expert_mask":4095}`:                                "expert_mask: ",
		`{"moe":{"active_bitmap":"0x0f"}}`:                    "moe.active_bitmap: ",
		`{"router":{"permutation":[3.5]}}`:                    "router.permutation[]: ",
		`{"expert_precision":{"e3":"fp8"}}`:                   "expert_precision.e3: ",
		`{"cold":["E_3","E_7"]}`:                              "cold[]: ",
		`{"pin":{"L1E3":4}}`:                                  "pin.L1E3: ",
		`{"pin":{"1.3":4}}`:                                   "pin: ",
		`{"pin":{"0-5":4,"6-7":8}}`:                           "pin: ",
		`{"pinned":[-1,-2]}`:                                  "pinned: ",
		`{"approximate_experts":{"0":[3]}}`:                   "approximate_experts.0: ",
		`{"a":{"b":{"3":1}}}`:                                 "a.b: ",
		`{"3":{"x":1}}`:                                       "the configuration: ",
		`{"layers":{"0":{"3":{"bits":8}}}}`:                   "layers.0: ",
		`{"bias":[1,2,3,4,5,6,7,8]}`:                          "bias: ",
		`{"bias":[0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5]}`:          "bias: ",
		`{"names":["a","b","c","d","e","f","g","h"]}`:         "names: ",
		`{"layer_load":[[1.5,1,1,1,1,1,1,1]]}`:                "layer_load[]: ",
		`{"hot":[3]}`:                                         "hot: ",
		`{"dead_expert":3}`:                                   "dead_expert: ",
		`{"moe":{"favourite":0}}`:                             "moe.favourite: ",
		`{"experts":[{"rank":0},{"rank":1}],"expert_id":[7]}`: "expert_id: ",
		`{"expert_order":"3,1,2"}`:                            "expert_order: ",
		`{"x":{"u0":1,"u1":1,"u2":1,"u3":1,"u4":1,"u5":1,"u6":1,"u7":1}}`: "x: ",
		`[{"experts":[[1],[2]]}]`: "[].experts[]: ",
		`{"a":`:                   "not valid JSON",
		`{} {}`:                   "not valid JSON",
		strings.Repeat(`{"a":`, 100) + strings.Repeat("}", 100): "nested deeper",
	} {
		err := CheckExpertEntries([]byte(text), 8, 4)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%.100s: %v, want %q", text, err, want)
		}
	}
}
