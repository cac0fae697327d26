#!/usr/bin/env python3
"""Trains a small MoE model, and records how well its gates predict the experts of a layer before the layer's attention.

    zstd -d TRACE.safetensors.zst
    python3 test/gpu/lookahead_model.py --texts TRACE.safetensors --out lookahead.json --trace held-out.safetensors

The texts are the token IDs of a routing trace. Its routes are not used. The model is trained on four of five documents. For the others the
program writes a routing trace of the model (docs/trace-format.md) with a look-ahead: the most probable experts if a layer's norm and gate are
applied to the residual stream before the layer's attention. `semmoe solve --forecast lookahead --attention tp` solves a plan from it, and
`semmoe eval` reports the local activation rate.

It needs PyTorch and a GPU, and takes half a minute on one H200. The model is a decoder of pre-norm layers, each with attention with learned
positions and an MoE block. Experts are gated linear units. The gate is a softmax with renormalized top experts, balanced by the usual
auxiliary loss.
"""
import argparse
import json
import math
import os
import struct
import sys
import time

import torch
import torch.nn.functional as functional
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "integrations", "torch"))
from semmoe_shuffle import tables  # noqa: E402  (the path is set above)

TYPES = {"U16": torch.uint16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
PAD = -1
SCALE = 65535  # scale of stored probabilities


class Block(nn.Module):
    """Attention and experts, each after a norm."""

    def __init__(self, hidden, heads, experts, width, topk):
        super().__init__()
        self.heads, self.experts, self.topk = heads, experts, topk
        self.before, self.norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * experts * width, bias=False), nn.Linear(experts * width, hidden, bias=False)

    def chances(self, x):
        """Returns the probabilities of all experts, computed by this layer's norm and gate."""
        with torch.autocast("cuda", enabled=False):
            return functional.linear(self.norm(x.float()), self.gate.weight.float()).softmax(-1)

    def attend(self, x):
        batch, length, hidden = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))

    def forward(self, x):
        """Returns the output of the layer, its probabilities, and those of the look-ahead."""
        ahead = self.chances(x)
        x = self.attend(x)
        chances = self.chances(x)
        best = chances.topk(self.topk, -1)
        weight = torch.zeros_like(chances).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        gate, up = self.up(self.norm(x)).unflatten(-1, (self.experts, -1)).chunk(2, -1)
        inner = functional.silu(gate) * up * weight.to(gate.dtype)[..., None]
        return x + self.down(inner.flatten(-2)), chances, ahead


class Model(nn.Module):
    def __init__(self, vocabulary, length, hidden, heads, layers, experts, width, topk):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, experts, width, topk) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            for module in (block.out, block.down):
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, ids):
        x = self.tokens(ids.clamp(min=0)) + self.places.weight[:ids.shape[1]]
        seen = []
        for block in self.blocks:
            x, chances, ahead = block(x)
            seen.append((chances, ahead))
        return functional.linear(self.norm(x), self.tokens.weight), seen


def read(path, device):
    """Reads the texts of a trace: token IDs [requests, longest], and the length, document and kind of each request."""
    stored, metadata = tables.parse(tables.mapped(path), path)
    take = lambda name: torch.frombuffer(bytearray(stored[name].raw), dtype=TYPES[stored[name].dtype]).long()  # noqa: E731
    ids, offsets, documents, domains = (take(name) for name in ("input_ids", "request_offsets", "request_document", "request_domain"))
    lengths = offsets.diff()
    padded = torch.full((len(lengths), int(lengths.max())), PAD)
    for i, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        padded[i, :end - begin] = ids[begin:end]
    return padded.to(device), lengths, documents, domains, metadata


def loss_of(model, ids, balance):
    """Returns the mean loss of the next token, without and with the auxiliary balancing loss: the number of experts x the sum over experts of
    share of tokens x mean probability."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores, seen = model(ids)
    language = functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=PAD)
    real, spread = ids >= 0, 0
    for (chances, _), block in zip(seen, model.blocks):
        chosen = torch.zeros_like(chances).scatter(-1, chances.topk(block.topk, -1).indices, 1 / block.topk)
        spread = spread + block.experts * (chosen[real].mean(0) * chances[real].mean(0)).sum()
    return language, language + balance * spread / len(model.blocks)


def train(model, ids, options):
    """Trains on whole requests in a random order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    steps = options.epochs * math.ceil(len(ids) / options.batch)
    step, generator = 0, torch.Generator().manual_seed(options.seed)
    for epoch in range(options.epochs):
        losses = []
        for part in torch.randperm(len(ids), generator=generator).split(options.batch):
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            language, whole = loss_of(model, ids[part.to(ids.device)], options.balance)
            optimizer.zero_grad(set_to_none=True)
            whole.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()
            losses.append(language.detach())
            step += 1
        print(json.dumps({"epoch": epoch, "loss": round(torch.stack(losses).mean().item(), 4)}), flush=True)
    return steps


@torch.no_grad()
def record(model, ids, lengths, options):
    """Returns the routes of requests and their look-ahead [tokens, layers, places], and the loss of their tokens."""
    routes, ahead, scores, losses = [], [], [], []
    for begin in range(0, len(ids), options.batch):
        part = ids[begin:begin + options.batch]
        losses.append(loss_of(model, part, 0)[0] * (part[:, 1:] >= 0).sum())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, seen = model(part)
        real = part >= 0
        routes.append(torch.stack([chances.topk(options.topk, -1).indices[real] for chances, _ in seen], 1).byte())
        best = [before.topk(options.kept, -1) for _, before in seen]
        ahead.append(torch.stack([b.indices[real] for b in best], 1).byte())
        scores.append(torch.stack([(b.values[real] * SCALE).round().int() for b in best], 1))
    return torch.cat(routes), torch.cat(ahead), torch.cat(scores), (sum(losses) / (ids[:, 1:] >= 0).sum()).item()


def write(path, tensors, metadata):
    """Writes a safetensors file atomically."""
    header, data = {"__metadata__": metadata}, b""
    for name, (kind, values) in tensors.items():
        raw = values.cpu().contiguous().numpy().tobytes()
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".part", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", required=True, help="path of an uncompressed routing trace")
    parser.add_argument("--out", required=True, help="path of the result (JSON)")
    parser.add_argument("--trace", required=True, help="path of the routing trace of the held-out documents to write")
    for name, value in (("hidden", 512), ("heads", 8), ("layers", 6), ("experts", 64), ("width", 256), ("topk", 6), ("kept", 12), ("epochs", 8), ("batch", 24), ("seed", 1)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--rate", type=float, default=6e-4, help="maximum learning rate")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the auxiliary loss")
    return parser


def main():
    options = flags().parse_args()
    torch.manual_seed(options.seed)
    device, begin = torch.device("cuda"), time.monotonic()
    ids, lengths, documents, domains, source = read(options.texts, device)
    held = documents % 5 == 0
    model = Model(int(source["vocab_size"]), ids.shape[1], options.hidden, options.heads, options.layers, options.experts, options.width, options.topk).to(device)
    steps = train(model, ids[~held], options)
    model.eval()
    routes, ahead, scores, loss = record(model, ids[held], lengths[held], options)
    hits = (routes[:, :, :, None] == ahead[:, :, None, :options.topk]).any(-1).float().mean((0, 2))
    load = torch.stack([torch.bincount(routes[:, layer].flatten().long(), minlength=options.experts) for layer in range(options.layers)]).float()
    result = {
        "texts": source.get("description", ""), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "steps": steps, "seconds": round(time.monotonic() - begin, 1),
        "parameters": sum(p.numel() for p in model.parameters()), "held_out_tokens": len(routes), "held_out_loss": round(loss, 4),
        "look_ahead_precision": [round(v, 4) for v in hits.tolist()], "largest_load": [round(v, 3) for v in (load.max(1).values / load.mean(1)).tolist()],
        **{name: getattr(options, name) for name in ("hidden", "heads", "layers", "experts", "width", "topk", "kept", "epochs", "batch", "seed", "rate", "balance")},
    }
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths[held].cumsum(0)])
    metadata = {key: source[key] for key in ("vocab_size", "domains") if key in source} | {
        "model_type": "qwen3_moe", "num_experts": str(options.experts), "num_experts_per_tok": str(options.topk), "num_moe_layers": str(options.layers),
        "moe_layers": json.dumps(list(range(options.layers))),
        "model_config": json.dumps({"num_hidden_layers": options.layers, "hidden_size": options.hidden, "moe_intermediate_size": options.width}),
    }
    write(options.trace, {
        "request_offsets": ("I64", offsets), "input_ids": ("I32", ids[held][ids[held] >= 0].int()), "request_document": ("I32", documents[held].int()),
        "lookahead_scores": ("U16", scores.to(torch.uint16)), "request_domain": ("U8", domains[held].byte()), "routed_experts": ("U8", routes), "lookahead_experts": ("U8", ahead),
    }, metadata)
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
