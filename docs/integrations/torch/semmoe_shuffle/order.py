"""The order that groups the tokens of a batch by rank: a stable counting sort, since ranks are few. Its time hardly depends on how many."""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

BLOCK = 512  # tokens of a program: with 64 ranks as fast as 256, and faster than 1,024
SCANNED = 1024  # blocks that are summed at a time


def group_by_rank(rank, ranks):
    """(order, inverse, counts) of the ranks of tokens [tokens], each in 0 to ranks - 1: order[i] is the token at place i, tokens of rank 0
    first, of one rank in their own order; inverse[token] is its place. All int32, counts [ranks]."""
    # Older versions of Triton cannot gather within a block.
    if hasattr(tl, "gather") and rank.is_cuda and ranks <= 256:
        return count_on_gpu(rank.contiguous(), ranks)
    order = torch.argsort(rank, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=rank.device)
    return order.int(), inverse.int(), torch.bincount(rank.long(), minlength=ranks).int()


if triton is not None:
    # Numbers that differ from batch to batch are no part of what is compiled.
    @triton.jit(do_not_specialize=["n"])
    def count_blocks(rank_ptr, count_ptr, n, BLOCK: tl.constexpr, RANKS: tl.constexpr):
        """How many tokens of each rank each block of tokens has: count [blocks, RANKS]."""
        block = tl.program_id(0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        number = tl.arange(0, RANKS)
        rank = tl.load(rank_ptr + at, mask=at < n, other=0).to(tl.int32)
        beyond = tl.sum((at >= n).to(tl.int32), axis=0)
        tl.store(count_ptr + block * RANKS + number, tl.histogram(rank, RANKS) - tl.where(number == 0, beyond, 0))

    @triton.jit(do_not_specialize=["blocks"])
    def add_blocks(count_ptr, earlier_ptr, total_ptr, blocks, RANKS: tl.constexpr, SCANNED: tl.constexpr):
        """Of a rank's counts those of all earlier blocks, earlier [blocks, RANKS], and their sum, total [RANKS]."""
        rank = tl.program_id(0)
        total = tl.zeros([1], dtype=tl.int32)
        for first in range(0, blocks, SCANNED):
            block = first + tl.arange(0, SCANNED)
            at = block * RANKS + rank
            counts = tl.load(count_ptr + at, mask=block < blocks, other=0)
            tl.store(earlier_ptr + at, total + tl.cumsum(counts, axis=0) - counts, mask=block < blocks)
            total += tl.sum(counts, axis=0)
        tl.store(total_ptr + rank + tl.arange(0, 1), total)

    @triton.jit(do_not_specialize=["n"])
    def place_tokens(rank_ptr, count_ptr, earlier_ptr, total_ptr, order_ptr, inverse_ptr, n, BLOCK: tl.constexpr, RANKS: tl.constexpr):
        """The places of a block's tokens: after all tokens of lower ranks, after those of its rank in earlier blocks and in its own. A block is
        sorted by rank and place in it, so that tokens of one rank lie side by side and are written so."""
        block = tl.program_id(0)
        number = tl.arange(0, RANKS)
        i = tl.arange(0, BLOCK)
        total = tl.load(total_ptr + number)
        own = tl.load(count_ptr + block * RANKS + number)
        begin = tl.cumsum(total, axis=0) - total + tl.load(earlier_ptr + block * RANKS + number)
        at = block * BLOCK + i
        # What is beyond the last token comes last.
        key = tl.sort(tl.load(rank_ptr + at, mask=at < n, other=RANKS - 1).to(tl.int32) * BLOCK + i)
        token = block * BLOCK + key % BLOCK
        place = tl.gather(begin - (tl.cumsum(own, axis=0) - own), key // BLOCK, 0) + i
        tl.store(order_ptr + place, token, mask=token < n)
        tl.store(inverse_ptr + token, place, mask=token < n)


def count_on_gpu(rank, ranks):
    n, width = len(rank), triton.next_power_of_2(max(ranks, 2))
    blocks = triton.cdiv(n, BLOCK)
    order, inverse = torch.empty(2, n, dtype=torch.int32, device=rank.device)
    counts, earlier = torch.empty(2, blocks, width, dtype=torch.int32, device=rank.device)
    total = torch.empty(width, dtype=torch.int32, device=rank.device)
    if n == 0:
        return order, inverse, total[:ranks].zero_()
    count_blocks[(blocks,)](rank, counts, n, BLOCK=BLOCK, RANKS=width, num_warps=4)
    add_blocks[(width,)](counts, earlier, total, blocks, RANKS=width, SCANNED=min(SCANNED, triton.next_power_of_2(blocks)), num_warps=4 if blocks > 256 else 1)
    place_tokens[(blocks,)](rank, counts, earlier, total, order, inverse, n, BLOCK=BLOCK, RANKS=width, num_warps=4)
    return order, inverse, total[:ranks]
