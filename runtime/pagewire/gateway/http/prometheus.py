"""`/metrics`: the engine's figures and the door's, under the names that dashboards of this field know.

Text by `prometheus_client`. Its registry and its metrics are not used: the engine's figures come in a `stats` message and
the door's are plain objects (see `pagewire.metrics`), read here when somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from pagewire.gateway.http.meters import Meters

_PREFIX: Final = "pagewire_"

_GAUGES: Final = {
    "sequences_running": ("num_requests_running", "Sequences that run"),
    "sequences_waiting": ("num_requests_waiting", "Sequences that wait to run"),
    "sequences_paused": ("num_requests_paused", "Sequences whose reader is too slow"),
    "ready": ("ready", "1: requests are taken and tokens move, as the engine says"),
    "kv_blocks": ("kv_cache_blocks", "KV blocks there are"),
    "kv_blocks_used": ("kv_cache_blocks_used", "KV blocks that sequences hold"),
    "kv_blocks_cached": ("kv_cache_blocks_cached", "KV blocks that only the prefix cache holds"),
    "step_prediction_error": (
        "step_prediction_error",
        "Mean relative error of predicted step times, where promises are",
    ),
    "step_prediction_bias": (
        "step_prediction_bias",
        "The same with its sign: above 0, steps take longer than predicted",
    ),
    "step_prediction_margin": (
        "step_prediction_margin",
        "Taken off the time of a step, so that it hardly ever is late",
    ),
    "clients_waiting": ("clients_waiting", "Clients of which something waits to run"),
    "recomputed_share": ("recomputed_share", "Part of all computed tokens that were computed again after preemptions"),
    "gateway_connections": ("gateway_connections", "Clients, each open HTTP request counted as one"),
    "gateway_streams": ("gateway_streams", "Open streams"),
    "gateway_prompts_waiting": ("gateway_prompts_waiting", "Prompts being tokenised"),
}
_COUNTERS: Final = {
    "requests_total": ("engine_requests", "Requests that the engine took"),
    "requests_refused_total": ("engine_requests_refused", "Requests that the scheduler refused"),
    "gateway_requests_total": ("gateway_requests", "Requests of all doors"),
    "prompt_tokens_total": ("prompt_tokens", "Tokens of prompts"),
    "output_tokens_total": ("generation_tokens", "Tokens generated"),
    "prefilled_tokens_total": ("prefilled_tokens", "Prompt tokens computed"),
    "recomputed_tokens_total": ("recomputed_tokens", "Tokens computed again after preemptions"),
    "prompt_tokens_cached_total": ("prefix_cache_hits", "Prompt tokens that the prefix cache spared"),
    "preemptions_total": ("num_preemptions", "Times that a sequence lost its blocks"),
    "promises_refused_total": ("promises_refused", "Requests refused since their promise could not have been kept"),
    "promises_late_total": ("promises_late", "Sequences that could not be in time any more and let others go first"),
    "steps_total": ("engine_steps", "Steps applied"),
    "stalls_total": ("engine_stalls", "Steps that took longer than they may"),
}
_SUMMARIES: Final = {
    "step_seconds": ("step_time_seconds", "Time of a step"),
    "forward_seconds": ("forward_time_seconds", "Of a step, what the worker computed"),
    "schedule_seconds": ("schedule_time_seconds", "Planning and applying of a step"),
    "loop_lag_seconds": ("engine_loop_lag_seconds", "How late a timer of the engine's loop fired"),
}
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": "HTTP: from the request to its first token",
    "inter_token_latency_seconds": "HTTP: between tokens of a choice",
    "e2e_request_latency_seconds": "HTTP: from the request to its end",
    "request_queue_time_seconds": "HTTP: until the request was first scheduled",
    "gateway_loop_lag_seconds": "How late a timer of the gateway's loop fired",
}
_SPARSE: Final = 2
"""Every second of our bounds is told: four a decade."""


def exposition(stats: Mapping[str, float], meters: Meters, model: str) -> tuple[bytes, str]:
    """The page and its content type.

    Args:
        stats: of the gateway and, as it last told them, the engine.
        meters: of the HTTP door.
        model: label of every figure.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(stats, meters, model))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Figures(Collector):
    def __init__(self, stats: Mapping[str, float], meters: Meters, model: str) -> None:
        self._stats = stats
        self._meters = meters
        self._names, self._model = ["model_name"], [model]

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engine()
        yield from self._of_door()

    def _of_engine(self) -> Iterator[Metric]:
        stats, names, model = self._stats, self._names, self._model
        for source, (name, text) in _GAUGES.items():
            if source in stats:
                gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
                gauge.add_metric(model, stats[source])
                yield gauge
        for source, (name, text) in _COUNTERS.items():
            if source in stats:
                counter = CounterMetricFamily(_PREFIX + name, text, labels=names)
                counter.add_metric(model, stats[source])
                yield counter
        if stats.get("kv_blocks"):
            gauge = GaugeMetricFamily(_PREFIX + "kv_cache_usage_perc", "KV blocks in use, 1: all", labels=names)
            gauge.add_metric(model, stats["kv_blocks_used"] / stats["kv_blocks"])
            yield gauge
        if "prompt_tokens_total" in stats:
            counter = CounterMetricFamily(_PREFIX + "prefix_cache_queries", "Prompt tokens looked up", labels=names)
            counter.add_metric(model, stats["prompt_tokens_total"])
            yield counter
        for source, (name, text) in _SUMMARIES.items():
            if f"{source}_count" in stats:
                yield self._summary(source, name, text)

    def _summary(self, source: str, name: str, text: str) -> Metric:
        """The engine tells quantiles, not buckets."""
        stats, labels = self._stats, dict(zip(self._names, self._model, strict=True))
        metric = Metric(_PREFIX + name, text, "summary")
        for percent in (50, 95, 99):
            quantile = {**labels, "quantile": f"0.{percent}"}
            metric.add_sample(_PREFIX + name, quantile, stats[f"{source}_p{percent}"])
        metric.add_sample(f"{_PREFIX}{name}_count", labels, stats[f"{source}_count"])
        metric.add_sample(f"{_PREFIX}{name}_sum", labels, stats[f"{source}_sum"])
        return metric

    def _of_door(self) -> Iterator[Metric]:
        meters, names, model = self._meters, self._names, self._model
        histograms = meters.registry.histograms()
        for name, text in _HISTOGRAMS.items():
            found = histograms[name]
            bounds = found.buckets()
            told = [*bounds[:-1][::_SPARSE], bounds[-1]]
            buckets = [("+Inf" if math.isinf(bound) else f"{bound:.3g}", float(count)) for bound, count in told]
            family = HistogramMetricFamily(_PREFIX + name, text, labels=names)
            family.add_metric(model, buckets, sum_value=found.sum)
            yield family
        ended = CounterMetricFamily(
            _PREFIX + "request_success", "Choices that ended, by reason", labels=[*names, "finished_reason"]
        )
        for reason, count in meters.finished.items():
            ended.add_metric([*model, reason], count)
        yield ended
        answers = CounterMetricFamily(_PREFIX + "http_responses", "HTTP answers, by status", labels=["status"])
        for status, count in meters.responses.items():
            answers.add_metric([str(status)], count)
        yield answers
        slow = CounterMetricFamily(_PREFIX + "http_slow_readers", "Connections cut because nobody read")
        slow.add_metric([], meters.slow_readers.value)
        yield slow
        gauge = GaugeMetricFamily(_PREFIX + "http_requests_open", "HTTP requests being answered")
        gauge.add_metric([], meters.num_open)
        yield gauge
