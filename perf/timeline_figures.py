"""A recorded timeline in figures, and the gaps that clients saw with what the engine did in them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from processes import Answer
from report import Report
from steplog import StepLog, StepTimes
from workload import percentile

_LONGEST = 10
_LATE = 1.25
"""A gap is long that takes so many times the median."""

_SHORT_S = 1e-4
"""Garbage collections below this are not worth telling."""

_HEAD = (
    f"{'step':>8} {'tokens':>9} {'plan':>13} {'launch':>15} {'on card':>17} {'idle':>6} {'home':>7} {'seen':>7} "
    f"{'apply':>13} {'delivered':>15} {'message':>8} {'read':>8}"
)

Gap = tuple[float, float, int]
"""When the token before came, when the next one did, which client's."""


@dataclass(slots=True)
class Recording:
    """What happened under one load; seconds of one clock.

    Attributes:
        steps: all that were delivered, in order.
        low, high: the window, in which all streams decode.
    """

    steps: list[StepTimes]
    turns: list[tuple[float, float]]
    lags: list[tuple[float, float]]
    pauses: list[tuple[float, float, int]]
    answers: list[Answer]
    low: float
    high: float

    @classmethod
    def of(cls, log: StepLog, answers: list[Answer]) -> Recording:
        """From what was noted."""
        served = [row for answer in answers for row in answer.served]
        steps = [step for step in log.steps.values() if not math.isnan(step.deliver[1])]
        low, high = max(row.times[0] for row in served), min(row.times[-1] for row in served)
        return cls(steps, log.turns, log.ticker.lags, log.pauses.found, answers, low, high)

    @property
    def window(self) -> list[StepTimes]:
        """Steps that were delivered in the window."""
        return [step for step in self.steps if self.low < step.deliver[0] and step.deliver[1] < self.high]

    def gaps(self) -> Iterator[Gap]:
        """Between tokens of a stream, as its reader saw them, in the window."""
        for client, answer in enumerate(self.answers):
            for row in answer.served:
                for a, b in itertools.pairwise(row.times):
                    if self.low < a and b < self.high:
                        yield a, b, client

    def messages(self, client: int) -> list[float]:
        """When messages with tokens came to a client, in the window."""
        return [at for at, _ in self.answers[client].messages if self.low < at < self.high]


def _intervals(times: Iterable[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def busy_share(steps: Sequence[StepTimes]) -> float:
    """Of the time from the first begin to the last end on the card, in which it computed; NaN of none."""
    spans = [step.computed for step in steps]
    busy, last = 0.0, spans[0][0] if spans else math.nan
    for begin, end in spans:
        busy += max(0.0, end - max(begin, last))
        last = max(last, end)
    return busy / (last - spans[0][0]) if spans and last > spans[0][0] else math.nan


def idle_before(steps: Sequence[StepTimes]) -> list[float]:
    """From the end of a step on the card to the begin of the next."""
    return [max(0.0, b.computed[0] - a.computed[1]) for a, b in itertools.pairwise(steps)]


def tell(report: Report, case: str, found: Recording) -> None:
    """All figures of a recording."""
    steps = found.window

    def spread(metric: str, seconds: Iterable[float], unit: str, *, top: bool = False) -> None:
        scale = {"µs": 1e6, "ms": 1e3}[unit]
        values = [scale * value for value in seconds if not math.isnan(value)]
        if values:
            report.add(case, f"{metric}_p50", percentile(values, 50), unit)
            report.add(case, f"{metric}_p99", percentile(values, 99), unit)
            if top:
                report.add(case, f"{metric}_max", max(values), unit)

    mixed = [step for step in steps if step.num_prefill]
    report.add(case, "steps", len(steps))
    report.add(case, "mixed_steps", len(mixed))
    if steps and not math.isnan(steps[0].computed[1]):
        report.add(case, "gpu_busy", 100 * busy_share(steps), "%")
        spread("gpu_idle_between_steps", idle_before(steps), "µs", top=True)
        for name, some in (("decode", [s for s in steps if not s.num_prefill]), ("mixed", mixed)):
            spread(f"gpu_{name}_step", [s.computed[1] - s.computed[0] for s in some], "ms", top=True)
        spread("gpu_sample", [s.computed[1] - s.forward_end for s in steps], "µs")
        # Negative: the step before was over when this one was launched.
        ahead = [a.computed[1] - b.sample[1] for a, b in itertools.pairwise(steps)]
        report.add(case, "launched_ahead_p50", 1e3 * percentile(ahead, 50), "ms")
        report.add(case, "launched_ahead_min", 1e3 * min(ahead, default=math.nan), "ms")
        spread("end_to_home", [s.home - s.computed[1] for s in steps], "µs", top=True)
        spread("home_to_seen", [s.seen - s.home for s in steps], "µs", top=True)
    spread("seen_to_apply", [s.apply[0] - s.seen for s in steps], "µs", top=True)
    spread("host", [s.host_time for s in steps], "µs", top=True)
    spread("host_decode", [s.host_time for s in steps if not s.num_prefill], "µs")
    spread("host_mixed", [s.host_time for s in mixed], "µs")
    for name in ("plan", "forward", "sample", "apply", "deliver"):
        label = f"launch_{name}" if name in ("forward", "sample") else name
        spread(label, [getattr(s, name)[1] - getattr(s, name)[0] for s in steps], "µs", top=True)
    spread("turn", [end - begin for begin, end in found.turns if found.low < begin < found.high], "µs", top=True)
    spread("loop_lag", [lag for at, lag in found.lags if found.low < at < found.high], "ms", top=True)
    pauses = [pause for pause in found.pauses if found.low < pause[0] < found.high]
    report.add(case, "gc_pauses", len(pauses))
    report.add(case, "gc_max", 1e6 * max((pause[1] for pause in pauses), default=0.0), "µs")
    # The same steps, seen at each place on the way out: where the spread begins, something happens.
    for name, times in (
        ("gpu_end", [s.computed[1] for s in steps]),
        ("seen", [s.seen for s in steps]),
        ("delivered", [s.deliver[1] for s in steps]),
    ):
        spread(f"interval_{name}", _intervals(times), "ms", top=True)
    messages = [gap for client in range(len(found.answers)) for gap in _intervals(found.messages(client))]
    spread("interval_message", messages, "ms", top=True)
    gaps = [b - a for a, b, _ in found.gaps()]
    spread("itl", gaps, "ms", top=True)
    usual = percentile(gaps, 50)
    report.add(case, "itl_late_share", 100 * sum(gap > _LATE * usual for gap in gaps) / max(1, len(gaps)), "%")
    for client, answer in enumerate(found.answers):
        pauses = [pause for pause in answer.pauses if found.low < pause[0] < found.high]
        report.add(case, f"cpu_client_{client}", 100 * answer.cpu_share, "%")
        report.add(case, f"gc_max_client_{client}", 1e6 * max((pause[1] for pause in pauses), default=0.0), "µs")


# ---- the longest gaps ----------------------------------------------------------------------------------------------------


def first_index(times: Sequence[float], causes: Sequence[float]) -> int:
    """Which of `causes` the first of `times` came of, where each that follows came of the next one; both ascend.

    The last cause before a time may be too late a one, where several were under way; never too early. Hence the least.
    """
    return min((bisect.bisect_right(causes, at) - 1 - k for k, at in enumerate(times)), default=0)


def message_times(found: Recording, client: int) -> dict[int, float]:
    """When the message of a step, by its index, came to a client; in the window each step sends one."""
    messages = found.messages(client)
    first = first_index(messages, [step.deliver[0] for step in found.steps])
    return {first + k: at for k, at in enumerate(messages)}


def by_step(found: Recording) -> list[tuple[int, Gap, int]]:
    """Gaps by the step that ended them: (its index, the longest, how many were long), the longest first."""
    usual = percentile([b - a for a, b, _ in found.gaps()], 50)
    longest: dict[int, Gap] = {}
    num_long: dict[int, int] = {}
    for client, answer in enumerate(found.answers):
        came = message_times(found, client)
        messages, first_step = list(came.values()), min(came, default=0)
        for row in answer.served:
            reads = [at for at in row.times if found.low < at < found.high]
            first = first_step + first_index(reads, messages)
            for k, (a, b) in enumerate(itertools.pairwise(reads), start=1):
                index = first + k
                num_long[index] = num_long.get(index, 0) + (b - a > _LATE * usual)
                known = longest.get(index)
                if known is None or b - a > known[1] - known[0]:
                    longest[index] = (a, b, client)
    rows = [(index, gap, num_long[index]) for index, gap in longest.items()]
    return sorted(rows, key=lambda row: row[1][0] - row[1][1])


def longest_gaps(found: Recording) -> str:
    """The longest gaps, a step each, and what happened in them."""
    lines = [
        "longest gaps; times in ms since the token before them was read; a step is launched one ahead",
        _HEAD,
    ]
    for index, gap, num_long in by_step(found)[:_LONGEST]:
        a, b, client = gap
        came = message_times(found, client)
        lines.append(f"gap of {1e3 * (b - a):.2f} ms, {num_long} long ones end with this step:")
        for at in range(max(0, index - 1), min(len(found.steps), index + 2)):
            lines.append(_step_line(found, at, gap, came.get(at), is_last=at == index))
        for name, pauses in (("engine", found.pauses), ("client", found.answers[client].pauses)):
            inside = [(begin - a, took, g) for begin, took, g in pauses if a - (b - a) < begin < b and took > _SHORT_S]
            lines += [
                f"{'':10}garbage collection of the {name}: at {1e3 * at:.2f}, {1e3 * took:.2f} ms, generation {g}"
                for at, took, g in inside
            ]
    return "\n".join(lines)


def _step_line(found: Recording, index: int, gap: Gap, came: float | None, *, is_last: bool) -> str:
    zero, read, _ = gap
    step = found.steps[index]
    idle = step.computed[0] - found.steps[index - 1].computed[1] if index else math.nan

    def at(when: float) -> str:
        return f"{1e3 * (when - zero):.2f}"

    def span(begin: float, end: float) -> str:
        return f"{at(begin)}…{at(end)}"

    return (
        f"{step.step:>8} {f'{step.num_decode}+{step.num_prefill}':>9} {span(*step.plan):>13} "
        f"{span(step.forward[0], step.sample[1]):>15} {span(*step.computed):>17} {1e3 * idle:>6.2f} {at(step.home):>7} "
        f"{at(step.seen):>7} {span(*step.apply):>13} {span(*step.deliver):>15} "
        f"{at(came) if came else '–':>8} {at(read) if is_last else '':>8}"
    ).rstrip()
