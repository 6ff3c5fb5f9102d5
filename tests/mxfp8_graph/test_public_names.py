"""What `import mxfp8_graph` promises."""

from __future__ import annotations

import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import mxfp8_graph
from mxfp8_graph.options import Unpack


@pytest.mark.parametrize("name", mxfp8_graph.__all__)
def test_a_public_name_is_callable_the_first_time_and_the_second(name: str) -> None:
    if name in {"load", "save", "to_onnx"}:
        pytest.importorskip("torch")
    first, second = getattr(mxfp8_graph, name), getattr(mxfp8_graph, name)
    assert callable(first), first
    assert first is second


@pytest.mark.parametrize("name", ["rewrite", "to_onnx", "from_hf", "verify", "analyze", "compare", "tune"])
def test_a_function_with_options_has_type_hints_that_can_be_read(name: str) -> None:
    if name == "to_onnx":
        pytest.importorskip("torch")
    hints = typing.get_type_hints(getattr(mxfp8_graph, name))
    assert "return" in hints
    (options,) = (typing.get_args(hint)[0] for hint in hints.values() if typing.get_origin(hint) is Unpack)
    assert options.__annotations__


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, mxfp8_graph; print([m for m in ('torch', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]", loaded


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'rewrit'; it has .*rewrite"):
        mxfp8_graph.rewrit  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [mxfp8_graph.__version__]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rewrite", ()),
        ("to_onnx", ("y.onnx",)),
        ("from_hf", ()),
        ("verify", ("x.onnx",)),
        ("compare", ()),
        ("analyze", ()),
        ("tune", (["cosine>=0.9"],)),
    ],
)
def test_a_misspelt_option_is_a_type_error_before_anything_is_read(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'overwrit'$"):
        getattr(mxfp8_graph, name)("missing.onnx", *arguments, overwrit=True)
