#!/usr/bin/env python3
"""Measures exchange and compute times of Mixture-of-Experts layers on the GPUs of this machine, for fitting cost models.

The script only needs PyTorch with NCCL, which every inference engine's image contains:

    python3 calibrate.py --out calibration.json              # all visible GPUs
    torchrun --nproc-per-node 8 calibrate.py --out c.json    # with a launcher, also over several nodes

Standard output contains one JSON object per line: {"event": "start" | "measured" | "skipped" | "result" | "error", ...}.
The last one is the result or the error. The file is written atomically.

Exit code 3: an argument or the machine must be changed (no GPU, too few GPUs, no NCCL). Exit code 1: retry.

Every time is in microseconds: the median over the repetitions of the slowest rank (us), with the 10th and 90th percentiles
(us_p10, us_p90). With --timing device (the default) the work is queued before the clock starts, and for collectives all
ranks are synchronized on the device. Launches are not counted, as in an engine that runs ahead of its GPUs or replays CUDA
graphs. With --timing host the time includes the launch of each call, as in eager decoding.
"""
import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    import torch.nn.functional as functional
except ImportError as error:
    print(json.dumps({"event": "error", "message": f"failed to import PyTorch: {error}: run the script in the image of the engine"}))
    sys.exit(3)

VERSION = 1
INVALID = 3  # exit code of errors that a retry does not fix

# hidden, intermediate, experts per rank, top-k: Qwen3-30B-A3B and DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-V3 at expert parallelism 8.
SHAPES = [(2048, 768, 16, 8), (2048, 1408, 8, 6), (5120, 1536, 20, 6), (7168, 2048, 32, 8)]
TOKENS_PER_EXPERT = [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
ALL_TO_ALL_TOKENS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]  # per rank
ALL_TO_ALL_TOPK = 8
LOCAL_RATES = [0.25, 0.4, 0.5, 0.6, 0.75, 0.9]
MESSAGE_BYTES = [1 << exponent for exponent in range(16, 28)]  # 64 KiB to 128 MiB
COPY_BYTES = [1 << exponent for exponent in range(26, 32)]  # larger than any cache
# heads, head dimension, batch, sequence length
PREFILL = [(heads, dim, batch, length) for heads, dim in [(32, 128), (128, 192)]
           for batch, length in [(1, 512), (1, 1024), (1, 2048), (4, 2048), (1, 4096), (1, 8192), (8, 1024)]]
# heads, key-value heads, head dimension, batch, context: Qwen3-30B-A3B and Mixtral
DECODE = [(32, kv, 128, batch, context) for kv in (4, 8) for batch in (1, 8, 32, 128) for context in (512, 2048, 8192)]
# key and output dimension of dense projections, and their rows
PROJECTIONS = [(2048, 4096), (4096, 4096), (7168, 7168)]
PROJECTION_ROWS = [1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384]


class InvalidInput(Exception):
    """An error that the user must fix."""


class Unsupported(Exception):
    """An operation that this PyTorch does not support. The measurement is skipped, and the result contains the reason."""


def emit(event, **fields):
    """Prints an event as a JSON line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def percentile(ordered, share):
    """Returns the quantile of sorted values, linearly interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(prefix, times):
    """Returns the fields of a row for times in microseconds."""
    ordered = sorted(times)
    return {f"{prefix}us": round(statistics.median(ordered), 1),
            f"{prefix}us_p10": round(percentile(ordered, 0.1), 1),
            f"{prefix}us_p90": round(percentile(ordered, 0.9), 1)}


class Bench:
    """Times operations on all ranks at the same time. Every rank must call the same methods in the same order."""

    def __init__(self, rank, world, device, repetitions, timing, seconds_per_point=1.0):
        self.rank, self.world, self.device = rank, world, device
        self.repetitions, self.seconds_per_point = repetitions, seconds_per_point
        self.cuda = device.type == "cuda"
        self.on_device = self.cuda and timing == "device" and hasattr(torch.cuda, "_sleep")
        self.token = torch.zeros(1, device=device)
        self.clock = 2.0e9  # an upper bound of the GPUs' clock, in Hz; a longer pause is harmless

    def agree(self, value):
        """Returns the maximum of a value over ranks."""
        shared = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.item()

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, op, collective, pause):
        """Times one call, in microseconds. The pause, in seconds, keeps the device busy until all work is queued."""
        if not self.cuda:
            if collective:
                dist.barrier()
            begin = time.perf_counter()
            op()
            return (time.perf_counter() - begin) * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.on_device:
            torch.cuda._sleep(int(pause * self.clock))
        if collective:
            dist.all_reduce(self.token)  # synchronizes the ranks
            if not self.on_device:
                torch.cuda.synchronize()
        start.record()
        op()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def warm_up(self, op, collective):
        """Calls op a few times. Returns the pause that hides the launches and the duration of one call, both in seconds."""
        for _ in range(3):
            op()
        self.synchronize()
        begin = time.perf_counter()
        op()
        launch = time.perf_counter() - begin
        self.synchronize()
        pause = 2 * launch + 100e-6
        return pause, self.once(op, collective, pause) * 1e-6

    def measure(self, op, collective=True):
        """Returns the times of the slowest rank, in microseconds, or None if a rank has too little memory."""
        failed, pause, took = 0, 0.0, 0.0
        try:
            pause, took = self.warm_up(op, collective)
        except torch.cuda.OutOfMemoryError:
            if collective:
                raise  # the other ranks wait inside the collective, so the run cannot continue
            failed = 1
        if self.agree(failed):
            return None
        repetitions = int(self.agree(min(self.repetitions, max(5, self.seconds_per_point / max(took, 1e-9)))))
        times = torch.tensor([self.once(op, collective, pause) for _ in range(repetitions)], dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()


# A case is one row of the result: its section, the fields that describe the measurement, whether ranks communicate, and a
# function that allocates the tensors and returns the operations by the prefix of their times.
class Case:
    def __init__(self, section, row, collective, prepare):
        self.section, self.row, self.collective, self.prepare = section, row, collective, prepare


def element(device):
    """Returns bfloat16, which engines use. Without a GPU it is float32, which every CPU backend supports."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def grouped_mm():
    """Returns the grouped matrix product of this PyTorch."""
    for module, name in ((functional, "grouped_mm"), (torch, "_grouped_mm")):
        if hasattr(module, name):
            return getattr(module, name)
    raise Unsupported(f"PyTorch {torch.__version__} has no grouped matrix product")


def attention():
    if not hasattr(functional, "scaled_dot_product_attention"):
        raise Unsupported(f"PyTorch {torch.__version__} has no scaled_dot_product_attention")
    return functional.scaled_dot_product_attention


def all_to_all_case(device, world, rank, hidden, tokens, rate, equal):
    """Exchanges the rows of top-k experts. The share `rate` of the rows stays on its rank, and the other ranks get equal parts of the
    rest. Rows that stay are not part of the exchange, as in engines. With equal=True they are part of it, and NCCL copies them
    (local_copied)."""
    rows = tokens * ALL_TO_ALL_TOPK
    each = rows // world if equal else int(rows * (1 - rate)) // (world - 1)
    splits = [each] * world
    if not equal:
        splits[rank] = 0

    def prepare():
        source = torch.randn(sum(splits), hidden, device=device).to(element(device))
        target = torch.empty_like(source)
        if equal:
            return {"": lambda: dist.all_to_all_single(target, source)}
        return {"": lambda: dist.all_to_all_single(target, source, splits, splits)}

    row = {"hidden": hidden, "tokens_per_rank": tokens, "topk": ALL_TO_ALL_TOPK, "lar": round(rate, 4),
           "remote_bytes_per_rank": each * (world - 1) * hidden * 2, "local_copied": equal}
    return Case("all_to_all", row, True, prepare)


def collectives_case(device, world, size):
    """`bytes` is the size of the whole tensor, which consists of equal parts of all ranks."""
    each = size // 2 // world

    def prepare():
        whole = torch.randn(each * world, device=device).to(element(device))
        part = torch.empty(each, dtype=element(device), device=device)
        return {"all_reduce_": lambda: dist.all_reduce(whole),
                "reduce_scatter_": lambda: dist.reduce_scatter_tensor(part, whole),
                "all_gather_": lambda: dist.all_gather_into_tensor(whole, part)}

    return Case("collectives", {"bytes": each * world * 2}, True, prepare)


def send_case(device, world, rank, senders, size):
    """The first ranks are attention ranks, the others expert ranks. Each attention rank sends `bytes` to the expert ranks in equal
    parts (a2e), and receives the same number of bytes from them (e2a)."""
    receivers = world - senders

    def exchange(forward):
        attention_rank = rank < senders
        peers = range(senders, world) if attention_rank else range(senders)
        call = dist.isend if attention_rank == forward else dist.irecv
        buffers = {peer: torch.ones(size // 2 // receivers, dtype=element(device), device=device) for peer in peers}

        def op():
            for request in dist.batch_isend_irecv([dist.P2POp(call, buffers[peer], peer) for peer in peers]):
                request.wait()
        return op

    def prepare():
        return {"a2e_": exchange(True), "e2a_": exchange(False)}

    return Case("send", {"attention_ranks": senders, "expert_ranks": receivers, "bytes": size // 2 // receivers * receivers * 2}, True, prepare)


def grouped_case(device, hidden, inter, experts, tokens):
    """The gate and up projections of a rank's experts, each with the same number of tokens: as one grouped product, and as one
    dense product per expert."""
    def prepare():
        multiply = grouped_mm()
        weights = torch.empty(experts, 2 * inter, hidden, dtype=element(device), device=device).normal_(std=0.02).transpose(1, 2)
        rows = torch.randn(experts * tokens, hidden, device=device).to(element(device))
        offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * tokens
        target = torch.empty(experts * tokens, 2 * inter, dtype=element(device), device=device)

        def dense():
            for expert in range(experts):
                torch.mm(rows[expert * tokens:(expert + 1) * tokens], weights[expert], out=target[expert * tokens:(expert + 1) * tokens])
        return {"grouped_": lambda: multiply(rows, weights, offs=offsets), "dense_": dense}

    return Case("gate_up_gemm", {"hidden": hidden, "inter": inter, "experts_per_rank": experts, "tokens_per_expert": tokens}, False, prepare)


def projection_case(device, rows, inner, outer):
    def prepare():
        left = torch.randn(rows, inner, device=device).to(element(device))
        right = torch.empty(outer, inner, dtype=element(device), device=device).normal_(std=0.02)
        return {"": lambda: functional.linear(left, right)}

    return Case("gemm", {"m": rows, "k": inner, "n": outer}, False, prepare)


def prefill_case(device, heads, dim, batch, length):
    def prepare():
        attend = attention()
        query, key, value = (torch.randn(batch, heads, length, dim, device=device).to(element(device)) for _ in range(3))
        return {"sdpa_": lambda: attend(query, key, value, is_causal=True)}

    return Case("attention", {"heads": heads, "head_dim": dim, "batch": batch, "seq": length}, False, prepare)


def decode_case(device, heads, kv, dim, batch, context):
    def prepare():
        attend = attention()
        query = torch.randn(batch, heads, 1, dim, device=device).to(element(device))
        key, value = (torch.randn(batch, kv, context, dim, device=device).to(element(device)) for _ in range(2))
        # The query heads of a key-value head are rows of one attention problem, so that no head is read twice.
        query = query.view(batch, kv, heads // kv, dim)
        return {"sdpa_": lambda: attend(query, key, value)}

    return Case("attention_decode", {"heads": heads, "kv_heads": kv, "head_dim": dim, "batch": batch, "context": context}, False, prepare)


def copy_case(device, size):
    """`bytes` is the number of bytes read, and also the number of bytes written."""
    def prepare():
        source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        target = torch.empty_like(source)
        return {"": lambda: target.copy_(source)}

    return Case("copy", {"bytes": size}, False, prepare)


def thin(values, quick):
    """Returns the two smallest values for a quick run, which only tests the setup."""
    return values[:2] if quick else values


def cases(device, rank, world, shapes, quick):
    """Yields the cases in descending order of importance, because the time of a run is limited."""
    if world > 1:
        for hidden in sorted({shape[0] for shape in shapes} & {2048, 7168} or {shapes[0][0]}):
            for tokens in thin(ALL_TO_ALL_TOKENS, quick):
                yield all_to_all_case(device, world, rank, hidden, tokens, 1 / world, True)
                for rate in thin([1 / world] + [r for r in LOCAL_RATES if r > 1 / world + 1e-9], quick):
                    yield all_to_all_case(device, world, rank, hidden, tokens, rate, False)
        for size in thin(MESSAGE_BYTES, quick):
            yield collectives_case(device, world, size)
        for senders in sorted({1, world // 2, world - 1}):
            for size in thin(MESSAGE_BYTES, quick):
                yield send_case(device, world, rank, senders, size)
    for shape in thin(shapes, quick):
        for tokens in thin(TOKENS_PER_EXPERT, quick):
            yield grouped_case(device, *shape[:3], tokens)
    for prefill in thin(PREFILL, quick):
        yield prefill_case(device, *prefill)
    for decode in thin(DECODE, quick):
        yield decode_case(device, *decode)
    for inner, outer in thin(PROJECTIONS, quick):
        for rows in thin(PROJECTION_ROWS, quick):
            yield projection_case(device, rows, inner, outer)
    for size in thin(COPY_BYTES, quick):
        yield copy_case(device, size)


def unsupported(error):
    """Reports whether an error means that this PyTorch or backend lacks an operation. All ranks get the same error."""
    text = str(error).lower()
    return isinstance(error, (Unsupported, NotImplementedError, AttributeError)) or any(words in text for words in ("not support", "only support", "not implemented", "unsupported"))


def run_case(bench, case):
    """Measures a case. Returns its row, or None and the reason."""
    operations, failed, reason = {}, 0, ""
    try:
        operations = case.prepare()
    except torch.cuda.OutOfMemoryError:
        failed = 1
    except Exception as error:  # pylint: disable=broad-except
        if not unsupported(error):
            raise
        failed, reason = 1, str(error)
    if bench.agree(failed):
        return None, reason or "too little GPU memory"
    row = dict(case.row)
    for prefix, operation in operations.items():
        try:
            times = bench.measure(operation, case.collective)
        except RuntimeError as error:
            if not unsupported(error):
                raise
            return None, str(error).splitlines()[0]
        if times is None:
            return None, "too little GPU memory"
        row.update(summary(prefix, times))
        row["repetitions"] = min(len(times), row.get("repetitions", len(times)))
    if "grouped_us" in row:
        work = 4 * row["hidden"] * row["inter"] * row["experts_per_rank"] * row["tokens_per_expert"]
        row["tflops_grouped"] = round(work / row["grouped_us"] / 1e6, 3)
    return row, ""


def command_output(*command):
    """Returns the output of a command, or an empty string if the command fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def links(count):
    """Returns the links between the GPUs of this machine, one row per GPU, as reported by `nvidia-smi topo -m` (NV18: eighteen NVLinks;
    PIX, PXB, PHB, NODE, SYS: PCIe paths of increasing length). Without nvidia-smi it returns whether each GPU can access the memory of
    the other (peer or host)."""
    rows = []
    for line in command_output("nvidia-smi", "topo", "-m").splitlines():
        words = line.replace("\x1b[4m", "").replace("\x1b[0m", "").split()
        if words and words[0].startswith("GPU") and len(words) > count and words[0] != words[1] and not words[1].startswith("GPU"):
            rows.append(words[1:count + 1])
    if len(rows) == count:
        return rows
    return [["X" if i == j else "peer" if torch.cuda.can_device_access_peer(i, j) else "host" for j in range(count)] for i in range(count)]


def machine(device, world, local):
    """Returns the properties of the machine."""
    facts = {"world": world, "nodes": world // local, "torch": torch.__version__, "gpu": "none (CPU)"}
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    driver = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    facts.update({
        "gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}", "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cuda": torch.version.cuda or torch.version.hip or "", "driver": driver[0] if driver else "", "links": links(local),
        "nccl_variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    })
    return facts


def write_whole(path, value):
    """Writes JSON with one row per line to a temporary file and renames it, so that the file is never incomplete."""
    text = "{\n" + ",\n".join(
        f" {json.dumps(key)}: " + ("[\n  " + ",\n  ".join(map(json.dumps, item)) + "\n ]" if isinstance(item, list) and item and isinstance(item[0], dict) else json.dumps(item))
        for key, item in value.items()) + "\n}\n"
    folder = os.path.dirname(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".calibration-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def same_gpus(device, world):
    """Rejects ranks with different GPU models, because one profile cannot describe them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    names = [None] * world
    dist.all_gather_object(names, name)
    if len(set(names)) > 1:
        raise InvalidInput(f"the GPU models differ ({', '.join(sorted(set(names)))}): calibrate each model separately")


def calibrate(rank, world, local, device, options):
    """Measures on all ranks. Rank 0 returns the result."""
    begin, started = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
    same_gpus(device, world)
    torch.manual_seed(rank)
    bench = Bench(rank, world, device, 3 if options.quick else options.repetitions, options.timing)
    result = {"version": VERSION, **machine(device, world, local), "timing": "device" if bench.on_device else "host",
              "unit": f"microseconds, median over {bench.repetitions} of the slowest rank", "started": started.isoformat(timespec="seconds")}
    planned = [case for case in cases(device, rank, world, SHAPES + options.shape, options.quick) if not options.only or case.section in options.only]
    rows = {case.section: [] for case in planned}
    skipped = []
    if rank == 0:
        emit("start", measurements=len(planned), **{key: result[key] for key in ("gpu", "world", "nodes", "torch", "timing")})
    for done, case in enumerate(planned, 1):
        if bench.agree(time.monotonic() - begin > options.seconds):
            skipped += [{"section": left.section, **left.row, "reason": f"the time limit of {options.seconds} seconds was reached"} for left in planned[done - 1:]]
            break
        row, reason = run_case(bench, case)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if row is None:
            skipped.append({"section": case.section, **case.row, "reason": reason})
        else:
            rows[case.section].append(row)
        if rank == 0:
            emit("skipped" if row is None else "measured", done=done, total=len(planned), section=case.section, **(row or {**case.row, "reason": reason}))
    result.update(elapsed_seconds=round(time.monotonic() - begin, 1), **rows, skipped=skipped)
    return result


def join(rank, world, local_rank, local, options, method):
    """Runs the process of one rank."""
    if options.device == "cuda":
        torch.cuda.set_device(local_rank)
    device = torch.device(options.device, local_rank) if options.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", init_method=method, rank=rank, world_size=world,
                            timeout=datetime.timedelta(minutes=5))
    try:
        result = options.work(rank, world, local, device, options)
        if rank == 0:
            if options.out:
                write_whole(options.out, result)
            emit("result", calibration=result)
    finally:
        dist.destroy_process_group()


def spawned(local_rank, world, options, method):
    join(local_rank, world, local_rank, world, options, method)


def check(options):
    """Rejects invalid options before any process is started. Returns the number of ranks."""
    if options.device == "cpu":
        return options.gpus or 2
    if not torch.cuda.is_available():
        raise InvalidInput(f"PyTorch {torch.__version__} finds no GPU: request one (nvidia.com/gpu), and use an image with a CUDA version that the driver supports")
    if not dist.is_available() or not dist.is_nccl_available():
        raise InvalidInput(f"PyTorch {torch.__version__} was built without NCCL: use the image of the engine")
    count = torch.cuda.device_count()
    if options.gpus > count:
        raise InvalidInput(f"--gpus: {options.gpus} is invalid: there are {count} GPUs")
    return options.gpus or count


def launch(options):
    """Runs the rank of the launcher that started this process, or starts a process for each GPU."""
    world = check(options)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")), local, options, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(spawned, args=(world, options, f"file://{folder}/ranks"), nprocs=world)


def shape(text):
    """hidden:intermediate:experts:topk"""
    try:
        hidden, inter, experts, topk = (int(word) for word in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid: must be hidden:intermediate:experts-per-rank:topk, four integers") from None
    if hidden < 8 or inter < 8 or hidden % 8 or inter % 8 or experts < 1 or topk < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid: hidden and intermediate must be multiples of 8, the others at least 1")
    return hidden, inter, experts, topk


def common_flags(parser):
    """Adds the flags that all measuring scripts have."""
    parser.add_argument("--out", help="path of the result file (default: only standard output)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use (default: all that are visible)")
    parser.add_argument("--repetitions", type=int, default=30, help="maximum repetitions of a measurement (long measurements: fewer, at least 5)")
    parser.add_argument("--timing", choices=["device", "host"], default="device", help="whether times exclude (device) or include (host) launches, see above")
    parser.add_argument("--quick", action="store_true", help="small sizes and three repetitions, to test the setup")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tests the script without a GPU; the times are meaningless")


def main(parser, work):
    """Parses the flags, runs the work on every rank, and reports errors as an event and an exit code."""
    try:
        options = parser.parse_args()
        if not 0 <= options.gpus <= 64 or options.repetitions < 1:
            raise InvalidInput(f"--gpus {options.gpus} or --repetitions {options.repetitions} is invalid: must be 0 to 64 GPUs and at least 1 repetition")
        options.work = work
        launch(options)
    except InvalidInput as error:
        emit("error", message=str(error))
        return INVALID
    except SystemExit as error:  # argparse has printed the reason
        return INVALID if error.code else 0
    except Exception as error:  # pylint: disable=broad-except
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        emit("error", message=lines[-1].split("InvalidInput: ")[-1] if lines else type(error).__name__)
        print(error, file=sys.stderr)
        return INVALID if "InvalidInput" in str(error) else 1
    return 0


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_flags(parser)
    parser.add_argument("--seconds", type=float, default=480, help="time limit in seconds after which no further measurement starts (default: 480)")
    parser.add_argument("--shape", type=shape, action="append", default=[], help="additional model, as hidden:intermediate:experts-per-rank:topk; may be repeated")
    parser.add_argument("--only", action="append", default=[], choices=["all_to_all", "collectives", "send", "gate_up_gemm", "attention", "attention_decode", "gemm", "copy"],
                        help="section to measure (default: all); may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(main(flags(), calibrate))
