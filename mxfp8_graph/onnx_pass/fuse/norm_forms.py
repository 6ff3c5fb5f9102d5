"""Reads a normalization over the last axis, whatever it is written with.

    LayerNormalization, RMSNormalization, SimplifiedLayerNormalization
    SkipLayerNormalization, SkipSimplifiedLayerNormalization                  ONNX Runtime's own, with a sum in front
    x * rsqrt(mean(x^2) + epsilon) * scale                                    as transformers' RMSNorm is exported
    c / sqrt(mean(c^2) + epsilon) * scale + bias, c = x - mean(x)             as LayerNorm was before opset 17

x^2 is Pow or Mul, the root is Sqrt with Reciprocal or Div, or a Pow. In float16 there are Casts around.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import onnx

from mxfp8_graph.onnx_model.walk import MICROSOFT, STANDARD
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView, attribute, is_op

Kind = Literal["layer", "rms"]


@dataclass(frozen=True)
class Norm:
    """A normalization over the last axis."""

    kind: Kind
    x: str
    """What is normalized, or what `residual` is added to before."""
    epsilon: float
    nodes: tuple[onnx.NodeProto, ...]
    """What computes it."""
    scale: str = ""
    bias: str = ""
    """Names of vectors; "" if there is no bias."""
    residual: str = ""
    total: str = ""
    """Name of x + residual, if the graph has it."""


def norm_of(view: GraphView, name: str) -> Norm | None:
    """Returns the normalization that makes the value `name`, or None if that is not one."""
    node = view.maker(name)
    if node is None or not node.output or node.output[0] != name:
        return None
    if node.domain in {*STANDARD, MICROSOFT} and node.op_type in _ONE_NODE:
        return _one_node(view, node)
    return _decomposed(view, node)


_ONE_NODE: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "LayerNormalization": "layer",
        "RMSNormalization": "rms",
        "SimplifiedLayerNormalization": "rms",
        "SkipLayerNormalization": "layer",
        "SkipSimplifiedLayerNormalization": "rms",
    }
)
"""Ops that are a whole normalization."""


def _one_node(view: GraphView, node: onnx.NodeProto) -> Norm | None:
    kind, skip = _ONE_NODE[node.op_type], node.op_type.startswith("Skip")
    given = [*node.input, *[""] * 5]
    x, residual = given.pop(0), given.pop(0) if skip else ""
    scale, bias = given.pop(0), given.pop(0) if kind == "layer" else ""
    total = node.output[3] if len(node.output) > 3 else ""
    others = (output for output in node.output[1:] if output and output != total)
    if given[0] or not all(view.is_between(output) for output in others):  # a bias of x, statistics that are read
        return None
    if not skip and not is_last(view, x, attribute(node, "axis", -1)):
        return None
    epsilon = attribute(node, "epsilon", 1e-12 if skip else 1e-5)
    return Norm(kind, x, epsilon, (node,), scale, bias, residual, total)


def _decomposed(view: GraphView, last: onnx.NodeProto) -> Norm | None:
    nodes = [last]
    bias, name = _vector(view, last) if is_op(last, "Add") else ("", last.output[0])
    scaled = view.maker(name, "Mul")
    if scaled is None:
        return None
    if scaled is not last:
        nodes.append(scaled)
    scale, name = _vector(view, scaled)
    found = _normalized(view, _behind_cast(view, name, nodes))
    if found is None:
        return None
    kind, x, nodes = found.kind, found.x, [*nodes, *found.nodes]
    centred = view.maker(x, "Sub")
    mean = None if centred is None else _mean(view, centred.input[1])
    if centred is not None and mean is not None and mean.input[0] == centred.input[0]:
        kind, x, nodes = "layer", mean.input[0], [*nodes, centred, mean]
    x = _behind_cast(view, x, nodes)
    return Norm(kind, x, found.epsilon, tuple(nodes), scale, bias)


def _normalized(view: GraphView, name: str) -> Norm | None:
    """Returns x / sqrt(mean(x^2) + epsilon) if the value `name` is that."""
    if node := view.maker(name, "Div"):
        return _scaled_by(view, node, node.input[0], _root(view, node.input[1]))
    if node := view.maker(name, "Mul"):
        one, other = node.input
        first = _scaled_by(view, node, one, _inverse_root(view, other))
        return first or _scaled_by(view, node, other, _inverse_root(view, one))
    return None


_Found = tuple[str, tuple[onnx.NodeProto, ...]]
"""The value that nodes start from, and the nodes."""


def _scaled_by(view: GraphView, node: onnx.NodeProto, x: str, root: _Found | None) -> Norm | None:
    """Returns the norm if `root` is that of the mean of x^2, plus epsilon."""
    total = None if root is None else view.maker(root[0], "Add")
    if root is None or total is None:
        return None
    for name, epsilon_name in (total.input, reversed(total.input)):
        epsilon, mean = view.scalar(epsilon_name), _mean(view, name)
        square = None if epsilon is None or mean is None else view.maker(mean.input[0], "Mul", "Pow")
        if epsilon is not None and mean is not None and square is not None and _is_square(view, square, x):
            return Norm("rms", x, epsilon, (node, *root[1], total, mean, square))
    return None


def _inverse_root(view: GraphView, name: str) -> _Found | None:
    """Returns v if the value `name` is 1 / sqrt(v)."""
    node = view.maker(name, "Pow", "Reciprocal", "Div")
    if node is None:
        return None
    if node.op_type == "Pow":
        return (node.input[0], (node,)) if view.scalar(node.input[1]) == -0.5 else None
    if node.op_type == "Div" and view.scalar(node.input[0]) != 1:
        return None
    root = _root(view, node.input[-1])
    return None if root is None else (root[0], (node, *root[1]))


def _root(view: GraphView, name: str) -> _Found | None:
    """Returns v if the value `name` is sqrt(v)."""
    node = view.maker(name, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and view.scalar(node.input[1]) != 0.5):
        return None
    return node.input[0], (node,)


def _is_square(view: GraphView, node: onnx.NodeProto, x: str) -> bool:
    if node.op_type == "Mul":
        return list(node.input) == [x, x]
    return node.input[0] == x and view.scalar(node.input[1]) == 2


def _mean(view: GraphView, name: str) -> onnx.NodeProto | None:
    """Returns the ReduceMean over the last axis, which stays with size 1, that makes a value."""
    node = view.maker(name, "ReduceMean")
    if node is None or not attribute(node, "keepdims", 1):
        return None
    given = view.constant(node.input[1]) if len(node.input) > 1 else None
    axes = [] if given is None else given.reshape(-1).tolist()
    return node if len(axes) == 1 and is_last(view, node.input[0], axes[0]) else None


def is_last(view: GraphView, name: str, axis: int) -> bool:
    """Whether an axis of a value is surely its last."""
    shape = view.type_of(name).shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _vector(view: GraphView, node: onnx.NodeProto) -> tuple[str, str]:
    """Returns the stored vector that a node adds or multiplies with, and its other operand; "" if there is none."""
    for vector, other in (node.input, reversed(node.input)):
        dims = view.stored_shape(vector)
        if dims is not None and len(dims) == 1:
            return vector, other
    return "", ""


def _behind_cast(view: GraphView, name: str, nodes: list[onnx.NodeProto]) -> str:
    """Returns what the value `name` is a Cast of, and adds the Cast to `nodes`; or `name` if it is none."""
    node = view.maker(name)
    if node is None or not is_op(node, "Cast"):
        return name
    nodes.append(node)
    return node.input[0]
