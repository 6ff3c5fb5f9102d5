"""validate(): every check, in the order in which one relies on another."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_graph.onnx_model.validate.functions import Functions
from mxfp8_graph.onnx_model.validate.graphs import CheckNode, check_function, check_graph
from mxfp8_graph.onnx_model.validate.header import check_header, opsets
from mxfp8_graph.onnx_model.validate.limits import check_nesting
from mxfp8_graph.onnx_model.validate.nodes import check_node
from mxfp8_graph.onnx_model.validate.places import Place
from mxfp8_graph.onnx_model.validate.tensors import check_tensors
from mxfp8_graph.onnx_model.walk import iter_nodes


def validate(model: onnx.ModelProto, name: str, folder: ModelFolder | None) -> None:
    """Raises ContractError if `model` is damaged; see the package for what that is.

    Args:
        model: as it was read, or given by a caller; it is not modified.
        name: what to call the model in messages: its path, or "model".
        folder: where external data is looked up; None for a model that came without a path.
    """
    place = Place(name)
    check_header(model, place)
    check_nesting(model, place)
    check_tensors(model, place, folder)
    validate_structure(model, name)


def validate_structure(model: onnx.ModelProto, name: str) -> None:
    """Raises ContractError if names, nodes or local functions of `model` are damaged; tensors may lack their data."""
    place = Place(name)
    functions = Functions(model, place)
    typed = model.ir_version > 1

    def checker(imports: Mapping[str, int]) -> CheckNode:
        def check(node: onnx.NodeProto, where: Place) -> None:
            if functions.by_key:
                functions.check_call(node, imports, where)
            check_node(node, imports, where, typed=typed)

        return check

    check_graph(model.graph, place, checker(opsets(model.opset_import, place)))
    reached = functions.reached()
    for key, function in functions.by_key.items():
        where = place.function(function.name)
        check = checker(opsets(function.opset_import, where))
        if key in reached:
            check_function(function, where, check)
        else:  # whatever uses it is not there, and ONNX Runtime does not look at its names either
            for node in iter_nodes(function.node):
                check(node, where)
