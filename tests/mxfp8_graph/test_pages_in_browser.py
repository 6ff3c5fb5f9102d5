"""The pages of reports in Chromium: nothing is cut, overlaps or breaks, and their scripts have no error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import models as b
import onnx
import pytest

import mxfp8_graph
from mxfp8_graph.report.html import page
from mxfp8_graph.report.scatter import Scatter
from mxfp8_graph.report.section import Head, Section, number
from mxfp8_graph.running.runner import run_model

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.tools,
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]

# Every page is in a frame of each width. The script opens what is folded, and lists what a reader could not read.
HARNESS = """<!DOCTYPE html><meta charset="utf-8">FRAMES<script>
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
function* problems(page, width) {
  page.querySelectorAll("details").forEach(each => { each.open = true; });
  if (page.documentElement.scrollWidth > width) yield "the page is wider than the window";
  for (const each of page.querySelectorAll("h1, h2, p, b, span, dd, dt, pre, button, svg, .tile"))
    if (each.getBoundingClientRect().right > width) yield `cut: ${each.textContent}`;
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode());)
    if (node.parentNode.closest("table, .tile, .answer, dl"))
      for (const word of node.data.matchAll(/\\w+/g)) {
        const range = page.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(rect => rect.top)).size > 1) yield `broken: ${word[0]}`;
      }
  for (const svg of page.querySelectorAll("svg")) {
    const words = [...svg.querySelectorAll("text")], frame = svg.getBoundingClientRect();
    const boxes = words.map(each => each.getBoundingClientRect());
    for (const [i, box] of boxes.entries()) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
        yield `out of the picture: ${words[i].textContent}`;
      for (const [j, other] of boxes.slice(0, i).entries())
        if (meet(box, other)) yield `overlap: ${words[i].textContent}, ${words[j].textContent}`;
    }
  }
  for (const head of page.querySelectorAll("thead tr")) head.cells[head.cells.length - 1].click();
  for (const each of page.querySelectorAll("button")) each.click();
}
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const list = [...problems(frame.contentDocument, frame.width)];
    return [`${frame.title} at ${frame.width}`, list, frame.contentDocument.querySelectorAll("button").length];
  });
  document.body.innerHTML = "";
  document.body.textContent = "RESULT" + JSON.stringify(found) + "END";
};
</script>"""


def model() -> str:
    """Writes a model with long names, and returns its path."""
    proto = b.chain_model()
    for i, node in enumerate(proto.graph.node):
        node.name = f"encoder.layer.{i // 2}.attention.self.output_projection.dense_{i}"
    Path("a_folder_with_a_long_name").mkdir()
    onnx.save(proto, path := "a_folder_with_a_long_name/a_model_with_a_long_name.onnx")
    return path


def pages() -> dict[str, str]:
    """Returns the page of each command by name."""
    path = model()
    rewritten, report = mxfp8_graph.rewrite(path)
    commands: dict[str, Callable[[], Any]] = {
        "rewrite": lambda: report,
        "verify": lambda: mxfp8_graph.verify(path, rewritten),
        "run": lambda: run_model(rewritten, repeat=1, profile=True),
        "compare": lambda: mxfp8_graph.compare(path, repeat=1),
        "analyze": lambda: mxfp8_graph.analyze(path),
        "tune": lambda: mxfp8_graph.tune(path, "cosine>=0.5"),
        "convert": lambda: mxfp8_graph.convert(rewritten, "standard")[1],
    }
    names = [f"a-recipe-with-a-name-{i}" for i in range(24)]
    rows = [(name, number(9 + i % 5 / 9), number(1 + i % 7 / 90)) for i, name in enumerate(names)]
    chart = Scatter(across="ms", up="error", reference=names[3])
    labels = Section(columns=(("recipe", "ms", "error"), rows), best=2, scatter=chart)
    found = {name: command().to_html() for name, command in commands.items()}
    return {**found, "labels": page("Points in one place", "", Head(), [labels], ())}


def test_every_page_can_be_read_on_a_narrow_and_a_wide_window(tmp_path: Path) -> None:
    frames = [
        f'<iframe title="{name}" width="{width}" height="900" srcdoc="{escape(text)}"></iframe>'
        for name, text in pages().items()
        for width in (600, 1200)
    ]
    path = tmp_path / "harness.html"
    path.write_text(HARNESS.replace("FRAMES", "".join(frames)), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path}")
    command = (str(CHROMIUM), *options, "--virtual-time-budget=10000", "--dump-dom", path.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    match = re.search("RESULT(.*)END", done.stdout)
    assert match, done.stdout[-2000:]
    results = json.loads(unescape(match[1]))
    assert len(results) == len(frames)
    assert {name: problems for name, problems, _ in results if problems} == {}
    assert {name.split()[0] for name, _, buttons in results if not buttons} == {"run", "convert", "labels"}
