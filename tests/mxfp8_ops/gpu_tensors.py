"""Tensors on a GPU, their comparison with NumPy, and the marks of a test that needs one."""

from __future__ import annotations

import compare
import numpy as np
import pytest
import torch
from tensors import array

import mxfp8_ops.torch_ops  # noqa: F401 - registers the ops
from mxfp8_ops.cuda import device as cuda_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (cuda_device.available() and torch.cuda.is_available()), reason="needs a CUDA device and CuPy"
    ),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning"),
]

ops = torch.ops.mxfp8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_same(got: torch.Tensor, expected: np.ndarray, what: str) -> None:
    compare.assert_same(array(got), expected, what)


def assert_within(got: torch.Tensor, expected: np.ndarray, bound: np.ndarray, what: str) -> None:
    compare.assert_within(array(got), expected, bound, what)


def captured(call):
    """Returns a graph of `call` and what it returned, after a run of it on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def heavy(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    return (x * torch.exp(1.5 * torch.randn(shape, generator=generator, device="cuda"))).to(dtype)


def random_bits(count: int, seed: int) -> torch.Tensor:
    """Returns float32 values with random bits: every exponent, subnormals, NaN and Inf in one block of eight."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, device="cuda", dtype=torch.int64)
    special = (bits >> 23 & 255 == 255) & (torch.arange(count, device="cuda") // 32 % 8 != 0)
    narrow = (bits & ~0x7F000000) | 0x3E000000  # neighbouring exponents, so that few elements vanish
    bits = torch.where(special | (torch.arange(count, device="cuda") // 32 % 3 == 0), narrow, bits)
    return bits.to(torch.int32).view(torch.float32)
