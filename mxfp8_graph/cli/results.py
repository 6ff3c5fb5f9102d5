"""Writes the result of a command: to stdout as text or JSON, and to the files of --report and --html."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mxfp8_graph.terminal import show

if TYPE_CHECKING:
    from mxfp8_graph.report.base import Report


def check_reports(reports: Sequence[Path] | None, models: Iterable[Path | None], *, overwrite: bool) -> None:
    """Raises Mxfp8Error if a report cannot be written. Commands call it before the work, which may take minutes."""
    from mxfp8_graph.report.base import check_report_path

    files = [model for model in models if model]
    for report in reports or ():
        check_report_path(report, files, overwrite=overwrite)


def print_result(
    result: Report, *, json: bool, reports: Sequence[Path] | None, overwrite: bool, every: bool = False
) -> None:
    """Prints a result, as JSON or as text, and writes the reports; see `Report.to_text`."""
    if json:
        typer.echo(result.to_json(), nl=False)
    else:
        show(result.to_text(every=every))
    # A path that is named twice is written once; the second write would fail without --overwrite.
    for report in dict.fromkeys(reports or ()):
        result.write(report, overwrite=overwrite)
