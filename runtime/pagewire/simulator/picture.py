"""A picture of a simulated run: one SVG that needs nothing else, a panel for each figure over virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from pagewire.simulator.figures import ITL_TARGET_NS, TTFT_TARGET_NS, Window

_WIDTH, _PANEL, _GAP, _LEFT, _RIGHT, _TOP = 1000, 110, 38, 70, 150, 56
_COLOURS: Final = ("#3b6fb6", "#d9822b", "#4c9a52")
_GREY: Final = "#999999"
_FONT: Final = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class _Panel:
    """A chart: lines by name, a value a window; `bound` is drawn across."""

    title: str
    lines: dict[str, list[float]]
    bound: float | None = None
    is_share: bool = False


def picture(windows: Sequence[Window], title: str, block_size: int) -> str:
    """SVG of TTFT, ITL, goodput, hit rate, KV use and preemptions over time."""
    panels = _panels(windows, block_size)
    height = _TOP + len(panels) * (_PANEL + _GAP) + 10
    end = max(window.end_ns for window in windows) / 1e9
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" {_FONT} font-weight="bold">{escape(title)}</text>',
    ]
    at = [window.end_ns / 1e9 for window in windows]
    for i, panel in enumerate(panels):
        parts += _draw(panel, at, end, _TOP + i * (_PANEL + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panels(windows: Sequence[Window], block_size: int) -> list[_Panel]:
    begins = [0, *(window.end_ns for window in windows)]
    seconds = [max(1e-9, (window.end_ns - begin) / 1e9) for window, begin in zip(windows, begins, strict=False)]
    pool = [max(1, window.pool) for window in windows]
    return [
        _Panel("TTFT p95, ms", {"p95": [w.ttft_p95_ms for w in windows]}, TTFT_TARGET_NS / 1e6),
        _Panel(
            "ITL, ms",
            {"p99": [w.itl_p99_ms for w in windows], "p50": [w.itl_p50_ms for w in windows]},
            ITL_TARGET_NS / 1e6,
        ),
        _Panel(
            "requests a second",
            {
                "within promise": [w.num_good / s for w, s in zip(windows, seconds, strict=True)],
                "ended": [w.num_ended / s for w, s in zip(windows, seconds, strict=True)],
            },
        ),
        _Panel(
            "prefix hits, share of prompt tokens",
            {"hit": [w.hit_tokens / w.prompt_tokens if w.prompt_tokens else math.nan for w in windows]},
            is_share=True,
        ),
        _Panel(
            "KV memory, share of the pool",
            {
                "owned": [w.owned / p for w, p in zip(windows, pool, strict=True)],
                "owned + cached": [(w.owned + w.cached) / p for w, p in zip(windows, pool, strict=True)],
                "live tokens": [w.live_tokens / (p * block_size) for w, p in zip(windows, pool, strict=True)],
            },
            is_share=True,
        ),
        _Panel(
            "sequences",
            {"running": [float(w.running) for w in windows], "waiting": [float(w.waiting) for w in windows]},
        ),
        _Panel("preemptions", {"preemptions": [float(w.preemptions) for w in windows]}),
    ]


def _draw(panel: _Panel, at: Sequence[float], end: float, top: int) -> list[str]:
    values = [v for line in panel.lines.values() for v in line if math.isfinite(v)]
    high = 1.0 if panel.is_share else _round_up(max([*values, panel.bound or 0.0]))
    right = _WIDTH - _RIGHT
    bottom = top + _PANEL

    def x(seconds: float) -> float:
        return _LEFT + (right - _LEFT) * seconds / max(end, 1e-9)

    def y(value: float) -> float:
        return bottom - _PANEL * min(value, high) / high

    parts = [
        f'<text x="{_LEFT}" y="{top - 6}" {_FONT}>{escape(panel.title)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{right - _LEFT}" height="{_PANEL}" fill="none" stroke="{_GREY}"/>',
    ]
    parts += [
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" {_FONT} text-anchor="end">{value:g}</text>'
        for value in (0.0, high / 2, high)
    ]
    for k in range(6):
        seconds = end * k / 5
        label = f"{seconds:,.0f} s" if end >= 20 else f"{seconds:.1f} s"
        parts.append(
            f'<text x="{x(seconds):.1f}" y="{bottom + 14}" {_FONT} fill="{_GREY}" text-anchor="middle">{label}</text>'
        )
    if panel.bound is not None:
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y(panel.bound):.1f}" y2="{y(panel.bound):.1f}" stroke="{_GREY}" '
            'stroke-dasharray="4 4"/>'
        )
    for i, (name, line) in enumerate(panel.lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        for run in _runs(at, line):
            points = " ".join(f"{x(seconds):.1f},{y(value):.1f}" for seconds, value in run)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{right + 10}" y="{top + 14 + 16 * i}" {_FONT} fill="{colour}">{escape(name)}</text>')
    return parts


def _runs(at: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Stretches without a missing value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for seconds, value in zip(at, values, strict=True):
        if math.isfinite(value):
            runs[-1].append((seconds, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _round_up(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
