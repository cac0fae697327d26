import os

import pytest


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Two expert-parallel ranks of vLLM's CPU build, in float32, with the plug-in and no plan."""
    pytest.importorskip("vllm")
    from server import serve

    # Steps of at most 64 tokens split prompts into pieces.
    with serve(tmp_path_factory.mktemp("vllm"), "--max-num-batched-tokens", "64") as running:
        yield running


def pytest_collection_modifyitems(items):
    """Runs the slow tests of engines last."""
    items.sort(key=lambda item: (item.path.stem in ("test_vllm", "test_loop"), item.path.stem == "test_loop"))
