"""The exchange of an expert-parallel layer: rows go to the ranks that hold their experts, and come back as sums.

Rows whose experts lie on their own rank are never sent. With `distinct`, a token is sent to a rank once, whatever the number of its experts
there, and comes back as one weighted sum; without, there is a row for every expert, and weights are applied where the token is.
"""
import torch
import torch.distributed as dist

from . import rows


class Exchange:
    """One batch's exchange on this rank.

    experts [tokens, top-k]: expert ids of this rank's tokens; weight [tokens, top-k]: their gate weights, float32. rank_of, local_of
    [experts]: the rank that holds an expert, and its number there. Preparing it sends the lists of rows to all ranks, and waits for their
    lengths.

    After `dispatch` the rows to compute, sorted by expert, are `arrived[index]`, with `offsets` [local experts] for a grouped product.
    """

    def __init__(self, experts, weight, rank_of, local_of, local_experts, distinct, group=None):
        self.group, self.distinct = group, distinct
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.device, (self.tokens, self.topk) = experts.device, experts.shape
        held = rank_of[experts.long()].long()
        local = local_of[experts.long()].int()
        token, wanted, weights = self.sent_rows(held, local, weight)
        to = torch.cat([torch.full((len(t),), rank, device=self.device) for rank, t in enumerate(token)])
        self.send_counts = [0 if rank == self.rank else len(t) for rank, t in enumerate(token)]
        own_token, own_wanted, own_weight = token[self.rank], wanted[self.rank], weights[self.rank]
        away = to != self.rank
        self.send_index = torch.cat(token)[away].int()
        received_wanted, received_weight = self.announce(to[away], torch.cat(wanted)[away], torch.cat(weights)[away])
        self.sent, self.received = sum(self.send_counts), sum(self.receive_counts)
        # Rows to compute: those that arrive, then this rank's own, which lie behind them (see dispatch).
        source = torch.cat([torch.arange(self.received, device=self.device), self.received + own_token])
        self.order_products(torch.cat([received_wanted, own_wanted]), torch.cat([received_weight, own_weight]), source, local_experts)
        # What the tokens sum: what comes back, then their own rows' results.
        back = torch.cat([self.send_index.long(), own_token])
        amount = torch.cat([torch.cat(weights)[away].sum(1), own_weight.sum(1)]) if not distinct else torch.ones(len(back), device=self.device)
        by = torch.argsort(back, stable=True)
        self.back_index, self.back_weight = by.int(), amount[by].contiguous()
        self.back_bounds = bounds(back, self.tokens)

    def sent_rows(self, held, local, weight):
        """For each rank the rows for it: token [rows], wanted [rows, width] (numbers of experts there, -1 for none), weights alike."""
        token, wanted, weights = [], [], []
        for rank in range(self.ranks):
            here = held == rank
            if self.distinct:
                at = here.any(1).nonzero()[:, 0]
                token.append(at)
                wanted.append(torch.where(here, local, -1)[at])
                weights.append(torch.where(here, weight, 0.0)[at])
            else:
                at, k = here.nonzero(as_tuple=True)
                token.append(at)
                wanted.append(local[at, k][:, None])
                weights.append(weight[at, k][:, None])
        return token, wanted, weights

    def announce(self, to, wanted, weights):
        """Sends the lists of the rows, which go to the ranks `to`, and returns the received lists."""
        self.receive_counts = self.exchange_counts()
        return self.exchange_lists(wanted), self.exchange_lists(weights)

    def exchange_counts(self):
        mine = torch.tensor(self.send_counts, device=self.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs.tolist()

    def exchange_lists(self, values):
        target = torch.empty(sum(self.receive_counts), values.shape[1], dtype=values.dtype, device=self.device)
        dist.all_to_all_single(target, values.contiguous(), self.receive_counts, self.send_counts, group=self.group)
        return target

    def order_products(self, wanted, weight, source, local_experts):
        """Sorts the pairs of row and expert by expert."""
        row, k = (wanted >= 0).nonzero(as_tuple=True)
        expert = wanted[row, k].long()
        by = torch.argsort(expert, stable=True)
        self.index = source[row[by]].int()
        self.rows_of_expert = torch.bincount(expert, minlength=local_experts)
        self.offsets = self.rows_of_expert.cumsum(0).int()
        place = torch.empty_like(by)
        place[by] = torch.arange(len(by), device=self.device)
        amount = weight[row, k] if self.distinct else torch.ones(len(row), device=self.device)
        # Sums of a row's results: `row` ascends, so that its pairs lie together.
        self.sum_index, self.sum_weight = place.int(), amount.contiguous()
        self.sum_bounds = bounds(row, len(wanted))

    def buffers(self, width, dtype):
        """Room for the rows: `arrived`, whose end is where this rank's own tokens must be written, and that of `combine`."""
        self.arrived = torch.empty(self.received + self.tokens, width, dtype=dtype, device=self.device)
        self.leaving = torch.empty(self.sent, width, dtype=dtype, device=self.device)
        self.sums = torch.empty(self.received, width, dtype=dtype, device=self.device)
        own = len(self.sum_bounds) - 1 - self.received
        self.back = torch.empty(self.sent + own, width, dtype=dtype, device=self.device)
        self.out = torch.empty(self.tokens, width, dtype=dtype, device=self.device)

    @property
    def own(self):
        """This rank's tokens, in front of the exchange."""
        return self.arrived[self.received:]

    def dispatch(self):
        """Sends the rows of `own` that others compute."""
        rows.gather(self.own, self.send_index, self.leaving)
        dist.all_to_all_single(self.arrived[:self.received], self.leaving, self.receive_counts, self.send_counts, group=self.group)

    def combine(self, results):
        """The experts' sum for each token, given the results of the rows `arrived[index]`, in their order."""
        rows.weighted_sums(results, self.sum_index, self.sum_weight, self.sum_bounds[:self.received + 1], self.sums)
        dist.all_to_all_single(self.back[:self.sent], self.sums, self.send_counts, self.receive_counts, group=self.group)
        rows.weighted_sums(results, self.sum_index, self.sum_weight, self.sum_bounds[self.received:], self.back[self.sent:])
        return rows.weighted_sums(self.back, self.back_index, self.back_weight, self.back_bounds, self.out)


class OneShot(Exchange):
    """An Exchange that sends counts, lists and rows together, in one all-to-all (the one-shot all-to-all-v of Speculative MoE). The other
    arguments are those of Exchange.

    tokens [tokens, width]: this rank's rows. capacity: the number of rows for which each pair of ranks has room in the all-to-all, the same on
    all ranks. Rows beyond it follow in a second message between the two ranks; too much room costs bandwidth. After preparing it, `arrived`
    contains the received rows: `dispatch` has nothing left to send.
    """

    ALIGN = 16  # the alignment of the sections of a message in bytes

    def __init__(self, tokens, capacity, experts, weight, rank_of, local_of, local_experts, distinct, group=None):
        if capacity < 1:
            raise ValueError(f"capacity {capacity} is invalid: must be at least 1")
        self.given, self.capacity = tokens, capacity
        super().__init__(experts, weight, rank_of, local_of, local_experts, distinct, group)

    def announce(self, to, wanted, weights):
        kinds = [("wanted", wanted.dtype, wanted.shape[1]), ("weight", weights.dtype, weights.shape[1]),
                 ("rows", self.given.dtype, self.given.shape[1])]
        begins = torch.tensor([0] + self.send_counts).cumsum(0)[:-1].to(self.device)
        place = torch.arange(len(to), device=self.device) - begins[to]  # among the rows for the same rank
        slot = to - (to > self.rank).long()  # a rank sends nothing to itself
        fits = place < self.capacity
        values = {"wanted": wanted, "weight": weights, "rows": rows.gather(self.given, self.send_index)}
        sent, views = self.message(kinds)
        views["count"].copy_(torch.tensor(self.send_counts[:self.rank] + self.send_counts[self.rank + 1:], dtype=torch.int32)[:, None])
        whole = max(self.send_counts) <= self.capacity
        for name, value in values.items():
            views[name][slot if whole else slot[fits], place if whole else place[fits]] = value if whole else value[fits]
        received, arrived = self.message(kinds)
        splits = [0 if rank == self.rank else sent.shape[1] for rank in range(self.ranks)]
        dist.all_to_all_single(received.view(-1), sent.view(-1), splits, splits, group=self.group)
        counts = arrived["count"][:, 0].tolist()
        self.receive_counts = counts[:self.rank] + [0] + counts[self.rank:]
        lists = {name: [arrived[name][at, :min(n, self.capacity)] for at, n in enumerate(counts)] for name in values}
        if not whole or max(counts, default=0) > self.capacity:
            self.exchange_rest({name: value[~fits] for name, value in values.items()}, to[~fits], lists, counts)
        lists = {name: torch.cat([values[name][:0], *parts]) for name, parts in lists.items()}
        self.received_rows = lists["rows"]
        return lists["wanted"], lists["weight"]

    def message(self, kinds):
        """Returns a message to every other rank, [ranks - 1, bytes], with views of its sections [ranks - 1, capacity, width]."""
        room, sections = self.ALIGN, [("count", torch.int32, 0, 1, 1)]
        for name, kind, width in kinds:
            sections.append((name, kind, room, self.capacity, width))
            size = self.capacity * width * kind.itemsize
            room += size + -size % self.ALIGN
        sent = torch.empty(self.ranks - 1, room, dtype=torch.uint8, device=self.device)
        views = {}
        for name, kind, begin, count, width in sections:
            section = sent[:, begin:begin + count * width * kind.itemsize].view(kind)
            views[name] = section.unflatten(1, (count, width)) if name != "count" else section
        return sent, views

    def exchange_rest(self, rest, to, lists, counts):
        """Exchanges the rows beyond the capacity between the pairs of ranks that have them, and appends them to the lists."""
        operations = []
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for at, rank in enumerate(others):
            peer = dist.get_global_rank(self.group, rank) if self.group else rank
            for name, value in rest.items():
                mine = value[to == rank].contiguous()
                if len(mine):
                    operations.append(dist.P2POp(dist.isend, mine, peer, self.group))
                if counts[at] > self.capacity:
                    theirs = torch.empty(counts[at] - self.capacity, value.shape[1], dtype=value.dtype, device=self.device)
                    operations.append(dist.P2POp(dist.irecv, theirs, peer, self.group))
                    lists[name][at] = (lists[name][at], theirs)
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for name, parts in lists.items():
            lists[name] = [torch.cat(part) if isinstance(part, tuple) else part for part in parts]

    def buffers(self, width, dtype):
        super().buffers(width, dtype)
        self.arrived[:self.received] = self.received_rows
        self.own.copy_(self.given)

    def dispatch(self):
        """Does nothing: the rows have arrived with the lists."""


def bounds(values, count):
    """Where each value from 0 to count - 1 begins in the sorted values, and the end: int32 [count + 1]."""
    counts = torch.bincount(values, minlength=count)
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=values.device), counts.cumsum(0)]).int()
