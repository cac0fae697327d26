"""Expert parallelism for the CPU build of vLLM. For tests only.

The CPU build of vLLM 0.32.0 accepts --enable-expert-parallel with --data-parallel-size 2, and then answers each request with
NotImplementedError: it has no implementation of three functions that its MoE layers call. This plug-in supplies them in the
simplest way that is right. It is not made for speed, and does nothing for other devices. vLLM loads it in each of its
processes by the entry point group vllm.general_plugins (vllm/plugins/__init__.py, 0.32.0).
"""

import torch
import torch.distributed as dist


def all_gatherv(self, input_, dim=0, sizes=None):
    """Concatenates the rows of all ranks, which may differ in number. A list of tensors gives a list."""
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    if dim != 0:
        raise NotImplementedError("all_gatherv: only dimension 0 is supported")
    if sizes is None:
        sizes = [input_.shape[0]] * self.world_size
    rows = max(sizes)
    padded = input_.new_zeros((rows, *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes)])


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    """Sums the tensors of all ranks, and returns the rows of this rank."""
    if dim != 0:
        raise NotImplementedError("reduce_scatterv: only dimension 0 is supported")
    if sizes is None:
        sizes = [input_.shape[0] // self.world_size] * self.world_size
    total = input_.to(torch.float32, copy=True)
    dist.all_reduce(total, group=self.device_group)
    begin = sum(sizes[: self.rank_in_group])
    return total[begin : begin + sizes[self.rank_in_group]].to(input_.dtype)


def _with_expert_map(apply):
    """Wraps the experts' apply, which expects the IDs of local experts and ignores its expert_map.

    An expert of another rank becomes local expert 0 with weight 0.
    """

    def mapped(self, *, topk_weights, topk_ids, expert_map, **others):
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **others)

    mapped.has_expert_map = True
    return mapped


def register():
    """Installs the functions. Calling it twice is a no-op."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    if not hasattr(CPUUnquantizedExperts.apply, "has_expert_map"):
        CPUUnquantizedExperts.apply = _with_expert_map(CPUUnquantizedExperts.apply)
