"""A rewrite report as one HTML page: no scripts, nothing fetched, readable in print."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from mxfp8_graph.report import text as tables
from mxfp8_graph.report.data import RewriteReport, SiteReport

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
.kept {{ opacity: .7; }}
</style>
</head>
<body>
<h1>{title}</h1>
{summary}
<h2>Why</h2>
{reasons}
<h2>Sites</h2>
{sites}
</body>
</html>
"""

_SITE: Final = (*tables.SITE_HEADER, "before", "after", "rel. L2", "SQNR dB")


def page(report: RewriteReport) -> str:
    """Returns the page: the closing table of the command line, the reasons, and every site."""
    title = f"{tables.headline(report)}: {report.source}"
    reasons = [
        (decision, str(len(sites)), reason)
        for decision, groups in (("rewritten", report.rewritten_by_reason), ("kept", report.kept_by_reason))
        for reason, sites in groups.items()
    ]
    return _PAGE.format(
        title=escape(title),
        summary=_table((), tables.facts(report)),
        reasons=_table(("decision", "sites", "reason"), reasons),
        sites=_table(*tables.filled(_SITE, [_site(site) for site in report.sites])),
    )


def _site(site: SiteReport) -> tuple[str, ...]:
    return (*tables.site_row(site), *tables.weight_row(site))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = [(list(row), "kept" if "kept" in row else "") for row in map(tuple, rows)]
    lines = [
        f'<tr class="{css}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells, css in body
    ]
    return "\n".join(["<table>", *([f"<tr>{head}</tr>"] if head else []), *lines, "</table>"])
