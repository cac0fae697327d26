"""Counters of local and remote activations that one process writes and others read.

vLLM serves /metrics in the processes of its API servers and computes in others. Each worker therefore keeps its counters in
a file that is mapped into memory, in a directory that all processes of the server inherit by DIRECTORY_VARIABLE. Writing is
a copy of 16 bytes for each MoE layer, without a system call. A collector reads the files when /metrics is scraped.

A file holds little-endian 64-bit integers: MAGIC, the rank, the number of MoE layers, then for each of them its index in the
model, its local and its remote activations.
"""

import atexit
import os
import re
import shutil
import tempfile

import numpy as np

DIRECTORY_VARIABLE = "SEMMOE_VLLM_COUNTERS"
METRIC = "semmoe_engine_activations"
HELP = (
    "Activations (token, MoE layer, chosen expert) by the rank that computes the attention of the token, by the index of "
    "the layer, and by whether that rank has a slot of the expert."
)

MAGIC = 0x31304F4F4D4D4553
HEADER_WORDS = 3
LAYER_WORDS = 3
# Bounds on what a scrape reads: more layers than any model, more ranks than any pod.
MAX_LAYERS = 4096
MAX_FILES = 1024

_FILE_NAME = re.compile(r"rank-\d{1,6}-\d{1,6}\.counters")
_WORD = np.dtype("<i8")


def directory():
    """Returns the directory of the server's counters; the first process to call it creates the directory."""
    path = os.environ.get(DIRECTORY_VARIABLE)
    if path:
        return path
    path = _make_directory()
    os.environ[DIRECTORY_VARIABLE] = path
    atexit.register(_remove, path, os.getpid())
    return path


def _make_directory():
    try:
        return tempfile.mkdtemp(prefix="semmoe-vllm-")
    except OSError:  # a read-only root file system; vLLM itself needs shared memory
        return tempfile.mkdtemp(prefix="semmoe-vllm-", dir="/dev/shm")


def _remove(path, owner):
    if os.getpid() == owner:  # forked processes inherit the exit handler
        shutil.rmtree(path, ignore_errors=True)


class Counters:
    """The counters of one worker. A new worker of the same rank replaces the file: its counters start at zero."""

    def __init__(self, path, rank, part, layers):
        """rank is the data-parallel rank, part the tensor-parallel one, layers lists the model's indices of MoE layers."""
        words = np.zeros(HEADER_WORDS + LAYER_WORDS * len(layers), _WORD)
        words[:HEADER_WORDS] = MAGIC, rank, len(layers)
        words[HEADER_WORDS:].reshape(-1, LAYER_WORDS)[:, 0] = layers
        name = os.path.join(path, f"rank-{rank}-{part}.counters")
        unfinished = f"{name}.{os.getpid()}"
        words.tofile(unfinished)
        os.replace(unfinished, name)
        mapped = np.memmap(name, _WORD, "r+").view(np.ndarray)  # whose assignments cost a fraction of a memmap's
        self._activations = mapped[HEADER_WORDS:].reshape(-1, LAYER_WORDS)[:, 1:]

    def publish(self, activations):
        """Publishes the totals [layers][local, remote]."""
        self._activations[:] = activations


def read(path):
    """Returns {(rank, layer): [local, remote]} of the files in a directory. Files of another form are ignored."""
    total = {}
    try:
        names = sorted(name for name in os.listdir(path) if _FILE_NAME.fullmatch(name))
    except OSError:
        return total
    for name in names[:MAX_FILES]:
        try:
            words = np.fromfile(os.path.join(path, name), _WORD, HEADER_WORDS + LAYER_WORDS * MAX_LAYERS)
        except OSError:
            continue
        if len(words) < HEADER_WORDS or words[0] != MAGIC or len(words) != HEADER_WORDS + LAYER_WORDS * int(words[2]):
            continue
        for layer, local, remote in words[HEADER_WORDS:].reshape(-1, LAYER_WORDS).tolist():
            sums = total.setdefault((int(words[1]), layer), [0, 0])
            sums[0] += local
            sums[1] += remote
    return total


class Collector:
    """A Prometheus collector of the counters in a directory."""

    def __init__(self, path):
        self._path = path

    def describe(self):
        """Returns nothing: registering the collector reads no file."""
        return []

    def collect(self):
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(METRIC, HELP, labels=["rank", "layer", "locality"])
        for (rank, layer), (local, remote) in sorted(read(self._path).items()):
            family.add_metric([str(rank), str(layer), "local"], local)
            family.add_metric([str(rank), str(layer), "remote"], remote)
        return [family]
