"""The functions of the fused nodes, natively, on NumPy arrays: same names, same arguments, same errors.

Each also takes `threads`, how many to use (0 for one per processor), and raises BackendError if the native library is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mxfp8_ops import checks, formats, op_options
from mxfp8_ops.cpu.operands import call, empty
from mxfp8_ops.cpu.products import check_epilogue, multiply, products, result
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from typing_extensions import Unpack


def fused_gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    **options: Unpack[op_options.FusedGemm],
) -> Array:
    """Returns epilogue(A @ B.T + bias) * factor; a [..., M, K], b [..., N, K], as in `numpy_nodes.fused_gemm`."""
    epilogue, factor, rest = op_options.epilogue(**options)
    return multiply((a, a_scales), (b, b_scales), bias, op_options.gemm(**rest), (epilogue, factor), threads)


def fused_weight_gemm(
    x: Array,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    **options: Unpack[op_options.FusedWeightGemm],
) -> Array:
    """Returns epilogue(x @ dequantize(b).T + bias) * factor; x [..., M, K], as in `numpy_nodes.fused_weight_gemm`."""
    epilogue, factor, rest = op_options.epilogue(**options)
    return multiply((x,), (b, b_scales), bias, op_options.weight_gemm(**rest), (epilogue, factor), threads)


def gemm_quantize(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    *,
    threads: int = 0,
    **options: Unpack[op_options.GemmQuantize],
) -> tuple[Codes, Codes, Array]:
    """Returns (elements, scales, y); a [..., M, K], b [..., N, K], as in
    `numpy_nodes.gemm_quantize`.
    """
    a_format, b_format, epilogue, element_format, scale_rounding = op_options.gemm_quantize(**options)
    check_epilogue(epilogue)
    formats.scale_increment(formats.element_format(element_format), scale_rounding)  # checks the names
    # The values are an output too, so their dtype is always float32: the codes are made of them, not of rounded ones.
    y, bias = result((a, a_scales), (b, b_scales), bias, "float32")
    formats.element_format(a_format), formats.element_format(b_format)
    elements, scales = (empty("gemm", size, np.uint8) for size in (y.shape, checks.scale_shape(y.shape, -1)))
    sizes = b.shape[-2:]
    for one_a, one_b, m, (at, *codes) in products((a, a_scales), (b, b_scales), y, elements, scales):
        call(
            "gemm", "mxfp8_gemm_quantize", a_format, *one_a, b_format, *one_b, bias, epilogue, m, *sizes,
            element_format, scale_rounding, *codes, at, threads=threads,
        )  # fmt: skip
    return elements, scales, y
