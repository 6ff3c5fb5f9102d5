"""Exports a module as an ONNX graph whose parameters are inputs, so that no optimization can fold them.

As initializers they would need values: constants are folded, and equal initializers are merged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import onnx
import torch

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_export.export import quiet, translate
from mxfp8_graph.tools.from_hf.architecture import Call
from mxfp8_ops.errors import ContractError

if TYPE_CHECKING:
    import onnx_ir as ir

_SCOPES: Final = "pkg.torch.onnx.name_scopes"
_OURS: Final = "model."
"""Prefix of the model's names in the wrapper of `Call`."""


def export(call: Call, opset: int, where: str) -> onnx.ModelProto:
    """Returns the graph of a model, with its parameters among the inputs by the names that the model gives them.

    Raises:
        ContractError: torch cannot export the model.
    """
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(call.module, call.inputs, dynamic_shapes=call.dims, strict=False)
    except Exception as error:  # they have no common base
        what = f"torch {torch.__version__} cannot export it: {first_line(error)}"
        raise ContractError(
            where, what, expected="a model without control flow on values", advice="export it yourself"
        ) from error
    # With duplicates: a tied tensor may be exported under either of its names.
    parameters = {name for name, _ in call.module.named_parameters(remove_duplicate=False)}
    parameters |= set(call.module.state_dict())

    def lift(model: ir.Model) -> None:
        for name in parameters & model.graph.initializers.keys():
            value = model.graph.initializers.pop(name)
            # Without a value the initializer becomes an input, which no pass folds.
            value.const_value = None
            value.name = name.removeprefix(_OURS)
            model.graph.inputs.append(value)

    names = {"input_names": call.input_names, "output_names": call.output_names()}
    import onnx_ir as ir

    proto = ir.to_proto(translate(program, opset, names, before_optimizing=lift))
    _name_axes(proto, call)
    for node in proto.graph.node:
        for entry in node.metadata_props:
            if entry.key == _SCOPES:
                entry.value = entry.value.replace(f"'{_OURS}", "'")
    return proto


def _name_axes(proto: onnx.ModelProto, call: Call) -> None:
    """Renames the dynamic axes to the names in `call`."""
    names: dict[str, str] = {}
    for value in proto.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            wanted = call.axis_names.get(value.name, ())[axis : axis + 1]
            if dim.dim_param and wanted and wanted[0]:
                names.setdefault(dim.dim_param, wanted[0])
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), dim.dim_param)


def layer_of(node: onnx.NodeProto, path: str) -> int | None:
    """Returns which layer of the list at `path` a node belongs to, or None."""
    scopes: Any = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    match = re.search(rf"'{re.escape(path)}\.(\d+)[.']", scopes)
    return int(match[1]) if match else None
