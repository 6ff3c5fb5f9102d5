"""What the torch ops accept and what shape they return: the checks of the kernels, and the fake kernels themselves.

Everything here works on symbolic shapes, so torch.export and torch.compile see the same rules and messages as an eager
call: ShapeError where shapes or dtypes do not fit, ContractError for an unknown format or rounding. Results are
contiguous, whatever the strides of the inputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import checks, formats
from mxfp8_ops.checks import dtype_name, scale_count, scale_shape
from mxfp8_ops.errors import ContractError, ShapeError

VALUE_ROWS: Final[dict[torch.dtype, formats.ValueDtype]] = {
    getattr(torch, row.numpy_name): row for row in formats.VALUE_DTYPES.values()
}
"""Row of each value dtype."""

DTYPE_CODES: Final = {dtype: row.onnx_dtype for dtype, row in VALUE_ROWS.items()}
"""Code of each value dtype in the native library."""

GRADIENT_FORMATS: Final = {"E4M3": "e4m3", "HYBRID": "e5m2"}
"""Element format of gradients, by TransformerEngine's name for the choice; everything else is E4M3."""

NO_GRADIENT: Final = (
    "quantize: x requires a gradient; expected none to be wanted, quantized values pass none back; run inference under "
    "torch.inference_mode(), train with mxfp8::linear_train"
)
"""Warning of `quantize` where a gradient of x is wanted."""

Pair = tuple[Tensor, Tensor]


def quantize(x: Tensor, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil") -> Pair:
    """Returns empty (elements, scales) of `mxfp8::quantize`."""
    axis = check_quantize(x, axis, element_format, scale_rounding)
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(scale_shape(x.shape, axis), dtype=torch.uint8)


def quantize_both(
    x: Tensor, element_format: str = "e4m3", scale_rounding: str = "ceil"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns empty results of `mxfp8::quantize_both`."""
    check_quantize_both(x, element_format, scale_rounding)
    return *quantize(x, -1, element_format, scale_rounding), *quantize(x.t(), -1, element_format, scale_rounding)


def dequantize(elements: Tensor, *rest: Any) -> Tensor:
    """Returns an empty result of `mxfp8::dequantize`."""
    _, dtype = check_dequantize(elements, *rest)
    return elements.new_empty(elements.shape, dtype=dtype)


def gemm(a: Tensor, *rest: Any) -> Tensor:
    """Returns an empty result of `mxfp8::gemm`."""
    shape, dtype = check_gemm(a, *rest)
    return a.new_empty(shape, dtype=dtype)


def weight_gemm(x: Tensor, *rest: Any) -> Tensor:
    """Returns an empty result of `mxfp8::weight_gemm`."""
    shape, dtype = check_weight_gemm(x, *rest)
    return x.new_empty(shape, dtype=dtype)


def linear_train(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, fp8_format: str = "E4M3", scale_rounding: str = "ceil"
) -> Tensor:
    """Returns an empty result of `mxfp8::linear_train`."""
    check_linear_train(x, weight, bias, fp8_format, scale_rounding)
    return x.new_empty((*x.shape[:-1], weight.shape[-2]))


def check_quantize(x: Tensor, axis: int, element_format: str, scale_rounding: str) -> int:
    """Returns `axis` as 0..rank-1; raises as `quantize` does."""
    formats.scale_increment(formats.element_format(element_format), scale_rounding)
    check_dtype("quantize", x.dtype)
    return checks.normalize_axis("quantize", x.dim(), axis)


def check_quantize_both(x: Tensor, element_format: str, scale_rounding: str) -> None:
    """Raises as `quantize_both` does."""
    check_quantize(x, -1, element_format, scale_rounding)
    if x.dim() != 2:
        raise ShapeError("quantize_both", f"x has shape {tuple(x.shape)}", expected="a matrix", advice="reshape it")


def check_dequantize(
    elements: Tensor, scales: Tensor, axis: int = -1, element_format: str = "e4m3", dtype: torch.dtype | None = None
) -> tuple[int, torch.dtype]:
    """Returns `axis` as 0..rank-1 and the dtype of the result; raises as `dequantize` does."""
    formats.element_format(element_format)
    dtype = dtype or torch.float32
    check_dtype("dequantize", dtype)
    axis = checks.normalize_axis("dequantize", elements.dim(), axis)
    check_codes("dequantize", elements, scales, axis)
    return axis, dtype


def check_gemm(  # noqa: PLR0917 - the op's schema
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    a_format: str = "e4m3",
    b_format: str = "e4m3",
    dtype: torch.dtype | None = None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns shape and dtype of the result; raises as `gemm` does."""
    formats.element_format(a_format)
    formats.element_format(b_format)
    dtype = dtype or torch.float32
    check_dtype("gemm", dtype)
    return gemm_shape("gemm", a, a_scales, b, b_scales, bias), dtype


def check_weight_gemm(  # noqa: PLR0917 - the op's schema
    x: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    b_format: str = "e4m3",
    dtype: torch.dtype | None = None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns shape and dtype of the result; raises as `weight_gemm` does."""
    formats.element_format(b_format)
    check_dtype("weight_gemm", x.dtype)
    if dtype is not None:
        check_dtype("weight_gemm", dtype)
    return gemm_shape("weight_gemm", x, None, b, b_scales, bias), dtype or x.dtype


def check_linear_train(x: Tensor, weight: Tensor, bias: Tensor | None, fp8_format: str, scale_rounding: str) -> None:
    """Raises as `linear_train` does."""
    if fp8_format not in GRADIENT_FORMATS:
        raise ContractError.unknown("fp8_format", fp8_format, GRADIENT_FORMATS)
    formats.scale_increment(formats.E4M3, scale_rounding)
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        check_dtype("linear_train", tensor.dtype)
    if weight.dim() != 2 and not (weight.dim() == x.dim() == 3 and weight.shape[0] == x.shape[0]):
        raise ShapeError(
            "linear_train",
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}",
            expected="a weight [N, K], or [B, N, K] for x [B, M, K]",
            advice="store it as nn.Linear does, or expand x",
        )
    checks.check_gemm_shapes(
        "linear_train", tuple(x.shape), tuple(weight.shape), None if bias is None else tuple(bias.shape)
    )


def check_dtype(where: str, dtype: torch.dtype) -> None:
    """Raises ShapeError unless `dtype` is float32, float16 or bfloat16."""
    if dtype not in VALUE_ROWS:
        checks.check_value_dtype(where, dtype)


def gemm_shape(  # noqa: PLR0917 - the op's operands
    where: str, x: Tensor, x_scales: Tensor | None, b: Tensor, b_scales: Tensor, bias: Tensor | None
) -> tuple[int, ...]:
    """Returns the shape of x [..., M, K] (or [K]) times b [..., N, K] transposed.

    Raises:
        ShapeError: they do not fit together, nor with their scales [..., ceil(K / 32)] and the bias float32 [N].
    """
    # What nearly every call looks like, in as few steps as Python allows: a whole op has 5 us.
    x_shape, b_shape = x.shape, b.shape
    if len(b_shape) == 2 and x_shape:
        n, k = b_shape
        lead, blocks = x_shape[:-1], scale_count(k)
        if (
            x_shape[-1] == k
            and b.dtype is b_scales.dtype is torch.uint8
            and b_scales.shape == (n, blocks)
            and (x_scales is None or (x.dtype is x_scales.dtype is torch.uint8 and x_scales.shape == (*lead, blocks)))
            and (bias is None or (bias.dtype is torch.float32 and bias.shape == (n,)))
        ):
            return (*lead, n)
    return _gemm_shape(where, x, x_scales, b, b_scales, bias)


def _gemm_shape(  # noqa: PLR0917 - the op's operands
    where: str, x: Tensor, x_scales: Tensor | None, b: Tensor, b_scales: Tensor, bias: Tensor | None
) -> tuple[int, ...]:
    """Returns what `gemm_shape` does, or raises, for operands of any rank."""
    bias_shape = None if bias is None else tuple(bias.shape)
    broadcast: Any = torch.broadcast_shapes
    shape = checks.gemm_shape(where, tuple(x.shape), tuple(b.shape), bias_shape, broadcast)
    check_codes(where, b, b_scales, -1)
    if x_scales is not None:
        check_codes(where, x, x_scales, -1)
    if bias is not None and bias.dtype is not torch.float32:
        raise ShapeError(
            where, f"bias has dtype {dtype_name(bias.dtype)}", expected="float32", advice="pass bias.float()"
        )
    return shape


def check_codes(where: str, elements: Tensor, scales: Tensor, axis: int) -> None:
    """Raises ShapeError unless both are uint8 and `scales` has one code per block of `elements` along `axis`."""
    if elements.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise ShapeError(
            where,
            f"elements have dtype {dtype_name(elements.dtype)} and scales {dtype_name(scales.dtype)}",
            expected="uint8 codes",
            advice="pass .view(torch.uint8)",
        )
    checks.check_scales(where, tuple(elements.shape), tuple(scales.shape), axis)
