"""Error bound of a kernel of MXFP8Attention, computed by ONNX nodes; `mxfp8_ops.attention` derives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
from onnx import TensorProto

from mxfp8_ops import contract

_ROUNDOFF: Final = 2.0**-24
_SEEN: Final = 104.0
"""A key whose score is this far below the highest has a weight of 0 in float32."""
_EXP_UNITS: Final = 8.0
"""Largest error of an exponential, in units of 2^-24 of its value."""


class Nodes(Protocol):
    """Adds nodes to a graph."""

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Adds op(*inputs) and returns the name of its output."""

    def constant(self, value: float | list[float], dtype: type[np.generic] = np.float32) -> str:
        """Returns the name of a constant."""


def attention_bound(
    g: Nodes, inputs: Mapping[str, str], presents: tuple[str, str], attributes: Mapping[str, Any]
) -> str:
    """Returns the name of a bound per value of Y [B, T, Hq * D], without the rounding to the dtype of Y.

    It is looser than `attention_error_bound`, and needs no scores: |q . k| <= |q| |k|, and a mean of values is at most
    the largest of them.

    Args:
        g: where nodes are added.
        inputs: names of the node's inputs, by port.
        presents: names of its outputs present_key and present_value.
        attributes: all of the node's.
    """
    heads = [0, 0, attributes["q_num_heads"], -1]
    q = g("Reshape", g("Cast", inputs["Q"], to=TensorProto.FLOAT), g.constant(heads, np.int64))
    rows = g("Unsqueeze", g("Transpose", _length(g, q), perm=[0, 2, 1]), g.constant([-1], np.int64))
    d = g("Cast", g("Shape", q, start=-1), to=TensorProto.FLOAT)
    key, value = (_of_q_heads(g, g("Cast", name, to=TensorProto.FLOAT), attributes) for name in presents)
    longest = g("ReduceMax", _length(g, key), g.constant([-1], np.int64), keepdims=1)
    products = g("Mul", rows, g("Unsqueeze", longest, g.constant([-1], np.int64)))
    scale = attributes["scale"]
    factor = g.constant(abs(scale)) if scale else g("Reciprocal", g("Sqrt", d))
    products = g("Mul", products, factor)  # [B, Hq, S, 1], at least |scale q . k| for every key

    # The absolute error of a score that counts, up to its exponential; it is the relative error of a weight.
    size = g("Add", products, g.constant(_SEEN))
    mask = g("Cast", inputs["attn_mask"], to=TensorProto.FLOAT)
    last = g.constant([-1], np.int64)
    size = g("Add", size, g("Abs", g("ReduceMax", mask, last, keepdims=1)))
    units = g("Mul", products, g("Add", d, g.constant(4)))
    units = g("Sum", units, g("Mul", size, g.constant(2)), g.constant(4 * _SEEN + _EXP_UNITS))
    e = g("Mul", units, g.constant(1.01 * _ROUNDOFF))
    off = g("Add", e, g("Mul", e, e))  # at least e^e - 1 where that is below 1

    total = g("Cast", g("Shape", key, start=2, end=3), to=TensorProto.FLOAT)
    terms = g("Add", g("Mul", total, g.constant(2)), g.constant(32))
    # Half a unit in the last place of bfloat16, which weights are rounded to there.
    rounded = 2.0**-8 if attributes["activation_dtype"] == contract.BFLOAT16 else 0.0
    growth = g("Add", g("Mul", terms, g.constant(2.02 * _ROUNDOFF * (1 + rounded))), g.constant(rounded))
    # (1 + off) (1 + growth) / (1 - off) - 1
    above = g("Sum", g("Mul", off, g.constant(2)), growth, g("Mul", off, growth))
    relative = g("Div", above, g("Sub", g.constant(1), off))
    # From off = 1 on the formula has no meaning; two means of the same values differ by at most twice the largest of
    # them.
    relative = g("Where", g("Less", off, g.constant(1)), relative, g.constant(2))
    largest = g("ReduceMax", g("Abs", value), g.constant([2], np.int64), keepdims=1)
    bound = g("Mul", g("Min", relative, g.constant(2)), largest)
    return g("Reshape", g("Transpose", bound, perm=[0, 2, 1, 3]), g.constant([0, 0, -1], np.int64))


def _length(g: Nodes, x: str) -> str:
    """Returns the Euclidean length of each row, 1% above it: it is a float32 sum."""
    return g("Mul", g("ReduceL2", x, g.constant([-1], np.int64), keepdims=0), g.constant(1.01))


def _of_q_heads(g: Nodes, x: str, attributes: Mapping[str, Any]) -> str:
    """Returns x [B, Hkv, P + T, D] as [B, Hq, P + T, D]: every head repeated for the heads of Q that share it."""
    each = attributes["q_num_heads"] // attributes["kv_num_heads"]
    apart = g("Unsqueeze", x, g.constant([2], np.int64))
    repeated = g("Concat", *(apart,) * each, axis=2)
    shape = g(
        "Concat",
        g("Shape", x, end=1),
        g.constant([attributes["q_num_heads"]], np.int64),
        g("Shape", x, start=2),
        axis=0,
    )
    return g("Reshape", repeated, shape, allowzero=1)
