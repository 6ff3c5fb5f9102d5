"""torch's scaled_mm on emulated CUDA threads: torch's own checks of the call, then float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from cuda_emulation import EmulatedDevice, device, queue, swizzle
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp8_ops import checks, numerics
from mxfp8_ops.cuda.execution import Queue
from mxfp8_ops.torch_ops import cuda as torch_cuda

OLDER, SCALED_MM = torch._scaled_mm, torch.nn.functional.scaled_mm


def on_a(monkeypatch, capability: tuple[int, int]) -> EmulatedDevice:
    on = device()
    monkeypatch.setattr(on, "capability", capability)
    on.launched.clear()
    return on


def wide_scales(layout: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Returns the values of scales in the layout of Blackwell, one for each of [rows, k] elements."""
    blocks = checks.scale_count(k)
    every = layout.reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
    scales = np.ascontiguousarray(every.reshape(-(-rows // 128) * 128, -1)[:rows, :blocks])
    assert_same(layout, swizzle(scales), "layout")
    return np.repeat(numerics.decode_scale(scales), 32, 1)[:, :k]


def scaled_mm(  # noqa: PLR0917 - as torch has it
    mat_a: Any, mat_b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, *swizzles: Any, **options: Any
) -> Any:
    """torch.nn.functional.scaled_mm in float64, after torch's own checks of a CUDA call with these arguments."""
    if {mat_a.dtype, mat_b.dtype} != {torch.float8_e4m3fn}:
        raise ValueError("Invalid scaling configuration")  # as check_mxfp8_recipe, which fake tensors do not reach
    assert swizzles
    assert not options["use_fast_accum"]
    with FakeTensorMode():
        a, b, scales, b_scales = on_cuda(mat_a, mat_b, scale_a, scale_b)
        y = SCALED_MM(a, b, scales, recipe_a, b_scales, recipe_b, *swizzles, **options)
        assert y.shape == (mat_a.shape[0], mat_b.shape[1])
    return block_scaled(mat_a, mat_b, scale_a, scale_b).to(options["output_dtype"])


def older_scaled_mm(mat_a: Any, mat_b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any) -> Any:
    """torch._scaled_mm of blocks in float64, after torch's own checks of a CUDA call with these arguments."""
    if mat_a.dtype == mat_b.dtype == torch.float8_e5m2:
        raise RuntimeError("Multiplication of two Float8_e5m2 matrices is not supported")
    with FakeTensorMode():
        a, b, scales, b_scales = on_cuda(mat_a, mat_b, scale_a, scale_b)
        y = OLDER(a, b, scale_a=scales, scale_b=b_scales, out_dtype=out_dtype)
        assert (y.shape, y.dtype) == ((mat_a.shape[0], mat_b.shape[1]), out_dtype)
    return block_scaled(mat_a, mat_b, scale_a, scale_b).to(out_dtype)


def on_cuda(*arrays: Any) -> list[Any]:
    """Returns fake tensors like these on a CUDA device."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0") for t in arrays]


def block_scaled(mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any) -> Any:
    """Returns the float32 product of elements with swizzled scales."""
    x, w = mat_a.double(), mat_b.t().double()
    for t, scale in ((x, scale_a), (w, scale_b)):
        t.mul_(torch.from_numpy(wide_scales(scale.view(torch.uint8).numpy(), *t.shape)))
    return (x @ w.t()).float()


@pytest.fixture
def emulated(monkeypatch) -> None:
    def allocate(size: int) -> tuple[Any, int]:
        memory = torch.empty(size, dtype=torch.uint8)
        return memory, memory.data_ptr()

    monkeypatch.setattr(torch_cuda, "_queue", lambda x: Queue(queue().device, 0, allocate))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "_scaled_mm", older_scaled_mm)
