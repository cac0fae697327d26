"""checkpoints.py OUT [FAMILY...] : writes a small random checkpoint of each family with Hugging Face transformers, in float32.

OUT/<family>/published has the tensor names of published checkpoints, OUT/<family>/native those of the modules of transformers
(save_original_format=False). The families of DERIVED are only written if they are named, and only as published. Heads have 32 dimensions, those of linear
attention in Qwen 128, and latent attention 576 where it is not sparse, which the kernels of vLLM for CPUs support.
"""
import json
import pathlib
import re
import sys

import safetensors.torch
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
    "num_hidden_layers": 4, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
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
    "deepseek_v4": TOP4 | INDEXED | {
        "n_routed_experts": 16, "num_key_value_heads": 1, "o_lora_rank": 16, "o_groups": 2, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
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
    "kimi_linear": LATENT576 | {
        "q_lora_rank": None, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_head_dim": 32, "linear_num_heads": 2,
        "num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "lfm2_moe": EXPERTS | {"num_hidden_layers": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "llama4_text": LOCAL | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
    "longcat_flash": LATENT576 | {
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
    "phimoe": LOCAL | {"attention_bias": True, "lm_head_bias": True},
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
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", EXPERTS | MROPE | {"moe_intermediate_size": 48}, VISION, {}),
    "step3p7": (
        "Step3p7ForConditionalGeneration", TOP4 | {"num_key_value_heads": 2, "num_hidden_layers": 5, "n_routed_experts": 16, "num_local_experts": 16, "share_expert_dim": 32, "sliding_window": 64}, ENCODER, {}),
}

# Attributes of published configurations that transformers does not write and vLLM reads. None removes an attribute.
PUBLISHED = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {"compress_ratios": [128] * 3, "num_hash_layers": 3, "layer_types": None, "mlp_layer_types": None},
    "glm4v_moe": {"use_qk_norm": False},
    "kimi_linear": {
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4},
        "first_k_dense_replace": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "sliding_window_size": 128, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
        "swa_head_dim": 32, "swa_v_head_dim": 128, "swa_rope_theta": 1e4, "rope_theta": 5e6, "partial_rotary_factor": 0.334,
        "add_swa_attention_sink_bias": True, "layernorm_epsilon": 1e-5},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}

# The names of tensors of published checkpoints that transformers reads and does not write.
NAMES = {
    "deepseek_v4": {
        r"^model\.(layers|norm)": r"\1", r"^model\.embed_tokens": "embed", r"^model\.hc_head\.hc_": "hc_head_", r"\.attn\.norm\.": ".attn.kv_norm."},
}

# The families whose published experts are transposed. transformers reads them and does not write them.
TRANSPOSED = ("qwen3_vl_moe",)

BAILING = {
    "num_experts": 16, "num_shared_experts": 1, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0, "norm_head": True}
BAILING_NAMES = {
    r"self_attn\.o_proj": "attention.dense", r"self_attn\.[qkv]_proj": "attention.query_key_value", r"self_attn\.q_norm": "attention.query_layernorm",
    r"self_attn\.k_norm": "attention.key_layernorm", r"embed_tokens": "word_embeddings", r"gate\.e_score_correction_bias": "gate.expert_bias"}

# Families that transformers does not contain: the family with the same blocks, the differences of config.json, and those of tensor names. None removes
# an attribute or a tensor. Tensors that get the same name are concatenated.
DERIVED = {
    "bailing_moe": (
        "dots1", BAILING | {"architectures": ["BailingMoeForCausalLM"], "n_group": None, "topk_group": None},
        {r"[qk]_norm|e_score_correction_bias": None} | BAILING_NAMES),
    "bailing_moe_v2": (
        "dots1", BAILING | {
            "architectures": ["BailingMoeV2ForCausalLM"], "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32",
            "use_qk_norm": True, "use_rmsnorm": True}, BAILING_NAMES),
    "kimi_k2": ("deepseek_v3", {}, {}),
    # transformers also writes weights of zero experts, and only reads checkpoints that contain them.
    "longcat_flash_published": ("longcat_flash", {"model_type": "longcat_flash"}, {r".*\.experts\.1[6-9]\..*": None}),
    "mimo_v2": ("mimo_v2_flash", {"architectures": ["MiMoV2ForCausalLM"]}, {}),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", {}, {}),
    "step3p5": (
        "step3p7", {
            "architectures": ["Step3p5ForCausalLM"], "moe_layers_enum": "3,4", "num_attention_groups": 2, "moe_num_experts": 16, "moe_top_k": 4,
            "use_head_wise_attn_gate": True, "moe_router_activation": "sigmoid", "rope_parameters": None, "rope_theta": 1e4},
        {r"^vi[st]": None}),
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


def rewrite(out, attributes, names):
    """Changes the attributes of the language model and the names of tensors. A new model_type replaces a multimodal configuration by that of its text."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text |= attributes
    for key in [key for key, value in attributes.items() if value is None]:
        del text[key]
    path.write_text(json.dumps(text if "model_type" in attributes else config, indent=2))
    tensors = {}
    for name, tensor in safetensors.torch.load_file(out / "model.safetensors").items():
        for old, new in names.items():
            name = re.sub(old, new, name) if new else name * (not re.search(old, name))
        if config["model_type"] in TRANSPOSED and ".mlp.experts." in name:
            tensor = tensor.transpose(1, 2).contiguous()
        if name:
            tensors.setdefault(name, []).append(tensor)
    safetensors.torch.save_file({name: torch.cat(parts) for name, parts in tensors.items()}, out / "model.safetensors", {"format": "pt"})


def complete(out):
    """Makes the checkpoint of a thinker that of the published model: its attributes and tensors are those of a part. The talker is left out."""
    path = out / "config.json"
    thinker = json.loads(path.read_text())
    thinker["vision_config"]["apply_vit_abs_pos_embed"] = True
    path.write_text(json.dumps({
        "model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": thinker, "enable_audio_output": False}, indent=2))
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    safetensors.torch.save_file({"thinker." + name: tensor for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})


def main():
    for family in sys.argv[2:] or [*TEXT, *WRAPPED]:
        base, attributes, names = DERIVED.get(family, (family, {}, {}))
        model = build(base)
        published = pathlib.Path(sys.argv[1], family, "published")
        model.save_pretrained(published)
        if base in PUBLISHED:
            rewrite(published, PUBLISHED[base], NAMES.get(base, {}))
        if family == "qwen3_omni_moe":
            complete(published)
        elif family in DERIVED:
            rewrite(published, {"model_type": family} | attributes, names)
        else:
            model.save_pretrained(f"{sys.argv[1]}/{family}/native", save_original_format=False)


main()
