import os
import subprocess
import sys

import numpy as np
import pytest

from semmoe_vllm import counters


def test_totals_of_all_workers_of_a_rank(tmp_path):
    first = counters.Counters(tmp_path, 0, 0, [1, 3])
    second = counters.Counters(tmp_path, 0, 1, [1, 3])
    other = counters.Counters(tmp_path, 7, 0, [1, 3])
    first.publish(np.array([[5, 2], [1, 0]]))
    second.publish(np.array([[10, 20], [0, 0]]))
    other.publish(np.array([[2**40, 1], [0, 4]]))
    assert counters.read(tmp_path) == {(0, 1): [15, 22], (0, 3): [1, 0], (7, 1): [2**40, 1], (7, 3): [0, 4]}


def test_a_restarted_worker_starts_at_zero(tmp_path):
    before = counters.Counters(tmp_path, 0, 0, [0])
    before.publish(np.array([[5, 2]]))
    counters.Counters(tmp_path, 0, 0, [0])
    before.publish(np.array([[6, 2]]))  # a worker that is still ending writes into the replaced file
    assert counters.read(tmp_path) == {(0, 0): [0, 0]}
    assert os.listdir(tmp_path) == ["rank-0-0.counters"]


@pytest.mark.parametrize(
    "content",
    [np.array([17, 0, 1, 0, 1, 1], "<i8").tobytes(), b"", b"\0" * 24, b"short", np.array([counters.MAGIC, 0, 2, 0, 1, 1], "<i8").tobytes(),
     np.array([counters.MAGIC, 0, -1], "<i8").tobytes(), np.array([counters.MAGIC, 0, 2**62], "<i8").tobytes(),
     np.zeros(3 + 3 * (counters.MAX_LAYERS + 1), "<i8").tobytes()],
)  # fmt: skip
def test_ignores_files_of_another_form(tmp_path, content):
    (tmp_path / "rank-0-0.counters").write_bytes(content)
    (tmp_path / "rank-0-1.counters.17").write_bytes(content)
    (tmp_path / "rank-1-0.counters").mkdir()
    counters.Counters(tmp_path, 2, 0, [0]).publish(np.array([[1, 2]]))
    assert counters.read(tmp_path) == {(2, 0): [1, 2]}


def test_no_directory_no_counters(tmp_path):
    assert counters.read(tmp_path / "absent") == {}


def test_processes_share_the_directory_of_the_first(tmp_path):
    program = """
import os, subprocess, sys
from semmoe_vllm import counters
path = counters.directory()
child = "from semmoe_vllm import counters; print(counters.directory())"
assert subprocess.check_output([sys.executable, "-c", child], text=True).strip() == path == counters.directory()
if os.fork() == 0:
    sys.exit()
os.wait()
assert os.path.isdir(path), "a child removed the directory"
print(path)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop(counters.DIRECTORY_VARIABLE, None)
    path = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment).strip()
    assert os.path.dirname(path) == str(tmp_path) and not os.path.exists(path)


def test_exposition(tmp_path):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry(auto_describe=True)
    registry.register(counters.Collector(tmp_path))
    counters.Counters(tmp_path, 1, 0, [4]).publish(np.array([[3, 9]]))
    lines = prometheus.generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'semmoe_engine_activations_total{layer="4",locality="local",rank="1"} 3.0',
        'semmoe_engine_activations_total{layer="4",locality="remote",rank="1"} 9.0',
    ]
    assert "# TYPE semmoe_engine_activations_total counter" in lines
