"""Device "cuda" without a GPU: the native code for it, over an emulated CUDA provider and an emulated CUDA driver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import cublaslt_emulation
import numpy as np
import pytest
from compare import assert_same, assert_within, heavy_tailed
from cublaslt_emulation import cublaslt
from cuda_driver_emulation import Driver, machine
from cuda_emulation import FORMATS, products
from grids import looped
from grouped_cases import CASES, Case
from ort_emulation import LEGACY_STREAM, STREAM, CudaProvider, NodeError, own_library

from mxfp8_ops import contract, numerics, numpy_nodes
from mxfp8_ops.cuda import loader as cuda_loader
from mxfp8_ops.cuda.planner import CODES

__all__ = ["cublaslt"]
pytestmark = pytest.mark.cuda

UINT8 = contract.UINT8


def sources(gpu: Driver) -> list[str]:
    """Returns the kernels that ran, without their template arguments."""
    return [launch.kernel.partition("<")[0] for launch in gpu.launches]


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Driver]:
    with machine(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def provider(gpu) -> Iterator[CudaProvider]:
    gpu.start(STREAM)
    provider = CudaProvider(own_library(), gpu)
    cuda_loader.give(provider.library)
    before = gpu.allocations
    yield provider
    assert gpu.allocations == before
    assert provider.released_allocators == provider.asked_allocators


@looped("dtype, fmt", [*itertools.product(numerics.VALUE_DTYPES, FORMATS)])
def test_quantize_and_dequantize(provider, dtype, fmt):
    for shape, axis, rounding in (((40, 96), -1, "ceil"), ((3, 40, 48), 1, "floor"), ((5, 37), 1, "even")):
        x = heavy_tailed(shape).astype(numerics.value_dtype(dtype))
        attributes = {"axis": axis, "output_dtype": CODES[fmt], "scale_rounding": rounding}
        got = provider.run(contract.QUANTIZE, [x], [CODES[dtype]], **attributes)
        expected = numpy_nodes.quantize(x, axis=axis, element_format=fmt, scale_rounding=rounding)
        for name, a, b in zip(("elements", "scales"), got, expected, strict=True):
            assert_same(a, b, f"{name} of {shape} along {axis}")
        (y,) = provider.run(contract.DEQUANTIZE, got, [CODES[fmt], UINT8], axis=axis, output_dtype=CODES[dtype])
        assert_same(y, numpy_nodes.dequantize(*expected, axis=axis, element_format=fmt, dtype=dtype), "values")
    assert provider.run(contract.QUANTIZE, [np.zeros((0, 64), np.float32)], [contract.FLOAT])[1].shape == (0, 2)


@looped("index_dtype", [np.int32, np.int64])
def test_embedding_of_indices_on_the_gpu(provider, gpu, index_dtype):
    """They are not looked at: one that names no row gives NaN."""
    table, indices = numpy_nodes.quantize(heavy_tailed((7, 96))), np.array([[0, -1], [6, 7]], index_dtype)
    code = contract.INT32 if index_dtype is np.int32 else contract.INT64
    gpu.start(STREAM)
    (y,) = provider.run(contract.EMBEDDING, [indices, *table], [code, CODES["e4m3"], UINT8], output_dtype=1)
    expected = numpy_nodes.embedding(indices.reshape(-1)[:3], *table)
    assert_same(y.reshape(4, 96)[:3], expected, "rows")
    assert np.isnan(y[1, 1]).all()
    assert [launch.kernel for launch in gpu.launches] == ["embedding<F32, E4M3, false>"]


def grouped(provider: CudaProvider, case: Case, kinds: tuple[str, str], dtype: str = "float32", **options: Any) -> Any:
    kind, fmt = kinds
    if kind in FORMATS:
        op, a = contract.GROUPED_GEMM, case.a
    else:
        op, a = contract.GROUPED_WEIGHT_GEMM, (case.x.astype(numerics.value_dtype(kind)),)
    dtypes = [CODES[kind], *[UINT8] * (len(a) - 1), CODES[fmt], UINT8, contract.INT64]
    return provider.run(op, [*a, *case.b, case.experts], dtypes, output_dtype=CODES[dtype], **options)[0]


GROUPED_KINDS = (("e4m3", "e5m2"), ("e5m2", "e4m3"), ("float32", "e4m3"), ("int8", "int8"), ("float32", "int8"))


@looped("name, kinds", [*itertools.product(CASES, GROUPED_KINDS)])
def test_every_grouped_product(provider, name, kinds):
    case = Case(name, *(kinds if kinds[0] != "float32" else ("e4m3", kinds[1])))
    values = case.x if kinds[0] == "float32" else numpy_nodes.dequantize(*case.a, element_format=kinds[0])
    assert_within(grouped(provider, case, kinds), case.exact(values), case.bound(values), name)


def test_grouped_products_round_activations_if_asked(provider):
    case = Case("any order, one row each")
    rounded = case.x.astype(numerics.value_dtype("bfloat16")).astype(np.float32)
    got = grouped(provider, case, ("float32", "e4m3"), activation_dtype=contract.BFLOAT16)
    assert_within(got, case.exact(rounded), case.bound(rounded))
    assert (np.abs(got - case.exact(case.x)) > case.bound(case.x)).any()


def test_rows_of_no_expert_are_zeros_and_of_a_wrong_one_nan(provider):
    """Indices on the GPU are not looked at. A NaN in a row that has no expert is not read."""
    case = Case("any order, one row each")
    case.experts[:4] = [4, 5, -5, 2**40]
    case.x[0] = np.nan
    y = grouped(provider, case, ("float32", "e4m3"))
    assert (y[0] == 0).all()
    assert np.isnan(y[1:4]).all()
    assert np.isfinite(y[4:]).all()


def test_a_group_is_one_slot_of_the_product(provider, gpu):
    """64 rows of an expert read its weight together; a group that has one row more takes another slot."""
    case = Case("many rows")
    case.x, case.experts = case.x[:129], np.repeat([0, 1, 2], [64, 65, 0])
    gpu.start(STREAM)
    got = grouped(provider, case, ("bfloat16", "e4m3"))
    x = case.x.astype(numerics.value_dtype("bfloat16")).astype(np.float32)
    assert_within(got, case.exact(x), case.bound(x))
    assert [launch.kernel for launch in gpu.launches] == ["group_rows", "gemm_grouped<BF16, E4M3, 8>"]


def test_experts_that_broadcast_in_too_many_runs_are_refused(provider):
    case = Case("any order, one row each")
    case.x, case.experts = case.x[:1].repeat(16, 0).reshape(2, 1, 2, 1, 4, 1, 70), np.zeros((1, 2, 1, 2, 1), np.int64)
    with pytest.raises(NodeError, match=r"in 5 runs of dimensions; expected 3 at most on a GPU"):
        grouped(provider, case, ("float32", "e4m3"))


def test_an_output_that_is_absent_is_not_returned(provider):
    x = heavy_tailed((5, 96))
    for wanted in ((True, False), (False, True)):
        got = provider.run(contract.QUANTIZE, [x], [contract.FLOAT], wanted=wanted)
        for a, b, asked in zip(got, numpy_nodes.quantize(x), wanted, strict=True):
            assert a is None if not asked else (a == b).all()
    assert provider.freed == 2


def check_gemm(provider, shapes, kinds, dtype, *, bias=True, change=None, **options):
    kind, fmt = kinds
    x = heavy_tailed(shapes[0], 1) / 64  # float16 has to hold the result
    bias = heavy_tailed(shapes[1][-2:-1], 3) if bias else None
    b = numpy_nodes.quantize(heavy_tailed(shapes[1], 2), element_format=fmt)
    quantized = kind in FORMATS
    a = numpy_nodes.quantize(x, element_format=kind) if quantized else (x.astype(numerics.value_dtype(kind)),)
    if change is not None:
        change(a, b)
    with np.errstate(over="ignore", invalid="ignore"):
        values = numpy_nodes.dequantize(*a, element_format=kind) if quantized else a[0]
        weight = numpy_nodes.dequantize(*b, element_format=fmt)
        expected = numpy_nodes.weight_gemm(values, *b, bias, b_format=fmt)
        bound = numpy_nodes.gemm_error_bound(values, weight, dtype, bias)
    op = contract.GEMM if quantized else contract.WEIGHT_GEMM
    inputs = [*a, *b, *([] if bias is None else [bias])]
    dtypes = [CODES[kind], *[UINT8] * quantized, CODES[fmt], UINT8, contract.FLOAT][: len(inputs)]
    (got,) = provider.run(op, inputs, dtypes, output_dtype=CODES[dtype], **options)
    assert_within(got, expected, bound, f"{shapes} {kinds} {dtype}")


X_KINDS = ("float32", "float16", "bfloat16", *FORMATS)


@looped("kinds", products(X_KINDS))
def test_gemms(provider, kinds):
    check_gemm(provider, ((2, 3, 96), (5, 96)), kinds, "float32")
    check_gemm(provider, ((2, 1, 3, 96), (4, 5, 96)), kinds, "float16", bias=False)
    check_gemm(provider, ((2, 3, 48), (2, 3, 48)), kinds, "bfloat16")  # the second of the batch is not aligned
    check_gemm(provider, ((70, 64), (40, 64)), kinds, "float32")


@looped("dtype, bias", [*itertools.product(contract.VALUE_NAMES.values(), (False, True))])
def test_many_rows_go_through_cublaslt_and_are_repaired(provider, gpu, dtype, bias):
    freed = provider.freed

    def edge(a, b):
        b[1][3] = [0, 1]
        if len(a) == 2:
            a[1][1] = [0, 1]

    for kind in ("bfloat16", "e4m3"):
        gpu.start(STREAM)
        check_gemm(provider, ((70, 64), (40, 64)), (kind, "e4m3"), dtype, bias=bias, change=edge)
        names = sources(gpu)
        operands = 1 + (kind == "e4m3")
        finish = ["finish"] if bias or dtype == "float16" else []
        assert names == ["dequantize"] * operands + finish + ["gemm_float32"]
    assert provider.freed == freed + 2


@pytest.fixture
def keeping(gpu) -> Iterator[CudaProvider]:
    """A provider whose nodes keep constant weights; a library has one table of overloads, so this has its own."""
    before = gpu.allocations
    provider = CudaProvider(own_library("keeping"), gpu, keep_wide=True)
    cuda_loader.give(provider.library)
    yield provider
    assert gpu.allocations == before


@looped("kind, fmt", [*zip(X_KINDS, ("e4m3",) * 5 + ("int8",), strict=True), ("float32", "int8")])
def test_constant_weights_are_kept_in_bfloat16(keeping, gpu, kind, fmt):
    def edge(a, b):
        b[1][3] = [0, 1]

    quantized = kind in FORMATS
    constants = frozenset({2, 3} if quantized else {1, 2})
    at_creation: list[str] = []

    def created() -> None:
        at_creation[:] = sources(gpu)
        gpu.start(STREAM)

    for change, m in itertools.product((None, edge), (3, 70)):
        gpu.start(LEGACY_STREAM)
        keeping.created = created
        check_gemm(keeping, ((m, 64), (40, 64)), (kind, fmt), "bfloat16", change=change, constants=constants)
        assert at_creation == ["dequantize"]
        names = sources(gpu)
        assert names.count("dequantize") == (quantized and m == 70)


def test_only_constant_matrices_are_kept_and_only_with_cublaslt(keeping, gpu, monkeypatch):
    kinds = ("bfloat16", "e4m3")
    for shape, constants in (((40, 64), frozenset()), ((40, 64), frozenset({1})), ((2, 40, 64), frozenset({1, 2}))):
        gpu.start(STREAM)
        check_gemm(keeping, ((*shape[:-2], 70, 64), shape), kinds, "float32", constants=constants)
        assert sources(gpu)[0] == "dequantize"
    gpu.start(LEGACY_STREAM)
    monkeypatch.setattr(cublaslt_emulation, "file", lambda: None)
    with pytest.raises(NodeError, match=r"'the node': keep_wide needs products of cuBLASLt \(not found\); expec"):
        check_gemm(keeping, ((3, 64), (40, 64)), kinds, "float32", constants=frozenset({1, 2}))


@looped("kind, dtype", [("bfloat16", "float32"), ("e4m3", "float16")])
@pytest.mark.filterwarnings("ignore:.*no cuBLASLt")
def test_many_rows_without_cublaslt_go_in_slices_and_a_long_k_is_split(gpu, monkeypatch, kind, dtype):
    monkeypatch.setattr(cublaslt_emulation, "file", lambda: None)
    gpu.start(STREAM)
    provider = CudaProvider(own_library(), gpu)
    cuda_loader.give(provider.library)
    check_gemm(provider, ((150, 64), (40, 64)), (kind, "e5m2"), dtype)
    slices = [(launch.kernel.split(", ")[2][0], launch.parameters[6]) for launch in gpu.launches]
    assert slices == [("8", 64), ("8", 64), ("4", 22)]
    assert provider.scratch == 0
    gpu.start(STREAM)
    check_gemm(provider, ((2, 8192), (13, 8192)), (kind, "e4m3"), dtype)
    assert sources(gpu) == ["gemm_skinny", "finish"]
    assert provider.freed == 1


def test_what_cannot_run_is_an_error_of_the_node(provider, gpu, cublaslt, monkeypatch):
    def run() -> None:
        provider.run(contract.QUANTIZE, [heavy_tailed((3, 64))], [contract.FLOAT])

    provider.gpu = 1
    with pytest.raises(NodeError, match=r"MXFP8Quantize 'the node': cuda: GPU 1: no such device; expected"):
        run()
    provider.gpu = 0
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "kernels", gpu.kernels[:3])
        with pytest.raises(NodeError, match=r"'the node': cuda: quantize_rows\.cu, .*, does not compile"):
            run()
    cublaslt.fail(13)
    with pytest.raises(NodeError, match=r"'the node': GPU 0: cannot multiply: cuBLASLt 130100: CUBLAS_STATUS_EXEC"):
        check_gemm(provider, ((70, 64), (40, 64)), ("bfloat16", "e4m3"), "float32")
    gpu.start(STREAM + 1)
    with pytest.raises(NodeError, match=r"'the node': GPU 0: cannot launch: CUDA error CUDA_ERROR_INVALID_CONTEXT; "):
        run()


def test_a_driver_that_was_not_opened_is_an_error(gpu):
    with pytest.raises(NodeError, match="the CUDA driver is not open; expected a call of mxfp8_cuda_open before"):
        CudaProvider(own_library("unopened"), gpu).run(contract.QUANTIZE, [heavy_tailed((3, 64))], [contract.FLOAT])
