"""The program gives the errors of docs/troubleshooting.md."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import models as b
import numpy as np
import onnx
import onnxruntime
import pytest
from typer.testing import CliRunner

from mxfp8_graph.cli import app
from mxfp8_ops import ort
from mxfp8_ops.errors import Mxfp8Error

PAGE = (Path(__file__).parents[1] / "docs/troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## `(.*)`$", PAGE, re.MULTILINE)
COMMANDS = {
    "none of its ... matmuls is eligible": "rewrite model.onnx -o new.onnx --set min_dim=1000",
    "matches none of the model's matmuls": "rewrite model.onnx -o new.onnx --exclude typo",
    "expected finite values": "rewrite nan.onnx",
    "exists already": "rewrite model.onnx -o model.mxfp8.onnx",
    "Recipe mismatch for": "rewrite model.mxfp8.onnx --recipe ocp",
    "cannot read external file": "rewrite external.onnx",
    "Could not find an implementation for": "run bfloat16.mxfp8.onnx",
    "is above the limit": "verify model.onnx model.mxfp8.onnx --max-rel-l2 1e-9",
}


@pytest.mark.parametrize("heading", COMMANDS)
def test_a_command_gives_an_error_of_the_page(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(b.attention_model(), "model.onnx")
    onnx.save(b.attention_model(dtype=ml_dtypes.bfloat16), "bfloat16.onnx")
    damaged = b.matmul_model(k=64, n=64)
    damaged.graph.initializer[0].raw_data = np.full((64, 64), np.nan, np.float32).tobytes()
    onnx.save(damaged, "nan.onnx")
    external = {"save_as_external_data": True, "location": "lost", "size_threshold": 0}
    onnx.save(b.attention_model(), "external.onnx", **external)
    Path("lost").unlink()
    assert all(CliRunner().invoke(app, ["rewrite", name]).exit_code == 0 for name in ("model.onnx", "bfloat16.onnx"))
    done = CliRunner().invoke(app, COMMANDS[heading].split())
    assert done.exit_code in (1, 2, 3)
    assert re.search(re.escape(heading).replace(r"\.\.\.", ".*"), " ".join(done.output.split())), done.output


def test_python_gives_the_other_errors_of_the_page(tmp_path: Path) -> None:
    *commands, cuda, gradient = HEADINGS
    assert commands == list(COMMANDS)
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(Mxfp8Error, match=cuda):
            ort.session(b.save(b.matmul_model(), tmp_path / "model.onnx"), device="cuda")
    torch = pytest.importorskip("torch")
    pytest.importorskip("mxfp8_ops.torch_ops")
    with pytest.raises(Mxfp8Error, match=gradient):
        torch.ops.mxfp8.quantize(torch.ones(2, 32, requires_grad=True))
