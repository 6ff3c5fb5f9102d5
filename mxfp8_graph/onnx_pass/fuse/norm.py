"""A normalization, the sum in front of it and the quantization behind it become one node.

    MXFP8Quantize(norm(x))          -> elements, scales, normalized? = MXFP8NormQuantize(x)
    MXFP8Quantize(norm(x + y))      -> elements, scales, normalized?, sum? = MXFP8AddNormQuantize(x, y)

The normalized values and the sum are outputs if anything else reads them. The norm is over the last axis, whatever it
is written with:

    LayerNormalization, RMSNormalization, SimplifiedLayerNormalization
    SkipLayerNormalization, SkipSimplifiedLayerNormalization                  ONNX Runtime's own, with a sum in front
    x * rsqrt(mean(x^2) + epsilon) * scale                                    as transformers' RMSNorm is exported
    c / sqrt(mean(c^2) + epsilon) * scale + bias, c = x - mean(x)             as LayerNorm was before opset 17

x^2 is Pow or Mul, the root is Sqrt with Reciprocal or Div, or a Pow. In float16 there are Casts around. Scale and bias
are [D], or [1, D], [1, 1, D], up to the rank of x, which broadcast to the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.replacement import (
    Replacement,
    is_last,
    is_ours,
    node_derived_from,
    stored_shape,
    type_of,
)
from mxfp8_graph.onnx_pass.graph import MICROSOFT, STANDARD, attribute, constant, is_op, made_by, only_used_by, scalar
from mxfp8_ops import contract

_Value = ir.Value | None

_ONE_NODE: Final[Mapping[str, Literal["layer", "rms"]]] = MappingProxyType(
    {
        "LayerNormalization": "layer",
        "RMSNormalization": "rms",
        "SimplifiedLayerNormalization": "rms",
        "SkipLayerNormalization": "layer",
        "SkipSimplifiedLayerNormalization": "rms",
    }
)
"""Ops that are a whole normalization."""


@dataclass(frozen=True)
class _Norm:
    """A normalization over the last axis."""

    kind: Literal["layer", "rms"]
    x: ir.Value
    """What is normalized, or what `residual` is added to before."""
    epsilon: float
    nodes: tuple[ir.Node, ...]
    """What computes it."""
    scale: _Value = None
    bias: _Value = None
    """Vectors; None if there is no bias."""
    residual: _Value = None
    total: _Value = None
    """x + residual, if the graph has it."""


def fuse_norm(node: ir.Node, *, fresh: Callable[[str], str]) -> Replacement | None:
    """Returns the fused node for a quantization of normalized values; `fresh` makes names."""
    value = node.inputs[0] if is_ours(node, contract.QUANTIZE) else None
    if value is None or not is_last(value, attribute(node, "axis", -1)):
        return None
    norm = _norm_of(value)
    if norm is None or not _fits(norm):
        return None
    norm = _with_sum(norm)
    gone = (node, *norm.nodes)
    inner = {output for part in norm.nodes for output in part.outputs if output.name} - {value, norm.total}
    if any(part.graph is not node.graph for part in gone) or not all(only_used_by(each, gone) for each in inner):
        return None
    before, vectors = _float32(norm, fresh)
    operands = [norm.x, *([norm.residual] if norm.residual else []), *vectors]
    outputs = [*node.outputs, *(_if_used(each, gone) for each in (value, norm.total))]
    op = contract.ADD_NORM_QUANTIZE if norm.residual else contract.NORM_QUANTIZE
    fused = node_derived_from(node, op, operands, outputs[: len(op.outputs)], norm=norm.kind, epsilon=norm.epsilon)
    kind = f"{'add + ' if norm.residual else ''}{norm.kind} norm + quantize"
    return Replacement(kind=kind, node=fused, gone=gone, before=before)


def _fits(norm: _Norm) -> bool:
    """Whether the fused node computes that normalization: dtypes and shapes."""
    x, dtype = type_of(norm.x), type_of(norm.scale).dtype  # that of the result
    if norm.scale is None or not x.shape or x.dtype != dtype or dtype not in contract.VALUES:
        return False
    for vector in filter(None, (norm.scale, norm.bias)):
        dims = stored_shape(vector)
        # With more dimensions than x has, the result would have them too.
        if dims is None or not _is_vector(dims) or dims[-1] != x.shape[-1] or len(dims) > len(x.shape):
            return False
    if norm.bias and type_of(norm.bias).dtype != dtype:
        return False
    return not norm.residual or (type_of(norm.residual) == x and None not in x.shape)


def _with_sum(norm: _Norm) -> _Norm:
    """Returns `norm` with the Add in front of it, if that adds two values of one shape."""
    add = made_by(norm.x, "Add")
    if norm.residual or add is None or add.graph is not norm.nodes[0].graph:
        return norm
    x, residual = add.inputs
    known = type_of(norm.x)
    if x is None or not type_of(x) == type_of(residual) == known or known.shape is None or None in known.shape:
        return norm
    return replace(norm, x=x, residual=residual, total=norm.x, nodes=(*norm.nodes, add))


def _if_used(value: _Value, gone: tuple[ir.Node, ...]) -> _Value:
    """Returns a value if anything but the nodes that go away needs it, else None."""
    return None if value is None or only_used_by(value, gone) else value


def _float32(norm: _Norm, fresh: Callable[[str], str]) -> tuple[tuple[ir.Node, ...], list[ir.Value]]:
    """Returns scale and bias as the fused node takes them, float32 [D], and the nodes that make them so."""
    nodes, vectors = [], []
    for vector in filter(None, (norm.scale, norm.bias)):
        result = vector
        if type_of(vector).dtype != contract.FLOAT:
            result = ir.Value(name=fresh(f"{vector.name}_f32"))
            nodes.append(ir.node("Cast", [vector], {"to": contract.FLOAT}, outputs=[result], name=result.name))
        if len(stored_shape(vector) or ()) > 1:
            shape, flat = ir.Value(name=fresh(f"{vector.name}_shape")), ir.Value(name=fresh(f"{vector.name}_flat"))
            nodes.append(ir.node("Constant", [], {"value_ints": [-1]}, outputs=[shape], name=shape.name))
            nodes.append(ir.node("Reshape", [result, shape], outputs=[flat], name=flat.name))
            result = flat
        vectors.append(result)
    return tuple(nodes), vectors


def _is_vector(dims: tuple[int, ...]) -> bool:
    """Whether a shape is [D], or has dimensions of 1 before that."""
    return len(dims) > 0 and all(dim == 1 for dim in dims[:-1])


def _norm_of(value: ir.Value) -> _Norm | None:
    """Returns the normalization that computes a value, or None if that is not one."""
    node = value.producer()
    if node is None or node.outputs[0] is not value:
        return None
    if node.domain in {*STANDARD, MICROSOFT} and node.op_type in _ONE_NODE:
        return _one_node(node)
    return _decomposed(node)


def _one_node(node: ir.Node) -> _Norm | None:
    kind, skip = _ONE_NODE[node.op_type], node.op_type.startswith("Skip")
    rest = [*node.inputs, *[None] * 5]
    x, residual = rest.pop(0), rest.pop(0) if skip else None
    scale, bias = rest.pop(0), rest.pop(0) if kind == "layer" else None
    total = node.outputs[3] if len(node.outputs) > 3 and node.outputs[3].name else None
    others = (output for output in node.outputs[1:] if output.name and output is not total)
    # A bias of x, or statistics that are read, have no place in the fused node.
    if x is None or rest[0] or not all(only_used_by(output, ()) for output in others):
        return None
    if not skip and not is_last(x, attribute(node, "axis", -1)):
        return None
    epsilon = attribute(node, "epsilon", 1e-12 if skip else 1e-5)
    return _Norm(kind, x, epsilon, (node,), scale, bias, residual, total)


def _decomposed(last: ir.Node) -> _Norm | None:
    nodes = [last]
    bias, value = _vector(last) if is_op(last, "Add") else (None, last.outputs[0])
    scaled = made_by(value, "Mul")
    if scaled is None:
        return None
    if scaled is not last:
        nodes.append(scaled)
    scale, normalized = _vector(scaled)
    norm = _normalized(_behind_cast(normalized, nodes))
    if norm is None:
        return None
    kind, nodes = norm.kind, [*nodes, *norm.nodes]
    x: _Value = norm.x
    centred = made_by(x, "Sub")
    mean = None if centred is None else _mean(centred.inputs[1])
    if centred is not None and mean is not None and mean.inputs[0] is centred.inputs[0] is not None:
        kind, x, nodes = "layer", mean.inputs[0], [*nodes, centred, mean]
    source = _behind_cast(x, nodes)
    return None if source is None else _Norm(kind, source, norm.epsilon, tuple(nodes), scale, bias)


def _normalized(value: _Value) -> _Norm | None:
    """Returns x / sqrt(mean(x^2) + epsilon) if a value is that."""
    if node := made_by(value, "Div"):
        return _scaled_by(node, node.inputs[0], _root(node.inputs[1]))
    if node := made_by(value, "Mul"):
        one, other = node.inputs
        return _scaled_by(node, one, _inverse_root(other)) or _scaled_by(node, other, _inverse_root(one))
    return None


_Path = tuple[_Value, tuple[ir.Node, ...]]
"""The value that nodes start from, and the nodes."""


def _scaled_by(node: ir.Node, x: _Value, root: _Path | None) -> _Norm | None:
    """Returns the norm if `root` is that of the mean of x^2, plus epsilon."""
    total = None if root is None else made_by(root[0], "Add")
    if root is None or total is None or x is None:
        return None
    for summand, addend in (total.inputs, reversed(total.inputs)):
        epsilon, mean = scalar(addend), _mean(summand)
        square = None if epsilon is None or mean is None else made_by(mean.inputs[0], "Mul", "Pow")
        if epsilon is not None and mean is not None and square is not None and _is_square(square, x):
            return _Norm("rms", x, epsilon, (node, *root[1], total, mean, square))
    return None


def _inverse_root(value: _Value) -> _Path | None:
    """Returns v if a value is 1 / sqrt(v)."""
    node = made_by(value, "Pow", "Reciprocal", "Div")
    if node is None:
        return None
    if node.op_type == "Pow":
        return (node.inputs[0], (node,)) if scalar(node.inputs[1]) == -0.5 else None
    if node.op_type == "Div" and scalar(node.inputs[0]) != 1:
        return None
    root = _root(node.inputs[-1])
    return None if root is None else (root[0], (node, *root[1]))


def _root(value: _Value) -> _Path | None:
    """Returns v if a value is sqrt(v)."""
    node = made_by(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and scalar(node.inputs[1]) != 0.5):
        return None
    return node.inputs[0], (node,)


def _is_square(node: ir.Node, x: ir.Value) -> bool:
    if node.op_type == "Mul":
        return all(factor is x for factor in node.inputs)
    return node.inputs[0] is x and scalar(node.inputs[1]) == 2


def _mean(value: _Value) -> ir.Node | None:
    """Returns the ReduceMean over the last axis, which stays with size 1, that computes a value."""
    node = made_by(value, "ReduceMean")
    if node is None or not attribute(node, "keepdims", 1):
        return None
    stored = constant(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    axes = [] if stored is None else stored.reshape(-1).tolist()
    return node if len(axes) == 1 and is_last(node.inputs[0], axes[0]) else None


def _vector(node: ir.Node) -> tuple[_Value, _Value]:
    """Returns the stored vector that a node adds or multiplies with, and its other operand; None if there is none."""
    for vector, other in (node.inputs, reversed(node.inputs)):
        dims = stored_shape(vector)
        if dims is not None and _is_vector(dims):
            return vector, other
    return None, None


def _behind_cast(value: _Value, nodes: list[ir.Node]) -> _Value:
    """Returns what a value is a Cast of, and adds the Cast to `nodes`; or the value if it is none."""
    cast = made_by(value, "Cast")
    if cast is None:
        return value
    nodes.append(cast)
    return cast.inputs[0]
