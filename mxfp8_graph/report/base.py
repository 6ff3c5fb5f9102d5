"""Base classes of all reports: JSON by fields, text and a page of the same sections, files."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text

from mxfp8_graph.files import check_output, output
from mxfp8_graph.naming import printable
from mxfp8_graph.report import html
from mxfp8_graph.report.section import Head, Section, plain_text, render
from mxfp8_ops.errors import Mxfp8Error


@dataclass(frozen=True, kw_only=True)
class Data:
    """A part of a report."""

    KEYS: ClassVar[str] = ""
    """Keys of the JSON, in order, each "attribute" or "key=attribute.of.attribute"; all fields if it is empty.
    With "?" at the end, an empty text becomes None."""

    def content(self) -> dict[str, Any]:
        """Returns the values of the JSON by key, before `plain` converts them to JSON types."""
        keys = self.KEYS.split() or [field.name for field in fields(self)]
        content = {}
        for entry in keys:
            key, _, attribute = entry.rstrip("?").partition("=")
            value = attrgetter(attribute or key)(self)
            content[key] = value or None if entry.endswith("?") else value
        return content

    def to_dict(self) -> dict[str, Any]:
        """Returns the content in JSON types. Numbers that JSON lacks (NaN, infinity) are None."""
        return {key: plain(value) for key, value in self.content().items()}


@dataclass(frozen=True, kw_only=True)
class Report(Data, ABC):
    """The result of a command, as data, text, JSON or an HTML page."""

    TITLE: ClassVar[str]
    """Heading of the page, with names of fields in braces: "Rewrite of {source}"."""
    FILES: ClassVar[tuple[str, ...]]
    """Fields with the paths of models, for the page's footer; None and paths without a file are left out."""

    def answer(self) -> str:
        """Returns the result in one sentence, with its two main numbers; "" without one.

        It is the last line on a terminal and the first on the page: "Take mxint8: relative L2 .0041, 2.3 times as fast
        as the original."
        """
        return ""

    def head(self) -> Head:
        """Returns the top of the page: verdict; size, speed and error as far as they are known; the next command."""
        return Head()

    @abstractmethod
    def sections(self) -> Iterable[Section]:
        """Yields the sections of the page, the most important first; a terminal shows them in reverse."""

    def to_text(self, *, every: bool = False) -> Group:
        """Returns the text for a terminal; with `every`, also details and the rows above a section's `most`."""
        return render(self.sections(), self.answer(), every=every)

    def __str__(self) -> str:
        """Returns a summary: title, facts and answer."""
        facts = [Section(facts=section.facts) for section in self.sections() if not section.detail]
        return plain_text(Group(Text(self._title()), render(facts, self.answer(), every=False)))

    def _repr_html_(self) -> str:
        """Returns the page for a notebook, in a frame: its style must not change the notebook's."""
        style = "width: 100%; height: 40rem; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.to_html())}"></iframe>'

    def _title(self) -> str:
        return printable(self.TITLE.format_map(vars(self)))

    def to_html(self) -> str:
        """Returns one self-contained page: it fetches nothing, and shows everything without its script."""
        files = (getattr(self, name) for name in self.FILES)
        return html.page(self._title(), self.answer(), self.head(), self.sections(), filter(None, files))

    def to_json(self) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def write(self, path: str | Path, *, overwrite: bool = True) -> Path:
        """Writes the report as JSON, or as a page if the suffix is .html, and returns the path.

        Raises:
            Mxfp8Error: another suffix, the file exists and `overwrite` is false, or it cannot be written.
        """
        path = check_report_path(path, overwrite=overwrite)
        text = self.to_html() if path.suffix.lower() == ".html" else self.to_json()
        with output(path, overwrite=overwrite) as folder:
            (folder / path.name).write_bytes(text.encode())
        return path


def check_report_path(path: str | Path, models: Iterable[Path] = (), *, overwrite: bool = True) -> Path:
    """Returns `path` if a report on `models` can be written there, else raises Mxfp8Error. Call it before long work."""
    path = Path(path)
    if path.suffix.lower() not in {".json", ".html"}:
        raise Mxfp8Error(path, f"report with suffix {path.suffix!r}", expected=".json or .html", advice="rename it")
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
    # JSON has no NaN and no infinity, and parsers differ in what they accept for them.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
