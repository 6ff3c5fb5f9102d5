"""What tests of models share: quick calls of onnx and of torch's exporter."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mxfp8_graph.onnx_model import check_nodes, child, onnx_calls

IN_CHILDREN = ("hostile", "validate", "wire", "upgrade", "corpus", "bad_input", "names", "repeated", "cli", "doctor")
"""How names of test files end in which onnx's passes run in processes of their own, as they do for users."""


@pytest.fixture(autouse=True)
def onnx_is_called_in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares sound models the forks in which onnx's passes run: these take the longer, the more a process holds."""
    if not request.path.stem.endswith(IN_CHILDREN):
        here = SimpleNamespace(call=call_here, Failure=child.Failure)
        monkeypatch.setattr(onnx_calls, "child", here)
        monkeypatch.setattr(check_nodes, "child", here)


def call_here(function: Callable[[], bytes], seconds: int) -> bytes | child.Failure:
    """Does what `child.call` does, without a child."""
    try:
        return function()
    except Exception as error:
        return child.Failure(type(error).__name__, str(error))


@pytest.fixture(autouse=True)
def torchs_onnx_ops_are_read_once() -> None:
    """Keeps the table of ops of torch's ONNX exporter, which it otherwise makes of 500 sources at each export."""
    exporter = sys.modules.get("torch.onnx._internal.exporter._registration")  # there is one after the first export
    if exporter is None or isinstance(vars(exporter.ONNXRegistry).get("from_torchlib"), staticmethod):
        return
    made = functools.cache(exporter.ONNXRegistry.from_torchlib)

    def from_torchlib(**options: int) -> Any:
        registry = copy.copy(made(**options))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}  # exports add some
        return registry

    exporter.ONNXRegistry.from_torchlib = staticmethod(from_torchlib)
