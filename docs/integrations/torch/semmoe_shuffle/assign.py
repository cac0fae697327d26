"""Equally many tokens for each rank, as a reduce-scatter needs."""
import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 256  # tokens of a program
WIDEST = 1 << 17  # above any regret: scores are at most 65,535, and regret counts from a score of -1. 128 of it, for as many ranks, fit int32


def align(scores):
    """The rank of each token, given scores [..., tokens, ranks] (int32, 0 to 65,535): each rank has tokens / ranks of them, the first ranks
    one more where that leaves a rest. int32 [..., tokens].

    Tokens ask for their best rank, the lowest among equals. A rank that more ask for than it has room for keeps those who would lose
    most by going to their next best rank with room, the earlier token among equals; the others ask again among the ranks with room. Every
    round fills a rank or places all tokens, so that as many rounds as there are ranks are enough; nothing waits for the GPU.
    """
    shape, ranks = scores.shape[:-1], scores.shape[-1]
    scores = scores.reshape(-1, shape[-1], ranks).contiguous()
    tokens, number = shape[-1], torch.arange(ranks, device=scores.device, dtype=torch.int32)
    room = (tokens // ranks + (number < tokens % ranks)).int().expand(len(scores), ranks).contiguous()
    placed = torch.full(scores.shape[:2], ranks, device=scores.device, dtype=torch.int32)
    step = round_on_gpu if triton is not None and scores.is_cuda else round_of_asks
    for _ in range(ranks if tokens else 0):
        placed, room = step(scores, room, placed)
    return placed.reshape(shape)


def round_of_asks(scores, room, placed):
    """One round: `placed` [batches, tokens], `ranks` for a token without one, and `room` [batches, ranks] after it."""
    batches, tokens, ranks = scores.shape
    device = scores.device
    number = torch.arange(ranks, device=device, dtype=torch.int32)
    place = torch.arange(tokens, device=device, dtype=torch.int32).expand(batches, tokens)
    asks = torch.where(room[:, None, :] > 0, scores, -1) * ranks + (ranks - 1 - number)  # no two are equal
    best, rank = asks.max(-1)
    second = asks.scatter(2, rank[:, :, None], -ranks).max(-1).values
    regret = torch.div(best, ranks, rounding_mode="floor") - torch.div(second, ranks, rounding_mode="floor")
    rank = torch.where(placed == ranks, rank.int(), ranks)
    ordered, by = torch.sort(rank * WIDEST + (WIDEST - 1 - regret), dim=1, stable=True)
    group = torch.div(ordered, WIDEST, rounding_mode="floor").long()
    asked = torch.zeros(batches, ranks + 1, dtype=torch.int32, device=device).scatter_add_(1, group, torch.ones_like(ordered))
    ahead = place - (asked.cumsum(1, dtype=torch.int32) - asked).gather(1, group)
    space = torch.cat([room, torch.zeros_like(room[:, :1])], 1)
    keeps = torch.where(ahead < space.gather(1, group), group.int(), ranks)
    placed = torch.minimum(placed, torch.full_like(placed, ranks).scatter(1, by, keeps))
    return placed, (room - asked[:, :ranks]).clamp(min=0)


def round_on_gpu(scores, room, placed):
    """round_of_asks in few kernels; `placed` is changed in place."""
    batches, tokens, ranks = scores.shape
    grid, keys = (triton.cdiv(tokens, BLOCK), batches), torch.empty_like(placed)
    ask_ranks[grid](scores, room, placed, keys, tokens, ranks, BLOCK=BLOCK, RANKS=triton.next_power_of_2(max(ranks, 2)), WIDEST=WIDEST, num_warps=4)
    ordered, by = torch.sort(keys, dim=1, stable=True)
    edges = torch.arange(0, (ranks + 1) * WIDEST, WIDEST, device=scores.device, dtype=torch.int32).expand(batches, ranks + 1).contiguous()
    begins = torch.searchsorted(ordered, edges, out_int32=True)  # where each rank's group begins, and those with a rank
    keep_tokens[grid](ordered, by, begins, room, placed, tokens, ranks, BLOCK=BLOCK, WIDEST=WIDEST, num_warps=4)
    return placed, (room - begins.diff(dim=1)).clamp(min=0)


if triton is not None:
    @triton.jit(do_not_specialize=["tokens"])
    def ask_ranks(scores, room, placed, keys, tokens, ranks, BLOCK: tl.constexpr, RANKS: tl.constexpr, WIDEST: tl.constexpr):
        """The keys by which tokens are sorted: the rank that each asks for, those who would lose most first; behind all, those with a rank."""
        batch = tl.program_id(1).to(tl.int64)
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        number = tl.arange(0, RANKS)
        inside, known = token < tokens, number < ranks
        space = tl.load(room + batch * ranks + number, mask=known, other=0)
        score = tl.load(scores + (batch * tokens + token)[:, None] * ranks + number[None, :], mask=inside[:, None] & known[None, :], other=-1)
        asks = (tl.where(space[None, :] > 0, score, -1) + 1) * RANKS + (RANKS - 1 - number)[None, :]  # no two are equal, and none is below 0
        best = tl.max(asks, axis=1)
        second = tl.max(tl.where(asks == best[:, None], 0, asks), axis=1)
        rank = RANKS - 1 - best % RANKS
        rank = tl.where(tl.load(placed + batch * tokens + token, mask=inside, other=0) < ranks, ranks, rank)
        tl.store(keys + batch * tokens + token, rank * WIDEST + (WIDEST - 1 - (best // RANKS - second // RANKS)), mask=inside)

    @triton.jit(do_not_specialize=["tokens"])
    def keep_tokens(ordered, by, begins, room, placed, tokens, ranks, BLOCK: tl.constexpr, WIDEST: tl.constexpr):
        """Gives those their rank that it has room for."""
        batch = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < tokens
        group = tl.load(ordered + batch * tokens + at, mask=inside, other=0) // WIDEST
        asks = inside & (group < ranks)
        ahead = at - tl.load(begins + batch * (ranks + 1) + group, mask=inside, other=0)
        space = tl.load(room + batch * ranks + group, mask=asks, other=0)
        token = tl.load(by + batch * tokens + at, mask=inside, other=0)
        tl.store(placed + batch * tokens + token, group, mask=asks & (ahead < space))
