"""The public names of mxfp8_graph: what they are, and that they cost no import before their use."""

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


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "rewrite": (),
    "to_onnx": ("y.onnx",),
    "from_hf": (),
    "verify": ("x.onnx",),
    "compare": (),
    "analyze": (),
    "tune": (["cosine>=0.9"],),
}
"""Functions with options -> their arguments after the model."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_options_have_type_hints_and_a_misspelt_one_is_an_error_before_a_file_is_read(name: str) -> None:
    if name == "to_onnx":
        pytest.importorskip("torch")
    function = getattr(mxfp8_graph, name)
    hints = typing.get_type_hints(function)
    assert "return" in hints
    (options,) = (typing.get_args(hint)[0] for hint in hints.values() if typing.get_origin(hint) is Unpack)
    assert options.__annotations__
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'overwrit'$"):
        function("missing.onnx", *ARGUMENTS[name], overwrit=True)


def test_neither_the_import_nor_the_kind_of_a_model_loads_a_heavy_package() -> None:
    code = (
        "import sys, mxfp8_graph; from mxfp8_graph.models import kind_of\n"
        "for thing in ('m.onnx', 'm.pt2', None, object()): kind_of(thing)\n"
        "print([m for m in ('torch', 'onnx', 'onnx_graphsurgeon', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'rewrit'; it has .*rewrite"):
        mxfp8_graph.rewrit  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [mxfp8_graph.__version__]
