"""The options of gemms, which the functions of all backends take by keyword.

A TypedDict documents the options; the function of the same name returns their values, defaults included. It is a
function because an object would take 2 % of a call of a gemm, which takes 10 us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import numpy.typing as npt


class _Product(TypedDict, total=False):
    b_format: str
    """Element format of `b`, "e4m3" (the default), "e5m2" or "int8"."""
    dtype: str
    """Dtype of the result, "float32" (the default), "float16" or "bfloat16"."""


class Gemm(_Product, total=False):
    """The options of `gemm` and `grouped_gemm`."""

    a_format: str
    """Element format of `a`, "e4m3" (the default), "e5m2" or "int8"."""


class WeightGemm(_Product, total=False):
    """The options of `weight_gemm` and `grouped_weight_gemm`."""

    activation_dtype: str | None
    """Dtype to which x is rounded first: "bfloat16" (to nearest even; overflow gives infinity; subnormals stay), or
    None (the default), which leaves x as it is."""


class _Epilogue(TypedDict, total=False):
    epilogue: str
    """One of `contract.EPILOGUES`; "none" by default."""
    factor: npt.NDArray[Any] | None
    """Factor of the result after the epilogue, of its shape, float32, float16 or bfloat16; None (the default) for 1."""


class FusedGemm(Gemm, _Epilogue, total=False):
    """The options of `fused_gemm`."""


class FusedWeightGemm(WeightGemm, _Epilogue, total=False):
    """The options of `fused_weight_gemm`."""


def gemm(a_format: str = "e4m3", b_format: str = "e4m3", dtype: str = "float32") -> tuple[str, str, str]:
    """Returns (a_format, b_format, dtype), the values of `Gemm`."""
    return a_format, b_format, dtype


def weight_gemm(
    b_format: str = "e4m3", dtype: str = "float32", activation_dtype: str | None = None
) -> tuple[str, str, str | None]:
    """Returns (b_format, dtype, activation_dtype), the values of `WeightGemm`."""
    return b_format, dtype, activation_dtype


def epilogue(
    epilogue: str = "none", factor: npt.NDArray[Any] | None = None, **rest: Any
) -> tuple[str, npt.NDArray[Any] | None, dict[str, Any]]:
    """Returns (epilogue, factor, the options of the gemm without an epilogue)."""
    return epilogue, factor, rest
