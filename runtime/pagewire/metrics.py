"""Counters, gauges and histograms of one process, as plain objects.

Why our own: the engine loop updates them in every step, on one thread. A client library locks each update and renders
labels; here an update is an addition. Whoever exports them (a `stats` message, an HTTP page) reads `Registry.values()`.

Names follow the Prometheus habit: `_total` counts up, `_seconds` is a histogram of seconds, the rest are gauges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final, TypeVar

SECONDS: Final = tuple(1e-5 * 10 ** (i / 8) for i in range(57))
"""Upper bounds from 10 µs to 100 s, eight a decade: a quantile read from them is at most 33 % too high, never too low."""

_M = TypeVar("_M", "Counter", "Gauge", "Histogram")


class Counter:
    """Counts up. O(1)."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        """Count `amount` ≥ 0 more."""
        self.value += amount


class Gauge:
    """A value as it is now; or, with `read`, one that is asked for only when somebody looks."""

    __slots__ = ("_read", "_value")

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        self._value = 0.0
        self._read = read

    @property
    def value(self) -> float:
        """The present value."""
        return float(self._read()) if self._read is not None else self._value

    def set(self, value: float) -> None:
        """Say what the value is now."""
        self._value = value


class Histogram:
    """Counts of values by upper bound, with sum, count and maximum. `observe` is a bisection over 57 bounds."""

    __slots__ = ("_bounds", "_counts", "count", "max", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        assert list(bounds) == sorted(bounds), "bounds ascend"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0
        self.max = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.count += 1
        self.sum += value
        self.max = max(self.max, value)

    def quantile(self, q: float) -> float:
        """The bound below which a part `q` (0 … 1) of the values lies; never more than the maximum; 0 without values."""
        wanted = q * self.count
        seen = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            seen += count
            if count and seen >= wanted:
                return min(bound, self.max)
        return self.max

    def buckets(self) -> list[tuple[float, int]]:
        """(upper bound, how many values lie at or below it), ascending; the last bound is infinity."""
        out: list[tuple[float, int]] = []
        seen = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            seen += count
            out.append((bound, seen))
        return out


class Registry:
    """The metrics of a process by name. Asking twice for a name gives the same object."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def counter(self, name: str) -> Counter:
        """The counter of that name; it must end in `_total`."""
        assert name.endswith("_total"), name
        return self._get(name, Counter())

    def gauge(self, name: str, read: Callable[[], float] | None = None) -> Gauge:
        """The gauge of that name."""
        return self._get(name, Gauge(read))

    def histogram(self, name: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
        """The histogram of that name."""
        return self._get(name, Histogram(bounds))

    def histograms(self) -> dict[str, Histogram]:
        """All histograms, for exporters that want buckets."""
        return {name: metric for name, metric in self._metrics.items() if isinstance(metric, Histogram)}

    def values(self) -> dict[str, float]:
        """Everything as numbers: a histogram gives `_count`, `_sum`, `_p50`, `_p95`, `_p99` and `_max`."""
        out: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if isinstance(metric, Histogram):
                out[f"{name}_count"] = float(metric.count)
                out[f"{name}_sum"] = metric.sum
                out[f"{name}_max"] = metric.max
                for percent in (50, 95, 99):
                    out[f"{name}_p{percent}"] = metric.quantile(percent / 100)
            else:
                out[name] = float(metric.value)
        return out

    def _get(self, name: str, new: _M) -> _M:
        found = self._metrics.setdefault(name, new)
        assert isinstance(found, type(new)), f"{name} is a {type(found).__name__}"
        return found
