"""The functions of the fused nodes, natively, on NumPy arrays: same names, same arguments, same errors.

Each also takes `threads`, how many to use (0 for one per processor), and raises BackendError if the native library is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp8_ops import op_options
from mxfp8_ops.cpu.products import multiply
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
