"""What tests of models share: quick calls of torch's exporter."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest


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
