"""The routed experts of requests between the steps that compute them and the outputs that carry them."""

import numpy as np


class Rows:
    """Collects the routed experts of requests, within a bound on memory.

    A step computes rows (one per token) of a request from a position on. Rows come in the order of positions, except that a
    preempted request computes its first positions again. Its rows are then the same, and are not kept twice.
    """

    def __init__(self, budget_bytes, bytes_per_token):
        self._budget = budget_bytes
        self._bytes_per_token = bytes_per_token
        self._requests = {}

    def __bool__(self):
        return bool(self._requests)

    def admit(self, request_id, tokens, first):
        """Admits a request of at most a number of tokens, whose rows before the position first are left out.

        It reports False where the rows of all admitted requests might exceed the budget. The budget counts rows until the end
        of their request: the API server holds those that were taken.
        """
        held = sum(request.tokens for request in self._requests.values())
        if (held + tokens) * self._bytes_per_token > self._budget:
            return False
        self._requests[request_id] = _Request(tokens, first)
        return True

    def add(self, request_id, start, rows):
        """Adds the rows of a step. A request with a gap, for example of tokens that another engine computed, is dropped."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if start > request.end:
            del self._requests[request_id]
            return
        fresh = rows[request.end - start :]
        if len(fresh):
            request.end += len(fresh)
            request.rows.append(fresh)

    def take(self, request_id):
        """Returns the rows that were added since the last call, or None where there are none."""
        request = self._requests.get(request_id)
        if request is None or not request.rows:
            return None
        rows, request.rows = request.rows, []
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def keep_only(self, running):
        """Drops the requests that are not in running."""
        for request_id in [request_id for request_id in self._requests if request_id not in running]:
            del self._requests[request_id]


class _Request:
    def __init__(self, tokens, first):
        self.tokens = tokens
        self.end = first
        self.rows = []
