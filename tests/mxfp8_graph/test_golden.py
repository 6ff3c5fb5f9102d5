"""Rewrites give what tests/golden/golden.json records: the bytes, tensors, nodes and reports of many models.

`python tests/golden/write.py` writes it anew. A commit that does so says why the bytes of the protobuf may differ;
packed bytes, nodes and reports stay equal.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import onnx
import pytest
from golden.cases import CASES
from golden.digests import model_text, record, summary

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())
OF_ONNX = ("file", "value_info")
"""Parts that depend on onnx's shape inference and on how it stores models."""


def test_each_case_is_recorded() -> None:
    assert list(RECORDED["models"]) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_rewrite_gives_what_is_recorded(name: str, tmp_path: Path) -> None:
    parts, recorded = record(CASES[name], tmp_path), RECORDED["models"][name]
    now = summary(parts)
    digests, wanted = now["digests"], recorded["digests"]
    compared = digests.keys() | wanted.keys()
    if onnx.__version__ != RECORDED["onnx"]:
        compared -= set(OF_ONNX)
    lines = []
    for part in sorted(part for part in compared if digests.get(part) != wanted.get(part)):
        lines.append(f"{name}: {part} differs")
        if part in now["texts"] and part in recorded["texts"]:
            texts = (recorded["texts"][part], now["texts"][part])
            lines += difflib.unified_diff(*texts, "recorded", "now", lineterm="", n=0)
    advice = f"for all of it, before and after: python tests/golden/write.py {name!r}"
    assert not lines, "\n".join([*lines, advice])


def test_the_order_of_the_protobuf_is_no_difference_and_all_else_is() -> None:
    model, other = (CASES["external data"].build() for _ in range(2))
    before = model_text(model)
    for items in (other.graph.initializer, other.graph.node):
        items.extend([items.pop() for _ in range(len(items))])
    assert other.graph != model.graph
    assert model_text(other) == before
    other.graph.initializer[0].raw_data = b"\0" * len(other.graph.initializer[0].raw_data)
    other.graph.node[0].attribute.append(onnx.helper.make_attribute("alpha", 1.0))
    other.graph.value_info.append(other.graph.input[0])
    assert [part for part, text in model_text(other).items() if text != before[part]] == list(before)
