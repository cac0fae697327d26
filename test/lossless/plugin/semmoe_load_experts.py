"""Loads the experts and gates of another checkpoint into a running vLLM on CPU. For measurements only.

The reload_weights of vLLM 0.32.0 (vllm/model_executor/model_loader/reload) leaves tied embeddings and packed linear layers
wrong on CPU: the same checkpoint loaded twice gives other answers. A permuted checkpoint differs in experts and gates only,
so this extension loads these, and processes them as the engine does after loading. vllm serve takes it as
--worker-extension-cls semmoe_load_experts.Extension.
"""

import json
import pathlib
import re

import torch
from safetensors import safe_open


class Extension:
    def load_experts(self, path):
        from vllm.config import set_current_vllm_config
        from vllm.distributed import get_ep_group

        names = json.loads((pathlib.Path(path) / "model.safetensors.index.json").read_text())["weight_map"]

        def tensor(name):
            with safe_open(pathlib.Path(path) / names[name], "pt") as file:
                return file.get_tensor(name)

        def parameter(value, like):
            return torch.nn.Parameter(value.to(like.dtype).contiguous(), requires_grad=False)

        model = self.model_runner.get_model()
        dtype = torch.empty(0, dtype=self.vllm_config.model_config.dtype)
        loaded = 0
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            for name, block in model.named_modules():
                found = re.fullmatch(r"model\.layers\.(\d+)\.mlp", name)
                experts = next((m for m in block.modules() if hasattr(m, "w13_weight")), None) if found else None
                if experts is None:
                    continue
                count = experts.local_num_experts
                first = get_ep_group().rank_in_group * count
                prefix = [f"{name}.experts.{first + e}." for e in range(count)]
                gates = [torch.cat([tensor(p + "gate_proj.weight"), tensor(p + "up_proj.weight")]) for p in prefix]
                experts.w13_weight = parameter(torch.stack(gates), dtype)
                experts.w2_weight = parameter(torch.stack([tensor(p + "down_proj.weight") for p in prefix]), dtype)
                experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)
                block.gate.weight = parameter(tensor(f"{name}.gate.weight"), dtype)
                block.gate.quant_method.process_weights_after_loading(block.gate)
                loaded += 1
        if loaded == 0:
            raise ValueError(f"the model has no layer with experts to load from {path}")
