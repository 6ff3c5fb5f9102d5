"""Titled tables as one HTML page: no scripts, nothing fetched, readable in print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from mxfp8_graph.naming import printable

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }}
h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }}
td {{ overflow-wrap: anywhere; }}
.{dimmed} {{ opacity: .7; }}
</style>
</head>
<body>
<h1>{title}</h1>
{tables}
</body>
</html>
"""

Table = tuple[str, Sequence[str], Iterable[Sequence[str]]]
"""Heading, header and rows; heading and header may be empty."""


def page(title: str, tables: Iterable[Table], *, dimmed: str) -> str:
    """Returns the page; rows with a cell that says `dimmed`, one word, are paler than the others."""
    parts = []
    for heading, header, rows in tables:
        parts += [f"<h2>{_text(heading)}</h2>"] if heading else []
        parts.append(_table(header, rows, dimmed))
    return _PAGE.format(title=_text(title), tables="\n".join(parts), dimmed=dimmed)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], dimmed: str) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    lines = ["<table>"]
    lines += [f"<tr>{head}</tr>"] if header else []
    for row in rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in row)
        lines.append(f'<tr class="{dimmed if dimmed in row else ""}">{cells}</tr>')
    return "\n".join([*lines, "</table>"])


def _text(text: str) -> str:
    """Returns `text` as it may stand anywhere in the page."""
    return escape(printable(text))
