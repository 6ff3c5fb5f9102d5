"""`mxfp8::grouped_gemm`: the products of a mixture of experts, one gemm per group of rows.

The op that corresponds to `torch.nn.functional.grouped_mm`: the rows are sorted by expert, `offs[e]` is where the rows
of expert e end, and they are multiplied by that expert's weight.

    y[offs[e-1]:offs[e]] = a[offs[e-1]:offs[e]]  b[e]^T

It is made of `gemm` and `weight_gemm`, on any device that has them, and reads `offs` on the host. In ONNX it is
MXFP8GroupedGemm or MXFP8GroupedWeightGemm, which take an expert per row. Values have gradients, as in `weight_gemm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops import checks, formats
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.torch_ops import gradients
from mxfp8_ops.torch_ops.operands import Op, check_codes, check_devices, check_dtype, check_memory


def grouped_gemm(  # noqa: PLR0917 - the op's schema
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    offs: Tensor,
    a_format: str = "e4m3",
    b_format: str = "e4m3",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns each group of rows of `a` times its own weight; rows behind the last group are 0.

    Args:
        a: elements uint8 [S, K], or with `a_scales` None values float32, float16 or bfloat16 [S, K].
        a_scales: uint8 [S, ceil(K / 32)], or None.
        b: elements uint8 [E, N, K].
        b_scales: uint8 [E, N, ceil(K / 32)].
        offs: int32 or int64 [E], ascending: the end of each group of rows.
        a_format: element format of `a`, if it is quantized.
        b_format: element format of `b`.
        dtype: dtype of the result; None for float32 if `a` is quantized, and the dtype of `a` if it is not.

    Returns:
        [S, N].

    Raises:
        ShapeError: shapes or dtypes do not fit, or `offs` is not ascending within 0..S.
        ContractError: unknown format.
        BackendError: no kernels for the device of `a`.
    """
    y = _fake(a, a_scales, b, b_scales, offs, a_format, b_format, dtype)
    # The products get slices of these, and would notice a storage that is too small only for some groups.
    for name, tensor in (("a", a), ("a_scales", a_scales), ("b", b), ("b_scales", b_scales), ("offs", offs)):
        if tensor is not None:
            check_memory("grouped_gemm", name, tensor)
    stop = 0
    for expert, rows, _ in groups("grouped_gemm", offs, a.shape[0]):
        weight, stop = (b[expert], b_scales[expert], None), rows.stop
        if a_scales is None:
            y[rows] = torch.ops.mxfp8.weight_gemm.default(a[rows], *weight, b_format, y.dtype)
        else:
            y[rows] = torch.ops.mxfp8.gemm.default(a[rows], a_scales[rows], *weight, a_format, b_format, y.dtype)
    y[stop:] = 0  # rows that no group has
    return y


def groups(where: str, offs: Tensor, count: int) -> Iterator[tuple[int, slice, slice]]:
    """Yields (expert, its rows, their blocks of 32, which no other group shares) of each group that has rows.

    Raises:
        ShapeError: `offs` is not ascending within 0..count.
    """
    # On the host: the sizes of the products depend on them. On a GPU this waits for the device.
    ends: list[int] = offs.tolist()
    block = 0
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
        if not 0 <= start <= stop <= count:
            raise ShapeError(
                where,
                f"offs {ends}",
                expected=f"ascending ends of groups within 0..{count}, the number of rows",
                advice="pass the running sum of the groups' sizes",
            )
        if start < stop:
            blocks = slice(block, block + checks.scale_count(stop - start))
            block = blocks.stop
            yield expert, slice(start, stop), blocks


def check_offs(where: str, offs: Tensor, experts: int | None = None) -> None:
    """Raises ShapeError unless `offs` is int32 or int64 [experts], of any size if `experts` is None."""
    wanted = offs.shape[:1] if experts is None else (experts,)
    if offs.dtype not in {torch.int32, torch.int64} or tuple(offs.shape) != tuple(wanted) or offs.dim() != 1:
        raise ShapeError(
            where,
            f"offs is {checks.dtype_name(offs.dtype)} {tuple(offs.shape)}",
            expected=f"int32 or int64 ({'E' if experts is None else experts},), the end of each expert's rows",
            advice="pass the running sum of the groups' sizes",
        )


def _fake(a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor, offs: Tensor, *rest: Any) -> Tensor:
    """Returns an empty result of `mxfp8::grouped_gemm`.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown format.
    """
    check_devices("grouped_gemm", a, a_scales, b, b_scales)
    a_format, b_format, dtype = options(*rest)
    formats.element_format(b_format)
    if a_scales is None:
        check_dtype("grouped_gemm", a.dtype)
    else:
        formats.element_format(a_format)
        check_codes("grouped_gemm", a, a_scales, -1)
    dtype = dtype or (a.dtype if a_scales is None else torch.float32)
    check_dtype("grouped_gemm", dtype)
    if a.dim() != 2 or b.dim() != 3 or a.shape[-1] != b.shape[-1]:
        raise ShapeError(
            "grouped_gemm",
            f"operands {tuple(a.shape)} and {tuple(b.shape)}",
            expected="[S, K] and [E, N, K] with the same K",
            advice="store each expert's weight with K last",
        )
    check_codes("grouped_gemm", b, b_scales, -1)
    check_offs("grouped_gemm", offs, b.shape[0])
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def options(
    a_format: str = "e4m3", b_format: str = "e4m3", dtype: torch.dtype | None = None
) -> tuple[str, str, torch.dtype | None]:
    """Returns the op's last arguments with their defaults: torch leaves out arguments that equal them."""
    return a_format, b_format, dtype


# Above autograd the slices and products of grouped_gemm record themselves, which needs no backward of its own.
_autograd: Final = gradients.kernel(
    "grouped_gemm", (0,), grouped_gemm, "go through torch.ops.mxfp8.dequantize and a matmul"
)

OPS: Final = (
    Op(
        """grouped_gemm(Tensor a, Tensor? a_scales, Tensor b, Tensor b_scales, Tensor offs, str a_format="e4m3",
        str b_format="e4m3", ScalarType? dtype=None) -> Tensor""",
        {"CompositeExplicitAutograd": grouped_gemm, "Autograd": _autograd},
        _fake,
    ),
)
