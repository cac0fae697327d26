"""A vLLM server on the small checkpoint of the repository, for tests."""

import base64
import contextlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
CHECKPOINT = REPOSITORY / "internal/refengine/testdata/tiny-qwen3moe"
GOLDEN = json.loads((CHECKPOINT / "golden.json").read_text())["cases"]
LAYERS, EXPERTS, TOP, RANKS = 4, 32, 4, 2


class Server:
    def __init__(self, base):
        self.base = base

    def get(self, path):
        with urllib.request.urlopen(self.base + path, timeout=60) as response:
            return response.read().decode()

    def post(self, path, body, rank=None):
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.read().decode()

    def complete(self, prompt, rank=None, **options):
        """Runs a completion, and returns its first choice."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **options}
        return json.loads(self.post("/v1/completions", body, rank))["choices"][0]

    def activations(self):
        """Returns the counters as an array [rank][layer][local, remote]."""
        counts = np.zeros((RANKS, LAYERS, 2), int)
        line = re.compile(r'^semmoe_engine_activations_total\{layer="(\d+)",locality="(\w+)",rank="(\d+)"\} (\S+)$', re.M)
        found = line.findall(self.get("/metrics"))
        for layer, locality, rank, value in found:
            counts[int(rank), int(layer), ["local", "remote"].index(locality)] = float(value)
        assert len(found) == counts.size, f"{len(found)} counters"
        return counts


def decode(text):
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@contextlib.contextmanager
def serve(folder, *flags, model=CHECKPOINT):
    """Starts a server, and ends it and the processes that it started.

    The CPU build has no expert parallelism: EP_PLUGIN is the directory of a plug-in that supplies it.
    """
    folder.mkdir(exist_ok=True)
    checkpoint = folder / "model"
    shutil.copytree(model, checkpoint)
    # The checkpoint lacks what vLLM needs for chats.
    shutil.copytree(REPOSITORY / "test/vllm/checkpoint", checkpoint, dirs_exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([os.environ["EP_PLUGIN"], os.environ["PYTHONPATH"]]),
    }  # fmt: skip
    log = folder / "server.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--data-parallel-size", str(RANKS), "--enable-expert-parallel",
        "--dtype", "float32", "--enforce-eager", "--enable-return-routed-experts", "--max-model-len", "1024", "--max-num-seqs", "8", *flags,
    ]  # fmt: skip
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        server = Server(f"http://127.0.0.1:{port}")
        wait(server, process, log)
        server.log = log
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(server, process, log, limit=600):
    deadline = time.monotonic() + limit
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError):
            server.get("/health")
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server does not serve:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)
