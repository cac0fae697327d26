#!/usr/bin/env python3
"""Runs MoE layers with attention on one GPU and experts on another, by schedules of micro-batches and chunks (FinDEP, arXiv 2512.21487).

    python3 test/gpu/disaggregated_moe.py stages --model DeepSeek-V2 --out stages.json       # times of the tasks, one at a time
    semmoe-lab pipeline serve --stages stages.json --listen 127.0.0.1:8091 &
    python3 test/gpu/disaggregated_moe.py grid --model DeepSeek-V2 --out grid.json           # measured layers for a grid of schedules
    python3 test/gpu/disaggregated_moe.py serve --model DeepSeek-V2 --server http://127.0.0.1:8091 --out serve.json

It needs two GPUs of one machine that can access each other's memory, and PyTorch with a grouped matrix product.

A layer, in bfloat16 with random weights. The attention GPU adds the results of the previous layer to the residual stream, and computes norm,
attention, norm and gate of a micro-batch, and gathers the rows of each chunk, sorted by expert; it also computes the shared experts. The expert
GPU computes grouped products over all experts of a chunk. A row is sent for each pair of a token and an expert. The gate's scores weight the
results, but tokens are assigned to experts evenly, as the schedule search assumes. There are no positions (RoPE).

One process queues the work of both GPUs: each GPU has a stream for its computation, and each direction has one for its copies, which use copy
engines and no multiprocessors. Events order the tasks, so the GPUs never wait for the host unless it queues slower than they compute. A run's
time is the time on the attention GPU from the first task to the last result. `host_bound` marks runs in which the host was slower.
"""
import argparse
import itertools
import json
import os
import statistics
import sys
import time
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "internal", "calibration"))
import calibrate as calibration  # noqa: E402  (the path is set above)

import torch  # noqa: E402
import torch.nn.functional as functional  # noqa: E402

# The members have the names of `semmoe-lab pipeline -o json`.
MODELS = {
    "DeepSeek-V2": {"experts": 160, "top_k": 6, "hidden_size": 5120, "expert_size": 1536, "shared_size": 3072, "dense_size": 12288, "heads": 128,
                    "kv_heads": 128, "query_dim": 192, "value_dim": 128, "kv_rank": 512, "query_rank": 1536, "rope_dim": 64},
    "Qwen3-235B-A22B": {"experts": 128, "top_k": 8, "hidden_size": 4096, "expert_size": 1536, "shared_size": 0, "dense_size": 0, "heads": 64,
                        "kv_heads": 4, "query_dim": 128, "value_dim": 128, "kv_rank": 0, "query_rank": 0, "rope_dim": 0},
}
SMALL = {"experts": 8, "top_k": 2, "hidden_size": 64, "expert_size": 32, "shared_size": 64, "dense_size": 0, "heads": 4,
         "kv_heads": 2, "query_dim": 16, "value_dim": 16, "kv_rank": 0, "query_rank": 0, "rope_dim": 0}
SEQUENCES, BATCHES, CHUNKS = [1024, 2048, 4096, 8192], [2, 4, 8], [1, 2, 3, 4, 8]
# The lengths and samples of a stream of batches, with the frequencies of FinDEP's table 6.
STREAM = [(1024, 8), (2048, 4), (1024, 4), (2048, 8), (4096, 4), (1024, 8), (4096, 2), (2048, 4), (1024, 2), (2048, 2)]


class Schedule:
    """How a batch is processed. `order` lists the attention GPU's tasks in a layer: i is the attention of micro-batch i, -1-i its shared experts. With
    `fused`, shared experts are a part of attention (PPPipe)."""

    def __init__(self, samples, micro_batches, chunks, order=None, name="", fused=False):
        self.samples, self.micro_batches, self.chunks, self.fused = samples, micro_batches, chunks, fused
        self.order = order or [step for i in range(micro_batches) for step in (i, -1 - i)]
        self.name = name or "ASAS"

    def row(self):
        return {"samples_per_micro_batch": self.samples, "micro_batches": self.micro_batches, "chunks": self.chunks, "order_name": self.name,
                "order": self.order, "fused": self.fused}


def late(micro_batches):
    """Returns the order AASS: the attention of all micro-batches first."""
    return list(range(micro_batches)) + [-1 - i for i in range(micro_batches)]


class Machine:
    """Two devices with their streams. Without GPUs everything runs on the CPU, one task after the other."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.attention, self.experts = (torch.device("cuda", 0), torch.device("cuda", 1)) if cuda else (torch.device("cpu"),) * 2
        self.kind = calibration.element(self.attention)
        if not cuda:
            return
        self.ag, self.eg = torch.cuda.Stream(self.attention), torch.cuda.Stream(self.experts)
        # A copy between GPUs is ordered after the current streams of both.
        self.forward = torch.cuda.Stream(self.attention), torch.cuda.Stream(self.experts)
        self.backward = torch.cuda.Stream(self.experts), torch.cuda.Stream(self.attention)

    def on(self, stream, after=()):
        """Makes a stream current on its device, behind events."""
        if not self.cuda:
            return
        torch.cuda.set_stream(stream)
        for event in after:
            stream.wait_event(event)

    def copy(self, link, target, source, after):
        """Copies between the GPUs on one direction's streams, and returns the event of the arrival."""
        if not self.cuda:
            target.copy_(source)
            return None
        sending, receiving = link
        sending.wait_event(after)
        torch.cuda.set_stream(sending)
        torch.cuda.set_stream(receiving)
        target.copy_(source, non_blocking=True)
        return receiving.record_event()

    def record(self, stream):
        return stream.record_event() if self.cuda else None

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize(self.attention)
            torch.cuda.synchronize(self.experts)

    def streams(self):
        return (self.ag, self.eg, self.forward, self.backward) if self.cuda else (None,) * 4


class Weights:
    """The weights of one layer."""

    def __init__(self, shape, machine, seed):
        self.shape = shape
        generators = {}

        def matrix(device, *sizes):
            generator = generators.setdefault(device, torch.Generator(device=device).manual_seed(seed))
            return (torch.randn(*sizes, device=device, generator=generator) * sizes[-2] ** -0.5).to(machine.kind)

        def large(device, count, inner, outer):
            # The layout [expert, out, in] transposed, as engines keep weights. Drawn expert by expert, because float32 numbers need memory.
            weights = torch.empty(count, outer, inner, dtype=machine.kind, device=device)
            for expert in range(count):
                weights[expert] = matrix(device, inner, outer).T
            return weights.transpose(1, 2)

        a, e, s = machine.attention, machine.experts, shape
        hidden, heads, keys = s["hidden_size"], s["heads"], s["kv_heads"]
        self.latent = s["kv_rank"] > 0
        if self.latent:
            self.query = [matrix(a, hidden, s["query_rank"]), matrix(a, s["query_rank"], heads * s["query_dim"])]
            self.down = matrix(a, hidden, s["kv_rank"] + s["rope_dim"])
            self.up = matrix(a, s["kv_rank"], heads * (s["query_dim"] - s["rope_dim"] + s["value_dim"]))
        else:
            self.query = [matrix(a, hidden, heads * s["query_dim"])]
            self.key, self.value = matrix(a, hidden, keys * s["query_dim"]), matrix(a, hidden, keys * s["value_dim"])
        self.output = matrix(a, heads * s["value_dim"], hidden)
        self.gate = matrix(a, hidden, s["experts"])
        self.shared = [matrix(a, hidden, 2 * s["shared_size"]), matrix(a, s["shared_size"], hidden)] if s["shared_size"] else None
        self.experts = large(e, s["experts"], hidden, 2 * s["expert_size"]), large(e, s["experts"], s["expert_size"], hidden)


def multiply_experts(rows, weights, offsets, cuda):
    """Returns the outputs of all experts for rows sorted by expert."""
    up, down = weights
    if cuda:
        product = calibration.grouped_mm()
        both = product(rows, up, offs=offsets)
        return product(functional.silu(both[:, :both.shape[1] // 2]) * both[:, both.shape[1] // 2:], down, offs=offsets)
    ends = [0] + offsets.tolist()
    parts = []
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        both = rows[begin:end] @ up[expert]
        parts.append((functional.silu(both[:, :both.shape[1] // 2]) * both[:, both.shape[1] // 2:]) @ down[expert])
    return torch.cat(parts)


def attend(weights, x, samples):
    """Returns causal attention of normed rows [samples × sequence, hidden]."""
    s = weights.shape
    sequence, heads = x.shape[0] // samples, s["heads"]
    query = x
    for w in weights.query:
        query = query @ w
    query = query.view(samples, sequence, heads, s["query_dim"]).transpose(1, 2)
    if weights.latent:
        compressed = x @ weights.down
        both = (compressed[:, :s["kv_rank"]] @ weights.up).view(samples, sequence, heads, -1)
        plain = s["query_dim"] - s["rope_dim"]
        position = compressed[:, s["kv_rank"]:].view(samples, sequence, 1, s["rope_dim"]).expand(-1, -1, heads, -1)
        key, value = torch.cat([both[..., :plain], position], dim=-1).transpose(1, 2), both[..., plain:].transpose(1, 2)
    else:
        key = (x @ weights.key).view(samples, sequence, s["kv_heads"], s["query_dim"]).transpose(1, 2)
        value = (x @ weights.value).view(samples, sequence, s["kv_heads"], s["value_dim"]).transpose(1, 2)
    grouped = s["kv_heads"] != heads
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(x.shape[0], heads * s["value_dim"]) @ weights.output


class Chunk:
    """A run of a micro-batch's tokens, with the rows of their experts sorted by expert."""

    def __init__(self, begin, tokens, shape, machine, seed):
        generator = torch.Generator().manual_seed(seed)
        experts, top = shape["experts"], shape["top_k"]
        cycle = torch.arange(tokens * top) % experts
        ids = torch.randperm(experts, generator=generator)[cycle].view(tokens, top)[torch.randperm(tokens, generator=generator)]
        order = torch.argsort(ids.view(-1), stable=True)
        self.begin, self.end, self.top = begin, begin + tokens, top
        self.ids = ids.to(machine.attention)
        self.source = (order // top + begin).to(machine.attention)
        self.back = torch.argsort(order).to(machine.attention)
        self.offsets = torch.cumsum(torch.bincount(ids.view(-1), minlength=experts), 0).to(torch.int32).to(machine.experts)
        size = (tokens * top, shape["hidden_size"])
        self.sent, self.returned = (torch.empty(size, dtype=machine.kind, device=machine.attention) for _ in range(2))
        self.received = torch.empty(size, dtype=machine.kind, device=machine.experts)
        self.weights = self.computed = None

    def gather(self, rows, scores):
        torch.index_select(rows, 0, self.source, out=self.sent)
        self.weights = scores[self.begin:self.end].gather(1, self.ids)

    def add_to(self, x):
        rows = self.returned.index_select(0, self.back).view(self.end - self.begin, self.top, -1)
        x[self.begin:self.end] += torch.bmm(self.weights.to(x.dtype).unsqueeze(1), rows).squeeze(1)


def parts(total, count):
    return [total // count + (1 if i < total % count else 0) for i in range(count)]


class Batch:
    """The state of a batch under a schedule: residual streams and buffers of each micro-batch. Seeds are of tokens, so that the assignment to experts
    differs between schedules only if their chunks do."""

    def __init__(self, layers, machine, sequence, schedule):
        shape = layers[0].shape
        self.layers, self.machine, self.sequence, self.schedule = layers, machine, sequence, schedule
        tokens = schedule.samples * sequence
        self.chunks = []
        for i in range(schedule.micro_batches):
            begins = itertools.accumulate(parts(tokens, schedule.chunks), initial=0)
            self.chunks.append([Chunk(begin, size, shape, machine, 1000 * i + j)
                                for j, (begin, size) in enumerate(zip(begins, parts(tokens, schedule.chunks)))])
        generator = torch.Generator(device=machine.attention).manual_seed(7)
        self.input = [torch.randn(tokens, shape["hidden_size"], device=machine.attention, generator=generator).to(machine.kind)
                      for _ in range(schedule.micro_batches)]
        self.x = [torch.empty_like(rows) for rows in self.input]
        self.normed = [torch.empty_like(rows) for rows in self.input]
        self.shared = [None] * schedule.micro_batches

    def restart(self):
        for x, rows in zip(self.x, self.input):
            x.copy_(rows)

    def collect(self, i):
        """Adds the results of a layer to the residual stream."""
        if self.shared[i] is not None:
            self.x[i] += self.shared[i]
            self.shared[i] = None
        for chunk in self.chunks[i]:
            chunk.add_to(self.x[i])

    def attention(self, layer, i):
        weights, x = self.layers[layer], self.x[i]
        hidden = (x.shape[1],)
        x += attend(weights, functional.rms_norm(x, hidden), self.schedule.samples)
        self.normed[i] = functional.rms_norm(x, hidden)
        scores = torch.softmax((self.normed[i] @ weights.gate).float(), dim=-1)
        for chunk in self.chunks[i]:
            chunk.gather(self.normed[i], scores)

    def shared_experts(self, layer, i):
        up, down = self.layers[layer].shared
        both = self.normed[i] @ up
        self.shared[i] = (functional.silu(both[:, :both.shape[1] // 2]) * both[:, both.shape[1] // 2:]) @ down

    def expert_task(self, layer, chunk):
        chunk.computed = multiply_experts(chunk.received, self.layers[layer].experts, chunk.offsets, self.machine.cuda)

    def run(self):
        """Queues all layers. The last results are in x."""
        m, s = self.machine, self.schedule
        ag, eg, forward, backward = m.streams()
        back = [[] for _ in range(s.micro_batches)]
        for layer, weights in enumerate(self.layers):
            for step in s.order:
                if step < 0:
                    if weights.shared is not None and not s.fused:
                        m.on(ag)
                        self.shared_experts(layer, -1 - step)
                    continue
                m.on(ag, back[step])
                if layer > 0:
                    self.collect(step)
                self.attention(layer, step)
                if weights.shared is not None and s.fused:
                    self.shared_experts(layer, step)
                ready, back[step] = m.record(ag), []
                for chunk in self.chunks[step]:
                    arrived = m.copy(forward, chunk.received, chunk.sent, ready)
                    m.on(eg, [arrived])
                    self.expert_task(layer, chunk)
                    back[step].append(m.copy(backward, chunk.returned, chunk.computed, m.record(eg)))
        for i in range(s.micro_batches):
            m.on(ag, back[i])
            self.collect(i)

    def timed(self, pause):
        """Returns the time of a run in microseconds, and whether the host was slower than the GPUs. The pause, in seconds, gives the host a start."""
        m = self.machine
        m.synchronize()
        if not m.cuda:
            self.restart()
            begin = time.perf_counter()
            self.run()
            return (time.perf_counter() - begin) * 1e6, False
        m.on(m.ag)
        self.restart()
        torch.cuda._sleep(int(pause * 2e9))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(m.ag)
        begin = time.perf_counter()
        self.run()
        queued = (time.perf_counter() - begin) * 1e6
        end.record(m.ag)
        m.synchronize()
        us = start.elapsed_time(end) * 1e3
        return us, queued > us + pause * 1e6

    def measure(self, repetitions):
        """Returns the fields of a row for the time of all layers: of fewer repetitions, but at least three, if a run takes long."""
        pause, long = 0.02, 0.6e6
        first, _ = self.timed(0)
        repetitions = min(repetitions, max(3, int(long / first)))
        times = [self.timed(pause) for _ in range(repetitions)]
        return {**calibration.summary("", [us for us, _ in times]), "host_bound": sum(bound for _, bound in times) > repetitions // 2}


def check(batch):
    """Raises an error unless the outputs of a run equal those of the same layers computed task by task on the expert GPU. Products of different sizes
    round differently."""
    m = batch.machine
    batch.restart()
    m.synchronize()
    batch.run()
    m.synchronize()
    worst = 0.0
    for i in range(batch.schedule.micro_batches):
        m.on(m.streams()[1])
        x = batch.input[i].to(m.experts, torch.float32)
        for weights in batch.layers:
            local = on_device(weights, m.experts)
            hidden = (x.shape[1],)
            x = x + attend(local, functional.rms_norm(x, hidden).to(m.kind), batch.schedule.samples).float()
            normed = functional.rms_norm(x, hidden).to(m.kind)
            scores = torch.softmax((normed @ local.gate).float(), dim=-1)
            result = torch.zeros_like(x)
            if local.shared is not None:
                both = normed @ local.shared[0]
                result += ((functional.silu(both[:, :both.shape[1] // 2]) * both[:, both.shape[1] // 2:]) @ local.shared[1]).float()
            for chunk in batch.chunks[i]:
                rows, share = normed[chunk.begin:chunk.end], scores[chunk.begin:chunk.end].gather(1, chunk.ids.to(m.experts))
                for expert in range(weights.shape["experts"]):
                    token, place = (chunk.ids.to(m.experts) == expert).nonzero(as_tuple=True)
                    both = rows[token] @ weights.experts[0][expert]
                    out = (functional.silu(both[:, :both.shape[1] // 2]) * both[:, both.shape[1] // 2:]) @ weights.experts[1][expert]
                    result[chunk.begin:chunk.end].index_add_(0, token, out.float() * share[token, place].unsqueeze(1))
            x = x + result
        m.synchronize()
        got = batch.x[i].to(m.experts).float()
        worst = max(worst, ((got - x).norm() / x.norm()).item())
    if not worst < 2e-2:  # also true for NaN
        raise AssertionError(f"the relative difference from the layers on one GPU is {worst:.2e}")
    return worst


def on_device(weights, device):
    """Returns the attention weights on another device."""
    local = object.__new__(Weights)
    for name, value in vars(weights).items():
        if name == "experts":
            continue
        if isinstance(value, torch.Tensor):
            value = value.to(device)
        elif isinstance(value, list):
            value = [tensor.to(device) for tensor in value]
        setattr(local, name, value)
    return local


def schedules(batch, shared):
    """Returns the schedules to measure for a batch of samples: all numbers of micro-batches with equal samples, all numbers of chunks, and with shared
    experts both orders, and PPPipe."""
    found = []
    for count in divisors(batch):
        samples = batch // count
        for chunks in CHUNKS:
            found.append(Schedule(samples, count, chunks))
            if shared and count > 1:
                found.append(Schedule(samples, count, chunks, late(count), "AASS"))
        if shared:
            found.append(Schedule(samples, count, 1, fused=True, name="PPPipe"))
    return found


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


class Tasks:
    """Times of single tasks, each on an idle machine."""

    def __init__(self, machine, repetitions):
        self.machine, self.repetitions = machine, repetitions

    def time(self, stream, op):
        m = self.machine
        if not m.cuda:
            op()
            begin = time.perf_counter()
            op()
            return {"us": round((time.perf_counter() - begin) * 1e6, 1)}
        m.synchronize()
        m.on(stream)
        for _ in range(2):
            op()
        m.synchronize()
        times = []
        for _ in range(self.repetitions):
            torch.cuda._sleep(2_000_000)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            op()
            m.on(stream)
            end.record(stream)
            m.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return calibration.summary("", times)

    def copy(self, link, target, source):
        m = self.machine
        if not m.cuda:
            return self.time(None, lambda: target.copy_(source))
        sending, receiving = link

        def op():
            torch.cuda.set_stream(receiving)
            torch.cuda.set_stream(sending)
            target.copy_(source, non_blocking=True)
        return self.time(sending, op)


def measure_stages(layers, machine, sequences, batches, repetitions):
    """Returns the times of all tasks of the grid's schedules."""
    shape, tasks = layers[0].shape, Tasks(machine, repetitions)
    ag, eg, forward, backward = machine.streams()
    stages = {"format": "semmoe.io/pipeline-stages/v1", "model": shape, "attention": [], "shared": [], "experts": [], "dispatch": [], "combine": []}
    done = set()
    for sequence in sequences:
        for samples in sorted({n for batch in batches for n in divisors(batch)}):
            for chunks in CHUNKS:
                batch = Batch(layers[:1], machine, sequence, Schedule(samples, 1, chunks))
                machine.on(ag)
                batch.restart()
                batch.attention(0, 0)
                machine.synchronize()
                for chunk in batch.chunks[0]:
                    chunk.returned.zero_()
                    chunk.received.normal_()

                def attention(batch=batch):
                    batch.collect(0)
                    batch.attention(0, 0)
                if chunks == 1:
                    stages["attention"].append({"samples": samples, "sequence": sequence, **tasks.time(ag, attention)})
                    if layers[0].shared is not None:
                        stages["shared"].append({"samples": samples, "sequence": sequence, **tasks.time(ag, lambda b=batch: b.shared_experts(0, 0))})
                chunk = batch.chunks[0][0]
                rows = (chunk.end - chunk.begin) * chunk.top
                if rows in done:
                    continue
                done.add(rows)
                size = chunk.sent.numel() * chunk.sent.element_size()
                stages["experts"].append({"tokens_per_expert": rows / shape["experts"], **tasks.time(eg, lambda b=batch, c=chunk: b.expert_task(0, c))})
                stages["dispatch"].append({"bytes": size, **tasks.copy(forward, chunk.received, chunk.sent)})
                stages["combine"].append({"bytes": size, **tasks.copy(backward, chunk.returned, chunk.received)})
        calibration.emit("measured", sequence=sequence)
    return stages


def measure_grid(layers, machine, sequences, batches, repetitions):
    rows, worst = [], 0.0
    for sequence in sequences:
        for samples in batches:
            for schedule in schedules(samples, layers[0].shared is not None):
                batch = Batch(layers, machine, sequence, schedule)
                if sequence == sequences[0] and samples == batches[0] and schedule.chunks < 3:
                    worst = max(worst, check(batch))
                rows.append({"sequence": sequence, "samples": samples, **schedule.row(), **batch.measure(repetitions)})
                del batch
            calibration.emit("measured", sequence=sequence, samples=samples, best=min(row["us"] for row in rows if (row["sequence"], row["samples"]) == (sequence, samples)))
            if machine.cuda:
                torch.cuda.empty_cache()
    return rows, worst


def ask(server, sequence, samples):
    """Returns the schedule of the server for a batch, and the seconds that the answer took."""
    body = json.dumps({"sequence": sequence, "samples": samples}).encode()
    begin = time.perf_counter()
    request = urllib.request.Request(server.rstrip("/") + "/v1/schedules", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        plan = json.loads(answer.read(1 << 20))["plan"]
    seconds = time.perf_counter() - begin
    sizes = plan["sizes"]
    return Schedule(plan["samples_per_micro_batch"], sizes["micro_batches"], sizes["chunks"], plan["order"], plan["order_name"]), plan, seconds


def measure_stream(layers, machine, server, repetitions, stream):
    """Asks the server for the schedule of each batch of a stream, and measures it next to naive and PPPipe with the best of its numbers of micro-batches."""
    rows = []
    for sequence, samples in stream:
        schedule, plan, seconds = ask(server, sequence, samples)
        row = {"sequence": sequence, "samples": samples, **schedule.row(), "answer_ms": round(seconds * 1e3, 2), "predicted_us": plan["makespan_us"]}
        row.update(Batch(layers, machine, sequence, schedule).measure(repetitions))
        shared = layers[0].shared is not None
        row["naive_us"] = Batch(layers, machine, sequence, Schedule(samples, 1, 1)).measure(repetitions)["us"]
        row["pppipe_us"] = min(Batch(layers, machine, sequence, Schedule(samples // n, n, 1, fused=shared)).measure(repetitions)["us"]
                               for n in divisors(samples))
        calibration.emit("measured", **row)
        rows.append(row)
    return rows


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stages", "grid", "serve"], help="what to measure, see above")
    parser.add_argument("--model", choices=list(MODELS), default="DeepSeek-V2", help="sizes of the layers (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (default: %(default)s)")
    parser.add_argument("--sequence", type=lambda text: [int(word) for word in text.split(",")], default=SEQUENCES, help="lengths of samples (default: %(default)s)")
    parser.add_argument("--batch", type=lambda text: [int(word) for word in text.split(",")], default=BATCHES, help="samples of a batch (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, help="repetitions of a measurement (default: %(default)s)")
    parser.add_argument("--server", default="", help="serve: URL of semmoe-lab pipeline serve")
    parser.add_argument("--out", required=True, help="path of the result file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tests the program without GPUs, with small layers; the times are meaningless")
    return parser


def main():
    options = flags().parse_args()
    machine = Machine(options.device == "cuda")
    shape = {"hidden_layers": options.layers, "moe_layers": options.layers, **(MODELS[options.model] if machine.cuda else SMALL)}
    if machine.cuda and (torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1)):
        raise SystemExit("two GPUs are needed that can access each other's memory")
    with torch.inference_mode():
        layers = [Weights(shape, machine, seed) for seed in range(options.layers)]
        machine.synchronize()
        begin = time.monotonic()
        facts = {"version": 1, "name": options.model, **calibration.machine(machine.attention, 2, 2), "layers": options.layers}
        if options.what == "stages":
            result = {**measure_stages(layers, machine, options.sequence, options.batch, options.repetitions), **facts}
        elif options.what == "grid":
            rows, worst = measure_grid(layers, machine, options.sequence, options.batch, options.repetitions)
            result = {**facts, "model": shape, "relative_difference": worst, "runs": rows}
        else:
            result = {**facts, "model": shape, "runs": measure_stream(layers, machine, options.server, options.repetitions, STREAM)}
        result["elapsed_seconds"] = round(time.monotonic() - begin, 1)
    calibration.write_whole(options.out, result)
    calibration.emit("result", out=options.out, seconds=result["elapsed_seconds"])


if __name__ == "__main__":
    main()
