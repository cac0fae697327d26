"""Moves rows of hidden states: by an index, as weighted sums, and together with what comes next. Triton on GPUs, PyTorch elsewhere."""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def on_gpu(tensor):
    return triton is not None and tensor.is_cuda


def whole_rows(tensor):
    """The tensor with its rows one after the other, as the kernels read them: a copy of one that is cut out of wider rows."""
    return tensor.contiguous()


def own_rows(tensor):
    """The tensor, whose rows must lie one after the other: the kernels write to nothing else."""
    if not tensor.is_contiguous():
        raise ValueError(f"rows of {tuple(tensor.shape)} with strides {tensor.stride()} cannot be written to: give a contiguous tensor")
    return tensor


def gather(source, index, out=None):
    """out[i] = source[index[i]], rows of source [rows, width]."""
    if out is None:
        out = torch.empty(len(index), source.shape[1], dtype=source.dtype, device=source.device)
    if not on_gpu(source):
        return torch.index_select(source, 0, index.long(), out=out)
    if len(index):
        gather_kernel[(len(index),)](whole_rows(source), index, own_rows(out), source.shape[1], WIDTH=triton.next_power_of_2(source.shape[1]), num_warps=4)
    return out


def weighted_sums(source, index, weight, bounds, out):
    """out[i] = the sum of weight[j] * source[index[j]] for j from bounds[i] to bounds[i + 1], summed in float32 in this order."""
    if on_gpu(source):
        if len(out):
            sums_kernel[(len(out),)](whole_rows(source), index, weight, bounds, own_rows(out), source.shape[1], WIDTH=triton.next_power_of_2(source.shape[1]), num_warps=4)
        return out
    part = slice(int(bounds[0]), int(bounds[-1]))  # bounds may be those of some rows of a longer list
    target = torch.repeat_interleave(torch.arange(len(out), device=out.device), (bounds[1:] - bounds[:-1]).long())
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    total.index_add_(0, target, source[index[part].long()].float() * weight[part, None])
    return out.copy_(total)


def add_and_norm(source, index, residual, weight, epsilon, residual_out, out):
    """residual_out[i] = residual[i] + source[index[i]], out[i] = RMSNorm of it: the next layer's first step, which reads rows by an index
    instead of in turn. That is all that putting tokens back in order costs there."""
    if on_gpu(source):
        norm_kernel[(len(index),)](whole_rows(source), index, whole_rows(residual), weight, own_rows(residual_out), own_rows(out), source.shape[1], epsilon,
                                   WIDTH=triton.next_power_of_2(source.shape[1]), num_warps=4)
        return out
    residual_out.copy_(residual + source[index.long()])
    values = residual_out.float()
    return out.copy_(values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float())


if triton is not None:
    @triton.jit
    def gather_kernel(source, index, out, width, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        taken = tl.load(index + row).to(tl.int64)
        tl.store(out + row * width + at, tl.load(source + taken * width + at, mask=at < width), mask=at < width)

    @triton.jit
    def sums_kernel(source, index, weight, bounds, out, width, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], dtype=tl.float32)
        for j in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
            taken = tl.load(index + j).to(tl.int64)
            total += tl.load(weight + j) * tl.load(source + taken * width + at, mask=at < width, other=0).to(tl.float32)
        tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=at < width)

    @triton.jit
    def norm_kernel(source, index, residual, weight, residual_out, out, width, epsilon, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        inside = at < width
        taken = tl.load(index + row).to(tl.int64)
        both = tl.load(residual + row * width + at, mask=inside, other=0) + tl.load(source + taken * width + at, mask=inside, other=0)
        tl.store(residual_out + row * width + at, both, mask=inside)
        values = both.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
        scaled = values * scale * tl.load(weight + at, mask=inside, other=0).to(tl.float32)
        tl.store(out + row * width + at, scaled.to(out.dtype.element_ty), mask=inside)
