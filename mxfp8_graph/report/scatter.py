"""A chart of named points as SVG, for a page. The style in `html.py` has its colors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

_WIDTH, _HEIGHT = 640, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, _WIDTH - 16, 14, _HEIGHT - 44
_LETTER: Final = 6.4
"""Width of a letter of a label."""
_LINE: Final = 14
"""Height of a label."""


Point = tuple[str, float, float]
"""Name, and the numbers across and up."""


class _Axis:
    """An axis from 0 on, so that twice the distance is twice the number; `start` and `end` are pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = min(0.0, *values), max(0.0, *values)
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        # The greatest point stays clear of the border; 1.0 if all are 0.
        high = self._high * 1.1 or 1.0
        return self._start + (value - self._low) / (high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        # At most six steps, each 1, 2, 5 or 10 times a power of ten.
        least = (self._high - self._low) / 6 or 1.0
        power = 10.0 ** math.floor(math.log10(least))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= least)
        # 1e-9 keeps the last tick where a division rounds down.
        return [i * step for i in range(math.ceil(self._low / step), 1 + int(self._high / step + 1e-9))]


def svg(points: Sequence[Point], titles: tuple[str, str], best: str | None) -> str:
    """Returns the chart; `titles` name the axes, `best` is the name of a highlighted point. Numbers must be finite."""
    across = _Axis([point[1] for point in points], _LEFT, _RIGHT)
    up = _Axis([point[2] for point in points], _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
    parts += [_text(across.place(t), _BOTTOM + 16, f"{t:g}", "middle") for t in across.ticks()]
    parts += [_text(_LEFT - 7, up.place(t) + 4, f"{t:g}", "end") for t in up.ticks()]
    parts += [f'<path class="grid" d="M{_LEFT} {up.place(t):.1f}H{_RIGHT}"/>' for t in up.ticks()]
    middle = (_TOP + _BOTTOM) / 2
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, titles[0], "middle"))
    parts.append(_text(13, middle, titles[1], "middle", f' transform="rotate(-90 13 {middle})"'))
    places = [(name, across.place(x), up.place(y)) for name, x, y in points]
    # The points come first, because labels keep off them.
    boxes = [(x - 4, y - 4, x + 4) for _, x, y in places]
    for place in places:
        parts += _point(*place, boxes, ' class="best"' * (place[0] == best))
    return "\n".join([*parts, "</svg>"])


def _point(name: str, x: float, y: float, boxes: list[tuple[float, float, float]], best: str) -> list[str]:
    """Returns a point and its label, moved off `boxes` (left, top, right), and adds the label to `boxes`."""
    width = len(name) * _LETTER
    # To the right of the point, unless the label would leave the chart.
    edge, anchor, left = (x + 8, "start", x + 8) if x + 8 + width < _RIGHT else (x - 8, "end", x - 8 - width)
    tops = sorted(range(_TOP, _BOTTOM - _LINE, 2), key=lambda top: abs(top + _LINE / 2 - y))
    # The nearest free height; if there is none, labels overlap.
    near = [box for box in boxes if box[0] <= left + width and left <= box[2]]
    top = next((top for top in tops if all(abs(top - box[1]) >= _LINE for box in near)), tops[0])
    boxes.append((left, top, left + width))
    line = f'<path class="grid" d="M{x:.1f} {y:.1f}L{edge:.1f} {top + _LINE / 2}"/>'
    circle = f'<circle{best} cx="{x:.1f}" cy="{y:.1f}" r="{5 if best else 4}"/>'
    return [line, circle, _text(edge, top + _LINE - 3, name, anchor, best)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
