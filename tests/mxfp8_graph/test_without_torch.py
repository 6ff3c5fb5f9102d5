"""Without torch, ONNX models are rewritten, and functions that need torch give an error with its package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import models as b

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
"""A module that is None cannot be imported, as one that is not there."""

COMMANDS = f"""{WITHOUT_TORCH}
import commands, json
for arguments in json.loads(sys.argv[1]):
    result = commands.run(*arguments)
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""

CALLS = f"""{WITHOUT_TORCH}
from mxfp8_graph import *
from mxfp8_ops.errors import BackendError
for call in (lambda: load('m.pt2'), lambda: unpack('m.pt2'), lambda: rewrite('m.pt2'), lambda: to_onnx('m.pt2', 'm'),
             lambda: quantize_(None)):
    try:
        call()
    except BackendError as error:
        print(error)
"""


def python(script: str, *arguments: str) -> list[str]:
    """Returns the lines that a script prints in a new process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_onnx_models_are_rewritten_verified_and_run_and_programs_are_an_error(tmp_path: Path) -> None:
    source, output = b.save(b.chain_model(), tmp_path / "m.onnx"), tmp_path / "m.mxfp8.onnx"
    lines = [f"rewrite {source}", f"verify {source} {output}", f"run {output}"]
    lines += ["rewrite m.pt2", "run m.pt2", "verify m.pt2 n.pt2"]
    results = [json.loads(line) for line in python(COMMANDS, json.dumps([line.split() for line in lines]))]
    assert [(code, errors) for code, _, errors in results[:3]] == [(0, "")] * 3
    message = "error: torch: not installed; expected it for exported programs and .pt2 files; pip install torch"
    assert results[3:] == [[2, "", f"{message} onnxscript\n"]] * 3


def test_functions_that_need_torch_give_an_error_when_they_are_called() -> None:
    lines = python(CALLS)
    assert len(lines) == 5
    assert all("pip install torch onnxscript" in line for line in lines), lines
