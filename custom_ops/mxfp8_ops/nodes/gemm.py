"""MXFP8Gemm and MXFP8WeightGemm: products of a packed weight with a packed operand or with plain values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, op_options
from mxfp8_ops.checks import Shape, check_value_dtype
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.node import ELEMENTS, FLOAT, FLOAT16, SCALES, VALUES, Op, Port
from mxfp8_ops.nodes.quantize import dequantize
from mxfp8_ops.numerics import Array, Codes, error_bound, value_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mxfp8_ops.function_body import Body


def gemm(
    a: Codes, a_scales: Codes, b: Codes, b_scales: Codes, bias: Array | None = None, **options: Unpack[op_options.Gemm]
) -> Array:
    """Returns dequantize(a) @ dequantize(b).T + bias, with the sums in float64.

    Other implementations accumulate in float32, in any order. Their results differ from this one by at most
    `gemm_error_bound`.

    Args:
        a: elements uint8 [..., M, K] (or [K], which gives [..., N]).
        a_scales: uint8 [..., M, ceil(K / 32)].
        b: elements uint8 [..., N, K]; leading dimensions broadcast against the leading dimensions of `a`.
        b_scales: uint8 [..., N, ceil(K / 32)].
        bias: float32 [N], or None.
        **options: see `op_options.Gemm`.

    Returns:
        [..., M, N].

    Raises:
        ShapeError: shapes do not fit.
        ContractError: unknown format.
    """
    a_format, b_format, dtype = op_options.gemm(**options)
    return weight_gemm(
        dequantize(a, a_scales, element_format=a_format), b, b_scales, bias, b_format=b_format, dtype=dtype
    )


def weight_gemm(
    x: Array, b: Codes, b_scales: Codes, bias: Array | None = None, **options: Unpack[op_options.WeightGemm]
) -> Array:
    """Returns x @ dequantize(b).T + bias, with the sums in float64.

    The rest is as in `gemm`, but x [..., M, K] (or [K]) is float32, float16 or bfloat16; see `op_options.WeightGemm`.
    """
    b_format, dtype, activation_dtype = op_options.weight_gemm(**options)
    check_value_dtype("gemm", x.dtype)
    product_shape("gemm", x.shape, b.shape, None if bias is None else bias.shape)
    if formats.activation_dtype(activation_dtype) is formats.BFLOAT16:
        x = x.astype(value_dtype("bfloat16"))
    weight = dequantize(b, b_scales, element_format=b_format)
    with np.errstate(over="ignore", invalid="ignore"):
        # An element has at most 7 significant bits and x at most 24: each product is exact in the 53 bits of float64.
        y = x.astype(np.float64) @ np.swapaxes(weight, -1, -2).astype(np.float64)
        if bias is not None:
            y = y + bias.astype(np.float64)
        # Through float32 to 16 bits, as in the kernels: they accumulate in float32 and round the sum.
        return np.asarray(y, np.float32).astype(value_dtype(dtype))


def gemm_error_bound(
    x: Array, weight: Array, dtype: str = "float32", bias: Array | None = None
) -> npt.NDArray[np.float64]:
    """Returns the largest error of each output of x @ weight.T + bias, by its `numerics.ErrorBound`.

    x [..., M, K] and weight [..., N, K] are dequantized values, bias is [N]; dtype is the dtype of the result that you
    judge. Compare it with `gemm(..., dtype="float32")`: a reference in 16 bits has one more rounding.
    """
    magnitude = np.abs(x.astype(np.float64)) @ np.swapaxes(np.abs(weight.astype(np.float64)), -1, -2)
    if bias is not None:
        magnitude = magnitude + np.abs(bias.astype(np.float64))
    return np.asarray(error_bound(dtype).at(magnitude, x.shape[-1]), np.float64)


# --- Shapes


def check_gemm_shapes(where: str, x: Shape, b: Shape, bias: Shape | None) -> None:
    """Raises ShapeError unless x [..., M, K] (or [K]), b [..., N, K] and bias [N] have the same K and N."""
    # The second operand has K last too, as a weight of nn.Linear: blocks of both are then contiguous in memory.
    if len(x) < 1 or len(b) < 2 or x[-1] != b[-1]:
        raise ShapeError(
            where,
            f"operands {x} and {b}",
            expected="[..., M, K] and [..., N, K] with the same K",
            advice="store the second operand with K last",
        )
    if bias is not None and bias != (b[-2],):
        raise ShapeError(
            where, f"bias has shape {bias}", expected=f"({b[-2]},), one value per output column", advice="reshape it"
        )


def product_shape(
    where: str, x: Shape, b: Shape, bias: Shape | None, broadcast: Callable[..., Any] = np.broadcast_shapes
) -> Shape:
    """Returns [..., M, N] (or [..., N]), the shape of x [..., M, K] (or [K]) times b [..., N, K] transposed.

    Leading dimensions combine as `broadcast` says; torch.broadcast_shapes knows symbolic ones.

    Raises:
        ShapeError: they do not fit together.
    """
    check_gemm_shapes(where, x, b, bias)
    # One weight for all rows: no dimension broadcasts.
    if len(b) == 2:
        return (*x[:-1], b[0])
    try:
        leading = broadcast(x[:-2], b[:-2])
    except (ValueError, RuntimeError):  # NumPy raises the first, torch the second
        raise ShapeError(
            where, f"operands {x} and {b}", expected="leading dimensions that broadcast", advice="reshape one"
        ) from None
    return (*leading, *x[-2:-1], b[-2])  # x[-2:-1] is empty for a vector: it has no M


# --- The portable body


def a_values(g: Body) -> str:
    """Returns the float32 values of A, which has the same K as B."""
    return g.values("A", "A_scales", g.known("A"), whole=g.known("B").whole)


def b_values(g: Body) -> str:
    """Returns the float32 values of B [..., N, K] as [..., K, N]."""
    known = g.known("B")
    if known.rank is None:
        return g("Einsum", g.values("B", "B_scales", known), equation="...nk->...kn")
    perm = [*range(known.rank - 2), known.rank - 1, known.rank - 2]
    if not (known.constant and known.whole and g.style.folds_weights):
        return g("Transpose", g.values("B", "B_scales", known), perm=perm)
    # ONNX Runtime keeps every step of its constant folding until all weights are done, so few steps are in float32.
    b, scales = g("Transpose", "B", perm=perm), g("Transpose", "B_scales", perm=perm)
    lead, n = g("Shape", b, end=-2), g("Shape", b, start=-1)
    blocks = g("Concat", lead, g("Shape", scales, start=-2, end=-1), g.constant([BLOCK_SIZE]), n, axis=0)
    x = g("Cast", g("Reshape", b, blocks, allowzero=1), to=FLOAT)
    factors = g("Unsqueeze", g.factors(scales, "B", known), g.constant([-2]))
    return g("Reshape", g("Mul", x, factors), g("Shape", b), allowzero=1)


def rounded_values(g: Body) -> str:
    """Returns the float32 values of X, rounded to activation_dtype first."""
    x = g.cast("X", "activation_dtype")
    return g.floats("X") if x == "X" else g("Cast", x, to=FLOAT)


def _matmul(g: Body, values: Callable[[Body], str]) -> None:
    """Y = values of A or X @ transpose(B) + bias."""
    y = g("MatMul", values(g), b_values(g))
    if g.known("bias").present is not False:
        y = g("Add", y, g.or_zeros("bias", "B_scales"))
    g.result(g.cast(y, "output_dtype"), "Y")


def weight_gemm_dtype(wanted: int) -> int:
    """Returns the output_dtype of an MXFP8WeightGemm for a result of dtype `wanted`; if they differ, add a Cast.

    Where the neighbours of a float16 node run only in float32, ONNX Runtime runs this node in float32 too, and keeps
    its attributes. A node with float16 on both sides and with its dtype as an attribute then fails to load. So
    output_dtype is float32 for float16.

    Args:
        wanted: an onnx.DataType.
    """
    return FLOAT if wanted == FLOAT16 else wanted


# --- The contract


GEMM: Final = Op(
    "MXFP8Gemm",
    (
        Port("A", ELEMENTS, "[..., M, K] or [K]"),
        Port("A_scales", SCALES, "[..., M, ceil(K / 32)]"),
        Port("B", ELEMENTS, "[..., N, K]"),
        Port("B_scales", SCALES, "[..., N, ceil(K / 32)]"),
        Port("bias", (FLOAT,), "[N]", optional=True),
    ),
    (Port("Y", VALUES, "[..., M, N] or [..., N]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "Y = A @ transpose(B) + bias.",
    partial(_matmul, values=a_values),
    is_gemm=True,
)
WEIGHT_GEMM: Final = Op(
    "MXFP8WeightGemm",
    (Port("X", VALUES, "[..., M, K] or [K]"), *GEMM.inputs[2:]),
    GEMM.outputs,
    MappingProxyType({"activation_dtype": FLOAT, "output_dtype": FLOAT}),
    "Y = X @ transpose(B) + bias. Only the weight is quantized.",
    partial(_matmul, values=rounded_values),
    is_gemm=True,
)


OPS: Final = (GEMM, WEIGHT_GEMM)
