"""A normalization, the sum in front of it and the quantization behind it become one node.

    MXFP8Quantize(norm(x))          -> elements, scales, normalized? = MXFP8NormQuantize(x)
    MXFP8Quantize(norm(x + y))      -> elements, scales, normalized?, sum? = MXFP8AddNormQuantize(x, y)

`norm_forms.py` says what a norm may look like. The normalized values and the sum are outputs if anything else reads
them.
"""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import helper

from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, attribute
from mxfp8_graph.onnx_pass.fuse.norm_forms import Norm, is_last, norm_of
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement, successor
from mxfp8_ops import contract


def fuse_norm(view: GraphView, node: onnx.NodeProto) -> Replacement | None:
    """Returns the fused node for a quantization of normalized values."""
    if node.domain != contract.DOMAIN or node.op_type != contract.QUANTIZE.name:
        return None
    name: str = node.input[0]
    norm = norm_of(view, name) if is_last(view, name, attribute(node, "axis", -1)) else None
    if norm is None or not _fits(view, norm, name):
        return None
    norm = _with_sum(view, norm)
    gone = (node, *norm.nodes)
    inner = {output for part in norm.nodes for output in part.output if output} - {name, norm.total}
    if not all(view.is_between(output, *gone) for output in inner):
        return None
    before, vectors = _float32(view, norm)
    operands = [norm.x, *([norm.residual] if norm.residual else []), *vectors]
    outputs = [*node.output, *(_if_read(view, output, gone) for output in (name, norm.total))]
    op = contract.ADD_NORM_QUANTIZE if norm.residual else contract.NORM_QUANTIZE
    outputs = outputs[: len(op.outputs)]
    fused = successor(node, op, operands, outputs, norm=norm.kind, epsilon=norm.epsilon)
    kind = f"{'add + ' if norm.residual else ''}{norm.kind} norm + quantize"
    return Replacement(kind=kind, node=fused, gone=gone, before=before)


def _fits(view: GraphView, norm: Norm, name: str) -> bool:
    """Whether the fused node computes that normalization, which makes the value `name`: dtypes and shapes."""
    x, scale, bias = view.type_of(norm.x), view.stored_shape(norm.scale), view.stored_shape(norm.bias)
    dtype = view.type_of(norm.scale).dtype  # that of the result
    if scale is None or len(scale) != 1 or (norm.bias and bias != scale) or dtype not in contract.VALUES:
        return False
    if norm.bias and view.type_of(norm.bias).dtype != dtype:
        return False
    if x.shape is None or not x.shape or x.shape[-1] != scale[0] or x.dtype != dtype:
        return False
    return not norm.residual or (view.type_of(norm.residual) == x and None not in x.shape)


def _with_sum(view: GraphView, norm: Norm) -> Norm:
    """Returns `norm` with the Add in front of it, if that adds two values of one shape."""
    add = view.maker(norm.x, "Add")
    if norm.residual or add is None:
        return norm
    one, other = (view.type_of(name) for name in add.input)
    if one != other or one != view.type_of(norm.x) or one.shape is None or None in one.shape:
        return norm
    return replace(norm, x=add.input[0], residual=add.input[1], total=norm.x, nodes=(*norm.nodes, add))


def _if_read(view: GraphView, name: str, gone: tuple[onnx.NodeProto, ...]) -> str:
    """Returns `name` if anything but the nodes that go away needs that value, else ""."""
    return "" if not name or view.is_between(name, *gone) else name


def _float32(view: GraphView, norm: Norm) -> tuple[tuple[onnx.NodeProto, ...], list[str]]:
    """Returns the names of scale and bias in float32, and the Casts that make them so."""
    casts, names = [], []
    for name in filter(None, (norm.scale, norm.bias)):
        if view.type_of(name).dtype == contract.FLOAT:
            names.append(name)
            continue
        wide = view.fresh(f"{name}_f32")
        casts.append(helper.make_node("Cast", [name], [wide], name=wide, to=contract.FLOAT))
        names.append(wide)
    return tuple(casts), names
