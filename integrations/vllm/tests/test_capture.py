import numpy as np
import pytest

torch = pytest.importorskip("torch")
from semmoe_vllm.capture import Capture, Layer, Span, own_span  # noqa: E402

LOCAL = torch.tensor([True, True, False, False])


@pytest.fixture(params=["host", "device"], autouse=True)
def place(request):
    """Runs each test by the operations for the host and by those for devices."""
    global ON_HOST
    ON_HOST = request.param == "host"


def capture(max_tokens=8, published=None, local=(LOCAL, ~LOCAL), **options):
    layers = [Layer(index, 2, mask) for index, mask in zip((1, 3), local)]
    options["on_host"] = ON_HOST
    return Capture(layers, max_tokens, "cpu", publish=None if published is None else lambda totals: published.append(totals.copy()), **options)


@pytest.mark.parametrize(
    ("rows", "rank", "tokens", "sizes", "part", "parts", "want"),
    [
        (7, 0, None, None, 0, 1, Span(0, 7)),  # no data parallelism
        (9, 1, [4, 5], None, 0, 1, Span(4, 5)),  # the tokens of all ranks
        (5, 1, [4, 5], None, 0, 1, Span(0, 5)),  # its own
        (5, 0, [5, 0], None, 0, 1, Span(0, 5)),  # both
        (5, 0, [5, 5], None, 1, 2, Span(0, 5)),  # each worker has its rank's
        (12, 1, [5, 5], [3, 3, 3, 3], 1, 2, Span(6, 5)),  # shards of all workers
        (3, 1, [5, 5], None, 1, 2, Span(0, 3, 3)),  # its shard
        (3, 1, [5, 5], None, 0, 1, None),
        (11, 1, [5, 5], [3, 3, 3, 3], 1, 2, None),
    ],
)
def test_own_span(rows, rank, tokens, sizes, part, parts, want):
    assert own_span(rows, rank, tokens, sizes, part, parts) == want


def run(capture, ids, tokens, flush=True):
    capture.begin()
    for layer, chosen in enumerate(ids):
        capture.record(layer, torch.tensor(chosen))
    capture.count(tokens)
    if flush:
        capture.flush()


def test_counts_each_layer_by_its_own_experts():
    published = []
    c = capture(published=published)
    run(c, [[[0, 1], [0, 2]], [[0, 1], [0, 2]]], 2)
    assert published[-1].tolist() == [[3, 1], [1, 3]]
    run(c, [[[2, 3]], [[2, 3]]], 1)
    assert published[-1].tolist() == [[3, 3], [3, 3]]


def test_counts_neither_padding_nor_ids_that_are_no_experts():
    published = []
    c = capture(published=published)
    run(c, [[[0, -1], [9, 3], [0, 0]], [[-4, -1], [4, 4], [0, 0]]], 2)
    assert published[-1].tolist() == [[1, 1], [0, 0]]


def test_counts_only_the_tokens_of_the_rank():
    published = []
    c = capture(published=published, rank=1, context=lambda: ([2, 1], None))
    ids = [[2, 3], [2, 3], [0, 1]]
    run(c, [ids, ids], 1)
    assert published[-1].tolist() == [[2, 0], [0, 2]]
    assert c.rows(1, 4, np.uint8).tolist() == [[[0, 0], [0, 1], [0, 0], [0, 1]]]


def test_workers_of_a_rank_count_each_token_once():
    """Five tokens in shards of three; the last row of the second is padding."""
    ids = [[0, 1], [0, 1], [0, 1], [2, 3], [0, 2], [0, 0]]
    totals = 0
    for part in range(2):
        published = []
        c = capture(published=published, part=part, parts=2, context=lambda: ([5], None))
        shard = ids[3 * part : 3 * part + 3]
        run(c, [shard, shard], 5)
        assert c.rows(3, 4, np.uint8) is None or part == 0
        totals = totals + published[-1]
    assert totals.tolist() == [[7, 3], [3, 7]]
    published = []
    c = capture(published=published, part=1, parts=2, context=lambda: ([5], None))
    run(c, [ids[:5], ids[:5]], 5)  # each worker has all five
    assert published == []


def test_a_batch_of_no_known_form_is_not_counted():
    published = []
    c = capture(published=published, context=lambda: ([4, 5], None))
    run(c, [[[0, 1]], [[0, 1]]], 4)
    assert published == [] and c.uncounted == 4 and c.rows(1, 4, np.uint8) is None
    run(c, [[[0, 1]] * 4, [[0, 1]] * 4], 4)
    assert published[-1].tolist() == [[8, 0], [0, 8]]


def test_a_batch_beyond_the_buffer_is_not_counted():
    published = []
    c = capture(max_tokens=2, published=published)
    run(c, [[[0, 1]] * 3, [[0, 1]] * 3], 3)
    assert published == [] and c.uncounted == 3


def test_rows_of_requests():
    c = capture()
    run(c, [[[0, 1], [2, 3], [1, 2]], [[3, 2], [1, 0], [0, 3]]], 3)
    rows = c.rows(2, 5, np.uint16)
    assert rows.dtype == np.uint16 and rows.shape == (2, 5, 2)
    assert rows[:, 1].tolist() == [[0, 1], [2, 3]] and rows[:, 3].tolist() == [[3, 2], [1, 0]]
    assert not rows[:, [0, 2, 4]].any()
    assert c.rows(4, 5, np.uint16) is None


def test_refuses_layers_that_differ():
    with pytest.raises(ValueError, match="not one number each"):
        Capture([Layer(0, 2, LOCAL), Layer(1, 3, LOCAL)], 8, "cpu")


def test_counts_small_steps_together():
    published = []
    c = capture(published=published, max_tokens=1000)
    for _ in range(Capture.PENDING_STEPS - 1):
        run(c, [[[0, 2]], [[0, 1]]], 1, flush=False)
    if ON_HOST:
        assert published == []
    run(c, [[[0, 2], [0, 0]], [[0, 1], [2, 2]]], 2, flush=False)  # steps differ in size
    assert published[-1].tolist() == [[18, 16], [2, 32]]
    run(c, [[[0, 2]] * 256, [[0, 1]] * 256], 256, flush=False)  # a large step does not wait
    assert published[-1].tolist() == [[18 + 256, 16 + 256], [2, 32 + 512]]
    published.clear()
    c.flush()
    assert published == []


def test_dummy_steps_do_not_count():
    """vLLM warms up, and computes dummy steps where only other ranks have requests; they record without begin and count."""
    published = []
    c = capture(published=published)
    c.record(0, torch.tensor([[3, 3]]))
    run(c, [[[0, 1], [0, 2]], [[0, 1], [0, 2]]], 2, flush=False)
    for layer in range(2):
        c.record(layer, torch.tensor([[3, 3]]))
    run(c, [[[2, 3]], [[2, 3]]], 1)
    assert published[-1].tolist() == [[3, 3], [3, 3]]


def test_counts_the_steps_of_a_cuda_graph():
    """A graph replays the operations of record() without a call of it. Its batch is padded."""
    if ON_HOST:
        pytest.skip("graphs are of devices")
    published, capturing = [], [False]
    c = capture(published=published, rank=1, context=lambda: ([3, 3], None), capturing=lambda: capturing[0])
    for capturing[0] in (False, True):  # vLLM computes the batch once before it captures it
        for layer in range(2):
            c.record(layer, torch.zeros((6, 2), dtype=torch.int32))
    capturing[0] = False
    c.begin()
    c._ids[:, :3] = torch.tensor([[0, 1], [0, 2], [3, 3]])  # what the captured operations do
    c.count(2)
    assert published[-1].tolist() == [[3, 1], [1, 3]] and c.uncounted == 0
    assert c.rows(2, 4, np.uint8)[:, 1].tolist() == [[0, 1], [0, 2]]
    run(c, [[[2, 3]] * 6, [[2, 3]] * 6], 3)  # a batch without a graph
    assert published[-1].tolist() == [[3, 7], [7, 3]]


@pytest.mark.parametrize(("part", "rows"), [(0, 3), (1, 3), (0, 5)])
def test_a_cuda_graph_of_a_shard_is_not_counted(part, rows):
    if ON_HOST:
        pytest.skip("graphs are of devices")
    published = []
    c = capture(published=published, part=part, parts=2, context=lambda: ([6], None), capturing=lambda: True)
    for layer in range(2):
        c.record(layer, torch.zeros((rows, 2), dtype=torch.int32))
    c.begin()
    c.count(2)
    assert published == [] and c.uncounted == 2
