"""The functions of the fused nodes, natively, on NumPy arrays: same names, same arguments, same errors.

Each also takes `threads`, how many to use (0 for one per processor), and raises BackendError if the native library is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp8_ops import checks, contract, formats, native, op_options
from mxfp8_ops.cpu.operands import array, thread_count
from mxfp8_ops.cpu.products import End, multiply, result
from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import VALUE_DTYPES
from mxfp8_ops.nodes.fused_gemm import check_factor
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
    a_format, b_format, dtype = op_options.gemm(**rest)
    codes = _codes(epilogue, factor)
    y, bias = result((a, a_scales), (b, b_scales), bias, dtype)
    threads = thread_count("gemm", threads)
    a_code, b_code = formats.element_format(a_format).onnx_dtype, formats.element_format(b_format).onnx_dtype
    library, y_code, n, k = native.load(), VALUE_DTYPES[dtype].onnx_dtype, *b.shape[-2:]

    def product(a: list[int], b: list[int], end: End, m: int, y: int) -> int:
        status: int = library.mxfp8_fused_gemm(
            a_code, *a, b_code, *b, end[0], *codes, end[1], m, n, k, y_code, y, n, threads
        )
        return status

    return multiply(product, (a, a_scales), (b, b_scales), (bias, _like(factor, y)), y)


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
    b_format, dtype, activation_dtype = op_options.weight_gemm(**rest)
    codes = _codes(epilogue, factor)
    checks.check_value_dtype("gemm", array("gemm", "x", x).dtype)
    y, bias = result((x,), (b, b_scales), bias, dtype)
    threads = thread_count("gemm", threads)
    x_code, b_code = VALUE_DTYPES[x.dtype.name].onnx_dtype, formats.element_format(b_format).onnx_dtype
    rounding = formats.activation_dtype(activation_dtype).onnx_dtype
    library, y_code, n, k = native.load(), VALUE_DTYPES[dtype].onnx_dtype, *b.shape[-2:]

    def product(x: list[int], b: list[int], end: End, m: int, y: int) -> int:
        status: int = library.mxfp8_fused_weight_gemm(
            x_code, *x, k, rounding, b_code, *b, end[0], *codes, end[1], m, n, k, y_code, y, n, threads
        )
        return status

    return multiply(product, (x,), (b, b_scales), (bias, _like(factor, y)), y)


def _codes(epilogue: str, factor: Array | None) -> tuple[int, int]:
    """Returns the codes of an epilogue and of the dtype of a factor."""
    if epilogue not in contract.EPILOGUES:
        raise ContractError.unknown("epilogue", epilogue, contract.EPILOGUES)
    # Without a factor its dtype is checked all the same, so it needs some valid code.
    if factor is None:
        return contract.EPILOGUES.index(epilogue), contract.FLOAT
    checks.check_value_dtype("gemm", array("gemm", "factor", factor).dtype)
    return contract.EPILOGUES.index(epilogue), VALUE_DTYPES[factor.dtype.name].onnx_dtype


def _like(factor: Array | None, y: Array) -> Array | None:
    if factor is not None:
        check_factor("gemm", factor, y.shape)
    return factor
