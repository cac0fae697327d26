"""Scores of ranks for the tokens of a batch, from the tables of a plan: integers, shares of activations times SCORE_SCALE."""
import torch

from .tables import SCORE_SCALE, Refused

LOOK_AHEAD_SLOPE = 2  # an expert twice as probable as the last one to be activated is activated in four of five cases
LEAST_MARGIN = -4  # of every expert that is far from being activated
LARGEST_FACTOR = 1e4  # of a look-back; the least is its inverse
TYPES = {"U8": torch.uint8, "U16": torch.uint16, "F32": torch.float32}


def tensor(stored, device):
    """A tensor of a plan on a device: integers as int32. bytearray copies: the mapped file cannot be written to, and PyTorch asks for what can."""
    values = torch.frombuffer(bytearray(stored.raw), dtype=TYPES[stored.dtype])
    return (values if values.is_floating_point() else values.to(torch.int32)).view(stored.shape).to(device)


class Forecast:
    """The tables of a plan on a device. Layers are counted among the MoE layers, from 0 on."""

    def __init__(self, plan, device):
        self.ranks, self.layers, self.vocabulary, self.best = plan.ranks, len(plan.layers), plan.vocabulary, plan.best
        self.token_rank, self.token_score = tensor(plan.token_rank, device), tensor(plan.token_score, device)
        self.transition_rank = self.transition_score = None
        if plan.transition_rank is not None:
            self.transition_rank, self.transition_score = tensor(plan.transition_rank, device), tensor(plan.transition_score, device)
        for name in ("token_rank", "transition_rank"):
            values = getattr(self, name)
            if values is not None and int(values.max()) >= self.ranks:
                raise Refused(f"{name} names rank {int(values.max())}; allowed is 0 to {self.ranks - 1}")
        self.depth, self.look_back_factor = plan.look_back, None
        if plan.look_back_factor is not None:
            self.look_back_factor = tensor(plan.look_back_factor, device)
            if not bool(((self.look_back_factor >= 1 / LARGEST_FACTOR) & (self.look_back_factor <= LARGEST_FACTOR)).all()):
                raise Refused(f"a factor of the look-back is outside of {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}")

    def score(self, layers, tokens):
        """Scores [layers, tokens, ranks] by token id alone, for a slice of the layers: all that a batch needs before its first layer. What
        the stored ranks leave of the whole is spread evenly over the others; an id beyond the vocabulary scores all ranks alike."""
        known = (tokens >= 0) & (tokens < self.vocabulary)
        ids = torch.where(known, tokens, 0).long()
        ranks, stored = self.token_rank[layers][:, ids], self.token_score[layers][:, ids]
        others = max(self.ranks - self.best, 1)
        rest = (SCORE_SCALE - stored.sum(-1, keepdim=True)).clamp(min=0) // others
        scores = rest.expand(*ranks.shape[:2], self.ranks).contiguous().int()
        scores.scatter_(2, ranks.long(), stored)
        return torch.where(known[:, None], scores, SCORE_SCALE // self.ranks)

    def merge(self, scores, layer, before, second):
        """Merges the ranks of a token's experts in earlier layers into its scores [tokens, ranks] for a layer, as Algorithm 3 does: where
        the sequence of ranks is surer of its rank than the token is of any. `before` and `second` are the ranks that hold most of the
        token's experts in the MoE layer before and in the one before that; in layer 1 both are the former, and layer 0 has none: 0."""
        confidence = self.transition_score[layer, before.long(), second.long()]
        rank = self.transition_rank[layer, before.long(), second.long()].long()
        best = scores.max(-1).values
        own = scores.gather(1, rank[:, None])[:, 0]
        return scores.scatter(1, rank[:, None], torch.where(confidence > best, confidence, own)[:, None])

    def look_back(self, scores, layer, earlier):
        """Corrects the scores [tokens, ranks] of a layer by where a token's experts were in up to `depth` MoE layers before, as the solver's
        forecast lookback does: each times the factor of the sequence of ranks, then scaled to the sum that they had. `earlier` [tokens,
        min(depth, layer)] are those main ranks, that of the MoE layer before first; layer 0 has none."""
        sequence = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        for back in range(self.depth):
            sequence *= self.ranks
            if back < min(self.depth, layer):
                sequence += earlier[:, back]
        corrected = scores * self.look_back_factor[layer, sequence]
        corrected *= scores.sum(1, keepdim=True) / corrected.sum(1, keepdim=True).clamp(min=1 / LARGEST_FACTOR)
        return corrected.clamp(max=SCORE_SCALE).round().int()


def main_rank(held, experts):
    """The rank that holds most of each token's experts [tokens, top-k], the lowest among equals. held is that of the experts' layer (holders)."""
    counts = sum(held[column] for column in experts.long().unbind(1)).int()
    ranks = held.shape[1]
    # argmax does not say which of several equal values it takes.
    return (counts * ranks + torch.arange(ranks - 1, -1, -1, device=held.device, dtype=torch.int32)).argmax(1)


def holders(rank_of, ranks, device):
    """[experts, ranks], 1 where a rank holds the expert of a layer: rank_of is that of the plan's layer."""
    held = torch.zeros(len(rank_of), ranks)
    for expert, on in enumerate(rank_of):
        held[expert, on] = 1
    return held.to(device)


def look_ahead(probabilities, held, top_k):
    """Scores [tokens, ranks] from what the layer's own norm and gate say of the residual stream before attention: probabilities [tokens,
    experts] among all experts. No profile is needed: the solver's forecast lookahead-raw. An expert's chance is the logistic function of its
    margin, the logarithm of its probability over that between the last expert to be activated and the first not to be."""
    width = min(top_k + 1, probabilities.shape[1])
    best, expert = (probabilities.float() * SCORE_SCALE).round().topk(width)
    logarithm = torch.log(best + 1)
    threshold = logarithm[:, top_k - 1:].mean(1, keepdim=True)
    margin = torch.full_like(probabilities, LEAST_MARGIN, dtype=torch.float32).scatter(1, expert, (logarithm - threshold).clamp(min=LEAST_MARGIN))
    chance = torch.sigmoid(LOOK_AHEAD_SLOPE * margin)
    shares = chance @ held / chance.sum(1, keepdim=True)
    return (shares.clamp(max=1) * SCORE_SCALE).round().int()
