#!/usr/bin/env python3
"""Compares the one-shot all-to-all-v of dispatch with separate exchanges of counts, expert numbers, weights and rows.

    python3 test/gpu/one_shot.py --out one-shot.json

It needs 2 or more GPUs of one machine (each is a rank) and PyTorch with NCCL. Both exchanges are those of docs/integrations/torch. A time is
that of preparing the exchange of a batch with its routes, sending its rows, and receiving them, on the slowest rank; the host waits for the
counts in both. `exchange_us` is the part on the network: four all-to-alls with known lengths, or one, without launches. Routes are uniformly
random: on N ranks, 1 - 1/N of the activations are remote. The output of a layer whose experts multiply by a number must be equal for both.
"""
import argparse
import itertools
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
for folder in ("internal/calibration", "docs/integrations/torch"):
    sys.path.insert(0, os.path.join(HERE, "..", "..", *folder.split("/")))
import calibrate as calibration  # noqa: E402  (the paths are set above)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from semmoe_shuffle.exchange import Exchange, OneShot  # noqa: E402

# name: hidden, routed experts, top-k
MODELS = {"Qwen3-30B-A3B": (2048, 128, 8), "DeepSeek-V3": (7168, 256, 8)}
ROOM = {"exact": 1.0, "half more": 1.5, "half": 0.5}  # capacity by the largest number of rows between two ranks; with half, the rest follows


def case(bench, shape, tokens, distinct):
    """Returns the times of all exchanges of one batch, by name."""
    hidden, experts, topk = shape
    device, local = bench.device, experts // bench.world
    draw = torch.Generator(device=device).manual_seed(bench.rank)
    routes = torch.rand(tokens, experts, device=device, generator=draw).topk(topk, -1).indices
    weight = torch.rand(tokens, topk, device=device, generator=draw)
    number = torch.arange(experts, device=device)
    given = torch.randn(tokens, hidden, device=device, generator=draw).to(calibration.element(device))
    plain = routes, weight, number // local, number % local, local, distinct

    def separate():
        exchange = Exchange(*plain)
        exchange.buffers(hidden, given.dtype)
        exchange.own.copy_(given)
        exchange.dispatch()
        return exchange

    def one_shot(capacity):
        exchange = OneShot(given, capacity, *plain)
        exchange.buffers(hidden, given.dtype)
        return exchange

    def layer(exchange):
        scale = 1 + (exchange.index * 0 + torch.repeat_interleave(number[:local], exchange.rows_of_expert)).to(given.dtype) / local
        return exchange.combine(exchange.arrived[exchange.index.long()] * scale[:, None]).clone()

    most = int(bench.agree(max(separate().send_counts)))
    ways = {"separate": separate}
    for name, share in ROOM.items():
        ways[f"one shot, {name}"] = lambda capacity=max(1, int(most * share)): one_shot(capacity)
    want, found = layer(separate()), {}
    for name, way in ways.items():
        same = bench.agree(not torch.equal(layer(way()), want)) == 0
        if not same:
            raise AssertionError(f"{name}: the output differs from that of separate exchanges")
        found[name] = calibration.summary("", bench.measure(way))["us"]
    return {"rows_between_ranks": most, "us": found, "exchange_us": network(bench, separate(), given, most)}


def network(bench, exchange, given, most):
    """Returns the times of the all-to-alls alone, by name, with known lengths."""
    send, receive, device = exchange.send_counts, exchange.receive_counts, bench.device
    width = exchange.topk if exchange.distinct else 1
    counts = torch.zeros(bench.world, dtype=torch.int64, device=device)
    parts = []
    for kind, columns in ((torch.int32, width), (torch.float32, width), (given.dtype, given.shape[1])):
        parts.append([torch.zeros(sum(n), columns, dtype=kind, device=device) for n in (receive, send)])
    room = 16 + sum(most * part[0].shape[1] * part[0].element_size() for part in parts)
    splits = [0 if rank == bench.rank else room for rank in range(bench.world)]
    whole = [torch.zeros(sum(splits), dtype=torch.uint8, device=device) for _ in range(2)]

    def separate():
        dist.all_to_all_single(counts.clone(), counts)
        for target, source in parts:
            dist.all_to_all_single(target, source, receive, send)

    def one_shot():
        dist.all_to_all_single(whole[0], whole[1], splits, splits)

    times = {"separate": separate, "one shot": one_shot}
    on_device = calibration.Bench(bench.rank, bench.world, device, bench.repetitions, "device", 0.2)
    return {name: calibration.summary("", on_device.measure(op))["us"] for name, op in times.items()}


def work(rank, world, local, device, options):
    """Measures on all ranks. Rank 0 returns the result."""
    calibration.same_gpus(device, world)
    bench = calibration.Bench(rank, world, device, 3 if options.quick else options.repetitions, "host", 0.5)
    result = {"version": 1, **calibration.machine(device, world, local), "timing": "host",
              "unit": f"microseconds, median over {bench.repetitions} of the slowest rank", "cases": []}
    for name, tokens, distinct in itertools.product(MODELS, options.tokens, (False, True)):
        shape = (64, *MODELS[name][1:]) if options.quick else MODELS[name]
        row = {"model": name, "ranks": world, "tokens_per_rank": tokens, "rows": "distinct" if distinct else "each",
               **case(bench, shape, tokens, distinct)}
        result["cases"].append(row)
        if rank == 0:
            calibration.emit("measured", **row)
    return result


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calibration.common_flags(parser)
    parser.add_argument("--tokens", type=lambda text: [int(word) for word in text.split(",")], default=[32, 256, 2048, 8192],
                        help="tokens per rank, separated by commas (default: 32,256,2048,8192)")
    return parser


if __name__ == "__main__":
    sys.exit(calibration.main(flags(), work))
