#!/usr/bin/env python3
"""Measures an MoE layer with expert parallelism that is split into pieces with overlapping dispatch, computation and combination.

    python3 test/gpu/pipelined_moe.py --out solver/pipeline/testdata/pipelined-moe-h200x2.json

It needs 2 to 8 GPUs of one machine (each is a rank), and PyTorch with NCCL and a grouped matrix product. Times are measured with the
functions of internal/calibration/calibrate.py.

The layer, on each rank, for a batch of tokens_per_rank tokens with balanced routing and random weights, in bfloat16:
dispatch (all-to-all of the rows, tokens x top-k of them, in equal parts), computation (sort rows by expert, grouped gate and up
projection, SiLU, grouped down projection, sort back) and combine (the same all-to-all back). The router before it, and the weighted
sum after it, are not split and not measured.

  cut "experts": a piece contains a part of each rank's experts with all of their rows (EPS-MoE); "tokens": a piece contains all
  experts with a part of their rows. Pieces differ by at most one expert, or one row per expert and source.
  channels 1: all all-to-alls run sequentially, in the order D0 D1 C0 D2 C1 ...; channels 2: dispatches and combinations have separate
  NCCL communicators and run concurrently.

The result has two lists. `layers`: the latency of the whole layer, in microseconds. `pieces`: the dispatch, computation and
combination of the largest piece of such a cut, measured separately.
"""
import argparse
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "internal", "calibration"))
import calibrate as calibration  # noqa: E402  (the path is set above)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as functional  # noqa: E402

PIECES = [1, 2, 4, 5, 8, 16]
TOKENS = [256, 1024, 4096, 8192, 16384]
# name: hidden, intermediate, routed experts, top-k
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V2-Lite": (2048, 1408, 64, 6),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
}
SMALL = (64, 32, 16, 4)  # for a quick run


def parts(total, count):
    """Splits `total` into `count` runs that differ by at most one, with the larger ones first."""
    return [total // count + (1 if i < total % count else 0) for i in range(count)]


class Weights:
    """The experts of a rank."""

    def __init__(self, hidden, inter, experts, device):
        kind = calibration.element(device)
        self.up = torch.empty(experts, 2 * inter, hidden, dtype=kind, device=device).normal_(std=0.02)
        self.down = torch.empty(experts, hidden, inter, dtype=kind, device=device).normal_(std=0.02)
        self.inter = inter


class Piece:
    """`experts` experts of each rank, starting at `first`, each with `rows` rows from each rank. The layout of rows is [rank, expert, row]."""

    def __init__(self, weights, world, first, experts, rows, device):
        hidden = weights.up.shape[2]
        self.world, self.experts, self.rows, self.inter = world, experts, rows, weights.inter
        self.up = weights.up[first:first + experts].transpose(1, 2)
        self.down = weights.down[first:first + experts].transpose(1, 2)
        self.offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (world * rows)
        kind = calibration.element(device)
        self.source, self.received, self.computed, self.combined, self.sorted = (
            torch.empty(world * experts * rows, hidden, dtype=kind, device=device) for _ in range(5))
        self.multiply = grouped(device)

    def dispatch(self, group):
        dist.all_to_all_single(self.received, self.source, group=group)

    def combine(self, group):
        dist.all_to_all_single(self.combined, self.computed, group=group)

    def compute(self):
        by_rank, by_expert = (self.world, self.experts, self.rows, -1), (self.experts, self.world, self.rows, -1)
        self.sorted.view(by_expert).copy_(self.received.view(by_rank).transpose(0, 1))
        both = self.multiply(self.sorted, self.up, self.offsets)
        inner = functional.silu(both[:, :self.inter]) * both[:, self.inter:]
        output = self.multiply(inner, self.down, self.offsets)
        self.computed.view(by_rank).copy_(output.view(by_expert).transpose(0, 1))


def grouped(device):
    """Returns the grouped product. Without a GPU it is one product per expert, to test the result."""
    if device.type == "cuda":
        multiply = calibration.grouped_mm()
        return lambda rows, weights, offsets: multiply(rows, weights, offs=offsets)

    def loop(rows, weights, offsets):
        begins = [0] + offsets.tolist()
        return torch.cat([rows[begin:end] @ weight for begin, end, weight in zip(begins, begins[1:], weights)])
    return loop


def cut_layer(weights, world, local, rows, cut, count, device):
    """Returns the pieces of a layer, or None if there are more pieces than experts or rows. Each rank has `local` experts, and each expert
    gets `rows` rows from each rank."""
    if count > (local if cut == "experts" else rows):
        return None
    if cut == "tokens":
        return [Piece(weights, world, 0, local, part, device) for part in parts(rows, count)]
    sizes = parts(local, count)
    return [Piece(weights, world, sum(sizes[:i]), size, rows, device) for i, size in enumerate(sizes)]


def layouts(pieces, cut, name):
    """Returns the rows of all pieces as one tensor [rank, expert, row, hidden], to compare and to fill layers with different cuts."""
    tensors = [getattr(piece, name).view(piece.world, piece.experts, piece.rows, -1) for piece in pieces]
    return torch.cat(tensors, dim=1 if cut == "experts" else 2)


def fill(pieces, cut, rows):
    """Fills the pieces with their rows, as the inverse of layouts."""
    along = 1 if cut == "experts" else 2
    begin = 0
    for piece in pieces:
        size = piece.experts if cut == "experts" else piece.rows
        piece.source.copy_(rows.narrow(along, begin, size).reshape(piece.source.shape))
        begin += size


class Pipeline:
    """Runs the pieces of a layer, with computation on the current stream, and communication on one or two streams."""

    def __init__(self, pieces, groups, device):
        self.pieces, self.groups = pieces, groups
        self.streams = [torch.cuda.Stream() for _ in groups] if device.type == "cuda" else []

    def run(self):
        if not self.streams:
            for piece in self.pieces:
                piece.dispatch(self.groups[0])
                piece.compute()
                piece.combine(self.groups[-1])
            return
        main = torch.cuda.current_stream()
        arrived = [torch.cuda.Event() for _ in self.pieces]
        for stream in self.streams:
            stream.wait_stream(main)
        self.send(0, arrived)
        for i, piece in enumerate(self.pieces):
            if i + 1 < len(self.pieces):
                self.send(i + 1, arrived)
            main.wait_event(arrived[i])
            piece.compute()
            computed = main.record_event()
            with torch.cuda.stream(self.streams[-1]):
                self.streams[-1].wait_event(computed)
                piece.combine(self.groups[-1])
        for stream in self.streams:
            main.wait_stream(stream)

    def send(self, i, arrived):
        with torch.cuda.stream(self.streams[0]):
            self.pieces[i].dispatch(self.groups[0])
            arrived[i].record()


def check(pieces, cut, count, rows, reference):
    """Raises an error if the output of a split layer differs from that of the whole layer. Products of different sizes round differently."""
    answer = layouts(pieces, cut, "combined").float()
    difference = (answer - reference).norm() / reference.norm()
    if not difference < 5e-3:  # also true for NaN
        raise AssertionError(f"cut by {cut} into {count} pieces, {rows} rows: the relative difference from the whole layer is {difference.item():.2e}")


def measure_model(bench, name, groups, tokens, quick):
    """Returns the rows of both lists for one model and one batch."""
    hidden, inter, experts, topk = SMALL if quick else MODELS[name]
    world, device = bench.world, bench.device
    local, rows = experts // world, tokens * topk // experts
    weights = Weights(hidden, inter, local, device)
    generator = torch.Generator(device=device).manual_seed(bench.rank)
    source = torch.randn(world, local, rows, hidden, device=device, generator=generator).to(calibration.element(device))
    layers, pieces, reference = [], [], None
    for cut in ("experts", "tokens"):
        for count in PIECES:
            chunk = cut_layer(weights, world, local, rows, cut, count, device)
            if chunk is None or (cut == "tokens" and count == 1):
                continue
            what = {"model": name, "tokens_per_rank": tokens, "cut": cut, "pieces": count}
            fill(chunk, cut, source)
            for channels in (1, 2):
                pipeline = Pipeline(chunk, groups[:channels], device)
                times = bench.measure(pipeline.run)
                if times is None:
                    raise calibration.InvalidInput(f"{name} with {tokens} tokens per rank needs more GPU memory: use --tokens with smaller batches")
                layers.append({**what, "channels": channels, **calibration.summary("", times)})
                if reference is None:
                    reference = layouts(chunk, cut, "combined").float()
                check(chunk, cut, count, rows, reference)
            pieces.append({**what, **measure_piece(bench, chunk[0], groups)})
            del chunk, pipeline
    return layers, pieces


def measure_piece(bench, piece, groups):
    """Measures dispatch, computation and combination of a piece separately."""
    hidden = piece.up.shape[1]
    row = {"experts": piece.experts, "tokens_per_expert": piece.world * piece.rows,
           "remote_bytes_per_rank": (piece.world - 1) * piece.experts * piece.rows * hidden * piece.source.element_size()}
    for prefix, op, collective in (("dispatch_", lambda: piece.dispatch(groups[0]), True), ("compute_", piece.compute, False),
                                   ("combine_", lambda: piece.combine(groups[-1]), True)):
        row[f"{prefix}us"] = calibration.summary("", bench.measure(op, collective))["us"]
    return row


def work(rank, world, local, device, options):
    """Measures on all ranks. Rank 0 returns the result."""
    calibration.same_gpus(device, world)
    if any(model[2] % world for model in MODELS.values()) or world < 2:
        raise calibration.InvalidInput(f"{world} ranks are invalid: must be 2, 4 or 8, which divide the number of experts of each model")
    bench = calibration.Bench(rank, world, device, 3 if options.quick else options.repetitions, options.timing, 0.4)
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    result = {"version": 1, **calibration.machine(device, world, local), "timing": "device" if bench.on_device else "host",
              "unit": f"microseconds, median over {bench.repetitions} of the slowest rank",
              "models": {name: dict(zip(("hidden", "inter", "experts", "topk"), SMALL if options.quick else model)) for name, model in MODELS.items()},
              "layers": [], "pieces": []}
    begin = time.monotonic()
    for tokens in [32] if options.quick else options.tokens:
        for name in MODELS:
            layers, pieces = measure_model(bench, name, groups, tokens, options.quick)
            result["layers"] += layers
            result["pieces"] += pieces
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if rank == 0:
                calibration.emit("measured", model=name, tokens_per_rank=tokens, seconds=round(time.monotonic() - begin, 1),
                                 us={f"{row['cut']}/{row['pieces']}/{row['channels']}": row["us"] for row in layers})
    result["elapsed_seconds"] = round(time.monotonic() - begin, 1)
    return result


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calibration.common_flags(parser)
    parser.add_argument("--tokens", type=lambda text: [int(word) for word in text.split(",")], default=TOKENS,
                        help="batch sizes in tokens per rank, separated by commas; multiples of 32 (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(calibration.main(flags(), work))
