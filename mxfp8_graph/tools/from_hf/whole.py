"""Exports a whole model: three layers, of which the third is repeated if all are alike, otherwise every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from torch import nn

from mxfp8_graph.tools.from_hf import graph
from mxfp8_graph.tools.from_hf.architecture import call_of, repeated, shortened
from mxfp8_graph.tools.from_hf.repeat import EXPORTED, repeat


def export(model: nn.Module, config: Any, folder: Path, opset: int) -> tuple[onnx.ModelProto, list[str]]:
    """Returns (the graph with parameters among its inputs, the names of the other inputs); errors as `graph.export`."""
    stack = repeated(model)
    if stack is not None and len(stack[1]) > EXPORTED:
        path, layers = stack
        with shortened(layers, EXPORTED):
            call = call_of(model, config)
            proto = graph.export(call, opset, str(folder))
        if repeat(proto.graph, path, len(layers)):
            return proto, call_of(model, config).input_names
    call = call_of(model, config)
    return graph.export(call, opset, str(folder)), call.input_names
