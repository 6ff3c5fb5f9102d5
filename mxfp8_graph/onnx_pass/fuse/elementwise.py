"""Finds which activation function a few elementwise nodes compute, by computing it.

Exporters write one function in many ways: 0.5 * x * (1 + erf(x / sqrt(2))) has its factors in any order, sqrt(2) as a
divisor or as a factor, and x ** 3 as a power or as products. All of them are the same function of x, which a few
hundred points tell from any other that so few nodes make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import MICROSOFT, STANDARD, attribute, constant, only_used_by
from mxfp8_ops import contract
from mxfp8_ops.nodes.fused_gemm import FUNCTIONS

MOST_NODES: Final = 12
"""An activation has fewer: the longest in use, gelu of tanh with a cube of products, has ten."""

Array = npt.NDArray[np.float64]

_erf: Final[Callable[[Array], Array]] = np.vectorize(math.erf, otypes=[np.float64])
_tanh: Final[Callable[[Array], Array]] = np.tanh
_relu, _gelu, _gelu_tanh = (FUNCTIONS[name].of for name in ("relu", "gelu", "gelu_tanh"))


def _sigmoid(x: Array) -> Array:
    return (1 + _tanh(x / 2)) / 2


_POINTS: Final = np.concatenate([np.linspace(-12, 12, 241), [-1e4, -300, -40, -1e-3, 1e-3, 40, 300, 1e4]])

with np.errstate(over="ignore"):
    _EPILOGUES: Final[Mapping[str, Array]] = {
        name: row.of(_POINTS) for name, row in FUNCTIONS.items() if name != "none"
    }
    """The activation functions that a fused gemm has, at `_POINTS`, by the value of its attribute `epilogue`."""

_TOLERANCE: Final = {contract.FLOAT: 1e-6, contract.FLOAT16: 2.5e-4, contract.BFLOAT16: 2e-3}
"""How far a function may be off, relative to 1 + |x|, by dtype, to which its constants are rounded."""

_Compute = Callable[[ir.Node, Sequence[Array]], Array]


_STANDARD: Final[Mapping[str, _Compute]] = {
    "Identity": lambda node, given: given[0],
    "Neg": lambda node, given: -given[0],
    "Relu": lambda node, given: _relu(given[0]),
    "Sigmoid": lambda node, given: _sigmoid(given[0]),
    "Tanh": lambda node, given: _tanh(given[0]),
    "Erf": lambda node, given: _erf(given[0]),
    "Gelu": lambda node, given: (_gelu_tanh if attribute(node, "approximate", "") == "tanh" else _gelu)(given[0]),
    "Swish": lambda node, given: given[0] * _sigmoid(attribute(node, "alpha", 1.0) * given[0]),
    "Add": lambda node, given: given[0] + given[1],
    "Sub": lambda node, given: given[0] - given[1],
    "Mul": lambda node, given: given[0] * given[1],
    "Div": lambda node, given: given[0] / given[1],
    "Pow": lambda node, given: given[0] ** given[1],
}
_MICROSOFT: Final[Mapping[str, _Compute]] = {
    "Gelu": lambda node, given: _gelu(given[0]),
    "FastGelu": lambda node, given: _gelu_tanh(given[0] if len(given) == 1 else given[0] + given[1]),
    "QuickGelu": lambda node, given: given[0] * _sigmoid(attribute(node, "alpha", 1.702) * given[0]),
}
_OPS: Final = {MICROSOFT: _MICROSOFT, **dict.fromkeys(STANDARD, _STANDARD)}
"""What each elementwise op computes, by domain."""


def activation_of(value: ir.Value, dtype: int) -> tuple[str, Sequence[ir.Node]] | None:
    """Returns the longest activation of a value that a fused gemm has, and its nodes; or None.

    Only these nodes use the value and those between them.

    Args:
        value: of dtype `dtype`.
        dtype: an onnx.TensorProto.DataType.
    """
    cone = _cone(value)
    for count in range(len(cone), 0, -1):
        nodes = _ancestors([node for node, _ in cone[:count]])
        inner = (value, *(node.outputs[0] for node in nodes[:-1]))
        epilogue = _named(cone[count - 1][1], dtype)
        if epilogue is not None and all(only_used_by(each, nodes) for each in inner):
            return epilogue, nodes if count == 1 else [node for node in value.graph or () if node in nodes]
    return None


def _cone(value: ir.Value) -> list[tuple[ir.Node, Array]]:
    """Returns the elementwise nodes that read nothing but `value` and numbers, and what they make of it at `_POINTS`.

    Each is behind those it reads; none if there are more than `MOST_NODES`, since no activation has that many.
    """
    graph = value.graph
    values, waiting = {value: _POINTS}, [value]
    cone: dict[ir.Node, Array] = {}
    while waiting and len(cone) <= MOST_NODES:
        for node in waiting.pop().consumers():
            compute = _OPS.get(node.domain, {}).get(node.op_type)
            if compute is None or len(node.outputs) != 1 or node in cone or node.graph is not graph:
                continue
            given = [array for each in node.inputs if (array := _known(each, values)) is not None]
            if len(given) == len(node.inputs):
                with np.errstate(all="ignore"):
                    cone[node] = values[node.outputs[0]] = compute(node, given)
                waiting.append(node.outputs[0])
    if len(cone) > MOST_NODES:
        return []
    return list(cone.items())


def _known(value: ir.Value | None, values: Mapping[ir.Value, Array]) -> Array | None:
    """Returns a value of the cone, or a constant that is one number and adds no dimension to what it meets."""
    if value is None or value in values:
        return None if value is None else values[value]
    array = constant(value)
    if array is None or array.size != 1 or array.ndim > 1:
        return None
    return np.full(_POINTS.shape, array.astype(np.float64).reshape(()))


def _ancestors(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Returns those of `nodes` that the last one depends on, and the last, in order."""
    wanted, found = {nodes[-1].outputs[0]}, []
    for node in reversed(nodes):
        if node.outputs[0] in wanted:
            found.append(node)
            wanted.update(filter(None, node.inputs))
    return found[::-1]


def _named(values: Array, dtype: int) -> str | None:
    """Returns the epilogue with these values at `_POINTS`, within the tolerance of the dtype."""
    scale = 1 + np.abs(_POINTS)
    errors = {
        name: float(np.max(np.nan_to_num(np.abs(values - wanted) / scale, nan=np.inf)))
        for name, wanted in _EPILOGUES.items()
    }
    nearest = min(errors, key=errors.__getitem__)
    return nearest if errors[nearest] <= _TOLERANCE[dtype] else None
