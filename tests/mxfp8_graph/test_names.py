"""Names: unique ones, and hostile ones, which move no cursor, reorder no line and mark up no page."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import models as b
import onnx
import pytest
from commands import run
from releases import release

import mxfp8_graph
from mxfp8_graph.naming import printable, reserve_name, unique_name
from mxfp8_graph.running.runner import run_model
from mxfp8_graph.running.verify import verify

pytestmark = pytest.mark.usefixtures("own_folder")

HOSTILE = "\x1b[31m\x1b]0;owned\x07\r\n\u202e\x9b2J[red]x[/red]<script>alert(1)</script>\u2066\u200b"


def hostile_model() -> onnx.ModelProto:
    """Returns a model in which everything that can have a name has a hostile one."""
    model = b.chain_model()
    renamed: dict[str, str] = {}
    graph = model.graph
    for node in graph.node:
        node.name += HOSTILE
        for names in (node.input, node.output):
            names[:] = [renamed.setdefault(name, name + HOSTILE) for name in names]
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = renamed.get(value.name, value.name)
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param += HOSTILE
    graph.name += HOSTILE
    model.producer_name = HOSTILE
    for key in ("pkg.torch.onnx.name_scopes", HOSTILE):
        graph.node[0].metadata_props.add(key=key, value=str(["", HOSTILE]))
    model.metadata_props.add(key=HOSTILE, value=HOSTILE)
    return model


def control_characters(text: str) -> set[str]:
    return {hex(ord(c)) for c in text if unicodedata.category(c) in {"Cc", "Cf", "Cs"} and c not in "\n\t"}


COMMANDS = (
    ("rewrite", "{m}", "-v", "--report", "r.html"),
    ("rewrite", "{m}", "--overwrite", "--report", "r.json"),
    ("verify", "{m}", "{r}"),
    ("run", "{r}", "--repeat", "1", "--profile"),
    ("analyze", "{m}", "--report", "a.html"),
    ("analyze", "{m}", "--json"),
    ("rewrite", "{m}", "--exclude", "nothing like it"),
    ("rewrite", "{r}", "--recipe", "ocp"),
    ("run", "{m}x"),
    ("run", "{m}", "{m}"),
    ("{m}",),
    ("rewrite", "{m}", "--recipe", "{m}"),
)


def test_no_command_writes_control_characters() -> None:
    names = {"m": f"m{HOSTILE.replace('/', '')}.onnx", "r": f"m{HOSTILE.replace('/', '')}.mxfp8.onnx"}
    b.save(hostile_model(), Path(names["m"]))
    codes = []
    for command in COMMANDS:
        result = run(*(part.format(**names) for part in command))
        codes.append(result.exit_code)
        assert control_characters(result.stdout + result.stderr) == set(), (command, result.output)
    escapes = release("onnxruntime") >= (1, 24)  # in profiles, one of which the fourth command reads
    assert codes == [0, 0, 0, 0 if escapes else 2, 0, 0, *[2] * 6]
    pages = [Path("r.html").read_text(), Path("a.html").read_text()]
    pages += [verify(names["m"], names["r"]).to_html(), run_model(names["r"], profile=escapes).to_html()]
    pages.append(mxfp8_graph.convert(names["r"], "standard", output=f"{HOSTILE.replace('/', '')}.onnx")[1].to_html())
    for page in pages:
        assert control_characters(page) == set()
        assert page.count("<script>") == 1  # ours
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert" in page
    data = Path("r.json").read_text()
    assert control_characters(data) == set()
    assert any(HOSTILE in site["name"] for site in json.loads(data)["sites"])


def test_invisible_characters_are_escaped() -> None:
    assert printable("a\x1b\x00\u202e\ud800\n b") == "a\\x1b\\x00\\u202e\\ud800\\n b"
    assert printable("naïve 名前 🙂") == "naïve 名前 🙂"


def test_a_report_of_a_file_whose_name_is_no_text() -> None:
    """The system hands over names with bytes that are not UTF-8 as lone surrogates."""
    b.save(b.chain_model(), Path("m.onnx"))
    Path("m.onnx").rename(os.fsdecode(b"m\xff.onnx"))
    result = run("rewrite", os.fsdecode(b"m\xff.onnx"), "--report", "r.json")
    assert result.exit_code == 0, result.output
    assert json.loads(Path("r.json").read_text())["source"] == os.fsdecode(b"m\xff.onnx")
    assert run("rewrite", os.fsdecode(b"m\xff.onnx"), "--overwrite", "--report", "r.html").exit_code == 0


def test_a_name_that_many_have_is_numbered_in_order() -> None:
    taken: set[str] = set()
    assert [reserve_name("x", taken, "#") for _ in range(40)] == ["x", *(f"x#{number}" for number in range(2, 41))]


@pytest.mark.parametrize("taken", [{"x", "x_3"}, {"x", "x_2", "x_4"}, {"x", "x_2", "x_3", "x_5", "x_6"}])
def test_a_unique_name_may_fill_a_gap(taken: set[str]) -> None:
    name = unique_name("x", taken)
    assert name.startswith("x_")
    assert name not in taken
