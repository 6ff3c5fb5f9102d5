"""Packed weights of ONNX models. Only the structure is read; a weight reads its data on access.

MXFP8Gemm, MXFP8WeightGemm, MXFP8Embedding       ours
MXFP8Dequantize                                  ours
TRT_MXFP8DequantizeLinear (domain trt)           TensorRT's, as modelopt writes it (float8 elements) and as
                                                 TransformerEngine does (uint8; scales padded to 128 x 4)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from mxfp8_graph.naming import reserve_name
from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.onnx_pass.dialect_ops import blocked_axis, without_padding
from mxfp8_graph.onnx_pass.dialects import TRT, TRT_DEQUANTIZE
from mxfp8_graph.onnx_pass.graph import NAME_SCOPES, attribute, default, label, module_of, name_of
from mxfp8_graph.onnx_pass.load import external_files, load, path_of
from mxfp8_graph.packed.contents import Array, Codes, Contents, PackedWeight, Tensor, bias_name, original_name
from mxfp8_ops import contract, formats
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError

_FORMATS: Final = {contract.UINT8: "e4m3", **formats.ELEMENT_NAMES}
"""Element format by the dtype of the stored elements; TransformerEngine stores E4M3 as uint8."""

_SCALES: Final = frozenset({ir.DataType.UINT8, ir.DataType.FLOAT8E8M0})

_FLOATS: Final = frozenset({*contract.VALUES, ir.DataType.DOUBLE})


class _Use(NamedTuple):
    """A node that reads a packed weight, with the weight's tensors."""

    node: ir.Node
    value: ir.Value
    """The elements."""
    elements: ir.TensorProtocol
    scales: ir.TensorProtocol
    axis: int
    """Axis of the blocks, as a negative number."""


@blame_models_if_checker_complains("source")
def contents(source: str | Path | onnx.ModelProto) -> Contents:
    """Returns the packed weights and the other parameters of an ONNX model."""
    model = load(source)
    graph, path = model.graph, path_of(model)
    weights: dict[ir.Value, PackedWeight] = {}
    taken: set[str] = set()
    packed: set[ir.TensorProtocol] = set()
    for use in _uses(graph, name_of(model)):
        # By value: a tied weight is one initializer with several users, and is listed once.
        only = _weight_only(use.node)
        if use.value not in weights:
            packed |= {use.elements, use.scales}
            weights[use.value] = _weight(use, reserve_name(original_name(str(use.value.name)), taken))
        # A shared weight is not weight-only if one of its nodes quantizes activations.
        elif weights[use.value].weight_only and only is False:
            weights[use.value] = replace(weights[use.value], weight_only=False)
    names, biases = set(graph.initializers), _biases(graph)
    others = [
        _other(value, tensor, bias_name(str(value.name), names) if value in biases else str(value.name))
        for value in graph.initializers.values()
        if (tensor := value.const_value) is not None and tensor not in packed
        if tensor.dtype in _FLOATS and len(tensor.shape)
    ]
    return Contents(
        where=name_of(model),
        weights={weight.name: weight for weight in weights.values()},
        others=others,
        recipe=record.recipe_of(model),
        files=frozenset({path, *external_files(model)} if path else ()),
    )


def _uses(main: ir.Graph, where: str) -> Iterator[_Use]:
    """Yields the nodes of a graph and its subgraphs whose elements and scales are both stored, in order."""
    for node in main.all_nodes():
        at = _elements_at(node)
        values = () if at is None else node.inputs[at : at + 2]
        # Packed initializers that a caller may replace count too.
        tensors = [value and default(value) for value in values]
        if len(tensors) == 2 and tensors[0] and tensors[1] and tensors[0].dtype in _FORMATS and values[0]:
            yield _Use(node, values[0], tensors[0], tensors[1], _axis(node, tensors[0], tensors[1], where))


def _biases(main: ir.Graph) -> set[ir.Value | None]:
    """Returns the biases of our gemms, in the graph and its subgraphs."""
    nodes = [node for node in main.all_nodes() if node.domain == contract.DOMAIN]
    places = ((node, op.at("bias")) for node in nodes if (op := contract.OPS.get(node.op_type)) and op.is_gemm)
    return {node.inputs[at] for node, at in places if at is not None and at < len(node.inputs)}


def _axis(node: ir.Node, elements: ir.TensorProtocol, scales: ir.TensorProtocol, where: str) -> int:
    """Returns the axis of the blocks, as a negative number; ContractError if the tensors contradict it."""
    axis, dims, scale_dims = attribute(node, "axis", None), tuple(elements.shape.numpy()), tuple(scales.shape.numpy())
    rank = len(dims)
    # TensorRT's parser finds the axis by the shapes of elements and scales, and so does `blocked_axis`.
    if node.domain == TRT and (axis is None or -rank <= axis < rank):
        axis = blocked_axis(dims, scale_dims, axis)
    elif axis is None:
        axis = -1  # our nodes without this attribute have blocks along K, the last axis
    if axis is None or not -rank <= axis < rank or scales.dtype not in _SCALES:
        kind = f"{scales.dtype.name.lower()} scales {list(scale_dims)}"
        what = f"node {label(node)!r} has {kind} for elements {list(dims)}"
        expected = "uint8, one for 32 elements along one axis, perhaps padded to multiples of 128 x 4"
        raise ContractError(where, what, expected=expected, advice="export the model again")
    return int(axis % rank - rank)


def _elements_at(node: ir.Node) -> int | None:
    if node.domain == contract.DOMAIN:
        return contract.OPS[node.op_type].packed_at if node.op_type in contract.OPS else None
    return 0 if (node.domain, node.op_type) == (TRT, TRT_DEQUANTIZE) else None


def _weight_only(node: ir.Node) -> bool | None:
    op = contract.OPS.get(node.op_type)
    return op.at("A_scales") is None if op is not None and op.at("B") is not None else None


def _weight(use: _Use, name: str) -> PackedWeight:
    dims = list(use.elements.shape.numpy())
    blocks = scale_shape(tuple(dims), use.axis)
    k = dims.pop(use.axis)
    return PackedWeight(
        name=name,
        module=_module(use.node),
        shape=(*dims, k),
        element_format=_FORMATS[use.elements.dtype],
        weight_only=_weight_only(use.node),
        # K is last in a PackedWeight, whichever axis has the blocks in the node.
        read_elements=lambda: np.moveaxis(_codes(use.elements), use.axis, -1),
        read_scales=lambda: np.moveaxis(without_padding(_codes(use.scales), blocks), use.axis, -1),
    )


def _codes(tensor: ir.TensorProtocol) -> Codes:
    return np.ascontiguousarray(_read(tensor)).view(np.uint8).reshape(tensor.shape.numpy())


def _read(tensor: ir.TensorProtocol) -> Array:
    try:
        return tensor.numpy()
    except (OSError, ValueError) as error:  # its file is missing or shorter now
        expected, advice = "an unchanged file of the model", "unpack the model again"
        raise ContractError(f"tensor {tensor.name!r}", str(error), expected=expected, advice=advice) from None


def _module(node: ir.Node) -> str | None:
    return module_of(node.metadata_props.get(NAME_SCOPES, "")) or None


def _other(value: ir.Value, tensor: ir.TensorProtocol, name: str) -> Tensor:
    user = next((node for node in value.consumers() if node.graph is value.graph), None)
    return Tensor(
        name=name,
        module=None if user is None else _module(user),
        dtype=tensor.dtype.numpy(),
        shape=tuple(tensor.shape.numpy()),
        read=lambda: _read(tensor),
    )
