"""Tests of the exchange on CPUs, by processes; without PyTorch they are skipped. test/gpu/one_shot.py measures it on GPUs."""
import os
import sys
import tempfile
import unittest

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as processes
except ImportError as error:
    raise unittest.SkipTest("PyTorch is not installed") from error

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from semmoe_shuffle.exchange import Exchange, OneShot  # noqa: E402  (the path is set above)

EXPERTS, TOPK, WIDTH, TOKENS = 12, 3, 10, 17


def layer(exchange, scale):
    """The sums of a layer whose expert e multiplies a row by scale[e]."""
    exchange.dispatch()
    begins = [0] + exchange.offsets.tolist()
    results = exchange.arrived[exchange.index.long()].clone()
    for expert, (begin, end) in enumerate(zip(begins, begins[1:])):
        results[begin:end] *= scale[expert]
    return exchange.combine(results)


def compare(rank, ranks, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    local = EXPERTS // ranks
    rank_of, local_of = torch.arange(EXPERTS) // local, torch.arange(EXPERTS) % local
    scale = torch.arange(1, EXPERTS + 1).float()
    draw = torch.Generator().manual_seed(rank)
    for favoured in (None, 0):  # with a favoured rank, some pairs of ranks exchange nothing
        routes = torch.rand(TOKENS, EXPERTS, generator=draw)
        if favoured is not None:
            routes[:, rank_of == favoured] += 1
        routes = routes.topk(TOPK, -1).indices
        weight = torch.rand(TOKENS, TOPK, generator=draw)
        given = torch.randn(TOKENS, WIDTH, generator=draw)
        want = (given[:, None] * (scale[routes] * weight)[..., None]).sum(1)
        for distinct in (False, True):
            plain = Exchange(routes, weight, rank_of, local_of, local, distinct)
            plain.buffers(WIDTH, given.dtype)
            plain.own.copy_(given)
            out = layer(plain, scale[rank * local:]).clone()
            torch.testing.assert_close(out, want)
            for capacity in (1, 5, 1000):  # below, near and above the number of rows
                shot = OneShot(given, capacity, routes, weight, rank_of, local_of, local, distinct)
                shot.buffers(WIDTH, given.dtype)
                assert shot.receive_counts == plain.receive_counts
                assert torch.equal(layer(shot, scale[rank * local:]), out), (distinct, capacity)
    dist.destroy_process_group()


class ExchangeTest(unittest.TestCase):
    def test_one_shot_equals_four_exchanges(self):
        for ranks in (1, 2, 3):
            with tempfile.TemporaryDirectory() as folder:
                processes.spawn(compare, (ranks, os.path.join(folder, "init")), nprocs=ranks)

    def test_capacity(self):
        with self.assertRaisesRegex(ValueError, "capacity 0"):
            OneShot(None, 0, None, None, None, None, 1, True)


if __name__ == "__main__":
    unittest.main()
