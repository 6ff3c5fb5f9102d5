"""The report as data, text, JSON and HTML: counts, groups, errors, tables and charts."""

import base64
import hashlib
import io
import json
import math
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from grids import looped
from rich.console import Console

from mxfp8_graph._version import __version__
from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.base import Report
from mxfp8_graph.report.data import Account, RewriteReport, SiteReport
from mxfp8_graph.report.scatter import Scatter
from mxfp8_graph.report.section import WIDTH, Section, number, plain_text
from mxfp8_ops import system


def make_report(**fields: Any) -> RewriteReport:
    """Returns three rewritten sites, two of which share a weight, and two kept ones."""
    sites = [
        MatMulSite(name="up", op="MatMul", m="batch", n=64, k=128, weight="w0", weight_bytes=4000),
        MatMulSite(name="down[0]", op="Gemm", m=4, n=128, k=64, weight="w1", weight_bytes=4000),
        MatMulSite(name="down[1]", op="Gemm", m=None, n=128, k=64, weight="w1", weight_bytes=4000, shared_with=1),
        MatMulSite(name="<head>", op="MatMul", role="output_projection", n=100, k=64, weight="w2"),
        MatMulSite(name="small", op="MatMul", n=8, k=64, weight="w3", subgraph="if/then_branch"),
    ]
    recipe = Recipe(name="mxfp8")
    outcome = {
        "up": {"packed": "w0_e", "bytes_after": 1000, "relative_l2": 0.01},
        "down[0]": {"packed": "w1_e", "bytes_after": 1000, "relative_l2": 0.03},
        "down[1]": {"packed": "w1_e", "bytes_after": 1000, "relative_l2": 0.03},
    }
    defaults: dict[str, Any] = {
        "source": "m.onnx",
        "output": "m.mxfp8.onnx",
        "recipe": recipe.model_dump(),
        "sites": tuple(SiteReport(decision=d, **outcome.get(d.site.name, {})) for d in plan(sites, recipe)),
        "bytes_before": 40_000,
        "bytes_after": 10_000,
        "seconds": 1.5,
    }
    return RewriteReport(**{**defaults, **fields})


REPORT = make_report()
ANSWER = (
    "Rewrote 3 of 5 matmuls to MXFP8 with recipe mxfp8: 40.0 kB to 10.0 kB; check it with "
    "`mxfp8-graph verify m.onnx m.mxfp8.onnx`."
)


def test_sites_are_rewritten_or_kept_by_reason() -> None:
    def names(sites: tuple[SiteReport, ...]) -> list[str]:
        return [site.decision.site.name for site in sites]

    assert (names(REPORT.rewritten), names(REPORT.kept)) == (["up", "down[0]", "down[1]"], ["<head>", "small"])
    groups = {reason[:17]: names(sites) for reason, sites in REPORT.kept_by_reason.items()}
    assert groups == {"output projection": ["<head>"], "tiny: N = 8 is be": ["small"]}


def test_the_weight_error_counts_a_shared_weight_once_and_a_nan_is_the_worst() -> None:
    error = REPORT.weight_error
    assert error is not None
    assert (error.mean, error.worst, error.worst_site) == (pytest.approx(0.02), 0.03, "down[0]")
    assert make_report(sites=REPORT.kept).weight_error is None
    worse = [*REPORT.sites]
    worse[0] = replace(worse[0], relative_l2=math.nan)
    error = make_report(sites=tuple(worse)).weight_error
    assert error is not None
    assert error.worst_site == "up"


def test_the_dict() -> None:
    assert list(REPORT.to_dict()) == [
        "schema", "source", "output", "recipe", "dry_run", "already_rewritten", "seconds", "bytes_before",
        "bytes_after", "advice", "notes", "rewritten", "kept", "kept_by_reason", "weight_error", "account", "sites",
        "fusions", "unfused",
    ]  # fmt: skip
    assert REPORT.to_dict()["sites"][1] == {
        "name": "down[0]", "op": "Gemm", "module": "", "subgraph": "", "role": "linear", "m": 4, "n": 128, "k": 64,
        "dtype": None, "weight": "w1", "shared_with": 0, "has_bias": False, "quantize": True, "kind": "quantized",
        "rule": "policy", "reason": "linear, by recipe 'mxfp8'", "activations": "e4m3", "weight_format": "e4m3",
        "scale_rounding": "ceil", "nodes": [], "packed": "w1_e", "bytes_before": 4000, "bytes_after": 1000,
        "relative_l2": 0.03, "sqnr_db": pytest.approx(30.4575749),
    }  # fmt: skip


def test_printed_it_is_a_summary() -> None:
    lines = str(make_report(notes=("word " * 30,))).splitlines()
    assert (lines[0], lines[-1]) == ("Rewrite of m.onnx", ANSWER)
    assert lines[1].startswith("weight error  relative L2 mean 0.0200")
    assert [line[:5] for line in lines[-3:-1]] == ["note ", "     "], "facts fold"
    assert max(map(len, lines[:-1])) <= WIDTH


@looped(
    "formats, names",
    [
        ((("int8", "int8"), ("int8", "unchanged")), "MXINT8"),
        ((("e4m3", "bfloat16"), ("e5m2", "e4m3")), "MXFP8"),
        ((("e4m3", "e4m3"), ("int8", "bfloat16")), "MXFP8 and MXINT8"),
    ],
)
def test_the_answer_names_the_formats(formats: tuple[tuple[str, str], ...], names: str) -> None:
    sites = tuple(
        replace(site, decision=replace(site.decision, weight_format=weights, activations=activations))
        for site, (weights, activations) in zip(REPORT.rewritten, formats, strict=False)
    )
    assert make_report(sites=sites).answer().startswith(f"Rewrote 2 of 2 matmuls to {names} with recipe mxfp8: ")


def test_the_answer_names_sizes_and_the_next_command() -> None:
    assert REPORT.answer() == ANSWER
    assert make_report(source="model").answer().endswith("with recipe mxfp8: 40.0 kB to 10.0 kB.")
    account = Account(bytes_before=40_000, bytes_after=9000)
    planned = make_report(dry_run=True, output=None, bytes_after=None, account=account).answer()
    assert planned.startswith("Would rewrite 3 of 5 matmuls to MXFP8 with recipe mxfp8: ")
    assert planned.endswith(": tensors of 40.0 kB to 9.0 kB; nothing is written.")


def test_a_json_file_is_the_dict_and_replaces_an_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    assert REPORT.write(path) == path
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(REPORT.to_json()) == REPORT.to_dict()


def test_what_json_lacks_is_null_and_what_is_not_visible_is_escaped() -> None:
    exact = replace(REPORT.sites[0], relative_l2=0.0)
    error = json.loads(make_report(sites=(exact,)).to_json())["weight_error"]
    assert (error["worst_relative_l2"], error["worst_sqnr_db"], error["worst_site"]) == (0.0, None, "up")
    text = make_report(source="a\x1b\u2028\U000e0001b\n").to_json()
    assert '"source": "a\\u001b\\u2028\\udb40\\udc01b\\n"' in text
    assert json.loads(text)["source"] == "a\x1b\u2028\U000e0001b\n"


class Page(HTMLParser):
    """Collects the text of cells, and the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.frames: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.frames += [str(text) for name, text in attrs if name == "srcdoc"]
        if tag in {"td", "dt", "dd"}:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_the_page(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    source.write_bytes(b"abc")
    report = make_report(source=str(source), notes=("pack <head>",))
    text = report.write(tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    cells = {cell.strip() for cell in page.cells}
    assert {"<head>", "down[0]", "if/then_branch/small", "batch x 64 x 128", "none, Python API"} <= cells
    for part in (f"{source}, 3 bytes", f"mxfp8-graph {__version__}", system.processor(), f"{datetime.now():%Y}-"):
        assert part in " ".join(page.cells)
    assert "<dt>note</dt><dd>pack &lt;head&gt;</dd>" in text.split("<table")[0], "notes come first"
    assert '<td class="number" data-sort="4000.0">4.0 kB</td>' in text  # numbers sort as numbers


def test_the_page_runs_its_own_script_alone() -> None:
    text = REPORT.to_html()
    said = ANSWER.replace("`mxfp8-graph verify m.onnx m.mxfp8.onnx`", "the command below")
    assert f'<p class="answer good">{said}</p>' in text
    assert "<pre>mxfp8-graph verify m.onnx m.mxfp8.onnx</pre>" in text
    assert "<span>40.0 kB &rarr;</span><b>10.0 kB</b><span>25% of the size</span>" in text
    assert Page(text).tags.isdisjoint({"link", "img", "iframe"})
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    frame = REPORT._repr_html_()  # in a notebook
    assert 'sandbox="allow-scripts"' in frame
    (page,) = Page(frame).frames
    assert page.split("<dt>date")[0] == text.split("<dt>date")[0]


class Result(Report):
    """A report of the sections that are set."""

    TITLE, FILES = "Title", ()
    shown: ClassVar[list[Section]] = []

    def sections(self) -> list[Section]:
        return self.shown


def shown(*sections: Section, every: bool = False) -> tuple[list[str], str]:
    """Returns the lines on a terminal, and the page."""
    Result.shown = [*sections]
    return plain_text(Result().to_text(every=every)).splitlines(), Result().to_html()


TABLE = Section(
    title="Times",
    columns=(("recipe", "ms"), [(f"r{n}", number(n)) for n in range(5)]),
    best=3,
    bar="ms",
    most=2,
    scatter=Scatter(across="ms", up="ms", reference="r4"),
)


def test_sections_on_a_terminal() -> None:
    table, detail = ["Times", "recipe  ms", "r3       3", "r0       0"], Section(facts=[("a", "b")], detail=True)
    more = "... and 3 more; --verbose and --json have all"
    assert shown(Section(facts=[("c", "d")]), TABLE, detail)[0] == [*table, more, "", "c  d"]
    rest = ["r1       1", "r2       2", "r4       4"]
    assert shown(TABLE, detail, every=True)[0] == ["a  b", "", *table, *rest]
    assert "/a" * 80 in shown(Section(facts=[("path", "/a" * 80)]))[0][1], "a path stays whole"
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with console.capture() as capture:
        Result.shown = [TABLE]
        console.print(Result().to_text())
    assert "\x1b[1mr3" in capture.get()


def test_a_wide_table_fits_and_its_numbers_do_not_fold() -> None:
    row = ("site " * 30, "word " * 30, *[("1234.5678", 1.0)] * 6)
    lines, _ = shown(Section(columns=(("site", "why", *["a title in words"] * 6), [row])))
    assert max(map(len, lines)) <= WIDTH
    assert any(line.count("1234.5678") == 6 for line in lines)
    assert " ".join(lines).count("site ") + " ".join(lines).count("word ") >= 60
    lines, _ = shown(Section(columns=(("site", *"abcdefghijk"), [("name", *[("1234.56789", 1.0)] * 11)])))
    assert [line.split()[0] for line in lines] == ["site", "name", "site", "name"], "the other columns are below"
    assert 90 < len(lines[1]) <= WIDTH


def test_a_page_has_bars_a_chart_and_the_best_row_first() -> None:
    _, page = shown(TABLE, Section(title="nothing"), Section(columns=(("budget",), [("met",), ("missed",)])))
    assert '<td class="short green">met</td>' in page
    assert '<td class="short red">missed</td>' in page
    first = '<tr class="best"><td class="short">r3</td><td class="number bar" data-sort="3.0" style="--part: 75.0%">'
    assert first in page.split("<tbody>")[1]
    assert page.count("<circle") == 5
    assert "<circle" not in shown(replace(TABLE, scatter=Scatter(across="ms", up="gone")))[1]
    assert (page.count('<circle class="best"'), page.count('<circle class="reference"')) == (1, 1)
    assert "<details><summary>Times" in shown(replace(TABLE, folded=True))[1]
    assert "nothing" not in page


@looped("numbers, places", [((1.0, 2.0), 2), ((0.0, 0.0, 0.0), 3), ((5.0,) * 19, 19)])
def test_labels_of_a_chart_are_apart(numbers: tuple[float, ...], places: int) -> None:
    points = [(f"<{n} is as long as a name", 1.0, value) for n, value in enumerate(numbers)]
    text = Scatter(across="x", up="y").svg(points, "<1 is as long as a name")
    labels = [line for line in text.splitlines() if line.startswith("<text") and ">&lt;" in line]
    tops = sorted(float(line.split('y="')[1].split('"')[0]) for line in labels)
    assert len(tops) == places
    assert text.count('text-anchor="end">&lt;') + text.count('text-anchor="end" class="best">&lt;') == places
    assert min(np.diff(tops)) >= 14
    assert tops[0] > 10
    assert tops[-1] < 360


def test_the_pareto_line_of_a_chart_and_a_label_without_room() -> None:
    points = [("a", 1.0, 4.0), ("b", 2.0, 2.0), ("c", 3.0, 3.0), ("d", 4.0, 0.0)]
    for higher, count in ((False, 3), (True, 1)):
        line = Scatter(across="ms", up="error", higher_is_better=higher).svg(points).split('class="pareto" d="M')[1]
        assert line.split('"')[0].count("L") + 1 == count
    assert "<text" not in Scatter(across="x", up="y").svg([("long" * 99, 1.0, 1.0)]).split("<circle")[1]
