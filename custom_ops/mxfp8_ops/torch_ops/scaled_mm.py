"""Products on FP8 tensor cores, by torch's own scaled_mm: the row `block_scaled` of the dispatch table, on Blackwell.

The packed operands go in as they are; only their scales get a new layout (swizzle_scales.cu).

Not verified on hardware yet: see src/cuda/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.execution import Fp8Product, RefusedError
from mxfp8_ops.formats import DTYPES


class Products:
    """Computes the FP8 products of a plan, for `execution.run`."""

    last: Tensor
    """The result of the last product, [M, N]."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        """Remembers the tensors whose addresses the products may name, besides scratch memory."""
        self._operands = {(t.data_ptr(), t.numel()): t for t in operands}

    def __call__(self, p: Fp8Product, scratch: Tensor | None) -> int:
        """Queues a product and returns the address of its result.

        Raises:
            RefusedError: torch cannot do the product.
        """
        # A plan has addresses, torch needs tensors: each address is of an operand, or lies in scratch memory.
        x = self._tensor(p.x, p.m * p.k, scratch).view(_dtype(p.x_kind)).view(p.m, p.k)
        b = self._tensor(p.b, p.n * p.k, scratch).view(_dtype(p.b_kind)).view(p.n, p.k)
        x_scales, b_scales = (
            self._tensor(at, planner.swizzled_bytes(rows, p.k), scratch).view(torch.float8_e8m0fnu)
            for at, rows in ((p.x_scales, p.m), (p.b_scales, p.n))
        )
        try:
            self.last = self._product(x, b, x_scales, b_scales, _dtype(p.dtype))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # they say nothing about the product
        except (RuntimeError, ValueError, NotImplementedError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            kinds, sizes = (p.x_kind, p.b_kind, p.dtype), (p.m, p.n, p.k)
            raise RefusedError.of(f"torch {torch.__version__}", kinds, sizes, why, advice="upgrade torch") from error
        return self.last.data_ptr()

    @staticmethod
    def _product(x: Tensor, b: Tensor, x_scales: Tensor, b_scales: Tensor, dtype: torch.dtype) -> Tensor:
        if x.dtype != b.dtype:
            # scaled_mm takes only blocks of E4M3 by E4M3 (check_mxfp8_recipe in torch's ScaledBlasUtils.cpp). The
            # older function takes E5M2 for one of the two.
            return torch._scaled_mm(x, b.t(), scale_a=x_scales, scale_b=b_scales, out_dtype=dtype)
        recipe, layout = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
        y: Tensor = functional.scaled_mm(
            x, b.t(), x_scales, recipe, b_scales, recipe, layout, layout, output_dtype=dtype, use_fast_accum=False
        )
        return y

    def _tensor(self, address: int, size: int, scratch: Tensor | None) -> Tensor:
        """Returns `size` bytes at an address."""
        if (address, size) in self._operands:
            return self._operands[address, size].view(-1)
        assert scratch is not None  # a plan has no other memory
        return scratch[address - scratch.data_ptr() :][:size]


def _dtype(kind: str) -> Any:
    return getattr(torch, DTYPES[kind].numpy_name)
