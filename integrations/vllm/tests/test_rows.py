import numpy as np

from semmoe_vllm.rows import Rows


def step(start, count):
    """Returns rows that hold their positions."""
    return np.arange(start, start + count).reshape(-1, 1, 1)


def taken(rows, request_id="a"):
    value = rows.take(request_id)
    return None if value is None else value.ravel().tolist()


def test_rows_wait_for_an_output():
    rows = Rows(100, 1)
    assert not rows and rows.admit("a", 10, 0) and rows
    rows.add("a", 0, step(0, 3))
    rows.add("a", 3, step(3, 2))
    assert taken(rows) == [0, 1, 2, 3, 4]
    assert taken(rows) is None
    rows.add("a", 5, step(5, 1))
    assert taken(rows) == [5]


def test_a_preempted_request_computes_rows_again():
    rows = Rows(100, 1)
    rows.admit("a", 10, 0)
    rows.add("a", 0, step(0, 4))
    assert taken(rows) == [0, 1, 2, 3]
    rows.add("a", 4, step(4, 1))
    rows.add("a", 0, step(0, 3))  # preempted: in pieces that end elsewhere
    rows.add("a", 3, step(3, 4))
    assert taken(rows) == [4, 5, 6]


def test_leaves_out_rows_before_the_first():
    rows = Rows(100, 1)
    rows.admit("a", 10, 3)
    rows.add("a", 0, step(0, 2))
    assert taken(rows) is None
    rows.add("a", 2, step(2, 3))
    assert taken(rows) == [3, 4]


def test_drops_a_request_with_a_gap():
    rows = Rows(100, 1)
    rows.admit("a", 10, 0)
    rows.add("a", 4, step(4, 2))
    assert taken(rows) is None and not rows
    rows.add("a", 6, step(6, 2))
    assert taken(rows) is None


def test_the_budget_counts_requests_until_they_end():
    rows = Rows(100, 10)
    assert rows.admit("a", 6, 0)
    assert not rows.admit("b", 5, 0)
    assert rows.admit("c", 4, 0)
    rows.add("b", 0, step(0, 1))
    assert taken(rows, "b") is None
    rows.add("a", 0, step(0, 1))
    taken(rows)
    assert not rows.admit("d", 1, 0)
    rows.keep_only({"c"})
    assert rows.admit("d", 6, 0) and taken(rows) is None
