"""Packed weights of ONNX models. Only the structure is read; a weight reads its data on access.

MXFP8Gemm, MXFP8WeightGemm, MXFP8Embedding       ours
MXFP8Dequantize                                  ours
TRT_MXFP8DequantizeLinear (domain trt)           TensorRT's, as modelopt writes it (float8 elements) and as
                                                 TransformerEngine does (uint8; scales padded to 128 x 4)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import record
from mxfp8_graph.onnx_model.dialect_ops import blocked_axis, without_padding
from mxfp8_graph.onnx_model.dialects import TRT, TRT_DEQUANTIZE
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import raw, read
from mxfp8_graph.onnx_model.walk import module_path, node_label, stored_in, subgraphs
from mxfp8_graph.onnx_model.write import input_files
from mxfp8_graph.packed.weight import Codes, Contents, PackedWeight, Tensor, original_name, plain_name
from mxfp8_ops import contract, formats
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError

_FORMATS: Final = {contract.UINT8: "e4m3", **{f.onnx_dtype: f.name for f in formats.ELEMENT_FORMATS.values()}}
"""Element format by the dtype of the stored elements; TransformerEngine stores E4M3 as uint8."""

_SCALES: Final = frozenset({"UINT8", "FLOAT8E8M0"})

_FLOATS: Final = frozenset({*contract.VALUES, onnx.TensorProto.DOUBLE})

Visible = dict[str, onnx.TensorProto]
"""The stored tensors a graph sees, by name."""


@dataclass(frozen=True)
class _Use:
    """A node that reads a packed weight, with the weight's tensors."""

    node: onnx.NodeProto
    name: str
    """Name of the elements."""
    elements: onnx.TensorProto
    scales: onnx.TensorProto
    axis: int
    """Axis of the blocks, as a negative number."""


def contents(opened: OpenedModel) -> Contents:
    """Returns the packed weights and the other parameters of an ONNX model."""
    weights: dict[int, PackedWeight] = {}
    taken: set[str] = set()
    packed: set[str] = set()
    for use in _uses(opened.proto.graph, {}, opened.name):
        # By object: a tied weight is one initializer with several readers, and is listed once.
        key = id(use.elements)
        only = _weight_only(use.node)
        if key not in weights:
            packed |= {use.name, use.scales.name}
            weights[key] = _weight(opened, use, take_name(original_name(use.name), taken))
        # A weight that several nodes share counts as quantized on both sides if one of them quantizes its activations.
        elif weights[key].weight_only and only is False:
            weights[key] = replace(weights[key], weight_only=False)
    names = {tensor.name for tensor in opened.proto.graph.initializer}
    # Reversed, so that the first node that reads a tensor is the one that stays in the dict.
    users = {name: node for node in reversed(opened.proto.graph.node) for name in node.input}
    others = [
        _other(opened, tensor, plain_name(tensor.name, names), users.get(tensor.name))
        for tensor in opened.proto.graph.initializer
        if tensor.name not in packed and tensor.data_type in _FLOATS and tensor.dims
    ]
    by_name, recipe = {weight.name: weight for weight in weights.values()}, record.recipe_of(opened.proto)
    result = Contents(where=opened.name, weights=by_name, others=others, recipe=recipe)
    if opened.folder is None:
        return result
    return replace(result, files=frozenset(input_files(opened)), check=opened.folder.files.check)


def _uses(graph: onnx.GraphProto, visible: Visible, where: str) -> Iterator[_Use]:
    """Yields the nodes of `graph` and its subgraphs whose elements and scales are both stored."""
    visible = {**visible, **stored_in(graph)}
    for node in graph.node:
        for _, inner in subgraphs(node):
            yield from _uses(inner, visible, where)
        at = _elements_at(node)
        if at is None or not {*node.input[at : at + 2]} <= visible.keys():
            continue
        elements, scales = (visible[name] for name in node.input[at : at + 2])
        if len(node.input) > at + 1 and elements.data_type in _FORMATS:
            yield _Use(node, node.input[at], elements, scales, _axis(node, elements, scales, where))


def _axis(node: onnx.NodeProto, elements: onnx.TensorProto, scales: onnx.TensorProto, where: str) -> int:
    """Returns the axis of the blocks, as a negative number; ContractError if the tensors contradict it."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    rank = len(elements.dims)
    # TensorRT's parser finds the axis by the shapes of elements and scales, and so does `blocked_axis`.
    if node.domain == TRT and (axis is None or -rank <= axis < rank):
        axis = blocked_axis(tuple(elements.dims), tuple(scales.dims), axis)
    elif axis is None:
        axis = -1
    dtype = onnx.TensorProto.DataType.Name(scales.data_type)
    if axis is None:
        what = f"node {node_label(node)!r} has scales {list(scales.dims)} for elements {list(elements.dims)}"
        expected = "one for 32 elements along one axis, perhaps padded to multiples of 128 x 4"
        raise ContractError(where, what, expected=expected, advice="export the model again")
    if not -rank <= axis < rank or dtype not in _SCALES:
        what = f"node {node_label(node)!r} has {dtype.lower()} scales along axis {axis} of {list(elements.dims)}"
        raise ContractError(where, what, expected="uint8 scales along an axis", advice="pack the model again")
    return axis % rank - rank


def _elements_at(node: onnx.NodeProto) -> int | None:
    if node.domain == contract.DOMAIN:
        return contract.OPS[node.op_type].packed_at if node.op_type in contract.OPS else None
    return 0 if (node.domain, node.op_type) == (TRT, TRT_DEQUANTIZE) else None


def _weight_only(node: onnx.NodeProto) -> bool | None:
    op = contract.OPS.get(node.op_type)
    return op.at("A_scales") is None if op is not None and op.at("B") is not None else None


def _weight(opened: OpenedModel, use: _Use, name: str) -> PackedWeight:
    dims = list(use.elements.dims)
    blocks = scale_shape(tuple(dims), use.axis)

    def elements() -> Codes:
        return np.moveaxis(_codes(opened, use.elements), use.axis, -1)

    def scales() -> Codes:
        return np.moveaxis(without_padding(_codes(opened, use.scales), blocks), use.axis, -1)

    k = dims.pop(use.axis)
    return PackedWeight(
        name=name,
        module=module_path(use.node) or None,
        shape=(*dims, k),
        element_format=_FORMATS[use.elements.data_type],
        weight_only=_weight_only(use.node),
        read_elements=elements,
        read_scales=scales,
    )


def _codes(opened: OpenedModel, tensor: onnx.TensorProto) -> Codes:
    # Tensors with large data are kept apart from the proto.
    stored = opened.tensors.get(tensor.name, tensor)
    return np.frombuffer(raw(stored, opened.folder, opened.name), np.uint8).reshape(tuple(stored.dims))


def _other(opened: OpenedModel, tensor: onnx.TensorProto, name: str, user: onnx.NodeProto | None) -> Tensor:
    return Tensor(
        name=name,
        module=module_path(user) or None if user is not None else None,
        dtype=np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)),
        shape=tuple(tensor.dims),
        read=lambda: read(opened.tensors.get(tensor.name, tensor), opened.folder, opened.name),
    )
