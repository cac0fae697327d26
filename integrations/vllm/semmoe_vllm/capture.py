"""The experts that the MoE layers of one worker choose in a step."""

import numpy as np
import torch


class Layer:
    """An MoE layer: its index in the model, the experts per token, and which of its experts have a slot on this rank."""

    def __init__(self, index, top, local):
        self.index = index
        self.top = top
        self.local = local  # a boolean tensor [experts], by the ids that the layer dispatches by


class Span:
    """The rows of a layer's tokens that are of this worker: from start on, tokens of the rank from position first on."""

    def __init__(self, start, rows, first=0):
        self.start = start
        self.rows = rows
        self.first = first

    def __eq__(self, other):
        return (self.start, self.rows, self.first) == (other.start, other.rows, other.first)


def own_span(rows, rank, tokens, sizes, part, parts):
    """Returns the span of a worker in a layer's batch of a number of rows, or None where the batch is of no known form.

    tokens are the numbers of tokens of the data-parallel ranks; None with one rank. sizes are the rows of each worker where
    the workers' rows were gathered, or None. part and parts are the tensor-parallel rank and size. vLLM 0.32.0 has four
    forms (routed_experts_capturer.py): the tokens of all ranks; those of the rank; the shards of all workers; the shard of
    the worker.
    """
    if tokens is None:
        return Span(0, rows)
    own = tokens[rank]
    if rows == sum(tokens):
        return Span(sum(tokens[:rank]), own)
    if rows == own:
        return Span(0, own)
    if sizes and rows == sum(sizes):
        shards = len(sizes) // len(tokens)
        return Span(sum(sizes[: rank * shards]), own)
    shard = -(-own // parts)
    if parts > 1 and rows == shard:
        return Span(0, shard, part * shard)
    return None


class Capture:
    """Captures and counts the chosen experts of a worker's steps.

    At the end of a step all layers are counted together. On a device the layers write into one buffer, by operations that a CUDA
    graph replays without a call of record(), and nothing waits for the device, except rows(). On the host the chosen ids are kept as they are. NumPy, whose
    operations on few tokens take a fraction of PyTorch's time, counts several small steps together: at most PENDING_STEPS.
    """

    PENDING_STEPS = 16
    PENDING_TOKENS = 256

    def __init__(self, layers, max_tokens, device, rank=0, part=0, parts=1, context=None, publish=None, on_host=None, capturing=None):
        """context returns the tokens of the ranks and the sizes of the shards, see own_span; publish takes the totals.

        on_host selects counting by NumPy; by default it does so where the device is the CPU. capturing reports whether a CUDA graph
        records what is done.
        """
        tops = {layer.top for layer in layers}
        experts = {len(layer.local) for layer in layers}
        if len(tops) != 1 or len(experts) != 1:
            raise ValueError(f"the MoE layers have {sorted(tops)} experts per token of {sorted(experts)}, not one number each")
        self.layers, self._top, self._experts, self._max_tokens = layers, tops.pop(), experts.pop(), max_tokens
        self._rank, self._part, self._parts = rank, part, parts
        self._context, self._publish = context or (lambda: (None, None)), publish or (lambda totals: None)
        # The table has a row [local, remote] for each expert of each layer, between rows for ids that are none of its experts.
        table = torch.zeros((len(layers), self._experts + 2, 2), dtype=torch.int32)
        table[:, 1:-1, 0] = torch.stack([layer.local for layer in layers]).to("cpu", torch.int32)
        table[:, 1:-1, 1] = 1 - table[:, 1:-1, 0]
        offsets = torch.arange(len(layers), dtype=torch.int32)[:, None, None] * (self._experts + 2) + 1
        totals = torch.zeros((len(layers), 2), dtype=torch.int64)
        self._on_host = torch.device(device).type == "cpu" if on_host is None else on_host
        if self._on_host:
            self._table, self._offsets, self._totals = table.numpy().reshape(-1, 2), offsets.numpy(), totals.numpy()
            self._ids = [None] * len(layers)
            self._pending, self._pending_tokens = [], 0
        else:
            self._table, self._offsets, self._totals = table.reshape(-1, 2).to(device), offsets.to(device), totals.to(device)
            self._ids = torch.zeros((len(layers), max_tokens, self._top), dtype=torch.int32, device=device)
            self._copy = totals.clone() if self._ids.device.type == "cpu" else totals.pin_memory()
            if capturing is None and self._ids.device.type == "cuda":
                capturing = torch.cuda.is_current_stream_capturing
        self._capturing = capturing or (lambda: False)
        self._span, self._rows = None, -1
        self._whole, self._partly, self._replayed = False, False, None
        self._behind = False
        self.uncounted = 0

    def begin(self):
        """Begins a step. Where its layers are those of a CUDA graph, record() is not called: the graph fills the buffer from its start."""
        self._span, self._rows = self._replayed, -1

    def record(self, layer, ids):
        """Records the ids [rows][top] that the layer of an index into layers chooses."""
        rows = ids.shape[0]
        if rows != self._rows:
            tokens, sizes = self._context()
            span = own_span(rows, self._rank, tokens, sizes, self._part, self._parts)
            self._span = span if span is not None and span.rows <= self._max_tokens else None
            self._whole = self._span is not None and self._span.first == 0 and (tokens is None or self._span.rows >= tokens[self._rank])
            self._rows = rows
        if self._capturing():
            # If a graph does not fill the buffer, its rows cannot be distinguished from those of an earlier step.
            self._partly |= not self._whole
            self._replayed = None if self._partly else Span(0, self._max_tokens)
        if self._on_host:
            self._ids[layer] = ids
        elif self._span is not None:
            self._ids[layer, : self._span.rows] = ids[self._span.start : self._span.start + self._span.rows]

    def count(self, tokens):
        """Counts a step that computed a number of tokens of the rank."""
        span = self._span
        if span is None:
            self.uncounted += tokens
            return
        if span.first == 0 and span.rows >= tokens and self._part > 0:
            return  # each worker of the rank has all of its tokens: the first counts them
        rows = max(0, min(tokens - span.first, span.rows))
        if self._on_host:
            self._pending.append((tuple(self._ids), span.start, rows))  # a dummy step records without a beginning
            self._pending_tokens += rows
            if len(self._pending) >= self.PENDING_STEPS or self._pending_tokens >= self.PENDING_TOKENS:
                self.flush()
            return
        index = self._ids[:, :rows].clamp(-1, self._experts).add_(self._offsets)
        self._totals += self._table.index_select(0, index.reshape(-1)).view(len(self.layers), -1, 2).sum(1)
        # The device is not waited for: what is published are the totals of the steps that it has finished.
        self._copy.copy_(self._totals, non_blocking=True)
        self._publish(self._copy.numpy())
        self._behind = self._ids.device.type != "cpu"

    def flush(self):
        """Counts and publishes the steps that wait to be counted together; on a device, what it has counted meanwhile."""
        if self._behind:
            self._publish(self._copy.numpy())
        if not self._on_host or not self._pending:
            return
        index = np.maximum(_stack(self._pending, len(self.layers)), -1)
        np.minimum(index, self._experts, out=index)
        index += self._offsets
        self._totals += self._table.take(index.reshape(len(self.layers), -1), axis=0).sum(1)
        self._pending, self._pending_tokens = [], 0
        self._publish(self._totals)

    def rows(self, count, layers, dtype):
        """Returns the ids [count][layers][top] of a step's first tokens; layers that are no MoE layers have zeros.

        It returns None where the worker has not all tokens of its rank.
        """
        span = self._span
        if span is None or span.first or count > span.rows:
            return None
        if self._on_host:
            ids = _stack([(self._ids, span.start, count)], len(self.layers))
        else:
            ids = self._ids[:, :count].to("cpu").numpy()
        out = np.zeros((count, layers, self._top), dtype)
        out[:, [layer.index for layer in self.layers]] = ids.swapaxes(0, 1)
        return out


def _stack(steps, layers):
    """Returns the ids [layers][rows of all steps][top] of steps (ids by layer, first row, rows)."""
    parts = [ids[layer].numpy()[start : start + rows] for layer in range(layers) for ids, start, rows in steps]
    return np.concatenate(parts).reshape(layers, -1, parts[0].shape[1])
