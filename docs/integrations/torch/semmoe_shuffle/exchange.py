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
        self.device, (self.tokens, topk) = experts.device, experts.shape
        held = rank_of[experts.long()].long()
        local = local_of[experts.long()].int()
        token, wanted, weights = self.sent_rows(held, local, weight)
        to = torch.cat([torch.full((len(t),), rank, device=self.device) for rank, t in enumerate(token)])
        self.send_counts = [0 if rank == self.rank else len(t) for rank, t in enumerate(token)]
        own_token, own_wanted, own_weight = token[self.rank], wanted[self.rank], weights[self.rank]
        away = to != self.rank
        self.send_index = torch.cat(token)[away].int()
        self.receive_counts = self.exchange_counts()
        received_wanted = self.exchange_lists(torch.cat(wanted)[away])
        received_weight = self.exchange_lists(torch.cat(weights)[away])
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


def bounds(values, count):
    """Where each value from 0 to count - 1 begins in the sorted values, and the end: int32 [count + 1]."""
    counts = torch.bincount(values, minlength=count)
    return torch.cat([torch.zeros(1, dtype=torch.int64, device=values.device), counts.cumsum(0)]).int()
