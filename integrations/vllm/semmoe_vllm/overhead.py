"""Measures what the plug-in costs, and prints one line of JSON.

    python -m semmoe_vllm.overhead MODEL [--routed-experts] [--rounds 20] [--prompt-tokens 256] [--new-tokens 64] [--requests 8]

One engine in this process serves the same batch again and again, in turn without and with the plug-in, so that whatever else
the machine does meets both alike. A round is a pair; a batch is timed by the wall clock and by the processor time of the
process. The overhead is the median of the pairs' ratios less 1, in percent, with the quartiles.
"""

import argparse
import json
import os
import statistics
import time


def main():
    parser = argparse.ArgumentParser(prog="python -m semmoe_vllm.overhead")
    parser.add_argument("model", help="directory of an MoE checkpoint")
    parser.add_argument("--routed-experts", action="store_true", help="every request asks for its routed experts")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of batches (default: 20)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of a prompt (default: 256)")
    parser.add_argument("--new-tokens", type=int, default=64, help="generated tokens of a request (default: 64)")
    parser.add_argument("--requests", type=int, default=8, help="requests of a batch (default: 8)")
    parser.add_argument("--dtype", default="auto", help="type of the weights (default: auto)")
    options = parser.parse_args()
    if min(options.rounds, options.prompt_tokens, options.new_tokens, options.requests) < 1:
        parser.error("numbers must be at least 1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print(json.dumps(measure(options)))


def measure(options):
    """Returns the figures of a measurement."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.config import CompilationMode

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

    def run(followed):
        follower.detach()
        if followed:
            follower.attach()
            assert follower.capture is not None, "the plug-in does not follow the model"
        extra = {ASK: 1} if followed and options.routed_experts else None
        params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True, extra_args=extra)
        wall, cpu = time.perf_counter(), time.process_time()
        answers = llm.generate(prompts, params, use_tqdm=False)
        times = time.perf_counter() - wall, time.process_time() - cpu
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
    return {
        "vllm": vllm.__version__, "model": os.path.basename(os.path.normpath(options.model)),
        "routed_experts": options.routed_experts, "rounds": options.rounds, "tokens_per_batch": tokens,
        "tokens_per_second": round(tokens / statistics.median(without[0] for without, _ in pairs)),
        "wall_percent": quartiles(with_[0] / without[0] for without, with_ in pairs),
        "processor_percent": quartiles(with_[1] / without[1] for without, with_ in pairs),
    }  # fmt: skip


def quartiles(ratios):
    """Returns the median and the quartiles of ratios less 1, in percent."""
    low, median, high = statistics.quantiles([100 * (ratio - 1) for ratio in ratios], n=4, method="inclusive")
    return {"median": round(median, 2), "low": round(low, 2), "high": round(high, 2)}


if __name__ == "__main__":
    main()
