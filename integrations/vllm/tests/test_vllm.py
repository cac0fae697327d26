"""Answers and counters of the server of conftest.py."""

import concurrent.futures
import json
import urllib.error

import numpy as np
import pytest

pytest.importorskip("vllm")
from server import EXPERTS, GOLDEN, LAYERS, RANKS, TOP, decode  # noqa: E402

ASK = {"return_routed_experts": True}


def same_experts(rows, golden):
    """Compares [tokens][layers][top] with golden's [layers][tokens][top]; the order of a token's experts does not matter."""
    want = np.array(golden["experts_by_layer"]).transpose(1, 0, 2)
    np.testing.assert_array_equal(np.sort(rows[: len(want)], -1), np.sort(want, -1))


@pytest.mark.parametrize("rank", range(RANKS))
def test_returns_the_experts_of_the_golden_outputs(server, rank):
    for golden in GOLDEN:
        choice = server.complete(golden["prompt_ids"], rank, max_tokens=8, **ASK)
        rows = decode(choice["routed_experts"])
        assert rows.shape == (len(golden["prompt_ids"]) + len(choice["token_ids"]) - 1, LAYERS, TOP)
        assert rows.dtype == np.uint8
        same_experts(rows, golden)


def test_cached_prompts_have_experts(server):
    prompt = GOLDEN[0]["prompt_ids"] * 3
    first = server.complete(prompt, 0)
    assert first.get("routed_experts") is None
    answers = [server.complete(prompt, 0, **ASK)["routed_experts"] for _ in range(2)]
    assert answers[0] == answers[1] and len(decode(answers[0])) == len(prompt)


def test_generated_tokens_have_the_experts_of_a_prompt(server):
    prompt = GOLDEN[1]["prompt_ids"]
    choice = server.complete(prompt, 1, max_tokens=30, ignore_eos=True, **ASK)
    whole = server.complete(prompt + choice["token_ids"], 0, **ASK)
    generated, prefilled = decode(choice["routed_experts"]), decode(whole["routed_experts"])
    assert len(generated) == len(prompt) + 29
    np.testing.assert_array_equal(np.sort(generated, -1), np.sort(prefilled[: len(generated)], -1))


def test_a_stop_string_ends_the_experts(server):
    prompt = GOLDEN[0]["prompt_ids"]
    text = server.complete(prompt, max_tokens=20)["text"]
    stop = text[len(text) // 2 :][:3]
    choice = server.complete(prompt, max_tokens=20, stop=[stop], **ASK)
    assert choice["finish_reason"] == "stop"
    assert len(decode(choice["routed_experts"])) == len(prompt) + len(choice["token_ids"]) - 1


def test_each_choice_has_its_experts(server):
    prompt = GOLDEN[2]["prompt_ids"]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "n": 3, "temperature": 1, "return_token_ids": True, **ASK}
    for choice in json.loads(server.post("/v1/completions", body))["choices"]:
        rows = decode(choice["routed_experts"])
        assert len(rows) == len(prompt) + len(choice["token_ids"]) - 1
        same_experts(rows, GOLDEN[2])


def test_leaves_out_the_start(server):
    prompt = GOLDEN[0]["prompt_ids"]
    whole = decode(server.complete(prompt, 0, **ASK)["routed_experts"])
    rest = decode(server.complete(prompt, 0, routed_experts_prompt_start=5, **ASK)["routed_experts"])
    np.testing.assert_array_equal(rest, whole[5:])


def test_chats(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": GOLDEN[0]["text"]}], "max_tokens": 4, **ASK}
    answer = json.loads(server.post("/v1/chat/completions", body))
    rows = decode(answer["choices"][0]["routed_experts"])
    assert len(rows) == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1


@pytest.mark.parametrize("options", [{}, {"return_routed_experts": False}, {"return_routed_experts": "yes"}])
def test_others_get_none(server, options):
    assert server.complete(GOLDEN[0]["prompt_ids"], **options).get("routed_experts") is None


def test_streams_get_none(server):
    body = {"model": "tiny", "prompt": GOLDEN[0]["prompt_ids"], "max_tokens": 4, "stream": True, **ASK}
    assert "routed_experts" not in server.post("/v1/completions", body)


def test_many_at_once(server):
    """Requests of both kinds share steps: each gets its own rows."""
    cases = [golden for golden in GOLDEN for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = lambda i: ASK if i % 3 else {}  # noqa: E731
        choices = list(pool.map(lambda i: server.complete(cases[i]["prompt_ids"], max_tokens=6, **asked(i)), range(len(cases))))
    for i, choice in enumerate(choices):
        if i % 3:
            same_experts(decode(choice["routed_experts"]), cases[i])
        else:
            assert choice.get("routed_experts") is None


@pytest.mark.parametrize("rank", range(RANKS))
def test_counts_what_the_answers_say(server, rank):
    """The counters grow by what the routed experts of the answers show: rank r has the r-th half of the experts."""
    before = server.activations()
    want = np.zeros((RANKS, LAYERS, 2), int)
    for golden in GOLDEN[:6]:
        rows = decode(server.complete(golden["prompt_ids"], rank, max_tokens=5, **ASK)["routed_experts"])
        local = rows // (EXPERTS // RANKS) == rank
        want[rank, :, 0] += local.sum((0, 2))
        want[rank, :, 1] += (~local).sum((0, 2))
    assert want[rank].min() > 0
    np.testing.assert_array_equal(server.activations() - before, want)


def test_each_api_server_serves_all_counters(server):
    """There are as many API servers as ranks; the kernel chooses one for each connection."""
    before = server.activations()
    assert all(np.array_equal(server.activations(), before) for _ in range(20))


def test_engine_metrics_stay(server):
    text = server.get("/metrics")
    assert 'vllm:request_success_total{engine="1"' in text and text.count("# TYPE semmoe_engine_activations_total") == 1


def test_bad_requests_stay_bad(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.complete(GOLDEN[0]["prompt_ids"], routed_experts_prompt_start=10_000, **ASK)
    assert refused.value.code == 400


def test_no_step_failed(server):
    log = server.log.read_text()
    assert "returns routed experts instead of vLLM" in log
    assert log.count("counts the activations of 4 MoE layers") == RANKS
    assert "semmoe-vllm: failed" not in log
