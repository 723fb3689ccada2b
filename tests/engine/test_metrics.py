"""Counters, gauges, histograms."""

import random
import re
from pathlib import Path

import pytest

from pagewire.config import SchedulerConfig
from pagewire.engine.decisions import Load
from pagewire.engine.instruments import Instruments
from pagewire.metrics import Histogram, Registry
from pagewire.scheduler.scheduler import Scheduler


def test_a_quantile_is_off_by_a_bucket_at_most():
    histogram = Histogram()
    values = sorted(random.Random(3).lognormvariate(-5, 2) for _ in range(5000))
    for value in values:
        histogram.observe(value)
    for q in (0.5, 0.95, 0.99):
        exact = values[int(q * len(values)) - 1]
        assert exact <= histogram.quantile(q) <= exact * 10 ** (1 / 8) * 1.01
    assert histogram.quantile(1.0) == histogram.max == values[-1]
    assert histogram.sum == pytest.approx(sum(values))


def test_values_beyond_the_last_bound_and_none_at_all():
    histogram = Histogram((1.0, 2.0))
    assert histogram.quantile(0.99) == 0
    histogram.observe(50.0)
    assert histogram.quantile(0.5) == 50.0
    assert histogram.buckets() == [(1.0, 0), (2.0, 0), (float("inf"), 1)]


def test_a_value_on_a_bound_lies_at_or_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.buckets() == [(1.0, 1), (2.0, 3), (float("inf"), 4)]


def test_registry_gives_one_object_a_name_and_flat_numbers():
    registry = Registry()
    registry.counter("requests_total").add(2)
    registry.counter("requests_total").add()
    registry.gauge("running", lambda: 7)
    registry.gauge("ready").set(1)
    registry.histogram("step_seconds", (0.1, 1.0)).observe(0.05)
    values = registry.values()
    assert values["requests_total"] == 3
    assert values["running"] == 7
    assert values["ready"] == 1
    assert values["step_seconds_count"] == 1
    assert values["step_seconds_p99"] == 0.05
    assert set(registry.histograms()) == {"step_seconds"}
    assert all(isinstance(value, float) for value in values.values())


def test_a_name_has_one_kind():
    registry = Registry()
    registry.histogram("x_total")
    with pytest.raises(AssertionError, match="x_total"):
        registry.counter("x_total")


def test_every_metric_is_documented():
    """`docs/metrics.md` names what an engine measures, and nothing else."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    engine = text.partition("A gateway's `stats()`")[0]
    rows = [line.split("|")[1] for line in engine.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    registry = Registry()
    instruments = Instruments(registry)
    scheduler = Scheduler(num_blocks=8, block_size=16, max_rows=4, max_model_len=64, config=SchedulerConfig(max_rows=4))
    instruments.look_at(scheduler, lambda: Load(0, 0, 0, 0), lambda: True)
    assert documented == set(registry._metrics)
