"""Rewrites and conversions give what tests/golden records: bytes, tensors, nodes and reports of many models.

`python tests/golden/write.py` writes the records anew. A commit that does so says why the bytes of the protobuf may
differ; packed bytes, nodes and reports stay equal.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import onnx
import pytest
from golden import conversions
from golden.cases import CASES
from golden.digests import record, summary
from grids import looped

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())
OF_ONNX = ("file", "value_info")
"""Parts that depend on onnx's shape inference and on how it stores models."""
CONVERTED = json.loads(conversions.FILE.read_text())
CONVERSIONS = dict(conversions.models())


def test_each_case_is_recorded() -> None:
    assert (list(RECORDED["models"]), list(CONVERTED)) == (list(CASES), list(CONVERSIONS))


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


@looped("name", CONVERSIONS)
def test_a_conversion_there_and_back_gives_what_is_recorded(name: str) -> None:
    assert conversions.record(CONVERSIONS[name]) == CONVERTED[name]
