import random

from semmoe_vllm.overhead import overhead


def test_finds_an_overhead_under_other_load():
    """Other load makes half of the batches up to three times slower; the plug-in adds 5 percent."""
    numbers = random.Random(7)
    slow = lambda: numbers.choice((1, numbers.uniform(1, 3))) * numbers.uniform(1, 1.01)  # noqa: E731
    found = overhead([(slow(), 1.05 * slow()) for _ in range(100)])
    assert abs(found["value"] - 5) < 0.5 and found["low"] <= found["value"] <= found["high"]
    assert overhead([(slow(), slow()) for _ in range(100)])["value"] < 0.5
