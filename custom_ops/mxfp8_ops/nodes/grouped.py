"""MXFP8GroupedGemm and MXFP8GroupedWeightGemm: products with matrices that indices pick, for a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import op_options
from mxfp8_ops.checks import Shape, check_scales, check_value_dtype
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.node import BOOL, ELEMENTS, FLOAT, INT64, SCALES, VALUES, Op, Port
from mxfp8_ops.nodes.gemm import a_values, b_values, product_shape, rounded_values, weight_gemm
from mxfp8_ops.nodes.quantize import dequantize
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from onnx import GraphProto
    from typing_extensions import Unpack

    from mxfp8_ops.function_body import Body


def grouped_gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    experts: npt.NDArray[np.int64],
    **options: Unpack[op_options.Gemm],
) -> Array:
    """Returns the products of `a` and the transposed matrices of b[experts], with the sums in float64.

    It is `gemm(a, a_scales, b[experts], b_scales[experts])`, except for rows without an expert.

    Args:
        a: elements uint8 [..., M, K].
        a_scales: uint8 [..., M, ceil(K / 32)].
        b: elements uint8 [E, N, K].
        b_scales: uint8 [E, N, ceil(K / 32)].
        experts: int64 [...], which broadcasts with the leading dimensions of `a`; -1 is the last expert. E stands for
            no expert: the result is 0 there, whatever the values of `a`.
        **options: see `op_options.Gemm`.

    Returns:
        [..., M, N].

    Raises:
        ShapeError: shapes do not fit, or an index is beyond -E..E.
        ContractError: unknown format.
    """
    a_format, b_format, dtype = op_options.gemm(**options)
    values = dequantize(a, a_scales, element_format=a_format)
    return grouped_weight_gemm(values, b, b_scales, experts, b_format=b_format, dtype=dtype)


def grouped_weight_gemm(
    x: Array, b: Codes, b_scales: Codes, experts: npt.NDArray[np.int64], **options: Unpack[op_options.WeightGemm]
) -> Array:
    """Returns the products of `x` and the transposed matrices of b[experts], with the sums in float64.

    The rest is as in `grouped_gemm`, but with x [..., M, K] and the options of `weight_gemm`.
    """
    check_value_dtype("grouped_gemm", x.dtype)
    grouped_shape("grouped_gemm", x.shape, b.shape, experts.shape)
    check_scales("grouped_gemm", b.shape, b_scales.shape, -1)
    picked = check_experts("grouped_gemm", experts, b.shape[0])
    no_expert = picked == b.shape[0]
    # One more matrix, of zeros: NumPy needs a matrix at the index E, which stands for no expert.
    b, b_scales = (np.concatenate([t, np.zeros((1, *t.shape[1:]), np.uint8)])[picked] for t in (b, b_scales))
    y = weight_gemm(x, b, b_scales, **options)
    y[np.broadcast_to(no_expert, y.shape[:-2])] = 0  # a NaN in x times the zeros is NaN
    return y


# --- Shapes


def grouped_shape(
    where: str, x: Shape, b: Shape, experts: Shape, broadcast: Callable[..., Any] = np.broadcast_shapes
) -> Shape:
    """Returns [..., M, N], the shape of the products of x [..., M, K] and the matrices of b [E, N, K] at experts [...].

    The shape of the indices broadcasts with the leading dimensions of `x`, as in `product_shape`.

    Raises:
        ShapeError: they do not fit together.
    """
    if len(x) < 2 or len(b) != 3 or x[-1] != b[-1]:
        raise ShapeError(
            where,
            f"operands {x} and {b}",
            expected="[..., M, K] and [E, N, K] with the same K",
            advice="store each expert's weight with K last",
        )
    # The weights are a stack [..., N, K], with one matrix for each index.
    return product_shape(where, x, (*experts, *b[1:]), None, broadcast)


def check_experts(where: str, experts: Any, count: int) -> Any:
    """Returns the indices of experts as 0..count, where `count` stands for no expert.

    -1 is the last expert, as in ONNX Gather.

    Raises:
        ShapeError: another dtype than int64, or an index beyond -count..count.
    """
    if experts.dtype != np.int64:
        raise ShapeError(where, f"experts have dtype {experts.dtype}", expected="int64", advice="cast them")
    if ((experts < -count) | (experts > count)).any():
        beyond = experts[(experts < -count) | (experts > count)][0]
        raise ShapeError(
            where,
            f"expert {int(beyond)} of {count}",
            expected=f"{-count} to {count - 1}, or {count} for none",
            advice="correct the indices",
        )
    # `count` itself passes: it stands for no expert, which has no index in Gather.
    return experts + count * (experts < 0)


# --- The portable body


def _grouped_matmul(g: Body, values: Callable[[Body], str]) -> None:
    """Y = values of A or X @ transpose(B[experts]), with one MatMul for each expert among the indices."""
    a, b = values(g), b_values(g)
    count = g("Squeeze", g("Shape", b, end=1), out="count")
    experts = g("Unsqueeze", _experts(g, count), g.constant([-1]))
    experts = g("Expand", experts, g("Shape", a, end=-1), out="of_rows")
    lead = g("Shape", experts, out="lead")  # [..., M], broadcast
    rows = g("Reshape", g("Size", experts), g.constant([1]), out="rows")
    k, n = g("Shape", a, start=-1), g("Shape", b, start=-1)
    a = g("Expand", a, g("Concat", lead, g.constant([1]), axis=0))
    a = g("Reshape", a, g("Concat", rows, k, axis=0), allowzero=1, out="a")
    experts = g("Reshape", experts, rows, allowzero=1)
    picked = g("Unique", g("Compress", experts, g("Less", experts, count)), out="picked")
    zero = g("ConstantOfShape", g("Concat", rows, n, axis=0), out="no_expert")
    y = g("Loop", g("Size", picked), "", zero, body=_expert(g, a, b, experts, picked), out="y")
    y = g("Reshape", y, g("Concat", lead, n, axis=0), allowzero=1)
    g.result(g.cast(y, "output_dtype"), "Y")


def _experts(g: Body, count: str) -> str:
    """Returns the indices of experts as 0..count, where count is no expert; others fail at run time in Gather."""
    from_end = g("Add", "experts", count)
    experts = g("Where", g("Less", "experts", g.constant(0)), from_end, "experts", out="from_start")
    beyond = g("Or", g("Less", experts, g.constant(0)), g("Greater", experts, count), out="beyond")
    end = g("Add", count, g.constant(1))
    return g("Gather", g("Range", g.constant(0), end, g.constant(1)), g("Where", beyond, end, experts))


def _expert(outer: Body, a: str, b: str, experts: str, picked: str) -> GraphProto:
    """Returns the body of a Loop over `picked`: it multiplies the rows of one expert and puts them into the result."""
    g = outer.inner()
    turn, more, before = (g.unique(name) for name in ("turn", "more", "before"))
    expert = g("Gather", picked, turn, out="expert")
    at = g("Transpose", g("NonZero", g("Equal", experts, expert)), out="at")  # [rows of this expert, 1]
    after = g("ScatterND", before, at, g("MatMul", g("GatherND", a, at), g("Gather", b, expert)), out="after")
    inputs = [(turn, INT64, []), (more, BOOL, []), (before, FLOAT, [None, None])]
    outputs = [(g("Identity", more), BOOL, []), (after, FLOAT, [None, None])]
    return g.graph("of_one_expert", inputs, outputs)


# --- The contract


GROUPED_GEMM: Final = Op(
    "MXFP8GroupedGemm",
    (
        Port("A", ELEMENTS, "[..., M, K]"),
        Port("A_scales", SCALES, "[..., M, ceil(K / 32)]"),
        Port("B", ELEMENTS, "[E, N, K]"),
        Port("B_scales", SCALES, "[E, N, ceil(K / 32)]"),
        Port("experts", (INT64,), "[...]"),
    ),
    (Port("Y", VALUES, "[..., M, N]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "Y = A @ transpose(B[experts]).",
    partial(_grouped_matmul, values=a_values),
    is_gemm=True,
)
GROUPED_WEIGHT_GEMM: Final = Op(
    "MXFP8GroupedWeightGemm",
    (Port("X", VALUES, "[..., M, K]"), *GROUPED_GEMM.inputs[2:]),
    GROUPED_GEMM.outputs,
    MappingProxyType({"activation_dtype": FLOAT, "output_dtype": FLOAT}),
    "Y = X @ transpose(B[experts]). Only the weights are quantized.",
    partial(_grouped_matmul, values=rounded_values),
    is_gemm=True,
)


OPS: Final = (GROUPED_GEMM, GROUPED_WEIGHT_GEMM)
