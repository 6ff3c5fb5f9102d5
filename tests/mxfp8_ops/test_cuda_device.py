"""The CUDA kernels on a GPU, against `numpy_nodes`: make gpu-test. Needs torch with CUDA, and CuPy."""

from __future__ import annotations

import concurrent.futures
import itertools
import os

import numpy as np
import pytest
from compare import FORMATS as FLOAT8
from compare import ROUNDINGS
from cuda_emulation import FORMATS, products, source_of

from mxfp8_ops import numpy_nodes
from mxfp8_ops.cuda import build, dispatch, planner

torch = pytest.importorskip("torch")
pytest.importorskip("mxfp8_ops.torch_ops")
from gpu_tensors import DTYPES, assert_same, assert_within, captured, heavy, ops, pytestmark, random_bits  # noqa: E402
from tensors import array, name  # noqa: E402

__all__ = ["pytestmark"]

CHUNK = 1 << 24
"""Values compared at a time."""


@pytest.fixture(scope="session", autouse=True)
def cubins():
    """Compiles everything at once, instead of each kernel where it is first used."""
    arch = build.target(torch.cuda.get_device_capability())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda kernel: len(build.cubin(source_of(kernel), kernel, arch)), planner.kernels()):
            pass


# --- quantize and dequantize -----------------------------------------------------------------------------------------


def check_quantize(x: torch.Tensor, axis: int, fmt: str, rounding: str = "ceil") -> tuple[torch.Tensor, torch.Tensor]:
    got = ops.quantize(x, axis, fmt, rounding)
    expected = numpy_nodes.quantize(array(x), axis=axis, element_format=fmt, scale_rounding=rounding)
    for label, t, wanted in zip(("elements", "scales"), got, expected, strict=True):
        assert_same(t, wanted, f"{label}, {tuple(x.shape)} {x.dtype} axis {axis}, {fmt}, {rounding}")
    return got


@pytest.mark.parametrize(("dtype", "fmt", "rounding"), [*itertools.product(DTYPES, FORMATS, ROUNDINGS)])
def test_every_16_bit_pattern(dtype, fmt, rounding):
    patterns = torch.arange(65536, device="cuda", dtype=torch.int64)
    if dtype == torch.float32:
        x = (patterns << 16).to(torch.int32).view(torch.float32)
    else:
        x = patterns.to(torch.int16).view(dtype)
    for source in (x.view(-1, 32), x[torch.randperm(65536, device="cuda")].view(-1, 64)):
        for axis in (-1, 0):
            check_quantize(source, axis, fmt, rounding)


def test_a_billion_random_values():
    """CHUNK values at a time, cycling through all dtypes, formats, roundings and axes: 60 * 2^24 = 1.007e9."""
    cases = [*itertools.product(DTYPES, FLOAT8, ROUNDINGS, (-1, 0))]
    for seed in range(60):
        dtype, fmt, rounding, axis = cases[seed % len(cases)]
        x = random_bits(CHUNK, seed).to(dtype).view(-1, 4096)
        # The kernels of the processor have the bytes of numerics, which takes minutes for this many.
        expected = ops.quantize(x.cpu(), axis, fmt, rounding)
        for label, a, b in zip(("elements", "scales"), ops.quantize(x, axis, fmt, rounding), expected, strict=True):
            assert_same(a, b.numpy(), f"{label}, seed {seed}, {dtype}, {fmt}, {rounding}, axis {axis}")


@pytest.mark.parametrize(("dtype", "fmt"), [*itertools.product(DTYPES, FORMATS)])
def test_tails_layouts_and_dequantize(dtype, fmt):
    for shape in ((1, 1), (37, 50), (130, 160), (3, 7, 96), (0, 64), (5, 0), (65, 544)):
        x = random_bits(max(1, int(np.prod(shape))), 3)[: int(np.prod(shape))].view(shape).to(dtype)
        for axis in range(len(shape)):
            codes = check_quantize(x, axis, fmt)
            options = {"axis": axis, "element_format": fmt, "dtype": name(dtype)}
            expected = numpy_nodes.dequantize(*map(array, codes), **options)
            assert_same(ops.dequantize(*codes, axis, fmt, dtype), expected, f"values {shape} {axis}")
    x = heavy(48, 96, dtype=dtype)
    for view in (x.t(), x[:, 1:70], x[::2], x[3].expand(5, -1)):
        check_quantize(view, -1, fmt)


@pytest.mark.parametrize(("dtype", "fmt"), [*itertools.product(DTYPES, FORMATS)])
def test_dequantize_every_element_under_every_scale(dtype, fmt):
    elements = torch.arange(256, device="cuda").to(torch.uint8).repeat(256, 1)
    scales = torch.arange(256, device="cuda").to(torch.uint8)[:, None].repeat(1, 8)
    expected = numpy_nodes.dequantize(array(elements), array(scales), element_format=fmt, dtype=name(dtype))
    assert_same(ops.dequantize(elements, scales, -1, fmt, dtype), expected, "values")


# --- gemm ------------------------------------------------------------------------------------------------------------

X_KINDS = (*DTYPES, *FORMATS)


def check_gemm(m, n, k, x_kind, fmt, dtype, *, bias=True, change=None):  # noqa: PLR0917
    x, w = heavy(m, k, seed=1) / 64, heavy(n, k, seed=2)  # / 64: float16 has to hold the result
    b = ops.quantize(w, -1, fmt)
    a = ops.quantize(x, -1, x_kind) if isinstance(x_kind, str) else (x.to(x_kind),)
    if change is not None:
        change(a, b)
    bias = heavy(n, seed=3) if bias else None
    codes = [array(t) for t in b]
    if isinstance(x_kind, str):
        got = ops.gemm(*a, *b, bias, x_kind, fmt, dtype)
        values = numpy_nodes.dequantize(*map(array, a), element_format=x_kind)
    else:
        got, values = ops.weight_gemm(*a, *b, bias, fmt, dtype), array(a[0])
    expected = numpy_nodes.weight_gemm(values, *codes, None if bias is None else array(bias), b_format=fmt)
    weight = numpy_nodes.dequantize(*codes, element_format=fmt)
    bound = numpy_nodes.gemm_error_bound(values, weight, name(dtype), None if bias is None else array(bias))
    assert_within(got, expected, bound, f"{m}x{n}x{k} {x_kind} {fmt} {dtype}")


@pytest.mark.parametrize(("x_kind", "fmt"), products(X_KINDS), ids=str)
def test_gemms_within_the_bound(x_kind, fmt):
    shapes = ((1, 272, 4096), (7, 33, 2080), (16, 256, 2048), (33, 130, 1056), (64, 64, 4096), (65, 200, 2080))
    for (m, n, k), dtype in zip((*shapes, (300, 257, 2048), (3, 5, 50), (128, 96, 37)), itertools.cycle(DTYPES)):
        check_gemm(m, n, k, x_kind, fmt, dtype, bias=m % 2 == 1)


@pytest.mark.parametrize(("x_kind", "fmt"), [*itertools.product((*DTYPES, *FLOAT8), FLOAT8)], ids=str)
@pytest.mark.parametrize("m", [5, 100])
def test_gemms_with_scales_and_elements_at_the_edges(x_kind, fmt, m):
    def edge(a, b):
        b[1][3, :8] = torch.tensor([0, 1, 2, 9, 143, 200, 254, 255], device="cuda").to(torch.uint8)
        b[0][5, 100] = 0x7F
        if len(a) == 2:
            a[1][1, 10:13] = torch.tensor([0, 1, 150], device="cuda").to(torch.uint8)

    def tiny(a, b):
        b[1].clamp_(max=2)
        if len(a) == 2:
            a[1].fill_(230)
        else:
            a[0].mul_(2.0**100 if a[0].dtype != torch.float16 else 2.0**4)

    for change in (edge, tiny):
        check_gemm(m, 40, 1056, x_kind, fmt, torch.float32, change=change)


def test_every_route_gives_the_same_within_the_bound():
    for route in ("skinny", "large", "float32"):
        with dispatch.forced_route(route):
            check_gemm(16, 96, 2048, "e4m3", "e4m3", torch.float32)
            check_gemm(16, 96, 2048, torch.bfloat16, "e4m3", torch.bfloat16)


# --- a good citizen of torch -----------------------------------------------------------------------------------------


def test_on_a_side_stream_without_waiting():
    x, b = heavy(16, 4096, dtype=torch.bfloat16), ops.quantize(heavy(4096, 4096, seed=1))
    expected = ops.weight_gemm(x, *b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(1_000_000_000)  # half a second: also on a busy host, the op is queued before it ends
        late.copy_(x)
        got = ops.weight_gemm(late, *b)
        assert not stream.query(), "the op waited for the device"
    stream.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("m", [4, 200])
def test_cuda_graphs_capture_and_replay(m):
    x, b = heavy(m, 2048, dtype=torch.bfloat16), ops.quantize(heavy(512, 2048, seed=1))

    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.gemm(*ops.quantize(x), *b, None, "e4m3", "e4m3", torch.bfloat16)

    static = x.clone()
    graph, y = captured(lambda: model(static))
    for seed in range(3):
        fresh = heavy(m, 2048, seed=seed, dtype=torch.bfloat16)
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(y, model(fresh))


def test_training_and_compile():
    layer = torch.nn.Linear(96, 64, device="cuda")
    x = heavy(40, 96).requires_grad_()
    y = ops.linear_train(x, layer.weight, layer.bias)
    y.square().sum().backward()
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert (y - exact).norm() / exact.norm() < 0.05
    assert x.grad is not None
    assert layer.weight.grad is not None
    b = ops.quantize(heavy(64, 96))
    compiled = torch.compile(lambda t: ops.weight_gemm(t, *b), fullgraph=True, backend="aot_eager")
    z = heavy(4, 96, dtype=torch.bfloat16)
    assert torch.equal(compiled(z), ops.weight_gemm(z, *b))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_while_the_first_is_current():
    x, w = heavy(16, 2048, dtype=torch.bfloat16), heavy(64, 2048)
    here = ops.weight_gemm(x, *ops.quantize(w))
    there = ops.weight_gemm(x.to("cuda:1"), *ops.quantize(w.to("cuda:1")))
    assert there.device.index == 1
    assert torch.equal(here.cpu(), there.cpu())
