"""The shuffled reduce-scatter (SRS) and the shuffled all-gather (SAG).

Where tensor-parallel attention ends in an all-reduce, SRS gives each rank the sums of the tokens that it is to compute experts for, and SAG
gives all ranks all tokens back in their own order: together as many bytes as the all-reduce.
"""
import torch
import torch.distributed as dist

from . import rows

try:
    import triton
    import triton.language as tl
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:
    triton = symmetric = None


def shuffled_reduce_scatter(partial, order, group=None):
    """The sums over ranks of `partial` [tokens, width] for this rank's tokens [tokens / ranks, width]: those at its places of `order`. Where
    rows can be permuted before the last projection of attention, which are fewer bytes, do so and use a plain reduce-scatter."""
    shard = torch.empty(partial.shape[0] // dist.get_world_size(group), partial.shape[1], dtype=partial.dtype, device=partial.device)
    dist.reduce_scatter_tensor(shard, rows.gather(partial, order), group=group)
    return shard


def shuffled_all_gather(shard, inverse, group=None):
    """All ranks' rows [tokens, width], in the tokens' own order. rows.add_and_norm does the last step together with the next layer's first."""
    whole = torch.empty(shard.shape[0] * dist.get_world_size(group), shard.shape[1], dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(whole, shard, group=group)
    return rows.gather(whole, inverse)


class PeerCollectives:
    """SRS and SAG in one kernel each, over memory that the GPUs of a node read from one another (NVLink): a row is read at its place in
    the order, and permuting costs nothing. Sums are in the order of the ranks, the same for a token wherever it is computed.

    `partial` [tokens, width] and `shard` [tokens / ranks, width] are where the inputs must be written: a smaller batch to their first rows.
    All ranks must make the same calls for as many tokens.
    """

    def __init__(self, tokens, width, dtype, device, group=None):
        if triton is None:
            raise RuntimeError("PeerCollectives needs Triton and torch.distributed._symmetric_memory")
        self.group = group or dist.group.WORLD
        self.ranks, self.rank, self.width = dist.get_world_size(group), dist.get_rank(group), width
        self.partial = symmetric.empty(tokens, width, dtype=dtype, device=device)
        self.shard = symmetric.empty(tokens // self.ranks, width, dtype=dtype, device=device)
        self.partials, self.shards = symmetric.rendezvous(self.partial, self.group), symmetric.rendezvous(self.shard, self.group)
        self.partial_pointers, self.shard_pointers = self.pointers(self.partials), self.pointers(self.shards)

    def pointers(self, handle):
        return torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=self.partial.device)

    def reduce_scatter(self, order, out):
        """out [tokens / ranks, width] = this rank's sums of all ranks' `partial`."""
        self.partials.barrier(channel=0)
        peer_sums[(len(out),)](self.partial_pointers, order, out, self.rank * len(out), self.width, RANKS=self.ranks,
                               WIDTH=triton.next_power_of_2(self.width), num_warps=4)
        self.partials.barrier(channel=0)  # until then no rank may write its `partial` anew
        return out

    def all_gather(self, inverse, out):
        """out [tokens, width] = all ranks' `shard`, in the tokens' own order."""
        self.shards.barrier(channel=0)
        peer_rows[(len(out),)](self.shard_pointers, inverse, out, len(out) // self.ranks, self.width,
                               WIDTH=triton.next_power_of_2(self.width), num_warps=4)
        self.shards.barrier(channel=0)
        return out


if triton is not None:
    @triton.jit(do_not_specialize=["first"])
    def peer_sums(pointers, order, out, first, width, RANKS: tl.constexpr, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        token = tl.load(order + first + row).to(tl.int64)
        total = tl.zeros([WIDTH], dtype=tl.float32)
        for rank in tl.static_range(RANKS):
            source = tl.load(pointers + rank).to(tl.pointer_type(out.dtype.element_ty))
            source = tl.multiple_of(source, 16)
            total += tl.load(source + token * width + at, mask=at < width, other=0).to(tl.float32)
        tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=at < width)

    @triton.jit(do_not_specialize=["shard"])
    def peer_rows(pointers, inverse, out, shard, width, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        place = tl.load(inverse + row).to(tl.int64)
        source = tl.load(pointers + place // shard).to(tl.pointer_type(out.dtype.element_ty))
        source = tl.multiple_of(source, 16)
        tl.store(out + row * width + at, tl.load(source + (place % shard) * width + at, mask=at < width), mask=at < width)
