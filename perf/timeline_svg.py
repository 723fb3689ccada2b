"""A picture of some steps: what the loop, the card and the clients did, a lane each, on one axis of time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from timeline_figures import Recording, by_step

_STEPS = 10
_WIDTH, _LEFT, _LANE, _TOP = 1400, 130, 26, 46
_COLOURS = ("#3b6fb6", "#d9822b", "#4c9a52")
"""A step keeps its colour in all lanes; three, since three are seen at once."""
_GREY = "#888888"
_LANES = ("plan", "launch forward", "launch sample", "GPU forward", "GPU sample", "results home", "seen", "apply", "deliver",
          "client: message", "client: tokens read", "garbage")  # fmt: skip
_FONT = 'font-family="sans-serif" font-size="12"'
_TICKS_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_MOST_TICKS = 15


class Bar(NamedTuple):
    """Something that took time."""

    lane: str
    begin: float
    end: float
    colour: str
    title: str


def picture(found: Recording, title: str, *, around: str = "middle") -> str:
    """SVG of ten steps: in the middle of the window, or (`around="gap"`) about the longest gap of a client."""
    steps = found.window
    if not steps:
        raise ValueError("no step lies in the window")
    centre = len(steps) // 2
    ranked = by_step(found)
    if around == "gap" and ranked:
        worst = found.steps[ranked[0][0]].step
        centre = next((i for i, step in enumerate(steps) if step.step >= worst), centre)
    first = max(0, min(centre - _STEPS // 2, len(steps) - _STEPS))
    shown = steps[first : first + _STEPS]
    low, high = shown[0].plan[0], shown[-1].deliver[1]
    bars = [bar for bar in _bars(found) if bar.end >= low and bar.begin <= high]
    return _draw(bars, low, high, f"{title}: steps {shown[0].step} to {shown[-1].step}")


def _bars(found: Recording) -> Iterator[Bar]:
    for step in found.steps:
        colour = _COLOURS[step.step % len(_COLOURS)]
        name = f"step {step.step}, {step.num_decode} decoding + {step.num_prefill} prompt tokens"
        for lane, begin, end in (
            ("plan", *step.plan),
            ("launch forward", *step.forward),
            ("launch sample", *step.sample),
            ("GPU forward", step.computed[0], step.forward_end),
            ("GPU sample", step.forward_end, step.computed[1]),
            ("results home", step.computed[1], step.home),
            ("seen", step.home, step.seen),
            ("apply", *step.apply),
            ("deliver", *step.deliver),
        ):
            if end >= begin:  # not of NaN
                yield Bar(lane, begin, end, colour, f"{name}: {1e3 * (end - begin):.3f} ms")
    for number, answer in enumerate(found.answers):
        reads = sorted(at for row in answer.served for at in row.times)
        for i, (at, num) in enumerate(answer.messages):
            until = answer.messages[i + 1][0] if i + 1 < len(answer.messages) else at + 1
            yield Bar("client: message", at, at, _GREY, f"client {number}: {num} streams")
            last = _last_before(reads, until)
            if last is not None and last >= at:
                yield Bar("client: tokens read", at, last, _GREY, f"client {number}: {1e3 * (last - at):.3f} ms")
        for begin, took, generation in answer.pauses:
            yield Bar("garbage", begin, begin + took, _GREY, f"client {number}, generation {generation}")
    for begin, took, generation in found.pauses:
        yield Bar("garbage", begin, begin + took, "#b03030", f"engine, generation {generation}: {1e3 * took:.3f} ms")


def _last_before(ascending: list[float], until: float) -> float | None:
    index = bisect_left(ascending, until)
    return ascending[index - 1] if index else None


def _draw(bars: list[Bar], low: float, high: float, title: str) -> str:
    scale = (_WIDTH - _LEFT - 20) / (high - low)
    bottom = _TOP + _LANE * len(_LANES)

    def x(when: float) -> float:
        return _LEFT + scale * (min(max(when, low), high) - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 30}" {_FONT}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    width_ms = 1e3 * (high - low)
    tick = next((t for t in _TICKS_MS if width_ms / t <= _MOST_TICKS), _TICKS_MS[-1])
    for i in range(int(width_ms / tick) + 1):
        at = x(low + 1e-3 * i * tick)
        out.append(f'<line x1="{at:.2f}" y1="{_TOP}" x2="{at:.2f}" y2="{bottom}" stroke="#dddddd"/>')
        out.append(f'<text x="{at:.2f}" y="{bottom + 16}" text-anchor="middle" fill="#555555">{i * tick:g} ms</text>')
    for row, lane in enumerate(_LANES):
        y = _TOP + _LANE * row
        out.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 20}" y2="{y}" stroke="#eeeeee"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{lane}</text>')
    for bar in bars:
        y, left = _TOP + _LANE * _LANES.index(bar.lane) + 4, x(bar.begin)
        width = max(1.0, x(bar.end) - left)
        out.append(
            f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 8}" fill="{bar.colour}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    return "\n".join([*out, "</svg>\n"])
