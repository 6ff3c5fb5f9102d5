"""The committed corpus and some damaged models end as they must; what does not, is found."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import run

LEFT = "left in the output's folder"
pytestmark = pytest.mark.tools


def test_damaged_models_end_as_promised(tmp_path: Path) -> None:
    assert run.main(["--count", "200", "--seed", "1", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("rewrite", "expected"),
    [
        (lambda *_, **__: os.abort(), run.Result(0)),  # the command, which calls the real one, is what counts
        (lambda *_, **__: time.sleep(9), run.Result(run.SLOW)),
        (lambda *_, output: output.write_bytes(b"x") and {}["x"], run.Result(70, f"{LEFT}: {{'model.onnx'}}")),
    ],
)
def test_what_a_file_does_is_found(rewrite: Any, expected: run.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    good = run.seeds()[0]
    monkeypatch.setattr(run.mxfp8_graph, "rewrite", rewrite)
    assert run.fuzz([good], seconds=1, every=2) == [expected]
