"""Measures what the plug-in costs, and prints one line of JSON.

    python -m semmoe_vllm.overhead MODEL [--routed-experts] [--rounds 60] [--prompt-tokens 128] [--new-tokens 32] [--requests 8]

One engine in this process serves the same batch again and again, alternately without and with the plug-in, so that other load on
the machine affects both in the same way. A batch is timed by the wall clock and by the processor time of the process. The overhead
is the ratio of the lower quartiles of the two series less 1, in percent: other load only makes batches slower. The 95%
interval is of a bootstrap over the rounds.

On a busy machine the interval is wide. own_percent is then more telling: the processor time that the thread of the engine spends in
the functions of the plug-in, over all of its time, as the median of the batches with the plug-in. It lacks the calls of these
functions, less than a microsecond each.
"""

import argparse
import json
import os
import random
import statistics
import time


def main():
    parser = argparse.ArgumentParser(prog="python -m semmoe_vllm.overhead")
    parser.add_argument("model", help="directory of an MoE checkpoint")
    parser.add_argument("--routed-experts", action="store_true", help="every request asks for its routed experts")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of batches (default: 60)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--new-tokens", type=int, default=32, help="generated tokens of a request (default: 32)")
    parser.add_argument("--requests", type=int, default=8, help="requests of a batch (default: 8)")
    parser.add_argument("--dtype", default="auto", help="type of the weights (default: auto)")
    options = parser.parse_args()
    if options.rounds < 8 or min(options.prompt_tokens, options.new_tokens, options.requests) < 1:
        parser.error("--rounds must be at least 8, other numbers at least 1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print(json.dumps(measure(options)))


def measure(options):
    """Returns the figures of a measurement."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationMode

    from semmoe_vllm.capture import Capture
    from semmoe_vllm.plugin import ASK

    llm = LLM(
        options.model, dtype=options.dtype, enforce_eager=True, max_num_seqs=options.requests,
        max_model_len=options.prompt_tokens + options.new_tokens, enable_prefix_caching=False,
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    assert core.vllm_config.compilation_config.mode == CompilationMode.NONE
    worker = core.model_executor.driver_worker.worker
    follower = worker.semmoe_capture
    vocabulary = llm.get_tokenizer().vocab_size
    prompts = [
        {"prompt_token_ids": [(7919 * (i * options.prompt_tokens + j)) % vocabulary for j in range(options.prompt_tokens)]}
        for i in range(options.requests)
    ]

    own = [0.0]

    def clocked(function):
        def call(*arguments):
            start = time.thread_time()
            function(*arguments)
            own[0] += time.thread_time() - start

        return call

    Capture.record = clocked(Capture.record)
    follower._computed, follower._hand_over = clocked(follower._computed), clocked(follower._hand_over)

    def run(followed):
        follower.detach()
        if followed:
            follower.attach()
            assert follower.capture is not None, "the plug-in does not follow the model"
        extra = {ASK: 1} if followed and options.routed_experts else None
        params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True, extra_args=extra)
        own[0], wall, cpu, thread = 0.0, time.perf_counter(), time.process_time(), time.thread_time()
        answers = llm.generate(prompts, params, use_tqdm=False)
        times = time.perf_counter() - wall, time.process_time() - cpu, own[0] / (time.thread_time() - thread)
        for answer in answers:
            rows = answer.outputs[0].routed_experts
            assert (rows is not None) == bool(extra), "routed experts are not as asked for"
        return times

    for followed in (False, True):
        run(followed)  # warm
    pairs = []
    for i in range(options.rounds):
        order = (False, True) if i % 2 else (True, False)
        times = {followed: run(followed) for followed in order}
        pairs.append((times[False], times[True]))
    tokens = options.requests * (options.prompt_tokens + options.new_tokens)
    wall, cpu = ([(without[clock], with_[clock]) for without, with_ in pairs] for clock in (0, 1))
    return {
        "vllm": vllm.__version__, "model": os.path.basename(os.path.normpath(options.model)),
        "routed_experts": options.routed_experts, "rounds": options.rounds, "tokens_per_batch": tokens,
        "tokens_per_second": round(tokens / quartile([without for without, _ in wall])),
        "own_percent": round(100 * statistics.median(with_[2] for _, with_ in pairs), 2),
        "wall_percent": overhead(wall), "processor_percent": overhead(cpu),
    }  # fmt: skip


def quartile(times):
    """Returns the lower quartile."""
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def overhead(pairs, resamples=2000):
    """Returns the overhead of pairs of times (without, with) in percent, and its 95% interval."""

    def percent(chosen):
        return 100 * (quartile([with_ for _, with_ in chosen]) / quartile([without for without, _ in chosen]) - 1)

    random_numbers = random.Random(1)
    resampled = sorted(percent(random_numbers.choices(pairs, k=len(pairs))) for _ in range(resamples))
    low, high = resampled[resamples // 40], resampled[-resamples // 40]
    return {"value": round(percent(pairs), 2), "low": round(low, 2), "high": round(high, 2)}


if __name__ == "__main__":
    main()
