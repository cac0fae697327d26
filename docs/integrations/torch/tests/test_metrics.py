"""Tests of the metrics, which need prometheus_client; without it they are skipped."""
import os
import sys
import types
import unittest

try:
    import prometheus_client
except ImportError as error:
    raise unittest.SkipTest("prometheus_client is not installed") from error

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from semmoe_shuffle import metrics  # noqa: E402  (the path is set above)


class Exposition(unittest.TestCase):
    def test_names_and_labels(self):
        registry = prometheus_client.CollectorRegistry()
        exported = metrics.Metrics(1, [3, 5], registry)
        exported.publish([[2, 6], [0, 8]])
        exported.publish([[5, 7], [0, 8]])
        plan = types.SimpleNamespace(digest="d" * 64)
        exported.use(types.SimpleNamespace(plan=plan, refused=""))
        exported.use(types.SimpleNamespace(plan=plan, refused="Damaged"))
        lines = prometheus_client.generate_latest(registry).decode().splitlines()
        for line in ('semmoe_engine_activations_total{layer="3",locality="local",rank="1"} 5.0', 'semmoe_engine_activations_total{layer="3",locality="remote",rank="1"} 7.0',
                     'semmoe_engine_activations_total{layer="5",locality="local",rank="1"} 0.0', 'semmoe_engine_tables_info{plan_digest="' + "d" * 64 + '"} 1.0',
                     'semmoe_engine_tables_refused{reason="Damaged"} 1.0'):
            self.assertIn(line, lines)
        exported.use(types.SimpleNamespace(plan=types.SimpleNamespace(digest="e" * 64), refused=""))
        lines = prometheus_client.generate_latest(registry).decode().splitlines()
        self.assertIn('semmoe_engine_tables_info{plan_digest="' + "d" * 64 + '"} 0.0', lines)
        self.assertIn('semmoe_engine_tables_refused{reason="Damaged"} 0.0', lines)


if __name__ == "__main__":
    unittest.main()
