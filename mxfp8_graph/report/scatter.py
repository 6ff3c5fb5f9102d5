"""A chart of named points as SVG, for a page. Its colors are those of the page, see the style in `html.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

_WIDTH: Final = 640
_HEIGHT: Final = 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, _WIDTH - 16, 14, _HEIGHT - 44
_LETTER, _LINE = 6.4, 14
"""Width of a letter and height of a line of a label."""
_LOGARITHMIC: Final = 20
"""Ratio of the largest to the smallest number from which on an axis is logarithmic."""


class Point(NamedTuple):
    """A row of a table."""

    name: str
    across: float
    up: float
    best: bool


@dataclass(frozen=True)
class _Axis:
    """The places of numbers from `low` to `high` between two ends, in pixels."""

    low: float
    high: float
    ends: tuple[float, float]
    logarithmic: bool

    @classmethod
    def over(cls, values: Sequence[float], ends: tuple[float, float]) -> _Axis:
        low, high = min(values), max(values)
        if low > 0 and high / low > _LOGARITHMIC:
            return cls(low / 1.4, high * 1.4, ends, logarithmic=True)
        # From 0 on, so that twice as far is twice as much.
        return cls(min(low, 0), high * 1.1 if high > 0 else 1.0, ends, logarithmic=False)

    def place(self, value: float) -> float:
        scale = math.log if self.logarithmic else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.ends[0] + share * (self.ends[1] - self.ends[0])

    def ticks(self) -> list[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [m * 10.0**d for d in decades for m in (1, 3) if self.low <= m * 10.0**d <= self.high]
        step = next(s for s in _steps((self.high - self.low) / 6) if s * 6 >= self.high - self.low)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _steps(about: float) -> list[float]:
    return [m * 10.0 ** math.floor(math.log10(about)) for m in (1, 2, 5, 10)]


def svg(points: Sequence[Point], titles: tuple[str, str]) -> str:
    """Returns the chart; `titles` are those of the axes, across and up. Numbers must be finite."""
    across = _Axis.over([point.across for point in points], (_LEFT, _RIGHT))
    up = _Axis.over([point.up for point in points], (_BOTTOM, _TOP))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
    parts += [_text(across.place(t), _BOTTOM + 16, f"{t:g}", "middle") for t in across.ticks()]
    parts += [_text(_LEFT - 7, up.place(t) + 4, f"{t:g}", "end") for t in up.ticks()]
    parts += [f'<path class="grid" d="M{_LEFT} {up.place(t):.1f}H{_RIGHT}"/>' for t in up.ticks()]
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, titles[0], "middle"))
    middle = (_TOP + _BOTTOM) / 2
    parts.append(_text(13, middle, titles[1], "middle", f' transform="rotate(-90 13 {middle})"'))
    boxes = [(across.place(p.across) - 4, up.place(p.up) - 4, across.place(p.across) + 4) for p in points]
    # The best one first: its label has the place beside its point.
    for point in sorted(points, key=lambda point: not point.best):
        parts += _point(point, across.place(point.across), up.place(point.up), boxes)
    return "\n".join([*parts, "</svg>"])


def _point(point: Point, x: float, y: float, boxes: list[tuple[float, float, float]]) -> list[str]:
    """Returns a point and its label, which is moved off the `boxes` (left, top, right) there are, and joins them."""
    width = len(point.name) * _LETTER
    flipped = x + 8 + width > _RIGHT
    left = x - 8 - width if flipped else x + 8
    places = sorted((y - _LINE / 2 + d for d in range(-12 * _LINE, 12 * _LINE, 2)), key=lambda top: abs(top + 7 - y))
    fits = [top for top in places if _TOP <= top <= _BOTTOM - _LINE]
    free = (t for t in fits if all(r < left or left + width < l or abs(t - b) >= _LINE for l, b, r in boxes))  # noqa: E741
    top = next(free, fits[0])
    boxes.append((left, top, left + width))
    best = ' class="best"' * point.best
    edge, anchor = (x - 8, "end") if flipped else (x + 8, "start")
    moved = abs(top + _LINE / 2 - y) > _LINE / 2
    line = [f'<path class="grid" d="M{x:.1f} {y:.1f}L{edge:.1f} {top + _LINE / 2:.1f}"/>'] if moved else []
    circle = f'<circle{best} cx="{x:.1f}" cy="{y:.1f}" r="{5 if point.best else 4}"/>'
    return [*line, circle, _text(edge, top + _LINE - 3, point.name, anchor, best)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
