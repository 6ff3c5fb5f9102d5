"""Where torch is not installed, ONNX models are rewritten, and what needs torch says how to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import builders as b
import pytest

_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from mxfp8_graph import cli; cli.main()"
"""A module that is None cannot be imported, as one that is not there."""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False
    )


def test_an_onnx_model_is_rewritten_and_verified(tmp_path: Path) -> None:
    source, output = b.save(b.chain_model(), tmp_path / "m.onnx"), tmp_path / "m.mxfp8.onnx"
    for arguments in (("rewrite", str(source)), ("verify", str(source), str(output)), ("run", str(output))):
        result = command(*arguments)
        assert (result.returncode, result.stderr) == (0, ""), arguments


@pytest.mark.parametrize("arguments", [("rewrite", "m.pt2"), ("run", "m.pt2"), ("verify", "m.pt2", "n.pt2")], ids=str)
def test_a_program_needs_torch(arguments: tuple[str, ...]) -> None:
    result = command(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (
        2,
        "",
        "error: torch: not installed; expected it for exported programs and .pt2 files; pip install torch onnxscript\n",
    )


def test_a_star_import_needs_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nfrom mxfp8_graph import *; print(rewrite.__name__, load.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout == "rewrite load\n", result


@pytest.mark.parametrize("call", ["load('m.pt2')", "unpack('m.pt2')", "rewrite('m.pt2')", "to_onnx('m.pt2', 'm.onnx')"])
def test_from_python_too(call: str) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import mxfp8_graph; from mxfp8_ops.errors import BackendError\n"
        f"try: mxfp8_graph.{call}\n"
        "except BackendError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install torch onnxscript" in result.stdout, result
