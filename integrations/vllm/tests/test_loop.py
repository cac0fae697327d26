"""The whole loop on a real engine: profile, solve, reshuffle, serve. The engine itself counts the local activations."""

import concurrent.futures
import json
import os
import struct
import subprocess

import numpy as np
import pytest

pytest.importorskip("vllm")
from server import CHECKPOINT, RANKS, REPOSITORY, serve  # noqa: E402

SEMMOE = os.environ.get("SEMMOE", "semmoe")
PIECE = 900  # characters: about 300 tokens
TEXT_FOLDERS = sorted(folder for folder in (REPOSITORY / "test/corpus").iterdir() if folder.is_dir())


def requests():
    """Returns (domain, text) of the corpus, in pieces."""
    for folder in TEXT_FOLDERS:
        for path in sorted(folder.iterdir()):
            text = path.read_text()
            for start in range(0, min(len(text), 4 * PIECE), PIECE):
                yield folder.name, text[start : start + PIECE]


def semmoe(*arguments):
    done = subprocess.run([SEMMOE, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def profile(server, requests, path):
    """Profiles the requests, pairs (domain, text), and returns the path of the routing trace."""
    dataset, trace = path.with_suffix(".jsonl"), path.with_suffix(".safetensors")
    dataset.write_text("".join(json.dumps({"prompt": text, "domain": domain}) + "\n" for domain, text in requests))
    semmoe("profile", "--engine", "VLLM", "--endpoint", server.base, "--model-path", CHECKPOINT, "--dataset", dataset, "--out", trace)
    return trace


def table(path):
    """Reads token_rank_score of tables.safetensors."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    about = json.loads(data[8 : 8 + length])["token_rank_score"]
    begin, end = (8 + length + offset for offset in about["data_offsets"])
    return np.frombuffer(data[begin:end], "<u2").reshape(about["shape"])


def measure(server, prompts, ranks):
    """Sends each prompt to its rank, and returns the local activation rate that the engine counted meanwhile."""
    before = server.activations()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(server.complete, prompts, ranks))
    local, remote = (server.activations() - before).sum((0, 1))
    return local / (local + remote)


def round_robin(prompts):
    return [i % RANKS for i in range(len(prompts))]


def by_forecast(scores, prompts):
    """Returns the ranks of prompts: half of them go to each of two ranks, those with the largest difference of scores first."""
    mean = np.array([scores[prompt].mean(0) for prompt in prompts])
    ranks = np.zeros(len(prompts), int)
    ranks[np.argsort(mean[:, 0] - mean[:, 1])[: len(prompts) // 2]] = 1
    return ranks.tolist()


def test_a_plan_raises_what_the_engine_counts(server, tmp_path, tmp_path_factory):
    every = list(requests())
    plan, model = tmp_path / "plan", tmp_path / "reshuffled"
    semmoe("solve", "--trace", profile(server, every[::2], tmp_path / "planned"), "--ep", RANKS, "--attention", "dp", "--out", plan, "--train-percent", 50)
    # The promise is for the requests that are measured: 74 of them are too few to compare with those that the plan held back.
    served = profile(server, every[1::2], tmp_path / "served")
    promise = json.loads(semmoe("eval", "--trace", served, "--plan", plan, "--requests", "all"))
    semmoe("reshuffle", "--model", CHECKPOINT, "--permutation", plan / "gate-permutation.json", "--out", model)

    prompts = [json.loads(server.post("/tokenize", {"model": "tiny", "prompt": text}))["tokens"] for _, text in every[1::2]]
    without = measure(server, prompts, round_robin(prompts))
    # vLLM creates its sockets there. Socket paths have at most 107 bytes, and tmp_path contains the long test name.
    with serve(tmp_path_factory.mktemp("planned"), model=model) as planned:
        spread = measure(planned, prompts, round_robin(prompts))
        with_plan = measure(planned, prompts, by_forecast(table(plan / "tables.safetensors"), prompts))
    print(f"\nlocal activation rate: {without:.4f} without a plan, {spread:.4f} with its experts and round-robin requests, ", end="")
    print(f"{with_plan:.4f} with the plan; promised {promise['lar']:.4f} over {promise['baseline_lar']:.4f}; {len(prompts)} requests")
    assert abs(without - 1 / RANKS) < 0.02 and abs(spread - 1 / RANKS) < 0.02
    assert abs(with_plan - promise["lar"]) < 0.03
    assert with_plan > without + 0.05
