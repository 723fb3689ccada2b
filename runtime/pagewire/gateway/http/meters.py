"""What the HTTP door measures: of each request from when its body was read, as its client would."""

from __future__ import annotations

import time

from pagewire.metrics import Registry
from pagewire_transport.messages import Done


class Meters:
    """The door's metrics; names as in docs/metrics.md."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.first_token = self.registry.histogram("time_to_first_token_seconds")
        self.inter_token = self.registry.histogram("inter_token_latency_seconds")
        self.e2e = self.registry.histogram("e2e_request_latency_seconds")
        self.queue = self.registry.histogram("request_queue_time_seconds")
        self.loop_lag = self.registry.histogram("gateway_loop_lag_seconds")
        self.slow_readers = self.registry.counter("http_slow_readers_total")
        self.finished: dict[str, int] = {}
        """Choices that ended, by reason."""
        self.responses: dict[int, int] = {}
        """Answers, by status."""
        self.num_open = 0
        """Requests being answered."""


class RequestMeter:
    """Of one request."""

    def __init__(self, meters: Meters, num_choices: int) -> None:
        self._meters = meters
        self._started = time.perf_counter()
        self._heard = [0.0] * num_choices
        self._has_token = False

    def on_tokens(self, index: int, count: int) -> None:
        """`count` ≥ 1 tokens of a choice came at once; the gap before them is shared among them."""
        now = time.perf_counter()
        if not self._has_token:
            self._has_token = True
            self._meters.first_token.observe(now - self._started)
        before = self._heard[index]
        if before:
            self._meters.inter_token.observe((now - before) / count)
        self._heard[index] = now

    def on_finished(self, reason: str) -> None:
        """A choice ended."""
        self._meters.finished[reason] = self._meters.finished.get(reason, 0) + 1

    def on_done(self, message: Done) -> None:
        """A stream ended."""
        self._meters.queue.observe(message.timings.queue_ns * 1e-9)

    def on_over(self) -> None:
        """The request was answered."""
        self._meters.e2e.observe(time.perf_counter() - self._started)
