"""Products on FP8 tensor cores, by torch's own scaled_mm: the rows `block_scaled` and `fold` of the dispatch table.

block_scaled  Blackwell. The packed operands go in as they are; only their scales are laid out anew (swizzle_scales.cu).
fold          Ada and later. Both operands are folded to one scale per row (fold.cu). On Hopper, a bfloat16 result
              without bias comes straight from the scaled product. Else that is summed in float32 with no scales, and
              finish.cu does the rest: cuBLASLt has scales per row on Hopper only, from CUDA 12.9 on, and what torch has
              in its place reads past the scales (pytorch/pytorch#133334) or refuses (pytorch/pytorch#192707).
              finish.cu rounds once, whatever the scales; the scaled product of the library may give 0, Inf or NaN
              where a sum times one of its scales leaves float32 (row scales beyond about 2^+-64), and cannot be mended.

Not verified on hardware yet: see src/cuda/README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Fp8Product
from mxfp8_ops.errors import BackendError
from mxfp8_ops.formats import DTYPES


def libraries() -> int:
    """Returns the bits of `planner.Place.libraries` for torch."""
    return _libraries(torch.version.cuda or "0")


@functools.lru_cache
def _libraries(cuda: str) -> int:
    rows = (*map(int, cuda.split(".")),) >= (12, 9)
    return planner.SCALED_MM | (planner.SCALED_MM_ROWS if rows else 0)


class Products:
    """Does the FP8 products of a plan, for `execution.run`."""

    last: Tensor
    """The result of the last one, [M, N]."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        """Remembers the tensors whose addresses the products may name, besides scratch memory."""
        self._operands = {(t.data_ptr(), t.numel()): t for t in operands}

    def __call__(self, p: Fp8Product, scratch: Tensor | None) -> int:
        """Queues a product and returns the address of its result.

        Raises:
            BackendError: a torch without torch.nn.functional.scaled_mm.
        """
        names = _names()
        # A plan has addresses, torch wants tensors: each address is one of an operand, or lies in scratch memory.
        x = self._tensor(p.x, p.m * p.k, scratch).view(_dtype(p.x_kind)).view(p.m, p.k)
        b = self._tensor(p.b, p.n * p.k, scratch).view(_dtype(p.b_kind)).view(p.n, p.k)
        layouts: tuple[Any, ...] = ()
        if p.how == planner.BLOCK_SCALED:
            recipe, layouts = names.ScalingType.BlockWise1x32, (names.SwizzleType.SWIZZLE_32_4_4,) * 2
            x_scales, b_scales = (
                self._tensor(at, planner.swizzled_bytes(rows, p.k), scratch).view(torch.float8_e8m0fnu)
                for at, rows in ((p.x_scales, p.m), (p.b_scales, p.n))
            )
            if x.dtype != b.dtype:
                # scaled_mm takes blocks of E4M3 by E4M3 alone (check_mxfp8_recipe in torch's ScaledBlasUtils.cpp). The
                # older function takes E5M2 for one of the two.
                dtype = _dtype(p.dtype)
                self.last = torch._scaled_mm(x, b.t(), scale_a=x_scales, scale_b=b_scales, out_dtype=dtype)
                return self.last.data_ptr()
        elif p.how == planner.ROW_SCALED:
            recipe = names.ScalingType.RowWise
            x_scales = self._tensor(p.x_scales, 4 * p.m, scratch).view(torch.float32).view(p.m, 1)
            b_scales = self._tensor(p.b_scales, 4 * p.n, scratch).view(torch.float32).view(1, p.n)
        else:
            recipe = names.ScalingType.TensorWise
            x_scales = b_scales = torch.ones((), dtype=torch.float32, device=x.device)
        self.last = names.scaled_mm(
            x, b.t(), x_scales, recipe, b_scales, recipe, *layouts, output_dtype=_dtype(p.dtype),
            use_fast_accum=p.how != planner.BLOCK_SCALED,  # folded products are opted into, others keep to their bound
        )  # fmt: skip
        return self.last.data_ptr()

    def _tensor(self, address: int, size: int, scratch: Tensor | None) -> Tensor:
        """Returns `size` bytes at an address."""
        if (address, size) in self._operands:
            return self._operands[address, size].view(-1)
        assert scratch is not None  # a plan has no other memory
        return scratch[address - scratch.data_ptr() :][:size]


def _dtype(kind: str) -> Any:
    return getattr(torch, DTYPES[kind].numpy_name)


@functools.cache
def _names() -> Any:
    """Returns torch.nn.functional, which has scaled_mm, ScalingType and SwizzleType."""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        raise BackendError(
            "cuda",
            f"torch {torch.__version__} has no torch.nn.functional.scaled_mm",
            expected="torch 2.10 or later for FP8 tensor cores",
            advice="upgrade torch, or use mxfp8_ops.cuda.dispatch.forced_route('large')",
        )
    return torch.nn.functional
