"""The metrics of a consumer of tables, which request routers read at the engine's /metrics.

A worker counts on its device, and publishes to prometheus_client, which SGLang and vLLM serve. In their multiprocess mode
(PROMETHEUS_MULTIPROC_DIR) the counters of all workers are summed. prometheus_client is imported by `Metrics` only.
"""
ACTIVATIONS = "semmoe_engine_activations"  # exported with the suffix _total
TABLES = "semmoe_engine_tables_info"
REFUSED = "semmoe_engine_tables_refused"
ACTIVATIONS_HELP = ("Activations (token, MoE layer, chosen expert) by the expert-parallel rank that served the token, by layer, and by whether "
                    "that rank holds the expert.")
REASONS = ("Absent", "Unreadable", "Damaged", "OtherPlan", "OtherModel", "OtherParallelism", "OtherPlacement", "UnsupportedForecast")


class Metrics:
    """The metrics of one worker, which serves one expert-parallel rank. `layers` are the indices of the MoE layers in the model."""

    def __init__(self, rank, layers, registry=None):
        import prometheus_client

        registry = prometheus_client.REGISTRY if registry is None else registry
        activations = prometheus_client.Counter(ACTIVATIONS, ACTIVATIONS_HELP, ["rank", "layer", "locality"], registry=registry)
        self._activations = [[activations.labels(str(rank), str(layer), locality) for locality in ("local", "remote")] for layer in layers]
        self._tables = prometheus_client.Gauge(
            TABLES, "The digest of the plan whose tables the engine uses.", ["plan_digest"], registry=registry, multiprocess_mode="livemax")
        self._refused = prometheus_client.Gauge(
            REFUSED, "Why the engine does not use the present files of a plan.", ["reason"], registry=registry, multiprocess_mode="livemax")
        self._published = [[0, 0] for _ in layers]
        self._digest = self._reason = ""

    def publish(self, totals):
        """Publishes the totals of this worker since its start [MoE layers][local, remote], such as Counts.totals()."""
        for counters, before, now in zip(self._activations, self._published, totals):
            for i, counter in enumerate(counters):
                counter.inc(now[i] - before[i])
                before[i] = now[i]

    def use(self, watcher):
        """Publishes the state of a tables.Watcher."""
        digest = watcher.plan.digest if watcher.plan is not None else ""
        self._digest = self._state(self._tables, self._digest, digest)
        self._reason = self._state(self._refused, self._reason, watcher.refused)

    @staticmethod
    def _state(gauge, before, now):
        # In multiprocess mode a label set cannot be removed: 0 is as good as absent.
        if before and before != now:
            gauge.labels(before).set(0)
        if now:
            gauge.labels(now).set(1)
        return now


class Counts:
    """Activations of this worker's tokens, counted on its device without synchronization."""

    def __init__(self, layers, rank, device):
        import torch

        self._rank, self._sums = rank, torch.zeros(layers, 2, dtype=torch.int64, device=device)

    def add(self, layer, held, experts):
        """Counts the experts [tokens, top-k] that a layer has chosen for the tokens of this rank; padding must be left out. held is that of
        the layer (forecast.holders); layers are counted among the MoE layers."""
        local = held[:, self._rank][experts.long()].sum().long()
        self._sums[layer, 0] += local
        self._sums[layer, 1] += experts.numel() - local

    def totals(self):
        """The totals [MoE layers][local, remote]. This waits for the device: call it every few seconds."""
        return self._sums.tolist()
