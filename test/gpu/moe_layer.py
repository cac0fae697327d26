#!/usr/bin/env python3
"""Measures the effect of placement and token shuffling on an MoE layer after tensor-parallel attention, with real routes.

    go run ./test/gpu/routes --trace TRACE --out routes.safetensors
    python3 test/gpu/moe_layer.py --routes routes.safetensors --out moe-layer.json

It needs 2 or more GPUs of one machine (each is a rank), PyTorch with NCCL and a grouped matrix product, and Triton. Times are
measured as in internal/calibration/calibrate.py. The collectives and the exchange are those of docs/integrations/torch.

The layer processes a batch of tokens over all ranks, with random weights in bfloat16. Its stages:
  srs       sum the ranks' parts of the attention output and scatter them
  gate      compute the gate's scores and its top experts (the routes of the trace are then used instead)
  dispatch  send rows to the ranks of their experts
  products  sort rows by expert, and multiply (gate and up, SiLU, down)
  combine   send rows back, and sum them by their weights
  sag       gather all tokens on all ranks
test/gpu/README.md describes the methods, the omitted parts, and the result.
"""
import argparse
import itertools
import json
import os
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
from semmoe_shuffle import order, rows, tables  # noqa: E402
from semmoe_shuffle.collectives import PeerCollectives  # noqa: E402
from semmoe_shuffle.exchange import Exchange  # noqa: E402

FORMAT = "semmoe-routes/1"
# name: hidden, intermediate, routed experts, top-k
MODELS = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "DeepSeek-V2-Lite": (2048, 1408, 64, 6)}
METHODS = ["vanilla", "placement", "table", "prefill", "oracle", "activation", "eplb"]
COMPARED = METHODS[5:]  # plans of other methods for comparison, with slots, and ranks by the table
EXCHANGES = ["each", "distinct"]
COLLECTIVES = ["nccl", "peer"]
STAGES = ["order", "srs", "gate", "dispatch", "products", "combine", "sag"]
TYPES = {"U8": torch.uint8, "I32": torch.int32}
TOLERANCE = 2e-2  # maximum relative difference from the output of the vanilla layer; bfloat16 sums have a different order


class Routes:
    """Reads the file of test/gpu/routes."""

    def __init__(self, path):
        self.tensors, metadata = tables.parse(tables.mapped(path), path)
        if metadata.get("format") != FORMAT:
            raise calibration.InvalidInput(f"{path}: format {metadata.get('format')!r} is invalid: must be {FORMAT!r}")
        self.layers, self.batches, self.ep_sizes = (json.loads(metadata[key]) for key in ("layers", "batches", "ep_sizes"))
        self.experts, self.topk, self.trace = int(metadata["num_experts"]), int(metadata["top_k"]), metadata["trace"]

    def take(self, name, device):
        stored = self.tensors[name]
        return torch.frombuffer(bytearray(stored.raw), dtype=TYPES[stored.dtype]).view(stored.shape).to(device)


def for_model(experts, ids, slots, count, topk):
    """Converts routes [tokens, top-k] and slots to a model with `count` experts and `topk` activations per token. If the model has more
    experts than the model of the trace (Qwen3-30B-A3B), each expert of the trace becomes two experts on its rank. A token activates one of
    the two, selected by a hash of the token ID and the expert. For its heaviest experts it activates both, until there are `topk`."""
    if count == slots.numel() and topk == experts.shape[1]:
        return experts.long(), slots.long()
    if count != 2 * slots.numel() or not experts.shape[1] <= topk <= 2 * experts.shape[1]:
        raise calibration.InvalidInput(f"top-{experts.shape[1]} of {slots.numel()} experts cannot be converted to top-{topk} of {count}")
    experts, slots = experts.long(), slots.long()
    half = (ids.long()[:, None] * 2654435761 + experts * 40503 >> 16) & 1
    both = topk - experts.shape[1]
    return torch.cat([2 * experts + half, 2 * experts[:, :both] + 1 - half[:, :both]], 1), torch.stack([2 * slots, 2 * slots + 1], 1).reshape(-1)


class Experts:
    """All experts of a model. They are the same on all ranks, so that the outputs of all placements can be compared."""

    def __init__(self, hidden, inter, experts, device):
        generator = torch.Generator(device=device).manual_seed(1)
        kind = calibration.element(device)
        make = lambda *shape: torch.empty(*shape, dtype=kind, device=device).normal_(std=0.02, generator=generator)  # noqa: E731
        self.up, self.down, self.gate = make(experts, 2 * inter, hidden), make(experts, hidden, inter), make(experts, hidden)
        self.inter = inter


class Layer:
    """One layer on this rank. `slots` defines the location of experts, and `ranks` the ranks of tokens (None: no shuffling). If `peer` is
    not None, it replaces NCCL's collectives."""

    def __init__(self, model, routes, weight, slots, ranks, partial, distinct, peer):
        self.model, self.ranks, self.partial, self.peer = model, ranks, partial, peer
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        device, count = partial.device, slots.numel()
        local = count // self.world
        number = torch.empty(count, dtype=torch.int64, device=device)
        number[slots] = torch.arange(count, device=device)
        self.local, self.rank_of, self.local_of, self.routes = local, number // local, number % local, routes
        mine = slots[self.rank * local:(self.rank + 1) * local]
        self.up, self.down = model.up[mine].transpose(1, 2), model.down[mine].transpose(1, 2)
        self.arrange()
        shard = len(partial) // self.world
        self.tokens = self.order.long()
        at = self.tokens[self.rank * shard:(self.rank + 1) * shard]
        self.exchange = Exchange(routes[at], weight[at], self.rank_of, self.local_of, local, distinct)
        self.exchange.buffers(partial.shape[1], partial.dtype)
        self.whole, self.permuted = torch.empty_like(partial), torch.empty_like(partial)
        self.answer = self.whole if ranks is None and not peer else torch.empty_like(partial)
        if peer:
            peer.partial[:len(partial)].copy_(partial)
            self.exchange.out = peer.shard[:shard]
        self.multiply = grouped(device)

    def arrange(self):
        if self.ranks is not None:
            self.order, self.inverse, _ = order.group_by_rank(self.ranks, self.world)
        else:
            self.order = self.inverse = torch.arange(len(self.partial), device=self.partial.device, dtype=torch.int32)

    def srs(self):
        if self.peer:
            self.peer.reduce_scatter(self.order, self.exchange.own)
            return
        source = self.partial if self.ranks is None else rows.gather(self.partial, self.order, self.permuted)
        dist.reduce_scatter_tensor(self.exchange.own, source)

    def gate(self):
        scores = functional.linear(self.exchange.own, self.model.gate).float().softmax(-1)
        self.chosen = scores.topk(self.routes.shape[1], -1)

    def dispatch(self):
        self.exchange.dispatch()

    def products(self):
        both = self.multiply(rows.gather(self.exchange.arrived, self.exchange.index), self.up, self.exchange.offsets)
        inner = functional.silu(both[:, :self.model.inter]) * both[:, self.model.inter:]
        self.results = self.multiply(inner, self.down, self.exchange.offsets)

    def combine(self):
        self.exchange.combine(self.results)

    def sag(self):
        if self.peer:
            self.peer.all_gather(self.inverse, self.answer)
            return
        dist.all_gather_into_tensor(self.whole, self.exchange.out)
        if self.ranks is not None:
            rows.gather(self.whole, self.inverse, self.answer)

    def stages(self):
        """Returns the stages in order."""
        steps = {"order": self.arrange, "srs": self.srs, "gate": self.gate, "dispatch": self.dispatch, "products": self.products,
                 "combine": self.combine, "sag": self.sag}
        if self.ranks is None:
            del steps["order"]
        return steps

    def run(self):
        for step in self.stages().values():
            step()

    def counts(self):
        """Counts the rows between all ranks, only from the routes."""
        device, world = self.partial.device, self.world
        shard = len(self.partial) // world
        own = torch.empty(len(self.partial), dtype=torch.int64, device=device)
        own[self.tokens] = torch.arange(len(self.partial), device=device) // shard
        held = self.rank_of[self.routes]
        pairs = torch.bincount((own[:, None] * world + held).flatten(), minlength=world * world).view(world, world)
        visits = torch.zeros(len(own), world, dtype=torch.int64, device=device).scatter_(1, held, 1)
        distinct = torch.zeros(world, world, dtype=torch.int64, device=device).index_add_(0, own, visits)
        place = held * self.local + self.local_of[self.routes]
        loads = torch.bincount(place.flatten(), minlength=world * self.local).view(world, self.local)
        return {"lar": round((pairs.diagonal().sum() / pairs.sum()).item(), 4), "rows": pairs.tolist(), "distinct": distinct.tolist(), "experts_rows": loads.tolist()}


def grouped(device):
    """Returns the grouped product. Without a GPU it is one product per expert, to test the result."""
    if device.type == "cuda":
        multiply = calibration.grouped_mm()
        return lambda given, weights, offsets: multiply(given, weights, offs=offsets)

    def loop(given, weights, offsets):
        begins = [0] + offsets.tolist()
        return torch.cat([given[begin:end] @ weight for begin, end, weight in zip(begins, begins[1:], weights)])
    return loop


def check(answer, reference, what):
    """Raises an error if the output of a method differs from the vanilla layer."""
    difference = (answer.float() - reference).norm() / reference.norm()
    if not difference < TOLERANCE:  # also true for NaN
        raise AssertionError(f"{what}: the relative difference from the vanilla layer is {difference.item():.2e}")
    return round(difference.item(), 5)


def measure_batch(bench, name, model, shape, routes, batch, layer, peer, options):
    """Returns the rows of one batch in one layer."""
    device, world = bench.device, bench.world
    hidden, _, count, topk = shape
    found = []
    ids = routes.take(f"tokens.{batch['name']}", device)
    chosen = routes.take(f"experts.{batch['name']}", device)[layer]
    planned = routes.take(f"slots.ep{world}", device)[layer]
    generator = torch.Generator(device=device).manual_seed(2)
    weight = torch.rand(batch["tokens"], topk, device=device, generator=generator).softmax(-1)
    generator.manual_seed(3 + bench.rank)
    partial = torch.randn(batch["tokens"], hidden, device=device, generator=generator).to(calibration.element(device))
    reference = None
    for method in options.methods:
        default = method == "vanilla"
        slots = torch.arange(routes.experts, device=device) if default else planned
        if method in COMPARED:
            slots = routes.take(f"slots.ep{world}.{method}", device)[layer]
        mapped, slots = for_model(chosen, ids, slots, count, topk)
        ranks = None if method in METHODS[:2] else routes.take(f"ranks.ep{world}.{batch['name']}.{method}", device)[layer].contiguous()
        for exchange, by in itertools.product(options.exchanges, options.collectives):
            built = Layer(model, mapped, weight, slots, ranks, partial, exchange == "distinct", peer if by == "peer" else None)
            built.run()
            row = {"model": name, "phase": batch["phase"], "batch_tokens": batch["tokens"], "ranks": world, "tokens_per_rank": batch["tokens"] // world,
                   "layer": routes.layers[layer], "method": method, "exchange": exchange, "collectives": by, **built.counts()}
            if reference is None:
                reference = built.answer.float()
            row["difference"] = check(built.answer, reference, f"{name}, {batch['name']}, {method}, {exchange}, {by}")
            row.update(calibration.summary("layer_", bench.measure(built.run)))
            for stage, step in built.stages().items():
                row[f"{stage}_us"] = calibration.summary("", bench.measure(step, stage not in ("order", "gate", "products")))["us"]
            found.append(row)
            del built
    return found


def work(rank, world, local, device, options):
    """Measures on all ranks. Rank 0 returns the result."""
    calibration.same_gpus(device, world)
    routes = Routes(options.routes)
    if world not in routes.ep_sizes:
        raise calibration.InvalidInput(f"{world} ranks: {options.routes} has EP sizes {routes.ep_sizes}")
    bench = calibration.Bench(rank, world, device, 3 if options.quick else options.repetitions, options.timing, 0.2)
    result = {"version": 1, **calibration.machine(device, world, local), "timing": "device" if bench.on_device else "host",
              "unit": f"microseconds, median over {bench.repetitions} of the slowest rank", "trace": routes.trace,
              "models": {name: dict(zip(("hidden", "inter", "experts", "topk"), MODELS[name])) for name in options.models}, "errors": [], "cases": []}
    begin = time.monotonic()
    with torch.no_grad():
        for name in options.models:
            hidden, inter, count, topk = MODELS[name]
            if options.quick:
                hidden, inter = 64, 32
            model = Experts(hidden, inter, count, device)
            largest = max(batch["tokens"] for batch in routes.batches)
            peer = PeerCollectives(largest, hidden, calibration.element(device), device) if "peer" in options.collectives else None
            for layer in range(len(routes.layers))[:options.layers]:
                for batch in routes.batches:
                    if options.tokens and batch["tokens"] not in options.tokens:
                        continue
                    if bench.agree(time.monotonic() - begin > options.seconds):
                        result["errors"].append(f"{name}, {batch['name']}: the time limit of {options.seconds} seconds was reached")
                        continue
                    try:
                        found = measure_batch(bench, name, model, (hidden, inter, count, topk), routes, batch, layer, peer, options)
                    except (AssertionError, RuntimeError) as error:
                        result["errors"].append(f"{name}, {batch['name']}: {error}")
                        traceback.print_exc()
                        continue
                    result["cases"] += found
                    if rank == 0:
                        calibration.emit("measured", model=name, batch=batch["name"], layer=layer, seconds=round(time.monotonic() - begin, 1),
                                         us={f"{row['method']}/{row['exchange']}/{row['collectives']}": row["layer_us"] for row in found})
    result["elapsed_seconds"] = round(time.monotonic() - begin, 1)
    return result


def words(allowed):
    """Returns a parser of comma-separated lists of allowed words."""
    def read(text):
        found = text.split(",")
        if not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} is invalid: allowed are {', '.join(allowed)}")
        return found
    return read


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calibration.common_flags(parser)
    parser.add_argument("--routes", required=True, help="path of the file of test/gpu/routes")
    parser.add_argument("--models", type=words(MODELS), default=list(MODELS), help="models, separated by commas (default: all)")
    parser.add_argument("--methods", type=words(METHODS), default=METHODS, help="methods, vanilla first (default: all)")
    parser.add_argument("--exchanges", type=words(EXCHANGES), default=EXCHANGES, help="each: one row per expert; distinct: one row per rank (default: both)")
    parser.add_argument("--collectives", type=words(COLLECTIVES), default=COLLECTIVES[:1],
                        help="nccl, or peer: SRS and SAG in one kernel each, over GPU peer-to-peer memory (default: nccl)")
    parser.add_argument("--tokens", type=lambda text: [int(word) for word in text.split(",")], help="batch sizes to measure (default: all in the file)")
    parser.add_argument("--layers", type=int, default=100, help="number of layers of the file to measure")
    parser.add_argument("--seconds", type=float, default=600, help="time limit in seconds after which no further batch starts (default: 600)")
    return parser


if __name__ == "__main__":
    sys.exit(calibration.main(flags(), work))
