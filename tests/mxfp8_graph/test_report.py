"""The report as data, JSON and HTML: counts, groups, errors; and files that are whole or not there."""

import base64
import hashlib
import json
import math
from dataclasses import replace
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from full_disk import files, files_of_at_most
from grids import looped

from mxfp8_graph import provenance
from mxfp8_graph._version import __version__
from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report import html
from mxfp8_graph.report.data import RewriteReport, SiteReport, sqnr_db
from mxfp8_graph.report.section import Section, render
from mxfp8_ops.errors import Mxfp8Error


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


def names(sites: tuple[SiteReport, ...]) -> list[str]:
    return [site.decision.site.name for site in sites]


REPORT = make_report()


def test_sqnr() -> None:
    for relative_l2, decibels in ((1.0, 0.0), (0.1, 20.0), (0.01, 40.0), (0.0, math.inf)):
        assert sqnr_db(relative_l2) == pytest.approx(decibels, abs=1e-12)


def test_rewritten_and_kept_and_groups_by_reason() -> None:
    assert names(REPORT.rewritten) == ["up", "down[0]", "down[1]"]
    assert names(REPORT.kept) == ["<head>", "small"]
    assert {reason[:17]: names(sites) for reason, sites in REPORT.kept_by_reason.items()} == {
        "output projection": ["<head>"],
        "tiny: N = 8 is be": ["small"],
    }


def test_the_error_counts_a_shared_weight_once_and_a_nan_is_the_worst() -> None:
    error = REPORT.weight_error
    assert error is not None
    assert (error.mean, error.worst, error.worst_site) == (pytest.approx(0.02), 0.03, "down[0]")
    assert make_report(sites=REPORT.kept).weight_error is None
    sites = tuple(
        SiteReport(decision=s.decision, packed=s.packed, relative_l2=math.nan if i == 1 else s.relative_l2)
        for i, s in enumerate(REPORT.sites)
    )
    error = make_report(sites=sites).weight_error
    assert error is not None
    assert error.worst_site == "down[0]"


def test_the_dict() -> None:
    assert list(REPORT.to_dict()) == [
        "schema", "source", "output", "recipe", "dry_run", "already_rewritten", "seconds", "bytes_before",
        "bytes_after", "notes", "rewritten", "kept", "kept_by_reason", "weight_error", "account", "sites", "fusions",
    ]  # fmt: skip
    assert REPORT.to_dict()["sites"][1] == {
        "name": "down[0]", "op": "Gemm", "module": "", "subgraph": "", "role": "linear", "m": 4, "n": 128, "k": 64,
        "dtype": None, "weight": "w1", "shared_with": 0, "has_bias": False, "quantize": True, "kind": "quantized",
        "rule": "policy", "reason": "linear, by recipe 'mxfp8'", "activations": "e4m3", "weight_format": "e4m3",
        "scale_rounding": "ceil", "nodes": [], "packed": "w1_e", "bytes_before": 4000, "bytes_after": 1000,
        "relative_l2": 0.03, "sqnr_db": pytest.approx(30.4575749),
    }  # fmt: skip


def test_printed_it_is_what_a_terminal_shows() -> None:
    lines = str(REPORT).splitlines()
    assert lines[0] == "3 of 5 matmuls rewritten to MXFP8 with recipe mxfp8"
    assert "size          40.0 kB -> 10.0 kB (4.00x smaller)" in lines
    assert not any("SiteReport(" in line or line != line.rstrip() for line in lines)


def test_a_notebook_shows_the_same_as_a_part_of_its_page() -> None:
    page = Page(REPORT._repr_html_())
    assert "40.0 kB -> 10.0 kB (4.00x smaller)" in {cell.strip() for cell in page.cells}
    assert page.tags.isdisjoint({"html", "style", "script", "link", "img"})
    assert "&lt;head&gt;" not in REPORT._repr_html_(), "the table of all sites is a detail"


@looped(
    "formats, wanted",
    [
        ((("int8", "int8"), ("int8", "unchanged")), "MXINT8"),
        ((("e4m3", "bfloat16"), ("e5m2", "e4m3")), "MXFP8"),
        ((("e4m3", "e4m3"), ("int8", "bfloat16")), "MXFP8 and MXINT8"),
    ],
)
def test_the_headline_names_the_formats(formats: tuple[tuple[str, str], ...], wanted: str) -> None:
    sites = tuple(
        replace(site, decision=replace(site.decision, weight_format=weights, activations=activations))
        for site, (weights, activations) in zip(REPORT.rewritten, formats, strict=False)
    )
    headline = make_report(sites=sites).headline()
    assert headline == f"2 of 2 matmuls rewritten to {wanted} with recipe mxfp8"


def test_json_is_the_dict(tmp_path: Path) -> None:
    assert json.loads(REPORT.to_json()) == REPORT.to_dict()
    path = REPORT.write(tmp_path / "report.json")
    assert json.loads(path.read_text(encoding="utf-8")) == REPORT.to_dict()


def test_what_json_lacks_is_null_and_what_is_not_visible_is_escaped() -> None:
    exact = SiteReport(decision=REPORT.sites[0].decision, packed="w", relative_l2=0.0)
    assert json.loads(make_report(sites=(exact,)).to_json())["weight_error"] == {
        "mean_relative_l2": 0.0,
        "mean_sqnr_db": None,
        "worst_relative_l2": 0.0,
        "worst_sqnr_db": None,
        "worst_site": "up",
    }
    text = make_report(source="a\x1b\u2028\U000e0001b\n").to_json()
    assert '"source": "a\\u001b\\u2028\\udb40\\udc01b\\n"' in text
    assert json.loads(text)["source"] == "a\x1b\u2028\U000e0001b\n"


class Page(HTMLParser):
    """Collects the text of cells, and the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in {"td", "dt", "dd"}:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_the_page(tmp_path: Path) -> None:
    text = REPORT.write(tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {"<head>", "down[0]", "if/then_branch/small", "batch x 64 x 128"} <= {cell.strip() for cell in page.cells}
    assert "<p>3 of 5 matmuls rewritten to MXFP8 with recipe mxfp8.</p>" in text
    assert "40.0 kB -> 10.0 kB (4.00x smaller)" in {cell.strip() for cell in page.cells}
    assert page.tags.isdisjoint({"link", "img", "iframe"})
    assert '<td class="number" data-sort="4000.0">4.0 kB</td>' in text  # numbers sort as numbers
    script = text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


def test_the_page_begins_with_the_notes_however_long_its_tables_are() -> None:
    top = make_report(notes=("pack <head>",)).to_html().split("<table")[0]
    assert "<dt>note</dt><dd>pack &lt;head&gt;</dd>" in top
    assert "<dt>size</dt><dd>40.0 kB -&gt; 10.0 kB (4.00x smaller)</dd>" in top
    assert "<dt>weight error</dt><dd>relative L2 mean 0.0200" in top


def test_the_page_says_how_it_was_made(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    source.write_bytes(b"abc")
    cells = " ".join(Page(make_report(source=str(source)).to_html()).cells)
    assert f"{source}, 3 bytes" in cells
    assert f"mxfp8-graph {__version__}" in cells
    assert "none, Python API" in cells
    assert provenance.processor() in cells
    assert datetime.now(timezone.utc).strftime("%Y-") in cells


def test_a_section_as_text_and_as_html() -> None:
    rows = [(f"site {n}", (f"{n} B", float(n))) for n in range(5)]
    table = Section(columns=(("site", "bytes"), rows), bar="bytes", most=-2)
    for every, shown in ((False, ["site 3", "site 4"]), (True, [row[0] for row in rows])):
        text = render("", [table, Section(facts=[("a", "b")], detail=True)], every=every).plain
        lines = [line.split("  ")[0] for line in text.splitlines()]
        more = [] if every else ["... and 3 more before; --verbose and --json have all"]
        assert lines == [*(["a"] if every else []), "site", *shown, *more]
    cell = '<td class="number" data-sort="2.0" style="background: linear-gradient(to right, var(--bar) 50.0%'
    assert cell in html.section_html(table)
    assert html.section_html(Section(title="nothing")).strip() == ""


def test_an_existing_report_is_replaced_or_left_where_it_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with files_of_at_most(100), pytest.raises(Mxfp8Error) as caught:
        REPORT.write(path)
    expected = "expected a writable folder with enough space; free some space or pass another path"
    assert str(caught.value) == f"{path}: cannot be written: File too large; {expected}"
    assert files(tmp_path) == ["report.json"]
    assert path.read_bytes() == b"old"
    REPORT.write(path)
    assert files(tmp_path) == ["report.json"]
    assert "old" not in path.read_text(encoding="utf-8")


def test_where_a_report_cannot_go(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    existing = "expected a file in an existing folder; create the folder"
    for name, message in (
        ("report.txt", "report with suffix '.txt'; expected .json or .html; rename it"),
        ("none/report.json", f"folder {tmp_path}/none does not exist; {existing}"),
        ("folder.json", "a directory; expected a file name; pass another path"),
    ):
        with pytest.raises(Mxfp8Error) as caught:
            REPORT.write(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: {message}"
