"""Runs the command line in tests: inside this process, or as one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import models as b
import onnx
from onnx import numpy_helper
from typer.testing import CliRunner, Result

from mxfp8_graph import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def refused(*arguments: str, code: int = 2) -> str:
    """Returns the message of a command that must fail with `code`, print nothing else and leave no file behind."""
    before = sorted(Path.cwd().rglob("*"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert sorted(Path.cwd().rglob("*")) == before
    return result.stderr.rstrip("\n")


def process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mxfp8_graph", *arguments], capture_output=True, text=True, check=False, **settings
    )


def save(model: onnx.ModelProto, name: str = "m.onnx", **settings: Any) -> str:
    return str(b.save(model, Path(name), **settings))


def poison(model: onnx.ModelProto, value: float) -> onnx.ModelProto:
    """Returns the model with one value of its first weight replaced."""
    tensor = model.graph.initializer[0]
    array = numpy_helper.to_array(tensor).copy()
    array[3, 5] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model
