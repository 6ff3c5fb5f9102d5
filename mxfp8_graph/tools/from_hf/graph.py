"""Exports a module as an ONNX graph whose parameters are inputs, so that no optimization can fold them.

As initializers they would need values: constants are folded, and equal initializers are merged.
"""

from __future__ import annotations

import re
from typing import Final

import onnx_ir as ir
import torch

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_pass.graph import NAME_SCOPES
from mxfp8_graph.tools.from_hf.architecture import Call
from mxfp8_graph.torch_pass import exporter
from mxfp8_ops.errors import ContractError

_OURS: Final = "model."
"""Prefix of the model's names in the wrapper of `Call`."""


def export(call: Call, opset: int, where: str) -> ir.Model:
    """Returns the graph of a model, with its parameters among the inputs by the names that the model gives them.

    Raises:
        ContractError: torch cannot export the model.
    """
    try:
        with exporter.quiet(), torch.no_grad():
            program = torch.export.export(call.module, call.inputs, dynamic_shapes=call.dims, strict=False)
    except Exception as error:  # they have no common base
        what = f"torch {torch.__version__} cannot export it: {first_line(error)}"
        raise ContractError(
            where, what, expected="a model without control flow on values", advice="export it yourself"
        ) from error
    # With duplicates: a tied tensor may be exported under either of its names.
    parameters = {name for name, _ in call.module.named_parameters(remove_duplicate=False)}
    parameters |= set(call.module.state_dict())

    def lift(exported: torch.onnx.ONNXProgram) -> None:
        model = exported.model
        for name in parameters & model.graph.initializers.keys():
            value = model.graph.initializers.pop(name)
            # Without a value the initializer becomes an input, which no pass folds.
            value.const_value = None
            value.name = name.removeprefix(_OURS)
            model.graph.inputs.append(value)

    names = {"input_names": call.input_names, "output_names": call.output_names()}
    model = exporter.export(program, opset, names, lift)
    _name_axes(model.graph, call)
    for node in model.graph:
        if NAME_SCOPES in node.metadata_props:
            node.metadata_props[NAME_SCOPES] = node.metadata_props[NAME_SCOPES].replace(f"'{_OURS}", "'")
    return model


def _name_axes(graph: ir.Graph, call: Call) -> None:
    """Renames the dynamic axes to the names in `call`."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        for dim, wanted in zip(value.shape or (), call.axis_names.get(str(value.name), ()), strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value and wanted:
                names.setdefault(dim.value, wanted)
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])


def _renamed(dim: int | ir.SymbolicDim, names: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"\w+", lambda match: names.get(match[0], match[0]), dim.value)
