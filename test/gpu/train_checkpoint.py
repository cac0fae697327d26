#!/usr/bin/env python3
"""Trains the small Qwen3-MoE checkpoint for tests of real engines, and records its outputs.

SGLang 0.5.17 ignores tie_word_embeddings for Qwen3-MoE, and its rotary kernel rejects a head dimension of 32. This checkpoint
therefore has untied embeddings and a head dimension of 64. It is trained on real text, so that the experts of a token depend on
the token and on the kind of text. With random weights all placements would have the same locality.

--text is a directory with one file per kind of text, KIND.jsonl, each line a JSON string: one document. All kinds are sampled
equally often. 1% of the documents of each kind is held out for the evaluation loss.

Needs one GPU, PyTorch and transformers 5. Prints the figures as JSON. The run is seeded, but GPU kernels sum in a varying order, so
each run gives different weights of the same quality.

--golden only recomputes golden.json in float32 on a CPU: prompt ids, the ten largest logits of the last position, experts and gate
weights, and 40 greedy tokens with their margins over the second most likely token.
"""
import argparse
import json
import pathlib
import random
import time

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEQUENCE = 512
END = 0  # separates documents
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def config(vocabulary):
    return Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], router_aux_loss_coef=0.002, max_position_embeddings=2048, rms_norm_eps=1e-6,
        tie_word_embeddings=False, bos_token_id=END, eos_token_id=END, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def read_text(directory, tokenizer):
    """Returns for each kind the token ids of its training and of its held-out documents, each as one tensor."""
    kinds = {}
    for path in sorted(pathlib.Path(directory).glob("*.jsonl")):
        documents = [json.loads(line) for line in path.open(encoding="utf-8")]
        random.Random(path.stem).shuffle(documents)
        held = max(1, len(documents) // 100)
        parts = []
        for part in (documents[held:], documents[:held]):
            ids = []
            for start in range(0, len(part), 256):
                for encoding in tokenizer.encode_batch(part[start:start + 256], add_special_tokens=False):
                    ids.extend(encoding.ids)
                    ids.append(END)
            parts.append(torch.tensor(ids, dtype=torch.int32))
        kinds[path.stem] = parts
    if not kinds:
        raise SystemExit(f"{directory}: no *.jsonl")
    return kinds


def batch(parts, size, generator, device):
    rows = []
    for _ in range(size):
        ids = parts[int(torch.randint(len(parts), (1,), generator=generator))]
        start = int(torch.randint(len(ids) - SEQUENCE, (1,), generator=generator))
        rows.append(ids[start:start + SEQUENCE])
    return torch.stack(rows).long().to(device)


def evaluate(model, kinds, device):
    """Returns the mean cross-entropy of at most 32 held-out sequences of each kind, in nats per token."""
    model.eval()
    losses = {}
    with torch.no_grad():
        for kind, (_, held) in kinds.items():
            rows = held[:len(held) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)[:32].long().to(device)
            if len(rows):
                losses[kind] = round(float(model(input_ids=rows, labels=rows, output_router_logits=False).loss), 3)
    model.train()
    return losses


def train(args, tokenizer):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    begin = time.time()
    kinds = read_text(args.text, tokenizer)
    training = [parts[0] for parts in kinds.values() if len(parts[0]) > SEQUENCE]
    print(json.dumps({"training_tokens": {kind: len(parts[0]) for kind, parts in kinds.items()}, "read_s": round(time.time() - begin)}), flush=True)
    # The model computes in bfloat16, as engines do; the optimizer updates float32 copies of the weights.
    model = Qwen3MoeForCausalLM(config(tokenizer.get_vocab_size())).to(device)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(torch.bfloat16)
    decayed = [p for p in masters if p.dim() >= 2]
    plain = [p for p in masters if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=args.rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(args.seed)
    begin, step, warmup = time.time(), 0, 100
    while step < args.steps and time.time() - begin < args.seconds:
        # The rate decreases to zero at the last step, or at the time limit if it is reached first.
        progress = max(step / args.steps, (time.time() - begin) / args.seconds)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / warmup) * max(0.02, 1 - progress)
        rows = batch(training, args.batch, generator, device)
        loss = model(input_ids=rows, labels=rows, output_router_logits=True).loss
        loss.backward()
        for weight, master in zip(model.parameters(), masters):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters):
                weight.copy_(master)
        step += 1
        if step % 200 == 0 or step == args.steps:
            print(json.dumps({"step": step, "loss": round(loss.item(), 3), "s": round(time.time() - begin)}), flush=True)
    losses = evaluate(model, kinds, device)
    print(json.dumps({"seed": args.seed, "steps": step, "tokens": step * args.batch * SEQUENCE, "seconds": round(time.time() - begin),
                      "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
                      "held_out_nats_per_token": losses}), flush=True)
    model.config.output_router_logits = False
    model.save_pretrained(args.out, max_shard_size="4MB")


def write_tokenizer(args):
    fast = PreTrainedTokenizerFast(tokenizer_file=args.tokenizer, eos_token="<|endoftext|>", model_max_length=2048)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(args.out)
    # The template is stored in the configuration, where all releases of the engines read it.
    path = pathlib.Path(args.out)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("backend", None)
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "tokenizer.json").write_bytes(pathlib.Path(args.tokenizer).read_bytes())


def golden(args, tokenizer):
    model = Qwen3MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    top, cases = model.config.num_experts_per_tok, []
    for name, text in json.loads(pathlib.Path(args.prompts).read_text()).items():
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        case = {"name": name, "text": text, "prompt_ids": prompt}
        ids, greedy, margins = list(prompt), [], []
        with torch.no_grad():
            for number in range(40):
                answer = model(input_ids=torch.tensor([ids]), output_router_logits=True)
                logits = answer.logits[0, -1]
                best = logits.topk(10)
                if number == 0:
                    case["last_logits_top10"] = [[int(i), float(v)] for v, i in zip(best.values, best.indices)]
                    chosen = [router.softmax(-1).topk(top) for router in answer.router_logits]
                    case["experts_by_layer"] = [c.indices.tolist() for c in chosen]
                    case["last_gate_weights_by_layer"] = [(c.values[-1] / c.values[-1].sum()).tolist() for c in chosen]
                margins.append(round(float(best.values[0] - best.values[1]), 6))
                greedy.append(int(best.indices[0]))
                ids.append(greedy[-1])
        case |= {"greedy_ids": greedy, "greedy_margin": margins, "greedy_text": tokenizer.decode(greedy)}
        cases.append(case)
    how = "transformers, bf16 weights, float32 arithmetic, no cache; experts by gate weight"
    (pathlib.Path(args.out) / "golden.json").write_text(json.dumps({"how": how, "cases": cases}, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="directory of KIND.jsonl")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--prompts", help="JSON object: name to prompt, for golden.json")
    parser.add_argument("--out", required=True, help="directory of the checkpoint")
    parser.add_argument("--golden", action="store_true", help="only write golden.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000, help="maximum number of optimizer steps")
    parser.add_argument("--seconds", type=float, default=300, help="maximum training time, in seconds")
    parser.add_argument("--batch", type=int, default=64, help=f"sequences of {SEQUENCE} tokens per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(args.tokenizer)
    tokenizer.no_truncation()
    if not args.golden:
        if not args.text:
            parser.error("--text is required")
        pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
        train(args, tokenizer)
        write_tokenizer(args)
    if args.prompts:
        golden(args, tokenizer)


if __name__ == "__main__":
    main()
