"""Products on FP8 tensor cores, by torch's own scaled_mm: the rows `block_scaled` and `fold` of the dispatch table.

block_scaled  Blackwell. The packed operands go in as they are; only their scales are laid out anew (swizzle_scales.cu).
fold          Ada and later. Both operands are folded to one scale per row (fold.cu). On Hopper, a bfloat16 result
              without bias comes straight from the scaled product. Else that is summed in float32 with no scales, and
              finish.cu does the rest: cuBLASLt has scales per row on Hopper only, from CUDA 12.9 on, and what torch has
              in its place reads past the scales (pytorch/pytorch#133334) or refuses (pytorch/pytorch#192707).
              finish.cu rounds once, whatever the scales; the scaled product of the library may give 0, Inf or NaN
              where a sum times one of its scales leaves float32 (row scales beyond about 2^+-64), and cannot be mended.

Not verified on hardware yet: see custom_ops/README.md.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import torch
from torch import Tensor

from mxfp8_ops.cuda import launches as cuda_kernels
from mxfp8_ops.cuda.launches import FoldedOperand, Product, Queue
from mxfp8_ops.errors import BackendError

ROUTES: Final = ("block_scaled", "fold")
"""The library rows of `cuda_dispatch.ROUTES` that torch brings."""

_ELEMENTS: Final = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def gemm(  # noqa: PLR0917
    route: str,
    queue: Queue,
    p: Product,
    operands: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    folded: FoldedOperand | None,
) -> Tensor:
    """Returns y [M, N] of a product, by one of `ROUTES`.

    Args:
        route: "block_scaled" or "fold".
        queue: where the work goes.
        p: the product, on addresses; its own y is not used.
        operands: the elements of x [M, K] and b [N, K], uint8, whose addresses are in `p`.
        dtype: of y.
        folded: b, if it is kept folded.

    Raises:
        BackendError: a torch without torch.nn.functional.scaled_mm.
    """
    if route == "block_scaled":
        return _block_scaled(queue, p, operands, dtype)
    return _folded(queue, p, dtype, folded)


def _block_scaled(queue: Queue, p: Product, operands: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    names = _names()
    x, b = operands[0].view(_ELEMENTS[p.x.kind]), operands[1].view(_ELEMENTS[p.b.kind])
    x_scales, b_scales = (
        cuda_kernels.swizzle_scales(queue, operand, rows, p.k)[0].view(torch.float8_e8m0fnu)
        for operand, rows in ((p.x, p.m), (p.b, p.n))
    )
    block, layout = names.ScalingType.BlockWise1x32, names.SwizzleType.SWIZZLE_32_4_4
    direct = not p.bias and dtype is not torch.float16
    sums: Tensor = names.scaled_mm(
        x, b.t(), x_scales, block, b_scales, block, layout, layout, output_dtype=dtype if direct else torch.float32
    )
    return sums if direct else _finish(queue, p, sums, dtype)


def _folded(queue: Queue, p: Product, dtype: torch.dtype, folded: FoldedOperand | None) -> Tensor:
    names = _names()
    x = cuda_kernels.fold(queue, p.x, p.m, p.k)
    b = folded or cuda_kernels.fold(queue, p.b, p.n, p.k)
    x_elements, b_elements = (operand.memory[0].view(torch.float8_e4m3fn).view(-1, p.k) for operand in (x, b))
    direct = not p.bias and dtype is torch.bfloat16 and queue.device.capability[0] == 9 and _cuda() >= (12, 9)
    scales: tuple[Tensor, ...]
    if direct:
        recipe = names.ScalingType.RowWise
        scales = x.memory[1].view(torch.float32).view(p.m, 1), b.memory[1].view(torch.float32).view(1, p.n)
    else:
        recipe = names.ScalingType.TensorWise
        scales = (torch.ones((), dtype=torch.float32, device=x_elements.device),) * 2
    sums: Tensor = names.scaled_mm(
        x_elements, b_elements.t(), scales[0], recipe, scales[1], recipe,
        output_dtype=torch.bfloat16 if direct else torch.float32, use_fast_accum=True,
    )  # fmt: skip
    return sums if direct else _finish(queue, p, sums, dtype, (x.scales, b.scales))


def _finish(queue: Queue, p: Product, sums: Tensor, dtype: torch.dtype, scales: tuple[int, int] = (0, 0)) -> Tensor:
    y = torch.empty_like(sums, dtype=dtype)
    cuda_kernels.finish(queue, dataclasses.replace(p, y=y.data_ptr()), sums.data_ptr(), scales)
    return y


def _cuda() -> tuple[int, ...]:
    """Returns the version of CUDA that torch was built with."""
    return tuple(map(int, (torch.version.cuda or "0").split(".")))


@functools.cache
def _names() -> Any:
    """Returns torch.nn.functional, which has scaled_mm, ScalingType and SwizzleType."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        raise BackendError(
            "cuda",
            f"torch {torch.__version__} has no torch.nn.functional.scaled_mm",
            expected="torch 2.10 or later for FP8 tensor cores",
            advice="upgrade torch, or use cuda_dispatch.forced_route('large')",
        )
    return torch.nn.functional
