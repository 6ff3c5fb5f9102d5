"""Charts of bars as SVG, for a page. The style in `html.py` has their colors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Final

from mxfp8_graph.naming import printable
from mxfp8_graph.report.scatter import LETTER, Axis, text

_ROW, _LONGEST = 22, 360
"""Height of a row, and width of the longest bar."""
_MOST: Final = 12
"""Rows; the last one has the sum of the others."""
_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 64, 632, 14, 216, 250


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars beside their labels, the longest first."""

    unit: str
    rows: Sequence[tuple[str, float, bool]]
    """(label, number, whether it is highlighted), at least one row."""

    def svg(self) -> str:
        """Returns the chart."""
        rows = sorted(self.rows, key=lambda row: -row[1])
        if rest := rows[_MOST:]:
            rows = [*rows[: _MOST - 1], (f"{len(rest) + 1} others", sum(row[1] for row in rows[_MOST - 1 :]), False)]
        labels = [printable(label) for label, _, _ in rows]
        start = max(map(len, labels)) * 1.2 * LETTER + 8  # capitals are wider
        total, longest = sum(row[1] for row in rows) or 1.0, max(row[1] for row in rows) or 1.0
        width = start + _LONGEST + 16 * LETTER
        parts = [f'<svg viewBox="0 0 {width:.0f} {_ROW * len(rows)}" style="max-width: {width:.0f}px" role="img">']
        for i, (label, (_, value, marked)) in enumerate(zip(labels, rows, strict=True)):
            y, long = i * _ROW, _LONGEST * value / longest
            kind = "marked" if marked else "other"
            parts.append(text(start - 8, y + 15, label, "end"))
            parts.append(f'<rect class="{kind}" x="{start:.0f}" y="{y + 3}" width="{long:.1f}" height="{_ROW - 6}"/>')
            parts.append(text(start + long + 6, y + 15, f"{value:.3g} {self.unit}, {value / total:.0%}", "start"))
        return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, kw_only=True)
class Depths:
    """A column for each site in the order of the graph, above the names of layers."""

    title: str
    """The title of the numbers."""
    columns: Sequence[tuple[str, str, float, bool]]
    """(layer, name, number, whether it is highlighted), at least one column."""

    def svg(self) -> str:
        """Returns the chart."""
        up, wide = Axis([column[2] for column in self.columns], _BOTTOM, _TOP), (_RIGHT - _LEFT) / len(self.columns)
        parts = [f'<svg viewBox="0 0 640 {_HEIGHT}" role="img"><path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
        parts += up.grid(_LEFT, _RIGHT)
        middle = (_TOP + _BOTTOM) / 2
        parts.append(text(13, middle, self.title, "middle", f' transform="rotate(-90 13 {middle})"'))
        for i, (_, name, value, marked) in enumerate(self.columns):
            top, kind = up.place(value), "marked" if marked else "other"
            box = f'x="{_LEFT + i * wide + 0.1 * wide:.1f}" y="{top:.1f}" width="{0.8 * wide:.1f}"'
            words = escape(printable(f"{name}: {value:.4g}"))
            parts.append(f'<rect class="{kind}" {box} height="{_BOTTOM - top:.1f}"><title>{words}</title></rect>')
        return "\n".join([*parts, *self._layers(wide), "</svg>"])

    def _layers(self, wide: float) -> Iterator[str]:
        """Yields the names of layers below their columns, as far as there is room."""
        end = 0
        for layer, group in groupby(self.columns, key=lambda column: column[0]):
            start, end = end, end + len(list(group))
            left, right = _LEFT + start * wide, _LEFT + end * wide
            yield f'<path class="grid" d="M{left:.1f} {_BOTTOM}v8M{right:.1f} {_BOTTOM}v8"/>'
            # "encoder.layer.0", or where that is too long "layer.0" or "0".
            parts = printable(layer).split(".")
            shorter = (".".join(parts[i:]) for i in range(len(parts)))
            fit = next((name for name in shorter if len(name) * LETTER <= right - left), None)
            if fit:
                yield text((left + right) / 2, _BOTTOM + 20, fit, "middle")
