"""answers.py [OPTION...] DIR... : prints the greedy answer of vLLM on CPU to two prompts, for each checkpoint, as a line of JSON.

A line has the tokens and their log-probabilities, or the error of the release. One process serves all checkpoints, one after the
other: run another process for a model of another type, because vLLM keeps state of the former type.
"""
import argparse
import gc
import json
import os
import traceback

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

from transformers import AutoConfig, PreTrainedConfig  # noqa: E402: the environment comes first
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

PROMPTS = [{"prompt_token_ids": [3, 5, 8, 13, 21, 34, 55, 7, 9, 11, 15]}, {"prompt_token_ids": [60, 2, 44, 17, 6]}]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True)


def answer(path, dtype, options):
    llm = LLM(
        path, dtype=dtype, **options, enforce_eager=True, max_model_len=128, max_num_seqs=4, enable_prefix_caching=False, skip_tokenizer_init=True)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return {
        "tokens": [token for output in outputs for token in output.token_ids],
        "logprobs": [step[token].logprob for output in outputs for token, step in zip(output.token_ids, output.logprobs)],
    }


def register_types():
    """Registers the types whose configuration classes are remote code: vLLM only reads their attributes."""
    for kind in ("bailing_moe", "bailing_moe_v2", "mimo_v2"):
        AutoConfig.register(kind, type(kind, (PreTrainedConfig,), {"model_type": kind}), exist_ok=True)


def cause(error):
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text-only", action="store_true", help="load a multimodal model without its encoders")
    parser.add_argument("--register-types", action="store_true", help="replace the remote code of configurations")
    parser.add_argument("checkpoints", nargs="+")
    arguments = parser.parse_args()
    if arguments.register_types:
        register_types()
    options = {"language_model_only": True} if arguments.text_only else {}
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to standard output, too
    for path in arguments.checkpoints:
        try:
            result = answer(path, arguments.dtype, options)
        except Exception as error:  # noqa: BLE001: any failure of the release is the result
            traceback.print_exc()
            result = {"error": cause(error)}
        gc.collect()
        cleanup_dist_env_and_memory()
        print(json.dumps(result), file=lines, flush=True)


main()
