"""`mxfp8::grouped_gemm`: a mixture of experts' products, one gemm per group of rows.

The op that corresponds to `torch.nn.functional.grouped_mm`: the rows are sorted by expert, `offs[e]` is where the rows
of expert e end, and they are multiplied by that expert's weight.

    y[offs[e-1]:offs[e]] = a[offs[e-1]:offs[e]]  b[e]^T

It is made of `gemm` and `weight_gemm`, on any device that has those, and reads `offs` on the host. In ONNX it is
MXFP8GroupedGemm or MXFP8GroupedWeightGemm, which take an expert per row. Values have gradients, as in `weight_gemm`.
"""

from __future__ import annotations

import itertools
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
    # Slices of these are passed on, so a storage that is too small would be noticed for some groups only.
    for name, tensor in (("a", a), ("a_scales", a_scales), ("b", b), ("b_scales", b_scales), ("offs", offs)):
        if tensor is not None:
            check_memory("grouped_gemm", name, tensor)
    # On the host: the sizes of the products depend on them. On a GPU this waits for the device.
    ends: list[int] = offs.tolist()
    y[ends[-1] if ends else 0 :] = 0  # rows that no group has; the others are written below
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
        if not 0 <= start <= stop <= a.shape[0]:
            raise ShapeError(
                "grouped_gemm",
                f"offs {ends}",
                expected=f"ascending ends of groups within 0..{a.shape[0]}, the rows of a",
                advice="pass the running sum of the groups' sizes",
            )
        if start == stop:
            continue
        weight = b[expert], b_scales[expert], None
        if a_scales is None:
            y[start:stop] = torch.ops.mxfp8.weight_gemm.default(a[start:stop], *weight, b_format, y.dtype)
        else:
            rows = a[start:stop], a_scales[start:stop]
            y[start:stop] = torch.ops.mxfp8.gemm.default(*rows, *weight, a_format, b_format, y.dtype)
    return y


def _fake(a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor, offs: Tensor, *rest: Any) -> Tensor:
    """Returns an empty result of `mxfp8::grouped_gemm`.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        ContractError: unknown format.
    """
    check_devices("grouped_gemm", a, a_scales, b, b_scales)
    a_format, b_format, dtype = _options(*rest)
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
    if offs.dtype not in {torch.int32, torch.int64} or tuple(offs.shape) != (b.shape[0],):
        raise ShapeError(
            "grouped_gemm",
            f"offs is {checks.dtype_name(offs.dtype)} {tuple(offs.shape)}",
            expected=f"int32 or int64 ({b.shape[0]},), the end of each expert's rows",
            advice="pass the running sum of the groups' sizes",
        )
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _options(
    a_format: str = "e4m3", b_format: str = "e4m3", dtype: torch.dtype | None = None
) -> tuple[str, str, torch.dtype | None]:
    """Returns the op's last arguments with their defaults: torch leaves out those that equal them."""
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
