"""Where torch is not installed, ONNX models are rewritten, and what needs torch says how to get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import builders as b

_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
"""A module that is None cannot be imported, as one that is not there."""

_COMMANDS = f"""{_WITHOUT_TORCH}
import commands, json
for arguments in json.loads(sys.argv[1]):
    result = commands.run(*arguments)
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""

_CALLS = f"""{_WITHOUT_TORCH}
from mxfp8_graph import *
from mxfp8_ops.errors import BackendError
for call in (lambda: load('m.pt2'), lambda: unpack('m.pt2'), lambda: rewrite('m.pt2'), lambda: to_onnx('m.pt2', 'm')):
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


def commands(*lines: str) -> list[Any]:
    return [json.loads(line) for line in python(_COMMANDS, json.dumps([line.split() for line in lines]))]


def test_an_onnx_model_is_rewritten_and_verified(tmp_path: Path) -> None:
    source, output = b.save(b.chain_model(), tmp_path / "m.onnx"), tmp_path / "m.mxfp8.onnx"
    results = commands(f"rewrite {source}", f"verify {source} {output}", f"run {output}")
    assert [(code, errors) for code, _, errors in results] == [(0, "")] * 3


def test_a_program_needs_torch() -> None:
    message = (
        "error: torch: not installed; expected it for exported programs and .pt2 files; pip install torch onnxscript"
    )
    expected = [2, "", f"{message}\n"]
    assert commands("rewrite m.pt2", "run m.pt2", "verify m.pt2 n.pt2") == [expected] * 3


def test_a_star_import_and_calls_from_python_say_so_too() -> None:
    lines = python(_CALLS)
    assert len(lines) == 4
    assert all("pip install torch onnxscript" in line for line in lines), lines
