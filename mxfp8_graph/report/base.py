"""What the reports of all commands have in common: JSON by fields; text and a page of the same sections; files."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.text import Text

from mxfp8_graph.files import check_output, output
from mxfp8_graph.report import html
from mxfp8_graph.report.section import Section, render
from mxfp8_ops.errors import Mxfp8Error

SUFFIXES: Final = (".json", ".html")
"""Suffixes of the files that `Report.write` can write."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A part of a report."""

    KEYS: ClassVar[str] = ""
    """Keys of the JSON, in order, each "attribute" or "key=attribute.of.attribute"; all fields if there are none.
    With "?" at the end, an empty text is None."""

    def content(self) -> dict[str, Any]:
        """Returns what the JSON has, by key, not yet in its types."""
        keys = self.KEYS.split() or [field.name for field in fields(self)]
        content = {}
        for entry in keys:
            key, _, attribute = entry.rstrip("?").partition("=")
            value = attrgetter(attribute or key)(self)
            content[key] = value or None if entry.endswith("?") else value
        return content

    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only. Numbers that JSON lacks (NaN, infinity) are None."""
        return {key: plain(value) for key, value in self.content().items()}


@dataclass(frozen=True, kw_only=True)
class Report(Data, ABC):
    """The result of a command, as data, text, JSON or an HTML page."""

    TITLE: ClassVar[str]
    """Heading of the page, with names of fields in braces: "Rewrite of {source}"."""
    FILES: ClassVar[tuple[str, ...]]
    """Fields that have the paths of models, which the page identifies; it leaves out None and paths without a file."""

    @abstractmethod
    def sections(self) -> Iterable[Section]:
        """Yields what a terminal and the page show, in this order."""

    def headline(self) -> str:
        """Returns the outcome in one line, the first of the text; "" without one."""
        return ""

    def facts(self) -> Sequence[tuple[str, str]]:
        """Returns (label, value) pairs: what there is to know beside the tables."""
        return ()

    def lead(self) -> Sequence[str]:
        """Returns the sentences at the top of the page: the outcome."""
        return [f"{self.headline()}."] if self.headline() else []

    def to_text(self, *, every: bool = False) -> Text:
        """Returns what a terminal shows; with `every` also the rows that are too many to be shown unasked."""
        return render(self.headline(), self.sections(), every=every)

    def __str__(self) -> str:
        """Returns what a terminal shows, as plain text."""
        return self.to_text().plain

    def _repr_html_(self) -> str:
        """Returns what a terminal shows as HTML, for notebooks."""
        outcome = Section(facts=[("outcome", self.headline())] if self.headline() else ())
        return "\n".join(html.section_html(part) for part in (outcome, *self.sections()) if not part.detail)

    def to_html(self) -> str:
        """Returns one self-contained page: nothing is fetched, and all is there without its script."""
        title, files = self.TITLE.format_map(vars(self)), (getattr(self, name) for name in self.FILES)
        # Facts first: they would stand behind tables of hundreds of rows, and notes are among them.
        sections = sorted(self.sections(), key=lambda section: not section.facts)
        return html.page(title, self.lead(), sections, filter(None, files))

    def to_json(self) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def write(self, path: str | Path, *, overwrite: bool = True) -> Path:
        """Writes the report, as JSON or (suffix .html) as a page, and returns the path; raises Mxfp8Error otherwise."""
        path = check_report_path(path, overwrite=overwrite)
        text = self.to_html() if path.suffix.lower() == ".html" else self.to_json()
        with output(path, overwrite=overwrite) as folder:
            (folder / path.name).write_bytes(text.encode())
        return path


def check_report_path(path: str | Path, models: Iterable[Path] = (), *, overwrite: bool = True) -> Path:
    """Returns `path` if a report on `models` can be written there, else raises Mxfp8Error. Ask before the work."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        what = f"report with suffix {path.suffix!r}"
        raise Mxfp8Error(path, what, expected=" or ".join(SUFFIXES), advice="rename it")
    # A report must not replace the model that it is about.
    check_output(path, overwrite=overwrite, inputs=list(models))
    return path


def plain(value: Any) -> Any:
    """Returns `value` with JSON types only: sequences as lists, NaN and infinity as None, anything unknown as text."""
    if isinstance(value, Data):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
