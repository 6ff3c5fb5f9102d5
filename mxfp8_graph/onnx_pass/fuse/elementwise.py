"""Recognizes the activation function that a few elementwise nodes compute, by its values.

Exporters write one function in many ways: 0.5 * x * (1 + erf(x / sqrt(2))) has its factors in any order, sqrt(2) as a
divisor or as a factor, and x ** 3 as a power or as products. All of them are one function of x. Its values at a few
hundred points tell it from any other function of so few nodes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import MICROSOFT, STANDARD, attribute, constant, only_used_by
from mxfp8_ops import contract
from mxfp8_ops.nodes.fused_gemm import FUNCTIONS

MOST_NODES: Final = 12
"""An activation has fewer: the longest in use, gelu of tanh with a cube of products, has ten."""

Array = npt.NDArray[np.float64]
T = TypeVar("T")

# NumPy has no erf.
_erf: Final[Callable[[Array], Array]] = np.vectorize(math.erf, otypes=[np.float64])
_tanh: Final[Callable[[Array], Array]] = np.tanh
_relu, _gelu, _gelu_tanh = (FUNCTIONS[name].function for name in ("relu", "gelu", "gelu_tanh"))


def _sigmoid(x: Array) -> Array:
    # 1 / (1 + exp(-x)), without an exponential that overflows.
    return (1 + _tanh(x / 2)) / 2


# Dense where activations bend; far points, where functions differ in their limits only; tiny ones beside 0.
POINTS: Final = np.concatenate([np.linspace(-12, 12, 241), [-1e4, -300, -40, -1e-3, 1e-3, 40, 300, 1e4]])
"""The points at which functions are compared."""

with np.errstate(over="ignore"):
    _EPILOGUES: Final[Mapping[str, Array]] = {
        name: row.function(POINTS) for name, row in FUNCTIONS.items() if name != "none"
    }
    """The activation functions that a fused gemm has, at `POINTS`, by the value of its attribute `epilogue`."""

_TOLERANCE: Final = {contract.FLOAT: 1e-6, contract.FLOAT16: 2.5e-4, contract.BFLOAT16: 2e-3}
"""Largest error of a function, relative to 1 + |x|, by dtype: the constants of the model are rounded to it."""


def _clip(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


_Compute = Callable[[ir.Node, Sequence[Any]], Array]


_STANDARD: Final[Mapping[str, _Compute]] = {
    "Identity": lambda node, inputs: inputs[0],
    "Clip": lambda node, inputs: _clip(*inputs),
    "HardSigmoid": lambda node, inputs: np.clip(
        attribute(node, "alpha", 0.2) * inputs[0] + attribute(node, "beta", 0.5), 0, 1
    ),
    "HardSwish": lambda node, inputs: inputs[0] * np.clip(inputs[0] / 6 + 0.5, 0, 1),
    "LeakyRelu": lambda node, inputs: np.where(inputs[0] < 0, attribute(node, "alpha", 0.01), 1) * inputs[0],
    "Max": lambda node, inputs: functools.reduce(np.maximum, inputs),
    "Min": lambda node, inputs: functools.reduce(np.minimum, inputs),
    "Neg": lambda node, inputs: -inputs[0],
    "Relu": lambda node, inputs: _relu(inputs[0]),
    "Sigmoid": lambda node, inputs: _sigmoid(inputs[0]),
    "Tanh": lambda node, inputs: _tanh(inputs[0]),
    "Erf": lambda node, inputs: _erf(inputs[0]),
    "Gelu": lambda node, inputs: (_gelu_tanh if attribute(node, "approximate", "") == "tanh" else _gelu)(inputs[0]),
    "Swish": lambda node, inputs: inputs[0] * _sigmoid(attribute(node, "alpha", 1.0) * inputs[0]),
    "Add": lambda node, inputs: inputs[0] + inputs[1],
    "Sub": lambda node, inputs: inputs[0] - inputs[1],
    "Mul": lambda node, inputs: inputs[0] * inputs[1],
    "Div": lambda node, inputs: inputs[0] / inputs[1],
    "Pow": lambda node, inputs: inputs[0] ** inputs[1],
}
_MICROSOFT: Final[Mapping[str, _Compute]] = {
    "Gelu": lambda node, inputs: _gelu(inputs[0]),
    "FastGelu": lambda node, inputs: _gelu_tanh(inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]),
    "QuickGelu": lambda node, inputs: inputs[0] * _sigmoid(attribute(node, "alpha", 1.702) * inputs[0]),
}
_OPS: Final = {MICROSOFT: _MICROSOFT, **dict.fromkeys(STANDARD, _STANDARD)}
"""The functions of elementwise ops, by domain and op type."""


def activation_of(
    value: ir.Value, dtype: int, recognize: Callable[[Array, int], T | None]
) -> tuple[T, Sequence[ir.Node]] | None:
    """Returns (what `recognize` returns, its nodes) for the longest activation of a value, or None.

    Nothing else uses the value or the values between these nodes.

    Args:
        value: of dtype `dtype`.
        dtype: an onnx.TensorProto.DataType.
        recognize: gets the values of a function at `POINTS` and `dtype`; returns the epilogue that it is, or None.
    """
    cone = _cone(value)
    for count in range(len(cone), 0, -1):
        nodes = _ancestors([node for node, _ in cone[:count]])
        inner = (value, *(node.outputs[0] for node in nodes[:-1]))
        epilogue = recognize(cone[count - 1][1], dtype)
        if epilogue is not None and all(only_used_by(each, nodes) for each in inner):
            return epilogue, nodes if count == 1 else [node for node in value.graph or () if node in nodes]
    return None


def _cone(value: ir.Value) -> list[tuple[ir.Node, Array]]:
    """Returns (node, its values at `POINTS`) for the elementwise nodes that read only `value` and numbers.

    A node comes after the nodes that it reads. The list is empty if there are more than `MOST_NODES`, since no
    activation has that many.
    """
    graph = value.graph
    values, waiting = {value: POINTS}, [value]
    cone: dict[ir.Node, Array] = {}
    while waiting and len(cone) <= MOST_NODES:
        for node in waiting.pop().consumers():
            compute = _OPS.get(node.domain, {}).get(node.op_type)
            if compute is None or len(node.outputs) != 1 or node in cone or node.graph is not graph:
                continue
            inputs = [None if each is None else _known(each, values) for each in node.inputs]
            # Only a bound of Clip may be absent.
            if all(each is None or array is not None for each, array in zip(node.inputs, inputs, strict=True)):
                with np.errstate(all="ignore"):  # the far points overflow on the way, as in the model
                    cone[node] = values[node.outputs[0]] = compute(node, inputs)
                waiting.append(node.outputs[0])
    if len(cone) > MOST_NODES:
        return []
    return list(cone.items())


def _known(value: ir.Value, values: Mapping[ir.Value, Array]) -> Array | None:
    """Returns a value of the cone, or a constant that is one number and adds no dimension to the other operand."""
    if value in values:
        return values[value]
    array = constant(value)
    if array is None or array.size != 1 or array.ndim > 1:
        return None
    return np.full(POINTS.shape, array.astype(np.float64).reshape(()))


def _ancestors(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Returns the last of `nodes` and those that it depends on, in order."""
    wanted, ancestors = {nodes[-1].outputs[0]}, []
    for node in reversed(nodes):
        if node.outputs[0] in wanted:
            ancestors.append(node)
            wanted.update(filter(None, node.inputs))
    return ancestors[::-1]


def gemm_epilogue(values: Array, dtype: int) -> str | None:
    """Returns the epilogue of a fused gemm with these values at `POINTS`, within the tolerance of the dtype."""
    nearest = min(_EPILOGUES, key=lambda name: _error(values, _EPILOGUES[name]))
    return nearest if is_near(values, _EPILOGUES[nearest], dtype) else None


def is_near(values: Array, wanted: Array, dtype: int) -> bool:
    """Whether two functions have the same values at `POINTS`, within the tolerance of the dtype."""
    return _error(values, wanted) <= _TOLERANCE[dtype]


def _error(values: Array, wanted: Array) -> float:
    """Returns the largest error relative to 1 + |x|; a NaN matches no function: its error counts as infinite."""
    return float(np.max(np.nan_to_num(np.abs(values - wanted) / (1 + np.abs(POINTS)), nan=np.inf)))
