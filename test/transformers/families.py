"""families.py OUT PROMPTS : makes a small random checkpoint of each family in OUT, and computes which experts the prompts activate.

PROMPTS is a JSON file with lists of token IDs. OUT/<family>/golden.json has the experts by MoE layer, request and token, the heaviest
first, in float32. The gates are computed here, from the weights and the inputs of their linear maps, by the rules that the papers and
model cards state. No code of transformers selects these experts.
"""
import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 8}
DEEPSEEK = {"num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
TOP4 = {"num_experts_per_tok": 4, "moe_intermediate_size": 32}


def softmax(logits, bias, top, groups):
    """The top experts by probability; with groups, of the best groups by their best expert (DeepSeek-V2)."""
    scores = logits.softmax(-1)
    allowed = in_groups(scores, groups, 1)
    return scores, (scores + bias).masked_fill(~allowed, float("-inf"))


def sigmoid(logits, bias, top, groups):
    """The top experts by sigmoid and correction bias; with groups, of the best groups by their two best experts (DeepSeek-V3)."""
    scores = logits.sigmoid()
    return scores, (scores + bias).masked_fill(~in_groups(scores + bias, groups, 2), float("-inf"))


def logit(logits, bias, top, groups):
    """The top experts by logit, of which the bias is a part."""
    return logits + bias, logits + bias


def in_groups(scores, groups, members):
    """Reports which experts are in the best groups: half of the groups here."""
    if groups == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    by_group = scores.unflatten(-1, (groups, -1))
    best = by_group.topk(members, -1).values.sum(-1).topk(GROUPS["topk_group"], -1).indices
    chosen = torch.zeros(by_group.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    return chosen.unsqueeze(-1).expand_as(by_group).flatten(-2)


# For each family: configuration, path of the gate in a layer, rule, path of a bias in a layer, path of a scale of the weights.
FAMILIES = {
    "qwen3_moe": ({"num_hidden_layers": 3, "num_experts": 16, "mlp_only_layers": [1], **TOP4}, "mlp.gate", softmax),
    "qwen3_next": ({
        "num_hidden_layers": 4, "num_experts": 16, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, **TOP4}, "mlp.gate", softmax),
    "mixtral": ({"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}, "mlp.gate", softmax),
    "olmoe": ({"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4}, "mlp.gate", softmax),
    "deepseek_v2": (DEEPSEEK | LATENT | GROUPS | {"topk_method": "group_limited_greedy"}, "mlp.gate", softmax),
    "deepseek_v3": (DEEPSEEK | LATENT | GROUPS, "mlp.gate", sigmoid, "mlp.gate.e_score_correction_bias"),
    "glm4_moe": (DEEPSEEK | NO_GROUPS, "mlp.gate", sigmoid, "mlp.gate.e_score_correction_bias"),
    "dots1": (DEEPSEEK | NO_GROUPS, "mlp.gate", sigmoid, "mlp.gate.e_score_correction_bias"),
    "minimax_m2": ({"num_hidden_layers": 2, "num_local_experts": 16, "num_experts_per_tok": 4}, "mlp.gate", sigmoid, "mlp.e_score_correction_bias"),
    "ernie4_5_moe": (
        {"num_hidden_layers": 3, "moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
        "mlp.gate", softmax, "mlp.gate.moe_statics.e_score_correction_bias"),
    "gpt_oss": ({"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}, "mlp.router", logit, "mlp.router.bias"),
    "granitemoe": ({"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}, "block_sparse_moe.router", logit),
    "llama4_text": ({
        "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
        "feed_forward.router", logit),
    "gemma4_text": ({
        "num_hidden_layers": 3, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32, "hidden_size_per_layer_input": 0},
        "router.proj", softmax, None, "router.per_expert_scale"),
}


def build(family, config):
    """Returns a model with random weights, whose gates prefer some experts, and whose biases change some selections."""
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(COMMON | config))).float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or "inv_freq" in name or name.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias"):
                continue
            if tensor.ndim > 1:
                tensor.normal_(std=0.2)
            elif "bias" in name or "scale" in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    return model


def golden(model, prompts, gate, rule, bias=None, scale=None):
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    modules = {name: module for name, module in model.named_modules() if name.endswith("." + gate)}
    top = next(value for key in ("num_experts_per_tok", "moe_k", "top_k_experts") if (value := getattr(model.config, key, None)))
    groups = getattr(model.config, "n_group", None) or 1
    experts = []
    for name, module in modules.items():
        layer = name.removesuffix(gate)
        inputs = []
        hook = module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, -2)))
        rows = []
        for prompt in prompts:
            inputs.clear()
            model(input_ids=torch.tensor([prompt]), use_cache=False)
            logits = inputs[0].float() @ module.weight.float().T
            weights, choice = rule(logits, tensors[layer + bias].flatten() if bias else 0.0, top, groups)
            chosen = choice.topk(top, -1).indices
            weights = weights * (tensors[layer + scale] if scale else 1.0)
            order = weights.gather(-1, chosen).argsort(-1, descending=True)
            rows.append(chosen.gather(-1, order).tolist())
        hook.remove()
        experts.append(rows)
    return experts


def main():
    out, prompts = sys.argv[1], json.load(open(sys.argv[2], encoding="utf-8"))
    for family, (config, *rule) in FAMILIES.items():
        model = build(family, config)
        model.save_pretrained(f"{out}/{family}")
        with torch.no_grad(), open(f"{out}/{family}/golden.json", "w", encoding="utf-8") as file:
            json.dump(golden(model, prompts, *rule), file)


main()
