"""Shared functions of run_sglang.py and run_vllm.py: servers, requests, steps of this project, and comparisons."""

import argparse
import base64
import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import math
import os
import pathlib
import shutil
import signal
import statistics
import struct
import subprocess
import threading
import time
import traceback
import urllib.error
import urllib.request

RANKS, LAYERS, EXPERTS, TOP = 2, 4, 32, 4
NAME = "small"  # by which the engines serve the model
PIECE, PIECES = 900, 3  # characters per piece of a document (about 300 tokens), maximum number of pieces per document


def arguments(engine, launch):
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=f"Runs the product's steps against {engine} on two GPUs, and writes what was measured as JSON.")
    parser.add_argument("--model", type=pathlib.Path, required=True, help="directory of the checkpoint: test/models/small-qwen3moe")
    parser.add_argument("--semmoe", type=pathlib.Path, required=True, help="path of the semmoe program")
    parser.add_argument("--corpus", type=pathlib.Path, required=True, help="directory with a directory of texts for each kind: test/corpus")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="directory for logs, plans and checkpoints")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="path of the result, which is rewritten after each step")
    parser.add_argument("--launch", default=launch, help="command that starts a server (default: %(default)s)")
    parser.add_argument("--flags", default="", help="additional flags of all servers")
    parser.add_argument("--limit", type=float, default=400, help="startup timeout of a server in seconds (default: %(default)s)")
    parser.add_argument("--servers", default="", help="commas between the servers to start (default: all); unplanned is always one of them")
    parser.add_argument("--only", default="", help="commas between the first words of the steps to run (default: all)")
    options = parser.parse_args()
    for name in ("model", "semmoe", "corpus", "work", "out"):
        setattr(options, name, getattr(options, name).resolve())
    options.work.mkdir(parents=True, exist_ok=True)
    return options


class Result:
    """The result file. Steps of several threads may add to it."""

    def __init__(self, options, **about):
        self.options, self.lock = options, threading.Lock()
        self.started = time.monotonic()
        self.only = set(filter(None, options.only.split(",")))
        self.data = {**about, "date": datetime.date.today().isoformat(), "machine": machine(), "servers": {}, "steps": {}, "errors": {}}

    def save(self):
        self.data["seconds"] = round(time.monotonic() - self.started, 1)
        unfinished = self.options.out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.data, indent=1))
        os.replace(unfinished, self.options.out)

    def step(self, name, function, *args):
        """Runs a step and records its result or its error. An error does not stop the other steps."""
        if self.only and name.split(" ")[0] not in self.only:
            return None
        begin = time.monotonic()
        try:
            found, failed = function(*args), None
        except Exception as error:
            traceback.print_exc()
            found, failed = None, f"{type(error).__name__}: {error}"[:2000]
        with self.lock:
            if failed is None:
                self.data["steps"][name] = found
            else:
                self.data["errors"][name] = failed
            self.save()
        print(f"{time.monotonic() - self.started:.0f} s: {name}: {'failed' if failed else 'done'} in {time.monotonic() - begin:.1f} s", flush=True)
        return found


def machine():
    """Describes the GPUs."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split("\n")[:-1]
    except OSError:
        return []


# --- servers ------------------------------------------------------------------------------------------------------------


class Server:
    """A server: a process, its log and its address."""

    def __init__(self, result, name, command, port, environment=None):
        self.result, self.name, self.command, self.port = result, name, command, port
        self.base = f"http://127.0.0.1:{port}"
        self.log = result.options.work / f"{name}.log"
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self.process, self.up = None, False

    def start(self):
        folder = self.result.options.work / f"{self.name}.d"
        folder.mkdir(exist_ok=True)
        self.begin = time.monotonic()
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=out, env=self.environment, cwd=folder, start_new_session=True)
        return self

    def wait(self):
        """Waits until the server answers GET /health with 200, and reports whether it does."""
        record = {"command": " ".join(map(str, self.command))}
        while True:
            ended = self.process.poll()
            if ended is None:
                with contextlib.suppress(urllib.error.URLError, OSError):
                    with urllib.request.urlopen(self.base + "/health", timeout=5):
                        self.up = True
            seconds = time.monotonic() - self.begin
            if self.up or ended is not None or seconds > self.result.options.limit:
                break
            time.sleep(0.5)
        record["up_after_s" if self.up else "down_after_s"] = round(seconds, 1)
        if not self.up:
            record["exit_code"] = ended
            lines = self.log.read_text(errors="replace").splitlines()
            record["errors"] = [line[:600] for line in lines if "Error" in line and "Traceback" not in line][-6:]
            self.stop()
        with self.result.lock:
            self.result.data["servers"][self.name] = record
            self.result.save()
        print(f"{time.monotonic() - self.result.started:.0f} s: server {self.name}: {'up' if self.up else 'not up'} after {seconds:.0f} s", flush=True)
        return self.up

    def stop(self):
        self.up = False
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def request(self, path, body=None, headers=None):
        """Sends a request, and returns (status, text, headers) of the response."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read().decode(), response.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace"), error.headers

    def post(self, path, body, headers=None):
        status, text, _ = self.request(path, body, headers)
        if status != 200:
            raise RuntimeError(f"POST {path} returned {status}: {text[:500]}")
        return json.loads(text)

    def get(self, path):
        status, text, _ = self.request(path)
        if status != 200:
            raise RuntimeError(f"GET {path} returned {status}: {text[:500]}")
        return text


def start(servers):
    """Starts the servers {name: server} that --servers selects, concurrently."""
    for name, server in servers.items():
        chosen = server.result.options.servers
        if not chosen or name in ["unplanned", *chosen.split(",")]:
            server.start()


def wait(servers):
    """Waits until the started servers are up or have failed."""
    in_parallel(Server.wait, [server for server in servers.values() if server.process], workers=len(servers))


def stop(servers):
    """Stops servers, concurrently."""
    in_parallel(Server.stop, servers, workers=max(1, len(servers)))


class Answer:
    """A response of an engine: log-probabilities of the prompt's tokens from the second one, greedy tokens, experts [tokens][layers][top], rank."""

    def __init__(self, logprobs, tokens, experts, rank):
        self.logprobs, self.tokens, self.experts, self.rank = logprobs, tokens, experts, rank


# --- requests -----------------------------------------------------------------------------------------------------------


def pieces(corpus):
    """Returns the pieces of text for profiling and for measuring, as (kind, text). Documents are assigned to the two alternately."""
    halves = [], []
    for folder in sorted(path for path in corpus.iterdir() if path.is_dir()):
        for number, path in enumerate(sorted(folder.iterdir())):
            text = path.read_text()
            for start in range(0, min(len(text), PIECE * PIECES), PIECE):
                halves[number % 2].append((folder.name, text[start : start + PIECE]))
    return halves


def semmoe(options, *args, expect=0, environment=None):
    """Runs semmoe and returns its output."""
    command = [str(options.semmoe), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **(environment or {})})
    if done.returncode != expect:
        raise RuntimeError(f"semmoe {args[0]} exited with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def profile(options, server, engine):
    """Records a profile with the profiling text."""
    dataset, trace = options.work / "requests.jsonl", options.work / f"{server.name}.safetensors"
    dataset.write_text("".join(json.dumps({"prompt": text, "domain": kind}) + "\n" for kind, text in pieces(options.corpus)[0]))
    arguments = ["--engine", engine, "--endpoint", server.base, "--model-path", options.model, "--dataset", dataset, "--out", trace]
    return json.loads(semmoe(options, "profile", *arguments).splitlines()[-1])


def solve(options, trace, name, *flags):
    """Solves a plan, and returns its promise."""
    plan = options.work / name
    found = json.loads(semmoe(options, "solve", "--trace", trace, "--ep", RANKS, "--attention", "dp", "--out", plan, "--train-percent", 50, *flags))
    keep = ("lar", "baseline_lar", "oracle_lar", "plan_digest", "train_requests", "test_requests", "seconds")
    return {key: found[key] for key in keep}


def reshuffle(options, plan, name, model=None):
    """Copies the checkpoint in the order of the plan, with the other files that an engine needs."""
    out = options.work / name
    semmoe(options, "reshuffle", "--model", model or options.model, "--permutation", plan / "gate-permutation.json", "--out", out)
    return out


def model_digest(options, model):
    return json.loads(semmoe(options, "inspect", "--model-path", model))["modelDigest"]


def as_float32(options):
    """Copies the checkpoint, with float32 as the compute type of engines."""
    out = options.work / "float32"
    shutil.copytree(options.model, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
    return out


def table(plan):
    """Reads token_rank_score of a plan's tables: a function of (token, rank) to its score, summed over layers."""
    data = (plan / "tables.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    about = json.loads(data[8 : 8 + length])["token_rank_score"]
    begin, end = (8 + length + offset for offset in about["data_offsets"])
    values = struct.unpack(f"<{(end - begin) // 2}H", data[begin:end])
    size = about["shape"][1]
    return lambda token, rank: values[token * size + rank]


def by_forecast(plan, prompts):
    """Returns the ranks of prompts. Each of two ranks gets half of them, assigned in descending order of score difference."""
    score = table(plan)
    differences = [statistics.fmean(score(token, 0) - score(token, 1) for token in prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=differences.__getitem__)
    ranks = [0] * len(prompts)
    for i in order[: len(prompts) // 2]:
        ranks[i] = 1
    return ranks


def round_robin(prompts):
    return [i % RANKS for i in range(len(prompts))]


# --- comparisons --------------------------------------------------------------------------------------------------------


def local_rate(answers, ranks):
    """Returns (local, all) activations of responses. The r-th half of the experts, in the engine's numbering, is on rank r."""
    local = total = 0
    for answer, rank in zip(answers, ranks):
        for token in answer.experts:
            for layer in token:
                total += len(layer)
                local += sum(expert // (EXPERTS // RANKS) == rank for expert in layer)
    return local, total


def rate(counts):
    local, total = counts
    return {"local": local, "all": total, "rate": round(local / total, 4)}


def compare(before, after):
    """Compares responses to the same prompts: greedy tokens, and the log-probabilities of the prompts' tokens."""
    differences, means, equal = [], [], 0
    for a, b in zip(before, after, strict=True):
        if len(a.logprobs) != len(b.logprobs):
            raise ValueError(f"{len(a.logprobs)} and {len(b.logprobs)} log-probabilities of the same prompt")
        of_prompt = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs)]
        differences += of_prompt
        means.append(statistics.fmean(of_prompt))
        equal += a.tokens == b.tokens
    differences.sort()
    at = lambda share: round(differences[min(len(differences) - 1, math.floor(share * len(differences)))], 6)  # noqa: E731
    return {
        "prompts": len(before), "greedy_answers_equal": equal, "tokens_compared": len(differences), "mean_nats": round(statistics.fmean(differences), 6),
        "median_nats": at(0.5), "p99_nats": at(0.99), "largest_nats": round(differences[-1], 6), "largest_mean_of_a_prompt": round(max(means), 6),
        "above_half_a_nat_percent": round(100 * sum(d > 0.5 for d in differences) / len(differences), 3),
    }  # fmt: skip


def golden(options, ask):
    """Compares the experts and greedy tokens with the golden outputs of the checkpoint. ask runs (prompt, new tokens) on an engine."""
    cases = json.loads((options.model / "golden.json").read_text())["cases"]
    sets = same = slots = shared = greedy = greedy_same = 0
    for case in cases:
        answer = ask(case["prompt_ids"], len(case["greedy_ids"]))
        want = case["experts_by_layer"]
        for token in range(len(case["prompt_ids"])):
            for layer in range(LAYERS):
                expected, got = set(want[layer][token]), set(answer.experts[token][layer])
                sets, same = sets + 1, same + (expected == got)
                slots, shared = slots + TOP, shared + len(expected & got)
        for token, expected, margin in zip(answer.tokens, case["greedy_ids"], case["greedy_margin"]):
            if margin < 0.1:
                break  # a tie in bfloat16
            greedy, greedy_same = greedy + 1, greedy_same + (token == expected)
            if token != expected:
                break
    return {
        "prompts": len(cases), "expert_sets": sets, "expert_sets_equal": same, "experts": slots, "experts_equal": shared,
        "greedy_tokens_with_margin": greedy, "greedy_tokens_equal": greedy_same,
    }  # fmt: skip


def in_parallel(function, *columns, workers=16):
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, *columns))


# --- the probe and the router -------------------------------------------------------------------------------------------


def record_probe(options, server, engine):
    """Stores the outputs of the engine without a plan."""
    arguments = ["--record", "--address", server.base, "--model-name", NAME, "--ranks", RANKS, "--engine", engine]
    semmoe(options, "probe", *arguments, "--model-digest", model_digest(options, options.model), "--answers", options.work / "answers.json")
    return {"bytes": (options.work / "answers.json").stat().st_size}


def check_probe(options, server, engine):
    """Compares a server with the stored outputs. Exit code 0: they are equal; 3: they differ."""
    arguments = ["--check", "--address", server.base, "--model-name", NAME, "--ranks", RANKS, "--engine", engine, "--answers", options.work / "answers.json"]
    begin = time.monotonic()
    done = subprocess.run([str(options.semmoe), "probe", *map(str, arguments)], capture_output=True, text=True, timeout=300)
    return {"exit_code": done.returncode, "says": (done.stderr or done.stdout)[-600:].strip(), "seconds": round(time.monotonic() - begin, 1)}


def through_router(options, server, engine, texts, ask, plan=None, permuted=False, port=29000):
    """Sends texts through semmoe router in front of a server, and compares the local activations that it counts with recomputed ones.

    The router runs outside Kubernetes: it starts from a snapshot of endpoints, as it does while the API server is away. ask returns the
    answer of the server itself to (text, rank), with its experts.
    """
    folder = options.work / f"router-{server.name}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "plans").mkdir(parents=True)
    shape = {"layers": LAYERS, "moeLayers": list(range(LAYERS)), "experts": EXPERTS, "expertsPerToken": TOP}
    backend = {
        "pod": "engine-0", "address": f"127.0.0.1:{server.port}", "ranks": RANKS, "engine": engine, "revision": "one",
        "modelDigest": model_digest(options, options.model), "permuted": permuted, "shape": shape,
    }  # fmt: skip
    if plan:
        digest = hashlib.sha256((plan / "manifest.json").read_bytes()).hexdigest()
        backend["planDigest"] = digest
        kept = folder / "plans" / digest
        shutil.copytree(plan, kept)
        shutil.copy(options.model / "tokenizer.json", kept)
        files = {str(path.relative_to(kept)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept.rglob("*") if path.is_file()}
        (kept / "bundle.json").write_text(json.dumps({"format": "semmoe-bundle/1", "planDigest": digest, "files": files}))
    (folder / "backends.json").write_text(json.dumps([backend]))
    away = "https://127.0.0.1:9"
    (folder / "kubeconfig").write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "away", "users": [{"name": "nobody", "user": {}}],
        "clusters": [{"name": "away", "cluster": {"server": away}}],
        "contexts": [{"name": "away", "context": {"cluster": "away", "user": "nobody"}}],
    }))  # fmt: skip
    command = [
        str(options.semmoe), "router", "--namespace", "default", "--selector", "app=engine", "--host", "127.0.0.1", "--port", str(port),
        "--metrics-port", str(port + 1), "--snapshot-dir", str(folder), "--engine", engine, "--sample-percent", "100", "--drain-timeout", "5s",
    ]  # fmt: skip
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig"), "SEMMOE_STORE_URL": away}
    router = Server(server.result, f"router-{server.name}", command, port, environment)
    metrics = Server(server.result, "metrics", [], port + 1)
    router.start()
    try:
        deadline = time.monotonic() + 30
        ready = 'semmoe_router_plans{state="loaded"} 1' if plan else "semmoe_router_backends 1"
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError, RuntimeError):
                if metrics.get("/readyz") and ready in metrics.get("/metrics"):
                    break
            if time.monotonic() > deadline or router.process.poll() is not None:
                raise RuntimeError(f"the router is not ready: {router.log.read_text()[-1500:]}")
            time.sleep(0.2)

        def send(text):
            body = {"model": NAME, "prompt": text, "max_tokens": 1, "temperature": 0}
            status, answer, headers = router.request("/v1/completions", body)
            if status != 200:
                raise RuntimeError(f"the router returned {status}: {answer[:300]}")
            return headers.get("X-Semmoe-Rank")

        ranks = in_parallel(send, texts, workers=8)
        counts = wait_for_counts(metrics, len(texts))
    finally:
        router.stop()
    named = [None if rank is None else int(rank) for rank in ranks]
    found = {"requests": len(texts), "rank_named": sum(rank is not None for rank in named), "ranks": [named.count(rank) for rank in range(RANKS)]}
    answers = in_parallel(ask, texts, named)
    return {**found, "observed": rate(counts), "recomputed": rate(local_rate(answers, named))}


def wait_for_counts(metrics, requests):
    """Returns (local, all) of the router's counters once they have stopped growing."""
    last, same = None, 0
    for _ in range(100):
        counts = {"local": 0, "remote": 0}
        for line in metrics.get("/metrics").splitlines():
            if line.startswith("semmoe_activations_total{"):
                for locality in counts:
                    if f'locality="{locality}"' in line:
                        counts[locality] += int(float(line.split()[-1]))
        now = (counts["local"], sum(counts.values()))
        same = same + 1 if now == last and now[1] else 0
        last = now
        if same >= 5:
            return now
        time.sleep(0.2)
    raise RuntimeError(f"the router's counters of {requests} requests: {last}")


def counter_deltas(before, after):
    """Returns the increases of counters {key: value}, without unchanged counters."""
    return {key: round(after[key] - before.get(key, 0)) for key in after if after[key] != before.get(key, 0)}


def decode_int32(text):
    """Reads base64 of int32 [tokens][layers][top], as SGLang reports experts."""
    data = base64.b64decode(text)
    flat = struct.unpack(f"<{len(data) // 4}i", data)
    row = LAYERS * TOP
    return [[flat[at + layer * TOP : at + (layer + 1) * TOP] for layer in range(LAYERS)] for at in range(0, len(flat), row)]


def decode_npy(text):
    """Reads base64 of a .npy file [tokens][layers][top] of uint8, as vLLM reports experts."""
    data = base64.b64decode(text)
    (length,) = struct.unpack("<H", data[8:10])
    header = data[10 : 10 + length].decode()
    if "'|u1'" not in header or "False" not in header:
        raise ValueError(f"routed experts with an unexpected header: {header}")
    flat, row = data[10 + length :], LAYERS * TOP
    return [[tuple(flat[at + layer * TOP : at + (layer + 1) * TOP]) for layer in range(LAYERS)] for at in range(0, len(flat), row)]
