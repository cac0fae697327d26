"""Runs the steps of this project with SGLang on two GPUs: python3 test/gpu/run_sglang.py --help, and README.md.

Attention data parallelism 2, expert parallelism 2. Each step and each server that does not start is in the result; the others go on.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time

import engine_runs as runs
from engine_runs import NAME, RANKS, Answer, Result, Server

ENGINE = "SGLang"


def main():
    options = runs.arguments(ENGINE, "python3 -m sglang.launch_server")
    result = Result(options, engine=ENGINE)
    first = ["--enable-metrics"]
    recorder = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(options.work / "recorder")}
    wide = runs.as_float32(options)
    servers = {
        "unplanned": server(result, "unplanned", 0, options.model, *first),
        "recorder": server(result, "recorder", 1, options.model, "--expert-distribution-recorder-mode", "stat", environment=recorder),
        "float32": server(result, "float32", 2, wide, "--dtype", "float32"),
    }
    plain, running = servers["unplanned"], list(servers.values())
    try:
        runs.start(servers)
        runs.wait(servers)
        if not plain.up:
            raise SystemExit("the unplanned server is not up")
        result.step("server_info", server_info, plain)
        plan = options.work / "plan"
        result.step("profile", runs.profile, options, plain, ENGINE)
        trace = options.work / "unplanned.safetensors"
        result.step("solve", runs.solve, options, trace, "plan")
        redundant = options.work / "redundant"
        result.step("solve with redundant experts", runs.solve, options, trace, "redundant", "--redundant-slots", "1")
        reshuffled = runs.reshuffle(options, plan, "reshuffled")
        wide_reshuffled = runs.reshuffle(options, plan, "float32-reshuffled", wide)
        copies = ["--init-expert-location", redundant / "engine/sglang.json", "--ep-num-redundant-experts", "2", "--ep-dispatch-algorithm"]
        planned = {
            "reshuffled": server(result, "reshuffled", 3, reshuffled, *first),
            "float32-reshuffled": server(result, "float32-reshuffled", 4, wide_reshuffled, "--dtype", "float32"),
            "map": server(result, "map", 5, options.model, "--init-expert-location", plan / "engine/sglang.json"),
            "map-redundant-static": server(result, "map-redundant-static", 6, options.model, *copies, "static"),
            "map-redundant-dynamic": server(result, "map-redundant-dynamic", 7, options.model, *copies, "dynamic"),
        }
        running += planned.values()
        runs.start(planned)
        # Steps with the servers that are up, while the others start.
        result.step("ranks", routes, plain)
        if servers["recorder"].up:
            result.step("recorder", record_distribution, options, servers["recorder"])
            servers["recorder"].stop()
        result.step("golden", golden, options, plain)
        result.step("probe recorded", runs.record_probe, options, plain, ENGINE)
        result.step("probe of the same server", runs.check_probe, options, plain, ENGINE)
        kinds, texts = zip(*runs.pieces(options.corpus)[1])
        prompts = [tokens(plain, text) for text in texts]
        some = prompts[:: max(1, len(prompts) // 48)][:48]
        before = runs.in_parallel(lambda prompt: answer(plain, prompt, 0, 24), some, workers=1)
        result.step("outputs of the same server", lambda: runs.compare(before, runs.in_parallel(lambda prompt: answer(plain, prompt, 0, 24), some, workers=1)))
        result.step("outputs of rank 1", lambda: runs.compare(before, runs.in_parallel(lambda prompt: answer(plain, prompt, 1, 24), some, workers=1)))
        result.step("lar unplanned", lar, plain, prompts, runs.round_robin(prompts))
        ask = lambda of: lambda text, rank: answer(of, tokens(of, text), rank, 1)  # noqa: E731
        result.step("router unplanned", lambda: runs.through_router(options, plain, ENGINE, texts, ask(plain)))
        runs.wait(planned)
        for name, one in planned.items():
            if one.up and not name.startswith("float32"):
                result.step(f"outputs of {name}", lambda: runs.compare(before, runs.in_parallel(lambda prompt: answer(one, prompt, 0, 24), some, workers=1)))
                result.step(f"probe of {name}", runs.check_probe, options, one, ENGINE)
        if planned["reshuffled"].up:
            one = planned["reshuffled"]
            result.step("lar reshuffled, round-robin", lar, one, prompts, runs.round_robin(prompts))
            result.step("lar reshuffled, by forecast", lar, one, prompts, runs.by_forecast(plan, prompts))
            result.step("router reshuffled", lambda: runs.through_router(options, one, ENGINE, texts, ask(one), plan, permuted=True, port=29100))
        pair = servers["float32"], planned["float32-reshuffled"]
        if all(one.up for one in pair):
            both = [runs.in_parallel(lambda prompt: answer(of, prompt, 0, 24), some, workers=1) for of in pair]
            result.step("outputs of float32-reshuffled", runs.compare, *both)
    finally:
        runs.stop(running)
        result.save()


def server(result, name, number, model, *flags, environment=None):
    """Returns a server with the flags that the operator renders, --flags and additional flags. Ports are far apart, because SGLang uses several."""
    port = 11000 + 1500 * number
    command = [
        *shlex.split(result.options.launch), "--model-path", model, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", port,
        "--tp-size", RANKS, "--ep-size", RANKS, "--dp-size", RANKS, "--enable-dp-attention", "--enable-return-routed-experts",
        *shlex.split(result.options.flags), *flags,
    ]  # fmt: skip
    return Server(result, name, list(map(str, command)), port, environment)


def server_info(server):
    info = json.loads(server.get("/server_info"))
    return {key: info.get(key) for key in ("version", "tp_size", "dp_size", "ep_size", "moe_a2a_backend", "attention_backend", "dtype", "disable_cuda_graph")}


def tokens(server, text):
    return server.post("/v1/tokenize", {"model": NAME, "prompt": text})["tokens"]


def answer(server, prompt, rank, new_tokens):
    """Runs a request on a rank through the native route."""
    body = {
        "input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}, "return_logprob": True,
        "logprob_start_len": 0, "return_routed_experts": True, "routed_dp_rank": rank,
    }  # fmt: skip
    found = server.post("/generate", body)
    about = found["meta_info"]
    if about.get("dp_rank", rank) != rank:
        raise RuntimeError(f"rank {about['dp_rank']} served a request for rank {rank}")
    logprobs = [item[0] for item in about["input_token_logprobs"][1:]]
    return Answer(logprobs, found["output_ids"], runs.decode_int32(about["routed_experts"]), rank)


def golden(options, server):
    return runs.golden(options, lambda prompt, new_tokens: answer(server, prompt, 0, new_tokens))


def lar(server, prompts, ranks):
    return runs.rate(runs.local_rate(runs.in_parallel(lambda prompt, rank: answer(server, prompt, rank, 1), prompts, ranks), ranks))


def counters(server):
    """Returns how many requests each rank has begun, by the log, and the counters of /metrics that name a rank."""
    found = {}
    for rank, requests in re.findall(r"DP(\d+) .*?Prefill batch.*?#new-seq: (\d+)", server.log.read_text(errors="replace")):
        found[f"log rank {rank}"] = found.get(f"log rank {rank}", 0) + int(requests)
    for line in server.get("/metrics").splitlines():
        named = re.match(r'(sglang:\w+_total)\{.*?dp_rank="(\d+)".*\} (\S+)$', line)
        if named:
            key = f"{named[1]} rank {named[2]}"
            found[key] = found.get(key, 0) + float(named[3])
    return found


def settled(server):
    """Returns the counters once they have stopped growing: the log is written after the answer."""
    last = counters(server)
    while True:
        time.sleep(0.4)
        now = counters(server)
        if now == last:
            return now
        last = now


ROUTES = {
    "/v1/completions": lambda text: {"model": NAME, "prompt": text, "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": lambda text: {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0, "return_meta_info": True},
    "/generate": lambda text: {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
    "/v1/messages": lambda text: {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0},
    "/v1/responses": lambda text: {"model": NAME, "input": text, "max_output_tokens": 2, "temperature": 0},
}


def reported(text):
    """Returns the rank that an answer reports, or None."""
    found = re.search(r'"dp_rank":\s*(\d+)', text)
    return int(found[1]) if found else None


def routes(server, requests=6):
    """Sends requests for each rank to each route, by header and by members of the body, and counts where they run."""
    number, found = 0, {}
    ways = {
        "header": lambda rank: ({"X-Data-Parallel-Rank": str(rank)}, {}),
        "routed_dp_rank": lambda rank: ({}, {"routed_dp_rank": rank}),
        "data_parallel_rank": lambda rank: ({}, {"data_parallel_rank": rank}),
        "header, and routed_dp_rank of the other rank": lambda rank: ({"X-Data-Parallel-Rank": str(rank)}, {"routed_dp_rank": 1 - rank}),
    }
    for route, body in ROUTES.items():
        found[route] = {}
        for way, make in ways.items():
            for rank in range(RANKS):
                before, statuses, reports = settled(server), [], []
                for _ in range(requests):
                    number += 1  # no prompt begins like another, so that each is computed
                    headers, members = make(rank)
                    status, text, _ = server.request(route, {**body(f"{number}: what comes after {number}?"), **members}, headers)
                    statuses.append(status)
                    reports.append(reported(text))
                ran = runs.counter_deltas(before, settled(server))
                found[route][f"{way}, rank {rank}"] = {
                    "status": sorted(set(statuses)), "requests_by_rank": [ran.get(f"log rank {r}", 0) for r in range(RANKS)],
                    "reported": sorted(set(filter(lambda r: r is not None, reports))),
                }  # fmt: skip
        for name, headers, members in (
            ("header, rank 7", {"X-Data-Parallel-Rank": "7"}, {}), ("header, no number", {"X-Data-Parallel-Rank": "x"}, {}),
            ("routed_dp_rank, rank 7", {}, {"routed_dp_rank": 7}), ("X-Override-Routed-Dp-Rank, rank 7", {"X-Override-Routed-Dp-Rank": "7"}, {}),
        ):  # fmt: skip
            status, text, _ = server.request(route, {**body("out of range"), **members}, headers)
            found[route][name] = {"status": status, "says": text[:160] if status != 200 else ""}
    found["counters that name a rank"] = sorted({key.rsplit(" rank ")[0] for key in counters(server)})
    return found


def record_distribution(options, server):
    """Compares what SGLang's recorder of expert distribution writes with the routed experts of the same requests."""
    found = {"start": server.request("/start_expert_distribution_record", {})[:2]}
    kinds, texts = zip(*runs.pieces(options.corpus)[1])
    prompts = [tokens(server, text) for text in texts[:24]]
    answers = runs.in_parallel(lambda prompt, rank: answer(server, prompt, rank, 1), prompts, runs.round_robin(prompts))
    found["stop"] = server.request("/stop_expert_distribution_record", {})[:2]
    found["dump"] = server.request("/dump_expert_distribution_record", {})[:2]
    want = [[0] * runs.EXPERTS for _ in range(runs.LAYERS)]
    for one in answers:
        for token in one.experts:
            for layer, chosen in enumerate(token):
                for expert in chosen:
                    want[layer][expert] += 1
    files = sorted((options.work / "recorder").glob("*.pt"))
    found["files"] = [{"name": re.sub(r"\d+\.\d+", "TIME", path.name), "bytes": path.stat().st_size} for path in files]
    if not files:
        return found
    read = (
        "import json, sys, torch\nread = torch.load(sys.argv[1], weights_only=False, map_location='cpu')\n"
        "counts = read['logical_count']\nprint(json.dumps({'members': {k: str(getattr(v, 'shape', v)) for k, v in read.items()}, 'counts': counts.sum(0).tolist()}))"
    )
    python = shlex.split(options.launch)[0]
    done = subprocess.run([python if "python" in python else sys.executable, "-c", read, str(files[-1])], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    dump = json.loads(done.stdout)
    counts = dump["counts"]
    total, expected = sum(map(sum, counts)), sum(map(sum, want))
    apart = lambda times: sum(abs(a - times * b) for of_dump, of_answers in zip(counts, want) for a, b in zip(of_dump, of_answers))  # noqa: E731
    return {
        **found, "members": dump["members"], "activations_recorded": total, "activations_of_answers": expected, "sum_of_differences": apart(1),
        "sum_of_differences_where_each_rank_counts_all": apart(RANKS),
    }  # fmt: skip


if __name__ == "__main__":
    main()
