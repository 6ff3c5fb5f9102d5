"""A chart of named points as SVG, for a page. The style in `html.py` has its colors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, _WIDTH - 8, 14, _HEIGHT - 44
LETTER: Final = 7.2
"""Width of a letter of 12 pixels: of a wide font, so that labels are apart in every one."""
_LINE: Final = 15
"""Height of a label."""
_CROSSED: Final = 60.0
"""A label goes that far to keep off the line."""


Point = tuple[str, float, float]
"""Name, and the numbers across and up."""


class Axis:
    """An axis from 0 on, so that twice the distance is twice the number; `start` and `end` are pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = min(0.0, *values), max(0.0, *values)
        self._start, self._end = start, end

    def place(self, value: float) -> float:
        """Returns the place of a number in pixels."""
        # The greatest point stays clear of the border; 1.0 if all are 0.
        high = self._high * 1.1 or 1.0
        return self._start + (value - self._low) / (high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Returns the numbers beside the axis."""
        # At most six steps, each 1, 2, 5 or 10 times a power of ten.
        least = (self._high - self._low) / 6 or 1.0
        power = 10.0 ** math.floor(math.log10(least))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= least)
        # 1e-9 keeps the last tick where a division rounds down.
        return [i * step for i in range(math.ceil(self._low / step), 1 + int(self._high / step + 1e-9))]

    def grid(self, left: float, right: float) -> Iterator[str]:
        """Yields the numbers and lines of an axis that goes up."""
        for tick in self.ticks():
            y = self.place(tick)
            yield text(left - 7, y + 4, f"{tick:g}", "end")
            yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """A chart of a table: a point with a name for each row that has both numbers, and the Pareto line."""

    across: str
    up: str
    """Titles of two columns. Less is better."""
    higher_is_better: bool = False
    """Whether more is better in column `up`."""
    reference: str = ""
    """Name of the row of the original."""

    def svg(self, points: Sequence[Point], best: str | None = None) -> str:
        """Returns the chart; `best` is the name of a highlighted point. Numbers must be finite."""
        across = Axis([point[1] for point in points], _LEFT, _RIGHT)
        up = Axis([point[2] for point in points], _BOTTOM, _TOP)
        middle, title = (_TOP + _BOTTOM) / 2, f"{self.across} (dashed: the Pareto line)"
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
        parts += [text(across.place(t), _BOTTOM + 16, f"{t:g}", "middle") for t in across.ticks()]
        parts += up.grid(_LEFT, _RIGHT)
        parts.append(text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, title, "middle"))
        parts.append(text(13, middle, self.up, "middle", f' transform="rotate(-90 13 {middle})"'))
        places = [(name, across.place(x), up.place(y)) for name, x, y in points]
        line = [(across.place(x), up.place(y)) for _, x, y in _pareto(points, -1 if self.higher_is_better else 1)]
        parts.append(f'<path class="pareto" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in line)}"/>')
        crossed = list(_along(line))
        # All points come first, because labels keep off them; the best one has the first choice.
        taken = [_Box(x - 5, y - 5, x + 5, y + 5) for _, x, y in places]
        for place in sorted(places, key=lambda place: place[0] != best):
            kind = {best: ' class="best"', self.reference: ' class="reference"'}.get(place[0], "")
            parts += _point(place, taken, crossed, kind)
        return "\n".join([*parts, "</svg>"])


def _pareto(points: Sequence[Point], sign: int) -> Iterator[Point]:
    """Yields the points that no other beats in both numbers, from left to right."""
    least = math.inf
    for point in sorted(points, key=lambda point: (point[1], sign * point[2])):
        if sign * point[2] < least:
            least = sign * point[2]
            yield point


def _along(line: Sequence[tuple[float, float]]) -> Iterator[_Box]:
    """Yields small boxes along a line."""
    for (x, y), (to_x, to_y) in pairwise(line):
        steps = max(1, int(math.hypot(to_x - x, to_y - y) / 4))
        for i in range(steps):
            at_x, at_y = x + (to_x - x) * i / steps, y + (to_y - y) * i / steps
            yield _Box(at_x - 1, at_y - 1, at_x + 1, at_y + 1)


def _point(place: Point, taken: list[_Box], crossed: Sequence[_Box], kind: str) -> Iterator[str]:
    """Yields a point and its label, in the nearest free place, which it adds to `taken`."""
    name, x, y = place
    width = len(name) * LETTER * (1.1 if "best" in kind else 1)
    choices: list[tuple[float, int, _Box, float, str]] = []
    for edge, anchor, left in ((x + 8, "start", x + 8), (x - 8, "end", x - 8 - width), (x, "middle", x - width / 2)):
        for top in range(_TOP, _BOTTOM - _LINE):
            box = _Box(left, top, left + width, top + _LINE)
            if box.left < _LEFT or box.right > _WIDTH or any(map(box.meets, taken)):
                continue
            far = abs(top + _LINE / 2 - y) + 2 * (anchor == "end") + _CROSSED * any(map(box.meets, crossed))
            choices.append((far, len(choices), box, edge, anchor))
    radius = 6 if "best" in kind else 4
    yield f'<circle{kind} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(name)}</title></circle>'
    if not choices:  # a full chart: the title of the point has its name
        return
    _, _, box, edge, anchor = min(choices)
    taken.append(box)
    if abs(box.top + _LINE / 2 - y) > _LINE:
        yield f'<path class="grid" d="M{x:.1f} {y:.1f}L{edge:.1f} {box.top + _LINE / 2:.1f}"/>'
    yield text(edge, box.top + _LINE - 4, name, anchor, kind)


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    """Returns a text of a chart; y is the place of its base line."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'
