#!/usr/bin/env python3
"""Tests and measures the token-shuffle consumer (docs/integrations/torch) on GPUs.

    python3 test/gpu/token_shuffle.py --out token-shuffle.json

It needs 2 or more GPUs of one machine (each is a rank), PyTorch with NCCL, and Triton. Times are measured as in
internal/calibration/calibrate.py.

  exact        compares shuffled with unshuffled collectives bitwise, and the order with a sort on the CPU; checks that shards are equal
  order        compares grouping tokens by rank with torch.argsort on its fastest type
  assign       measures the lookup of scores and the split into equal shards, for one layer and for all layers of a batch
  collectives  compares SRS and SAG with reduce-scatter and all-gather
  peer         the same with GPU peer-to-peer memory
"""
import argparse
import os
import random
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
for folder in ("internal/calibration", "docs/integrations/torch"):
    sys.path.insert(0, os.path.join(HERE, "..", "..", *folder.split("/")))
import calibrate as calibration  # noqa: E402  (the paths are set above)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from semmoe_shuffle import assign, collectives, order, rows  # noqa: E402

WIDTH = 2048  # of the residual stream: Qwen3-30B-A3B's and DeepSeek-V2-Lite's
ATTENTION = 4096  # of attention's output before the last projection, over all ranks: Qwen3-30B-A3B's
IDS = [8192, 16384, 32768, 65536, 131072]
TOKENS = [64, 512, 2048, 4096, 8192, 16384, 32768]


def time_of(bench, operation, collective=True):
    return calibration.summary("", bench.measure(operation, collective))["us"]


def shared_order(bench, tokens, seed):
    """Returns random ranks in equal shards, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    ranks = (torch.randperm(tokens, generator=generator) % bench.world).to(bench.device)
    return order.group_by_rank(ranks.to(torch.uint8), bench.world)


def exact(bench, quick):
    """Raises an error if a result is not exact. NCCL's sums depend on the position of a row, so with more than two ranks random values may
    round differently, but integers do not. Sums are compared with integers, and all other results with random values."""
    found = []
    for tokens in [64, 512, 4096] if quick else [64, 512, 4096, 16384]:
        for seed in range(4):
            by, inverse, counts = shared_order(bench, tokens, seed)
            if counts.tolist() != [tokens // bench.world] * bench.world:
                raise AssertionError(f"shards are {counts.tolist()}")
            generator = torch.Generator(device=bench.device).manual_seed(10 * seed + bench.rank)
            partial = torch.randn(tokens, WIDTH, device=bench.device, generator=generator)
            for name, values in (("whole", (partial * 1000).round()), ("random", partial)):
                summed = values.clone()
                dist.all_reduce(summed)
                shard = collectives.shuffled_reduce_scatter(values, by)
                back = collectives.shuffled_all_gather(shard, inverse)
                plain = torch.empty_like(shard)
                dist.reduce_scatter_tensor(plain, values)
                unshuffled = torch.empty_like(values)
                dist.all_gather_into_tensor(unshuffled, plain)
                row = {"check": f"NCCL, {name} numbers", "tokens": tokens, "equal": bool(torch.equal(back, unshuffled)), "equal_to_all_reduce": bool(torch.equal(back, summed)),
                       "different": round((back != unshuffled).float().mean().item(), 6), "largest_difference": (back - unshuffled).abs().max().item()}
                if name == "whole" and not (row["equal"] and row["equal_to_all_reduce"]):
                    raise AssertionError(f"{row}")
                found.append(row)
            gathered = collectives.shuffled_all_gather(partial[by.long()].chunk(bench.world)[bench.rank].contiguous(), inverse)
            mine = [torch.empty_like(partial) for _ in range(bench.world)]
            dist.all_gather(mine, partial)
            want = torch.cat([mine[rank][by.long()].chunk(bench.world)[rank] for rank in range(bench.world)])[inverse.long()]
            if not torch.equal(gathered, want):
                raise AssertionError(f"the shuffled all-gather of {tokens} tokens differs")
    draw = random.Random(1)
    for case in range(20 if quick else 100):
        n, ranks = draw.randint(1, 20000), draw.choice([1, 2, 4, 7, 64, 200])
        ids = torch.randint(ranks, (n,), device=bench.device, dtype=draw.choice([torch.uint8, torch.int64]))
        by, inverse, counts = order.group_by_rank(ids, ranks)
        want = torch.argsort(ids.cpu(), stable=True)
        if not (torch.equal(by.cpu().long(), want) and torch.equal(inverse.long()[by.long()].cpu(), torch.arange(n)) and
                torch.equal(counts.cpu().long(), torch.bincount(ids.cpu().long(), minlength=ranks))):
            raise AssertionError(f"the order of {n} ids of {ranks} ranks is not stable")
        tokens, n = draw.randint(1, 500), draw.randint(1, 9)
        scores = torch.randint(draw.choice([3, 65536]), (2, tokens, n), device=bench.device, dtype=torch.int32)
        placed = assign.align(scores)
        if not torch.equal(placed.cpu(), assign.align(scores.cpu())):
            raise AssertionError(f"{tokens} tokens on {n} ranks are assigned differently than on the CPU")
        sizes = [tokens // n + (rank < tokens % n) for rank in range(n)]
        if any(torch.bincount(row, minlength=n).tolist() != sizes for row in placed):
            raise AssertionError(f"shards of {tokens} tokens on {n} ranks are {[torch.bincount(row, minlength=n).tolist() for row in placed]}")
    return found


def measure_order(bench, quick):
    found = []
    for n in IDS[:2] if quick else IDS:
        for ranks in (4, 8, 16, 64):
            ids = torch.randint(ranks, (n,), device=bench.device)
            row = {"ids": n, "ranks": ranks}
            for kind in (torch.uint8, torch.int32, torch.int64):
                given = ids.to(kind)
                name = str(kind).split(".")[1]
                row[f"argsort_{name}_us"] = time_of(bench, lambda: torch.argsort(given), False)
                row[f"stable_argsort_{name}_us"] = time_of(bench, lambda: torch.argsort(given, stable=True), False)
            given = ids.to(torch.uint8)
            row["us"] = time_of(bench, lambda: order.group_by_rank(given, ranks), False)
            best = min(value for key, value in row.items() if "argsort" in key)
            row["times_as_fast"] = round(best / row["us"], 2)
            found.append(row)
    return found


def measure_assign(bench, quick):
    found = []
    for tokens, ranks, layers in ((512, 4, 1), (4096, 4, 1), (8192, 4, 1), (8192, 8, 1), (16384, 4, 1), (8192, 4, 48), (8192, 8, 48))[:2 if quick else 7]:
        scores = torch.randint(65536, (layers, tokens, ranks), device=bench.device, dtype=torch.int32)
        row = {"tokens": tokens, "ranks": ranks, "layers": layers, "us": time_of(bench, lambda: assign.align(scores), False)}
        row["us_per_layer"] = round(row["us"] / layers, 1)
        found.append(row)
    return found


def measure_collectives(bench, quick):
    found = []
    kind = calibration.element(bench.device)
    for tokens in TOKENS[:2] if quick else TOKENS:
        by, inverse, _ = shared_order(bench, tokens, 1)
        straight = torch.arange(tokens, dtype=torch.int32, device=bench.device)
        partial, residual, whole, permuted, answer, added = (torch.randn(tokens, WIDTH, device=bench.device).to(kind) for _ in range(6))
        shard = torch.empty(tokens // bench.world, WIDTH, dtype=kind, device=bench.device)
        attention = torch.randn(tokens, ATTENTION // bench.world, device=bench.device).to(kind)
        attention_permuted = torch.empty_like(attention)
        projection, norm = torch.randn(WIDTH, ATTENTION // bench.world, device=bench.device).to(kind), torch.ones(WIDTH, device=bench.device).to(kind)

        def scatter(source):
            dist.reduce_scatter_tensor(shard, source)

        def gather():
            dist.all_gather_into_tensor(whole, shard)

        def normed(index):
            gather()
            rows.add_and_norm(whole, index, residual, norm, 1e-6, added, answer)

        row = {"tokens": tokens, "width": WIDTH,
               "reduce_scatter_us": time_of(bench, lambda: scatter(partial)),
               "srs_us": time_of(bench, lambda: scatter(rows.gather(partial, by, permuted))),
               "projected_us": time_of(bench, lambda: scatter(functional.linear(attention, projection))),
               "projected_srs_us": time_of(bench, lambda: scatter(functional.linear(rows.gather(attention, by, attention_permuted), projection))),
               "all_gather_us": time_of(bench, gather),
               "sag_us": time_of(bench, lambda: (gather(), rows.gather(whole, inverse, permuted))),
               "normed_us": time_of(bench, lambda: normed(straight)),
               "normed_sag_us": time_of(bench, lambda: normed(inverse)),
               "index_select_us": time_of(bench, lambda: torch.index_select(partial, 0, by, out=permuted), False),
               "gather_us": time_of(bench, lambda: rows.gather(partial, by, permuted), False)}
        plain = row["reduce_scatter_us"] + row["all_gather_us"]
        row["overhead"] = round((row["srs_us"] + row["sag_us"]) / plain - 1, 4)
        row["fused_overhead"] = round((row["projected_srs_us"] - row["projected_us"] + row["normed_sag_us"] - row["normed_us"]) / plain, 4)
        found.append(row)
    return found


def measure_peer(bench, quick):
    found = []
    for tokens in TOKENS[:2] if quick else TOKENS:
        by, inverse, _ = shared_order(bench, tokens, 1)
        straight = torch.arange(tokens, dtype=torch.int32, device=bench.device)
        exactly = collectives.PeerCollectives(tokens, WIDTH, torch.float32, bench.device)
        exactly.partial.normal_(generator=torch.Generator(device=bench.device).manual_seed(bench.rank))
        answers = []
        for way, back in ((straight, straight), (by, inverse)):
            out = torch.empty(tokens // bench.world, WIDTH, device=bench.device)
            exactly.shard.copy_(exactly.reduce_scatter(way, out))
            answers.append(exactly.all_gather(back, torch.empty(tokens, WIDTH, device=bench.device)))
        if not torch.equal(*answers):
            raise AssertionError(f"{tokens} tokens: SRS and SAG differ from the unshuffled collectives")
        del exactly, answers
        peer = collectives.PeerCollectives(tokens, WIDTH, torch.bfloat16, bench.device)
        peer.partial.normal_()
        peer.shard.normal_()
        shard, whole = torch.empty_like(peer.shard), torch.empty_like(peer.partial)
        row = {"tokens": tokens, "width": WIDTH, "float32_equal": True,
               "reduce_scatter_us": time_of(bench, lambda: peer.reduce_scatter(straight, shard)), "srs_us": time_of(bench, lambda: peer.reduce_scatter(by, shard)),
               "all_gather_us": time_of(bench, lambda: peer.all_gather(straight, whole)), "sag_us": time_of(bench, lambda: peer.all_gather(inverse, whole)),
               "nccl_reduce_scatter_us": time_of(bench, lambda: dist.reduce_scatter_tensor(shard, whole)),
               "nccl_all_gather_us": time_of(bench, lambda: dist.all_gather_into_tensor(whole, shard))}
        row["overhead"] = round((row["srs_us"] + row["sag_us"]) / (row["nccl_reduce_scatter_us"] + row["nccl_all_gather_us"]) - 1, 4)
        found.append(row)
    return found


SECTIONS = {"exact": exact, "order": measure_order, "assign": measure_assign, "collectives": measure_collectives, "peer": measure_peer}


def work(rank, world, local, device, options):
    """Measures on all ranks. Rank 0 returns the result."""
    calibration.same_gpus(device, world)
    bench = calibration.Bench(rank, world, device, 3 if options.quick else options.repetitions, options.timing, 0.2)
    result = {"version": 1, **calibration.machine(device, world, local), "timing": "device" if bench.on_device else "host",
              "unit": f"microseconds, median over {bench.repetitions} of the slowest rank", "errors": []}
    begin = time.monotonic()
    for name in options.only or SECTIONS:
        try:
            with torch.no_grad():
                result[name] = SECTIONS[name](bench, options.quick)
        except Exception as error:  # pylint: disable=broad-except  (a failed section must not stop the others)
            result["errors"].append(f"{name}: {error!r}")
            traceback.print_exc()
            continue
        if rank == 0:
            calibration.emit("measured", section=name, seconds=round(time.monotonic() - begin, 1), rows=result[name])
    result["elapsed_seconds"] = round(time.monotonic() - begin, 1)
    return result


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calibration.common_flags(parser)
    parser.add_argument("--only", action="append", default=[], choices=list(SECTIONS), help="section (default: all); may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(calibration.main(flags(), work))
