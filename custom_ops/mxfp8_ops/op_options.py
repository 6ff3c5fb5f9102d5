"""The options of gemms, which the functions of every backend take by keyword.

A TypedDict documents the options of a function of the backends; a function here returns their values, with defaults.
These are functions and no classes because a call of a gemm takes 10 us: an object would be 2 % of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import numpy.typing as npt


class _Product(TypedDict, total=False):
    b_format: str
    """Element format of `b`, "e4m3" (the default) or "e5m2"."""
    dtype: str
    """Dtype of the result, "float32" (the default), "float16" or "bfloat16"."""


class Gemm(_Product, total=False):
    """The options of `gemm` and `grouped_gemm`."""

    a_format: str
    """Element format of `a`, "e4m3" (the default) or "e5m2"."""


class WeightGemm(_Product, total=False):
    """The options of `weight_gemm` and `grouped_weight_gemm`."""

    activation_dtype: str | None
    """What x is rounded to first: "bfloat16" (to nearest even, beyond the greatest number to infinity, subnormals
    kept), or None (the default), which multiplies it as it is."""


class _Epilogue(TypedDict, total=False):
    epilogue: str
    """One of `contract.EPILOGUES`; "none" by default."""
    factor: npt.NDArray[Any] | None
    """Multiplied after the epilogue: the shape of the result, float32, float16 or bfloat16; None (the default) is
    ones."""


class FusedGemm(Gemm, _Epilogue, total=False):
    """The options of a fused `gemm`."""


class FusedWeightGemm(WeightGemm, _Epilogue, total=False):
    """The options of a fused `weight_gemm`."""


def gemm(a_format: str = "e4m3", b_format: str = "e4m3", dtype: str = "float32") -> tuple[str, str, str]:
    """Returns the values of `Gemm`."""
    return a_format, b_format, dtype


def weight_gemm(
    b_format: str = "e4m3", dtype: str = "float32", activation_dtype: str | None = None
) -> tuple[str, str, str | None]:
    """Returns the values of `WeightGemm`."""
    return b_format, dtype, activation_dtype


def epilogue(
    epilogue: str = "none", factor: npt.NDArray[Any] | None = None, **rest: Any
) -> tuple[str, npt.NDArray[Any] | None, dict[str, Any]]:
    """Returns (epilogue, factor, the options of the gemm without an epilogue)."""
    return epilogue, factor, rest
