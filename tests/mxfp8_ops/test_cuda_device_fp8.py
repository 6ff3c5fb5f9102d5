"""On a GPU: FP8 tensor cores, training, gemm_skinny at real sizes. make gpu-test."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from cuda_emulation import route, swizzle

from mxfp8_ops import cuda, numpy_nodes
from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda import dispatch, planner

torch = pytest.importorskip("torch")
from gpu_tensors import DTYPES, assert_same, assert_within, captured, heavy, ops, pytestmark, random_bits  # noqa: E402
from tensors import array, assert_is_mxfp8_product, name  # noqa: E402

__all__ = ["pytestmark"]

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
needs_blackwell = pytest.mark.skipif(CAPABILITY < (10, 0), reason="needs Blackwell's block-scaled tensor cores")


# --- swizzle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (130, 5), (4096, 256)])
def test_swizzled_scales(shape):
    scales = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    memory = torch.empty(planner.swizzled_bytes(shape[0], 32 * shape[1]), device="cuda", dtype=torch.uint8)
    arguments = (scales.data_ptr(), memory.data_ptr(), *shape)
    cuda_device.device(0).functions(["swizzle_scales"])[0]((-(-memory.numel() // 4096),), (256,), arguments)
    assert_same(memory, swizzle(array(scales)), "layout")


# --- products on FP8 tensor cores ------------------------------------------------------------------------------------


@needs_blackwell
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("x_format", "with_bias"), [("e4m3", False), ("e5m2", True)])
@pytest.mark.parametrize(("m", "n", "k"), [(65, 48, 96), (300, 256, 4096), (1024, 512, 8192)])
def test_block_scaled_products_are_exact(m, n, k, x_format, with_bias, dtype):  # noqa: PLR0917
    a, b = ops.quantize(heavy(m, k, seed=1) / 64, -1, x_format), ops.quantize(heavy(n, k, seed=2))
    bias = heavy(n, seed=3) if with_bias else None
    a[1][3, 1], b[1][5, 2] = 255, 0
    got = ops.gemm(*a, *b, bias, x_format, "e4m3", dtype)
    x, w = numpy_nodes.dequantize(*map(array, a), element_format=x_format), numpy_nodes.dequantize(*map(array, b))
    bias = None if bias is None else array(bias)
    y = x.astype(np.float64) @ w.astype(np.float64).T + (0 if bias is None else bias)
    assert_within(got, y, numpy_nodes.gemm_error_bound(x, w, name(dtype), bias), "block scaled")


@needs_blackwell
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_through_cupy(dtype):
    import cupy

    a, b = ops.quantize(heavy(300, 4096, seed=1)), ops.quantize(heavy(256, 4096, seed=2))
    codes = [cupy.asarray(array(t)) for t in (*a, *b)]
    got = cuda.gemm(*codes, dtype=dtype)
    values = [numpy_nodes.dequantize(*map(array, pair)) for pair in (a, b)]
    y = values[0].astype(np.float64) @ values[1].astype(np.float64).T
    actual = torch.as_tensor(cupy.asnumpy(got).astype(np.float32))
    assert_within(actual, y, numpy_nodes.gemm_error_bound(*values, dtype), "product")


# --- gemm_skinny at real sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 4, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("x_kind", ["float32", "bfloat16", "e4m3"])
def test_skinny_products_of_real_size_are_right_and_always_the_same(m, x_kind):
    """A result that changes from run to run would be a race."""
    for n, k in ((8192, 4096), (1024, 8192), (4000, 2080), (57344, 512)):
        x = heavy(m, k, seed=1, dtype=torch.float32 if x_kind == "float32" else torch.bfloat16)
        a, b = ops.quantize(x), ops.quantize(heavy(n, k, seed=2))
        values = (ops.dequantize(*a) if x_kind == "e4m3" else x).double()
        w = ops.dequantize(*b).double()

        def call(x=x, a=a, b=b):
            return ops.gemm(*a, *b) if x_kind == "e4m3" else ops.weight_gemm(x, *b, None, "e4m3", torch.float32)

        first = call()
        bound = (k + 2) * 2.0**-24 * (values.abs() @ w.abs().T) + k * 2.0**-149
        excess = ((first.double() - values @ w.T).abs() - bound).max().item()
        assert excess <= 0, f"{m}x{n}x{k}: {excess:.3g} past the bound"
        assert all(torch.equal(call(), first) for _ in range(20)), f"{m}x{n}x{k}: results differ from run to run"


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
def test_skinny_products_with_every_cut(m, warps, splits):
    if warps not in ((2, 1) if m <= 8 else (4, 2)):
        pytest.skip("not made for so many rows")
    x, b = heavy(m, 4128, dtype=torch.bfloat16), ops.quantize(heavy(333, 4128, seed=1))
    with dispatch.forced_route("skinny"), dispatch.fixed_cut(warps=warps, splits=splits):
        got = ops.weight_gemm(x, *b, None, "e4m3", torch.float32)
    w = numpy_nodes.dequantize(*map(array, b))
    bound = numpy_nodes.gemm_error_bound(array(x), w)
    assert_within(got, array(x).astype(np.float64) @ w.astype(np.float64).T, bound, "skinny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_products_of_parts_are_within_the_bound_of_float32_sums(dtype):
    x, b = heavy(4096, 4096, seed=1).to(dtype), ops.quantize(heavy(4096, 4096, seed=2))
    exact, magnitude = (f(x.double()) @ f(ops.dequantize(*b).double()).T for f in (lambda t: t, torch.abs))
    for forced, rows in ((None, 4096), ("float32", 128)):
        with dispatch.forced_route(forced) if forced else contextlib.nullcontext():
            got = ops.weight_gemm(x[:rows], *b, None, "e4m3", torch.float32)
        assert ((got.double() - exact[:rows]).abs() <= (4096 + 2) * 2.0**-24 * magnitude[:rows]).all(), forced


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_and_both_ways_are_those_of_the_reference(dtype):
    for shape, fmt in itertools.product(((4096, 1024), (37, 50), (96, 544), (64, 2064), (33, 64)), ("e4m3", "e5m2")):
        x = random_bits(shape[0] * shape[1], 5).view(shape).to(dtype)
        rows, columns = (
            numpy_nodes.quantize(np.ascontiguousarray(a), element_format=fmt) for a in (array(x), array(x).T)
        )
        got = *ops.quantize_both(x, fmt), *ops.quantize(x.t(), -1, fmt)
        for i, (a, expected) in enumerate(zip(got, (*rows, *columns, *columns), strict=True)):
            assert_same(a, expected, f"result {i} of {shape} {fmt}")


@pytest.mark.parametrize("fp8_format", ["E4M3", "HYBRID"])
def test_training_in_a_cuda_graph(fp8_format):
    """Forward, backward and update as one graph, against the same steps outside of it."""
    weights = [heavy(128, 256, seed=s).mul_(0.05).requires_grad_() for s in range(2)]
    for w in weights[1:]:
        w.data.copy_(weights[0].data)
    static = heavy(96, 256, seed=9, dtype=torch.bfloat16)

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = ops.linear_train(x, w, None, fp8_format).float().square().mean()
        (grad,) = torch.autograd.grad(loss, w)
        w.data.sub_(grad, alpha=0.1)
        return loss

    start = weights[0].detach().clone()
    graph, loss = captured(lambda: step(weights[0], static))
    weights[0].data.copy_(start)
    for seed in range(4):
        static.copy_(heavy(96, 256, seed=seed, dtype=torch.bfloat16))
        graph.replay()
        expected = step(weights[1], static)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)


def test_gradients_are_the_products_of_the_reference():
    x, w, dy = (heavy(*shape, seed=s) for s, shape in enumerate(((160, 96), (64, 96), (160, 64))))
    dx, dw = torch.autograd.grad(ops.linear_train(x.requires_grad_(), w.requires_grad_(), None, "HYBRID"), (x, w), dy)
    assert_is_mxfp8_product(dx, dy, w.t(), a_format="e5m2")
    assert_is_mxfp8_product(dw, dy.t(), x.t(), a_format="e5m2")


def test_shapes_above_are_what_the_table_sends_there():
    products = planner.BFLOAT16_PRODUCTS | planner.BLOCK_SCALED_PRODUCTS
    chosen = route(("e4m3", "e4m3"), (300, 256, 4096), capability=CAPABILITY, cublaslt=products)
    assert chosen == ("block_scaled" if CAPABILITY >= (10, 0) else "large")
