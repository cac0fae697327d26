"""Tests of what needs PyTorch, on the CPU; without it they are skipped. test/gpu/token_shuffle.py repeats them on GPUs, with the collectives."""
import array
import json
import math
import os
import random
import sys
import types
import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest("PyTorch is not installed") from error

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from semmoe_shuffle import assign, forecast, metrics, order, rows, tables  # noqa: E402  (the path is set above)


def by_the_rule(scores, room):
    """assign.align, word by word, for one batch as lists."""
    placed, waiting = [None] * len(scores), list(range(len(scores)))
    while waiting:
        asks = [[] for _ in room]
        for token in waiting:
            choices = sorted(((-score, rank) for rank, score in enumerate(scores[token]) if room[rank]))
            second = -choices[1][0] if len(choices) > 1 else -1
            asks[choices[0][1]].append((second + choices[0][0], token))
        waiting = []
        for rank, of in enumerate(asks):
            of.sort()
            for _, token in of[:room[rank]]:
                placed[token] = rank
            waiting += [token for _, token in of[room[rank]:]]
            room[rank] -= min(room[rank], len(of))
        waiting.sort()
    return placed


def stored(dtype, shape, values):
    return tables.Tensor(dtype, shape, array.array({"U8": "B", "U16": "H", "F32": "f"}[dtype], values).tobytes())


class Shuffle(unittest.TestCase):
    def test_align_follows_the_rule(self):
        draw = random.Random(1)
        for _ in range(300):
            tokens, ranks, levels = draw.randint(1, 60), draw.randint(1, 6), draw.choice([3, 65536])
            scores = torch.tensor([[[draw.randrange(levels) for _ in range(ranks)] for _ in range(tokens)] for _ in range(2)], dtype=torch.int32)
            room = [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]
            placed = assign.align(scores)
            for batch in range(2):
                self.assertEqual(placed[batch].tolist(), by_the_rule(scores[batch].tolist(), room[:]))

    def test_counts(self):
        held = forecast.holders([[0], [0, 1], [1]], 2, "cpu")
        counts = metrics.Counts(2, 1, "cpu")
        counts.add(0, held, torch.tensor([[0, 1], [2, 1]]))
        counts.add(1, held, torch.tensor([[0, 0]]))
        counts.add(1, held, torch.tensor([[2, 0]]))
        self.assertEqual(counts.totals(), [[3, 1], [1, 3]])

    def test_order(self):
        rank = torch.tensor([2, 0, 1, 0, 2, 2])
        by, inverse, counts = order.group_by_rank(rank, 4)
        self.assertEqual((by.tolist(), inverse.tolist(), counts.tolist()), ([1, 3, 2, 0, 4, 5], [3, 0, 2, 1, 4, 5], [2, 1, 3, 0]))
        batch = torch.randn(6, 3)
        self.assertTrue(torch.equal(rows.gather(rows.gather(batch, by), inverse), batch))

    def test_weighted_sums(self):
        source = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
        out = rows.weighted_sums(source, torch.tensor([2, 0, 1]), torch.tensor([1., 2., .5]), torch.tensor([0, 2, 2, 3]), torch.empty(3, 2))
        self.assertEqual(out.tolist(), [[7., 10.], [0., 0.], [1.5, 2.]])

    def test_weighted_sums_of_some_rows(self):
        source, index, weight = torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), torch.tensor([2, 0, 1]), torch.tensor([1., 2., .5])
        bounds = torch.tensor([0, 2, 2, 3])
        for first, last in ((0, 2), (1, 3), (2, 3), (3, 3)):
            out = rows.weighted_sums(source, index, weight, bounds[first:last + 1], torch.empty(last - first, 2))
            self.assertEqual(out.tolist(), [[7., 10.], [0., 0.], [1.5, 2.]][first:last])

    def test_add_and_norm(self):
        source, index, residual, weight = torch.randn(4, 8), torch.tensor([2, 0, 3, 1]), torch.randn(4, 8), torch.randn(8)
        added, out = torch.empty(4, 8), torch.empty(4, 8)
        rows.add_and_norm(source, index, residual, weight, 1e-6, added, out)
        self.assertTrue(torch.equal(added, residual + source[index]))
        self.assertTrue(torch.allclose(out, added / (added.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight, atol=1e-6))

    def test_forecast(self):
        plan = types.SimpleNamespace(
            ranks=4, layers=[1, 2, 3], vocabulary=2, best=2,
            token_rank=stored("U8", (3, 2, 2), [3, 1, 0, 2] * 3), token_score=stored("U16", (3, 2, 2), [30000, 20000, 65535, 0] * 3),
            transition_rank=stored("U8", (3, 4, 4), [2] * 48), transition_score=stored("U16", (3, 4, 4), [40000] * 48), look_back=0, look_back_factor=None)
        tables_ = forecast.Forecast(plan, "cpu")
        scores = tables_.score(slice(1, 2), torch.tensor([0, 1, 7, -1]))
        even = tables.SCORE_SCALE // 4
        self.assertEqual(scores.tolist(), [[[7767, 20000, 7767, 30000], [65535, 0, 0, 0], [even] * 4, [even] * 4]])
        merged = tables_.merge(scores[0], 1, torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 0]))
        self.assertEqual(merged.tolist(), [[7767, 20000, 40000, 30000], [65535, 0, 0, 0], [even, even, 40000, even], [even, even, 40000, even]])
        plan.token_rank = stored("U8", (3, 2, 2), [3, 1, 0, 4] * 3)
        with self.assertRaises(tables.Refused):
            forecast.Forecast(plan, "cpu")

    def test_look_ahead(self):
        probabilities = [[.5, .25, .125, .125, 0, 0], [.05, .05, .1, .2, .3, .3]]
        rank_of, top_k = [[0], [0], [1], [1], [2], [0, 2]], 2
        got = forecast.look_ahead(torch.tensor(probabilities), forecast.holders(rank_of, 3, "cpu"), top_k).tolist()
        for row, scores in zip(probabilities, got):
            logs = [math.log(round(p * tables.SCORE_SCALE) + 1) for p in row]
            ordered = sorted(logs, reverse=True)
            threshold, kept = (ordered[top_k - 1] + ordered[top_k]) / 2, ordered[top_k]
            margins = [max(log - threshold, -4) if log >= kept else -4 for log in logs]
            if row[2] == row[3]:
                margins[3] = -4  # of equal ones the first counts
            chances = [1 / (1 + math.exp(-2 * margin)) for margin in margins]
            for rank in range(3):
                share = sum(chance for chance, on in zip(chances, rank_of) if rank in on) / sum(chances)
                self.assertAlmostEqual(scores[rank], min(share, 1) * tables.SCORE_SCALE, delta=2)

    def test_main_rank(self):
        held = forecast.holders([[0], [0], [1], [1], [2], [0, 2]], 3, "cpu")
        self.assertEqual(forecast.main_rank(held, torch.tensor([[0, 2, 3], [4, 0, 2], [5, 4, 1]])).tolist(), [1, 0, 0])

    def test_look_back(self):
        """The scores that the solver gave the tokens of a trace: solver/forecast/lookback_golden_test.go writes them."""
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lookback.json"), encoding="utf-8") as file:
            golden = types.SimpleNamespace(**json.load(file))
        layers, ranks = len(golden.rank_of), golden.ranks
        shape = (layers, golden.vocabulary, golden.best)
        plan = types.SimpleNamespace(
            ranks=ranks, layers=range(layers), vocabulary=golden.vocabulary, best=golden.best,
            token_rank=stored("U8", shape, golden.token_rank), token_score=stored("U16", shape, golden.token_score), transition_rank=None,
            look_back=golden.depth, look_back_factor=stored("F32", (layers, ranks ** golden.depth, ranks), golden.factor))
        tables_ = forecast.Forecast(plan, "cpu")
        held = [forecast.holders(rank_of, ranks, "cpu") for rank_of in golden.rank_of]
        experts = torch.tensor(golden.experts)
        main = torch.stack([forecast.main_rank(held[layer], experts[:, layer]) for layer in range(layers)], 1)
        own = tables_.score(slice(None), torch.tensor(golden.tokens))
        for layer, want in enumerate(golden.scores):
            earlier = main[:, max(layer - golden.depth, 0):layer].flip(1)
            got = tables_.look_back(own[layer], layer, earlier)
            self.assertLessEqual((got - torch.tensor(want)).abs().max().item(), 1, f"layer {layer}")
            if layer:
                self.assertGreater((own[layer] - torch.tensor(want)).abs().max().item(), 100, f"layer {layer}: the look-back changes nothing")
        plan.look_back_factor = stored("F32", (layers, ranks ** golden.depth, ranks), [0] + golden.factor[1:])
        with self.assertRaises(tables.Refused):
            forecast.Forecast(plan, "cpu")


if __name__ == "__main__":
    unittest.main()
