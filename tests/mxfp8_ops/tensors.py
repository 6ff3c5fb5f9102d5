"""Tensors for the tests of torch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_within

from mxfp8_ops import numpy_nodes

torch = pytest.importorskip("torch")


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    """Returns normal values times exponentials of others: heavy-tailed, so that the order of a sum matters."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(spread * torch.randn(shape, generator=generator))).to(dtype)


def array(t: torch.Tensor) -> np.ndarray:
    """Returns the tensor as the NumPy array that the reference takes."""
    t = t.detach().cpu()
    return t.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if t.dtype == torch.bfloat16 else t.numpy()


def name(dtype: torch.dtype) -> str:
    """Returns the name that the reference has for a dtype."""
    return str(dtype).removeprefix("torch.")


def assert_is_mxfp8_product(
    got: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_format: str = "e4m3",
    scale_rounding: str = "ceil",
    bias: torch.Tensor | None = None,
) -> None:
    """Fails unless `got` is a [M, K] x b [N, K], both quantized along K by the reference, within the sum's bound."""
    dtype = name(got.dtype)
    wide_bias = None if bias is None else array(bias).astype(np.float32)
    operands = [
        numpy_nodes.dequantize(
            *numpy_nodes.quantize(array(t), element_format=f, scale_rounding=scale_rounding), element_format=f
        )
        for t, f in ((a, a_format), (b, "e4m3"))
    ]
    expected = operands[0].astype(np.float64) @ operands[1].T.astype(np.float64)
    expected = expected if wide_bias is None else expected + wide_bias
    bound = numpy_nodes.gemm_error_bound(*operands, dtype, wide_bias)
    assert_within(array(got), expected, bound, "product")


def saved_by(call: Callable[[], Any]) -> list[torch.Tensor]:
    """Returns the tensors that autograd saves for the backward pass of `call`."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        call()
    return saved


def step(module: Callable[..., torch.Tensor], net: torch.nn.Module, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    """Returns the result of `module`, and the gradients of its sum of squares: of x and the parameters of `net`."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = module(x, *rest)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


def assert_equal(got: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
    """Fails with the number of the first tensor that differs, and by how much."""
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: differs by {float((a.double() - b.double()).abs().max())}"
