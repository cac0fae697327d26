"""Runs the product's steps against vLLM on two GPUs: python3 test/gpu/run_vllm.py --help, and README.md.

Data parallelism 2, expert parallelism 2. Each step and each server that does not start is in the result; the others go on.
"""

import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import statistics
import time

import engine_runs as runs
from engine_runs import NAME, RANKS, Answer, Result, Server

ENGINE = "VLLM"
PLUGIN = pathlib.Path(__file__).resolve().parents[2] / "integrations/vllm/semmoe_vllm"


def main():
    options = runs.arguments(ENGINE, "vllm serve")
    result = Result(options, engine=ENGINE)
    wide = runs.as_float32(options)
    eager, balanced = ["--enforce-eager"], json.dumps({"window_size": 40, "step_interval": 80, "num_redundant_experts": 0})
    copies = json.dumps({"window_size": 40, "step_interval": 80, "num_redundant_experts": 4})
    servers = {
        "unplanned": server(result, "unplanned", 0, options.model),
        "plugin": server(result, "plugin", 1, options.model, plugin=True),
        "plugin-eager": server(result, "plugin-eager", 2, options.model, *eager, plugin=True),
        "round-robin": server(result, "round-robin", 3, options.model, "--expert-placement-strategy", "round_robin", *eager),
        "eplb": server(result, "eplb", 4, options.model, "--enable-eplb", "--eplb-config", balanced, *eager),
        "eplb-redundant": server(result, "eplb-redundant", 5, options.model, "--enable-eplb", "--eplb-config", copies, *eager, plugin=True),
        "float32": server(result, "float32", 6, wide, "--dtype", "float32", *eager),
    }
    running = list(servers.values())
    try:
        runs.start(servers)
        runs.wait(servers)
        plain = servers["unplanned"]
        if not plain.up:
            raise SystemExit("the unplanned server is not up")
        result.step("configuration", configuration, plain)
        plan, trace = options.work / "plan", options.work / "unplanned.safetensors"
        result.step("profile", runs.profile, options, plain, ENGINE)
        result.step("solve", runs.solve, options, trace, "plan")
        reshuffled, wide_reshuffled = runs.reshuffle(options, plan, "reshuffled"), runs.reshuffle(options, plan, "float32-reshuffled", wide)
        planned = {
            "reshuffled": server(result, "reshuffled", 7, reshuffled, "--expert-placement-strategy", "linear", plugin=True),
            "reshuffled-eager": server(result, "reshuffled-eager", 8, reshuffled, "--expert-placement-strategy", "linear", *eager, plugin=True),
            "float32-reshuffled": server(result, "float32-reshuffled", 9, wide_reshuffled, "--dtype", "float32", *eager),
        }
        running += planned.values()
        runs.start(planned)
        # Steps of the servers that are up, while the others start.
        result.step("ranks", routes, plain)
        result.step("golden", golden, options, plain)
        result.step("probe recorded", runs.record_probe, options, plain, ENGINE)
        result.step("probe of the same server", runs.check_probe, options, plain, ENGINE)
        kinds, texts = zip(*runs.pieces(options.corpus)[1])
        prompts = [tokens(plain, text) for text in texts]
        some = prompts[:: max(1, len(prompts) // 48)][:48]
        outputs = lambda of, rank=0: runs.in_parallel(lambda prompt: answer(of, prompt, rank, 24, True), some, workers=1)  # noqa: E731
        before = outputs(plain)
        result.step("outputs of the same server", lambda: runs.compare(before, outputs(plain)))
        result.step("outputs of rank 1", lambda: runs.compare(before, outputs(plain, 1)))
        result.step("lar unplanned", lar, plain, prompts, runs.round_robin(prompts))
        ask = lambda of: lambda text, rank: answer(of, tokens(of, text), rank, 1)  # noqa: E731
        result.step("router unplanned", lambda: runs.through_router(options, plain, ENGINE, texts, ask(plain), port=29200))
        compared = lambda name, of: result.step(f"outputs of {name}", lambda: runs.compare(before, outputs(of)))  # noqa: E731
        up = lambda *names: [name for name in names if servers[name].up]  # noqa: E731
        for name in up("plugin", "plugin-eager"):
            result.step(f"counted by {name}", counted, servers[name], prompts, runs.round_robin(prompts))
        others = up("plugin", "plugin-eager", "round-robin", "eplb", "eplb-redundant")
        runs.in_parallel(lambda name: compared(name, servers[name]), others)
        # Once the load balancer has moved experts.
        balancing = up("eplb", "eplb-redundant")
        runs.in_parallel(lambda name: result.step(f"rearrangements of {name}", rearrangements, servers[name], prompts), balancing)
        runs.in_parallel(lambda name: compared(f"{name}, rearranged", servers[name]), balancing)
        runs.wait(planned)
        servers.update(planned)
        reordered = up("reshuffled", "reshuffled-eager")
        for name in reordered:
            one = servers[name]
            result.step(f"counted by {name}, round-robin", counted, one, prompts, runs.round_robin(prompts))
            result.step(f"counted by {name}, by forecast", counted, one, prompts, runs.by_forecast(plan, prompts))
        if reordered:
            one = servers[reordered[0]]
            result.step("router reshuffled", lambda: runs.through_router(options, one, ENGINE, texts, ask(one), plan, permuted=True, port=29300))
        runs.in_parallel(lambda name: compared(name, servers[name]), reordered)
        for name in reordered:
            result.step(f"probe of {name}", runs.check_probe, options, servers[name], ENGINE)
        pair = up("float32", "float32-reshuffled")
        if len(pair) == 2:
            result.step("outputs of float32-reshuffled", lambda: runs.compare(*runs.in_parallel(lambda name: outputs(servers[name]), pair)))
        timed = [("unplanned", "plugin"), ("round-robin", "plugin-eager")]
        runs.stop([one for one in running if one.name not in sum(timed, ())])
        for without, with_ in timed:
            if len(up(without, with_)) == 2:
                result.step(f"overhead of the plug-in: {with_} to {without}", overhead, servers[without], servers[with_], prompts)
    finally:
        runs.stop(running)
        result.save()


def server(result, name, number, model, *flags, plugin=False):
    """Returns a server with the flags that the operator renders, --flags and further ones."""
    port = 23500 + 500 * number
    command = [
        *shlex.split(result.options.launch), model, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", port, "--tensor-parallel-size", 1,
        "--data-parallel-size", RANKS, "--enable-expert-parallel", "--enable-return-routed-experts", *shlex.split(result.options.flags), *flags,
    ]  # fmt: skip
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "semmoe" if plugin else "none"}
    if plugin:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site(result.options)), os.environ.get("PYTHONPATH", "")]))
    return Server(result, name, list(map(str, command)), port, environment)


def site(options):
    """Returns a directory with the plug-in as pip would install it."""
    folder = options.work / "site"
    if not folder.exists():
        shutil.copytree(PLUGIN, folder / "semmoe_vllm")
        about = folder / "semmoe_vllm-0.1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: semmoe-vllm\nVersion: 0.1.0\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nsemmoe = semmoe_vllm.plugin:register\n")
    return folder


def configuration(server):
    """Returns what the log says of the configuration: attention backend, all-to-all backend, CUDA graphs."""
    log = server.log.read_text(errors="replace")
    found = {"version": json.loads(server.get("/version"))["version"]}
    for name, pattern in (
        ("attention", r"Using (\S+) attention backend"), ("attention_backend", r"Using AttentionBackendEnum\.(\w+)"), ("all2all", r"Using (\w+) all2all manager"),
        ("moe", r"Using '?([\w ]+?)'? (?:Unquantized )?MoE backend"), ("cudagraph_mode", r"'?cudagraph_mode'?: <CUDAGraphMode\.(\w+)"),
    ):  # fmt: skip
        match = re.search(pattern, log)
        found[name] = match[1] if match else None
    return found


def tokens(server, text):
    return server.post("/tokenize", {"model": NAME, "prompt": text})["tokens"]


def answer(server, prompt, rank, new_tokens, logprobs=False):
    """Runs a completion on a rank."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body["return_routed_experts"] = True  # vLLM ignores it; the plug-in, where it returns experts, does not
    if logprobs:
        body["prompt_logprobs"] = 0
    choice = server.post("/v1/completions", body, {"X-data-parallel-rank": str(rank)})["choices"][0]
    of_prompt = choice.get("prompt_logprobs") or [None]
    values = [at[str(token)]["logprob"] for at, token in zip(of_prompt[1:], prompt[1:])]
    if not choice.get("routed_experts"):
        raise RuntimeError("an answer has no routed experts")
    return Answer(values, choice["token_ids"], runs.decode_npy(choice["routed_experts"]), rank)


def golden(options, server):
    return runs.golden(options, lambda prompt, new_tokens: answer(server, prompt, 0, new_tokens))


def lar(server, prompts, ranks):
    return runs.rate(runs.local_rate(runs.in_parallel(lambda prompt, rank: answer(server, prompt, rank, 1), prompts, ranks), ranks))


# --- the plug-in --------------------------------------------------------------------------------------------------------


def activations(server):
    """Returns the plug-in's counters as (local, all)."""
    counts = {"local": 0, "remote": 0}
    found = re.findall(r'^semmoe_engine_activations_total\{.*?locality="(\w+)".*?\} (\S+)$', server.get("/metrics"), re.M)
    if not found:
        raise RuntimeError("the server has no semmoe_engine_activations_total")
    for locality, value in found:
        counts[locality] += int(float(value))
    return counts["local"], counts["local"] + counts["remote"]


def settled(server):
    last = activations(server)
    while True:
        time.sleep(0.5)
        now = activations(server)
        if now == last:
            return now
        last = now


def counted(server, prompts, ranks, new_tokens=8):
    """Compares the plug-in's counters with the routed experts of the same requests, whose prompts are computed anew."""
    before = settled(server)
    answers = runs.in_parallel(lambda i: answer(server, unlike(prompts[i]), ranks[i], new_tokens), range(len(prompts)))
    after = settled(server)
    log = server.log.read_text(errors="replace")
    return {
        "counted": runs.rate((after[0] - before[0], after[1] - before[1])), "from_routed_experts": runs.rate(runs.local_rate(answers, ranks)),
        "says": sorted(set(re.findall(r"semmoe-vllm: [^\n]*", log)))[:8],
    }  # fmt: skip


_fresh = itertools.count()


def unlike(prompt):
    """Returns a prompt that begins unlike all others: tokens of the prefix cache are not computed, and do not count."""
    number = next(_fresh)
    return [number // 64 % 4000 + 1, number % 64 + 1, *prompt]


def overhead(plain, plugin, prompts, rounds=16, requests=64, new_tokens=48):
    """Measures the throughput of two servers by the same requests in turns, and returns the loss of the second in percent."""
    times = {plain.name: [], plugin.name: []}

    def batch(server, number):
        begin = time.monotonic()
        def one(i):  # noqa: E306
            prompt = [number % 4000 + 1, i + 1, *(prompts[i % len(prompts)] * 2)][:130]
            body = {"model": NAME, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
            server.post("/v1/completions", body, {"X-data-parallel-rank": str(i % RANKS)})
        runs.in_parallel(one, range(requests), workers=requests)
        return time.monotonic() - begin

    for number in range(rounds + 2):
        order = (plain, plugin) if number % 2 else (plugin, plain)
        for server in order:
            seconds = batch(server, number)
            if number >= 2:
                times[server.name].append(seconds)
    lower = {name: statistics.quantiles(values, n=4)[0] for name, values in times.items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    done = requests * (130 + new_tokens)
    return {
        "rounds": rounds, "requests": requests, "tokens_of_a_round": done,
        "tokens_per_second": {name: round(done / value) for name, value in lower.items()},
        "loss_percent_lower_quartiles": round(100 * (1 - lower[plain.name] / lower[plugin.name]), 2),
        "loss_percent_medians": round(100 * (1 - median[plain.name] / median[plugin.name]), 2),
    }  # fmt: skip


# --- routes and the load balancer ---------------------------------------------------------------------------------------


def by_rank(server):
    found = re.findall(r'^vllm:request_success_total\{.*?engine="(\d+)".*?\} (\S+)$', server.get("/metrics"), re.M)
    counts = [0] * RANKS
    for rank, value in found:
        counts[int(rank)] += int(float(value))
    return counts


ROUTES = {
    "/v1/completions": lambda text: {"model": NAME, "prompt": text, "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": lambda text: {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0},
    "/inference/v1/generate": lambda text: {"token_ids": [ord(c) % 256 + 1 for c in text], "sampling_params": {"max_tokens": 2, "temperature": 0}},
    "/v1/messages": lambda text: {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/responses": lambda text: {"model": NAME, "input": text, "max_output_tokens": 2, "temperature": 0},
}


def routes(server, requests=6):
    """Sends requests for each rank to each route, by header and by members of the body, and counts where they run."""
    found = {}
    ways = {
        "header": lambda rank: ({"X-data-parallel-rank": str(rank)}, {}),
        "data_parallel_rank": lambda rank: ({}, {"data_parallel_rank": rank}),
        "routed_dp_rank": lambda rank: ({}, {"routed_dp_rank": rank}),
    }
    for route, body in ROUTES.items():
        found[route] = {}
        for way, make in ways.items():
            for rank in range(RANKS):
                before, statuses = by_rank(server), []
                for number in range(requests):
                    headers, members = make(rank)
                    statuses.append(server.request(route, {**body(f"{number}: what comes after {number}?"), **members}, headers)[0])
                deadline = time.monotonic() + 5
                while sum(by_rank(server)) < sum(before) + statuses.count(200) and time.monotonic() < deadline:
                    time.sleep(0.1)
                after = by_rank(server)
                found[route][f"{way}, rank {rank}"] = {"status": sorted(set(statuses)), "requests_by_rank": [b - a for a, b in zip(before, after)]}
        for name, headers, members in (
            ("header, rank 7", {"X-data-parallel-rank": "7"}, {}), ("header, no number", {"X-data-parallel-rank": "x"}, {}),
            ("data_parallel_rank, rank 7", {}, {"data_parallel_rank": 7}),
        ):  # fmt: skip
            status, text, _ = server.request(route, {**body("out of range"), **members}, headers)
            found[route][name] = {"status": status, "says": text[:160] if status != 200 else ""}
    return found


def rearrangements(server, prompts, rounds=4):
    """Serves until the load balancer has moved experts, and returns what the log says of it."""
    for number in range(rounds):
        runs.in_parallel(lambda i: answer(server, unlike(prompts[i]), i % RANKS, 24), range(len(prompts)), workers=32)
    log = server.log.read_text(errors="replace")
    return {"rearranged": len(re.findall(r"Rearranged experts", log)), "says": sorted({line[-160:] for line in re.findall(r"[^\n]*(?:Rearrang|EPLB)[^\n]*", log)})[:8]}


if __name__ == "__main__":
    main()
