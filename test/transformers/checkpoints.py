"""checkpoints.py OUT [FAMILY...] : writes a small random checkpoint of each family with Hugging Face transformers, in float32.

OUT/<family>/published has the tensor names of published checkpoints, OUT/<family>/native those of the modules of transformers
(save_original_format=False). Heads have 32 dimensions, and latent attention 576 where it is not sparse, which the kernels of vLLM for CPUs support.
"""
import sys

import torch
import transformers

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 2, "head_dim": 8}
LATENT576 = LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
INDEXED = LATENT | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
LINEAR = {
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TOP4 = {"num_hidden_layers": 3, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
ROUTED = TOP4 | {"n_routed_experts": 16, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
GROUPED = ROUTED | {"n_group": 4, "topk_group": 2}
EXPERTS = TOP4 | {"num_experts": 16}
LOCAL = {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16}

# The configurations of language models.
TEXT = {
    "afmoe": EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "deepseek_v2": GROUPED | LATENT576 | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": GROUPED | LATENT576 | {"topk_method": "noaux_tc"},
    "deepseek_v32": GROUPED | INDEXED,
    "deepseek_v4": TOP4 | INDEXED | {"n_routed_experts": 16, "num_key_value_heads": 1, "o_lora_rank": 16, "o_groups": 2, "head_dim": 32},
    "dots1": ROUTED,
    "ernie4_5_moe": {"num_hidden_layers": 3, "moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "exaone_moe": EXPERTS | {"num_shared_experts": 1},
    "gemma4_text": {
        "num_hidden_layers": 3, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32, "hidden_size_per_layer_input": 0},
    "glm4_moe": ROUTED,
    "glm4_moe_lite": ROUTED | LATENT576,
    "glm_moe_dsa": ROUTED | INDEXED,
    "gpt_oss": LOCAL,
    "granitemoe": LOCAL,
    "granitemoehybrid": LOCAL | MAMBA | {"shared_intermediate_size": 32},
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"num_hidden_layers": 2, "num_experts": 16, "moe_topk": [4, 4]},
    "kimi_linear": LATENT | {"num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "lfm2_moe": EXPERTS | {"num_hidden_layers": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "llama4_text": LOCAL | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
    "longcat_flash": LATENT | {
        "num_layers": 2, "n_routed_experts": 16, "moe_topk": 4, "zero_expert_num": 4, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96,
        "num_hidden_layers": None, "intermediate_size": None},
    "mimo_v2_flash": TOP4 | {"n_routed_experts": 16},
    "minimax_m2": LOCAL | {"num_local_experts": 16, "num_experts_per_tok": 4},
    "mixtral": LOCAL,
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "n_shared_experts": 1, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "chunk_size": 16},
    "olmoe": LOCAL | {"num_local_experts": None, "num_experts": 8},
    "phimoe": LOCAL,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_moe_text": EXPERTS | LINEAR,
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_next": EXPERTS | LINEAR,
    "solar_open": TOP4 | {"n_routed_experts": 16, "n_shared_experts": 1},
}

VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "image_size": 16, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}

# The classes and configurations of multimodal models.
WRAPPED = {
    "gemma4": ("Gemma4ForConditionalGeneration", TEXT["gemma4_text"], ENCODER | {"num_key_value_heads": 2, "head_dim": 16}, {}),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", ROUTED | {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [2, 3, 3]}}, VISION, {}),
    "llama4": (
        "Llama4ForConditionalGeneration", TEXT["llama4_text"],
        ENCODER | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}, {}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", TEXT["qwen3_5_moe_text"], VISION, {}),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration", EXPERTS | MROPE, VISION, {"audio_config": {
            "encoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8, "output_dim": 64,
            "downsample_hidden_size": 8}}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", EXPERTS | MROPE, VISION, {}),
    "step3p7": (
        "Step3p7ForConditionalGeneration", TOP4 | {"num_hidden_layers": 5, "n_routed_experts": 16, "num_local_experts": 16, "share_expert_dim": 32, "sliding_window": 64}, ENCODER, {}),
}


def configured(config):
    return {key: value for key, value in (COMMON | config).items() if value is not None}


def build(family):
    """Returns a model with random weights that prefers some tokens and experts."""
    torch.manual_seed(len(family))
    if family in TEXT:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **configured(TEXT[family])))
    else:
        name, text, vision, others = WRAPPED[family]
        kind = getattr(transformers, name)
        model = kind(kind.config_class(text_config=configured(text), vision_config=vision, **others))
    model = model.float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            last = name.rsplit(".", 1)[-1]
            if not tensor.is_floating_point() or "inv_freq" in name or last in ("A_log", "D", "dt_bias"):
                continue
            if tensor.ndim > 1:
                tensor.normal_(std=0.15)
            elif "bias" in last:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def main():
    for family in sys.argv[2:] or [*TEXT, *WRAPPED]:
        model = build(family)
        model.save_pretrained(f"{sys.argv[1]}/{family}/published")
        model.save_pretrained(f"{sys.argv[1]}/{family}/native", save_original_format=False)


main()
