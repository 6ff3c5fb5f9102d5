"""Products on FP8 tensor cores without a GPU: what cuBLASLt is asked for, and the way there, from every host.

cuBLASLt is a stand-in that checks its arguments and computes in float64 (cublaslt_emulation.cpp).
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import cublaslt_emulation
import gpu_start
import numpy as np
import pytest
from compare import assert_same, assert_within, heavy_tailed
from cublaslt_emulation import CublasLt, cublaslt
from cuda_driver_emulation import Driver, machine
from cuda_emulation import device, launch, placed, queue, swizzle
from cupy_stand_in import array, sources
from grids import looped, pairwise
from ort_emulation import LEGACY_STREAM, STREAM, CudaProvider, own_library

from mxfp8_ops import contract, cpu, cuda, numerics, numpy_nodes
from mxfp8_ops.cuda import dispatch, execution, loader, planner, system
from mxfp8_ops.cuda.planner import CODES
from mxfp8_ops.errors import BackendError

torch = pytest.importorskip("torch")

torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
import tensors  # noqa: E402
from torch_stand_in import cupy, emulated, on_a  # noqa: E402

__all__ = ["cublaslt", "cupy", "emulated"]
pytestmark = pytest.mark.cuda

DTYPES = tuple(numerics.VALUE_DTYPES)
BFLOAT16 = numerics.value_dtype("bfloat16")
M, N, K = 70, 48, 160


def operands(x_format: str = "e4m3") -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the codes of x [M, K] and w [N, K], and a bias [N]; some blocks are NaN, zero or much smaller."""
    x, w = heavy_tailed((M, K)), heavy_tailed((N, K), 1)
    x[3, 32:64], w[5, :32], x[4] = x[3, 32:64] * 2.0**-12, 0, 0
    codes = [*numpy_nodes.quantize(x, element_format=x_format), *numpy_nodes.quantize(w)]
    codes[1][7, 2] = 255
    return codes, heavy_tailed((N,), 2)


def check(got: np.ndarray, codes: list[np.ndarray], bias: np.ndarray | None, dtype: str, x_format: str) -> None:
    x, w = numpy_nodes.dequantize(*codes[:2], element_format=x_format), numpy_nodes.dequantize(*codes[2:])
    y = x.astype(np.float64) @ w.astype(np.float64).T + (0 if bias is None else bias)
    assert_within(got, y, numpy_nodes.gemm_error_bound(x, w, dtype, bias), "product")


def by_torch(codes: list[np.ndarray], bias: np.ndarray | None, a_format: str = "e4m3", dtype: str = "float32") -> Any:
    arrays = [torch.from_numpy(each.copy()) for each in (*codes, *([] if bias is None else [bias]))]
    return tensors.array(torch_cuda.gemm(*arrays, a_format=a_format, dtype=getattr(torch, dtype)))


def by_cupy(codes: list[np.ndarray], bias: np.ndarray | None, a_format: str = "e4m3", dtype: str = "float32") -> Any:
    arrays = [None if each is None else array(each) for each in (*codes, bias)]
    return np.asarray(cuda.gemm(*arrays, a_format=a_format, dtype=dtype))


ARRAYS = pytest.mark.parametrize("product", [by_torch, by_cupy])


@pytest.fixture
def blackwell(monkeypatch, emulated) -> Any:
    return on_a(monkeypatch, (10, 0))


# --- CuPy and torch --------------------------------------------------------------------------------------------------


@ARRAYS
@looped("dtype, with_bias, x_format", pairwise(dtype=DTYPES, bias=[False, True], x=["e4m3", "e5m2"]))
def test_block_scaled_products_on_blackwell(blackwell, cublaslt, product, dtype, with_bias, x_format):  # noqa: PLR0917
    cublaslt.library.start()
    codes, bias = operands(x_format)
    for _ in range(2):
        blackwell.launched.clear()
        y = product(codes, bias if with_bias else None, x_format, dtype)
        product_to = f"matmul_fp8 {'float32' if with_bias else dtype}"
        names = ["swizzle_scales", "swizzle_scales", product_to, *(["finish"] if with_bias else [])]
        assert sources(blackwell) == names
        check(y, codes, bias if with_bias else None, dtype, x_format)
    kinds = x_format, "e4m3", "float32" if with_bias else dtype
    assert cublaslt.calls == [((M, N, K), kinds, 0)] * 2
    assert cublaslt.questions <= 1, "asked once for a shape"


def test_products_of_values_and_of_other_shapes_take_no_fp8_cores(blackwell, cublaslt):
    *a, b, b_scales = (torch.from_numpy(each) for each in operands()[0])
    torch_cuda.weight_gemm(torch.ones(M, K, dtype=torch.bfloat16), b, b_scales)
    torch_cuda.gemm(*a, b[:40], b_scales[:40])
    torch_cuda.gemm(*(each[:64] for each in a), b, b_scales)
    assert [call.dtypes[0] for call in cublaslt.calls] == ["bfloat16"] * 2


def test_a_batch_of_products_takes_them_too(blackwell, cublaslt):
    codes, _ = operands()
    y = by_torch([np.stack([each, each]) for each in codes], None)
    assert len(cublaslt.calls) == 2
    for each in y:
        check(each, codes, None, "float32", "e4m3")


@looped("aligned", [(16, 16, 16), (2, 16, 16), (16, 2, 16), (16, 16, 2), (8, 4, 2)])
def test_cublaslt_learns_how_each_operand_is_aligned(cupy, cublaslt, aligned):
    """x, a kept weight in bfloat16, and y; the stand-in looks at the addresses too."""
    cublaslt.library.start()
    x, w = (heavy_tailed(shape, seed).astype(BFLOAT16) for seed, shape in enumerate(((M, K), (N, K))))
    arrays = x, w, np.zeros((M, N), BFLOAT16)
    held = [placed(each, at % 16) for each, at in zip(arrays, aligned, strict=True)]
    exact = np.zeros(4, np.uint32)
    elements, scales = (placed(each) for each in numpy_nodes.quantize(w.astype(np.float32)))
    kinds, at = [CODES[name] for name in ("bfloat16", "e4m3", "bfloat16")], [each.ctypes.data for each in held]
    product = planner.Gemm(
        *kinds, at[0], 0, elements.ctypes.data, scales.ctypes.data, 0, at[2], M, N, K, at[1], exact.ctypes.data
    )
    to = queue()
    with dispatch.forced_route("large"):
        plan = planner.gemm(dispatch.place(to.device), product, to.packed)
    assert cublaslt.alignments == aligned
    execution.run(plan, to)
    assert [call.sizes for call in cublaslt.calls] == [(M, N, K)]


def missing(lt: CublasLt, monkeypatch: Any) -> str:
    monkeypatch.setattr(cublaslt_emulation, "file", lambda: None)
    return "no cuBLASLt (not found); products of many rows take the next row"


def no_library(lt: CublasLt, monkeypatch: Any) -> str:
    path = Path(lt.path.decode()).with_name("text.so")
    path.write_text("text")
    text = str(path).encode()  # alive until the native library has copied it
    monkeypatch.setattr(cublaslt_emulation, "file", lambda: text)
    return "text.so: "


def another_library(lt: CublasLt, monkeypatch: Any) -> str:
    path = str(own_library("no cuBLASLt")).encode()
    monkeypatch.setattr(cublaslt_emulation, "file", lambda: path)
    return "has no cublasLtGetVersion"


def refused(lt: CublasLt, monkeypatch: Any) -> str:
    lt.refuse(cublaslt_emulation.STATUS)
    what = "cuBLASLt refuses float8e4m3fn times float8e4m3fn, M = 70, N = 48, K = 160, in float"
    return f"{what} (cuBLASLt 130100: CUBLAS_STATUS_NOT_SUPPORTED); such products take the next row"


def no_algorithm(lt: CublasLt, monkeypatch: Any) -> str:
    lt.refuse(cublaslt_emulation.NO_ALGORITHM)
    what = "cuBLASLt refuses float8e4m3fn times float8e4m3fn, M = 70, N = 48, K = 160, in float"
    return f"{what} (cuBLASLt 130100: no algorithm); such products take the next row"


@pytest.fixture(params=[missing, no_library, another_library, refused, no_algorithm])
def words(request, monkeypatch, fresh, cublaslt) -> str:
    """Makes the library refuse, and returns its words."""
    text: str = request.param(cublaslt, monkeypatch)
    return text


@pytest.fixture
def fresh(monkeypatch) -> None:
    """Gives the device another number: the native library remembers the answers and warnings for a GPU."""
    monkeypatch.setattr(device(), "index", next(numbers))


numbers = iter(range(1, 1000))


@ARRAYS
def test_a_product_that_cublaslt_refuses_takes_the_next_row(blackwell, cublaslt, words, product):
    codes, bias = operands()
    blackwell.launched.clear()
    with pytest.warns(UserWarning, match="take the next row of the dispatch table") as warned:
        y = product(codes, bias)
    check(y, codes, bias, "float32", "e4m3")
    (warning,) = warned
    assert words in str(warning.message)
    usable = "refuses" in words
    large, slices = ["dequantize", "dequantize", "matmul_bf16 float32", "finish", "gemm_float32"], ["gemm_skinny"] * 2
    assert sources(blackwell) == (large if usable else slices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = product([*(each[:66] for each in codes[:2]), *codes[2:]], bias)  # another shape of the same dtypes
    check(y, [*(each[:66] for each in codes[:2]), *codes[2:]], bias, "float32", "e4m3")


@ARRAYS
def test_products_of_bfloat16_can_be_refused_too(blackwell, cublaslt, fresh, product):
    cublaslt.refuse(cublaslt_emulation.STATUS, cublaslt_emulation.BFLOAT16, cublaslt_emulation.FP8)
    codes, bias = operands()
    blackwell.launched.clear()
    both = "cuBLASLt refuses float8e4m3fn times .*; cuBLASLt refuses bfloat16 times bfloat16, M = 70"
    with pytest.warns(UserWarning, match=both):
        y = product(codes, bias)
    check(y, codes, bias, "float32", "e4m3")
    assert sources(blackwell) == ["gemm_skinny"] * 2


@pytest.mark.filterwarnings("ignore:.*no cuBLASLt")
def test_values_are_split_only_if_their_parts_have_a_row(monkeypatch, blackwell, cublaslt, fresh):
    """Without cuBLASLt, the parts of rows whose K is no multiple of 32 would take ordinary cores three times."""
    monkeypatch.setattr(cublaslt_emulation, "file", lambda: None)
    for k, names in ((40, ["gemm_float32"]), (64, ["bfloat16_parts", *["gemm_skinny"] * 4, "finish", "gemm_float32"])):
        x, b = heavy_tailed((70, k)), numpy_nodes.quantize(heavy_tailed((48, k), 1))
        blackwell.launched.clear()
        y = tensors.array(torch_cuda.weight_gemm(torch.from_numpy(x), *map(torch.from_numpy, b)))
        weight = numpy_nodes.dequantize(*b)
        assert_within(y, x.astype(np.float64) @ weight.T, numpy_nodes.gemm_error_bound(x, weight), "product")
        assert sources(blackwell) == names


@pytest.mark.parametrize(
    ("failure", "name"), [({"create": 3}, "ALLOC_F"), ({"create": 14}, "INTERNAL_E"), ({"ask": 13}, "EXECUTION_F")]
)
def test_a_failure_that_says_nothing_about_the_product_is_an_error_and_is_forgotten(
    blackwell, cublaslt, fresh, failure, name
):
    codes, bias = operands()
    cublaslt.fail_once(**failure)
    with pytest.raises(BackendError, match=f"cannot multiply: cuBLASLt 130100: CUBLAS_STATUS_{name}"):
        by_torch(codes, bias)
    check(by_torch(codes, bias), codes, bias, "float32", "e4m3")
    assert len(cublaslt.calls) == 1


def test_a_forced_row_that_is_refused_is_an_error_and_a_warning(blackwell, cublaslt, fresh):
    cublaslt.refuse(cublaslt_emulation.STATUS)
    error = pytest.raises(BackendError, match="forced route 'block_scaled' to fit")
    with pytest.warns(UserWarning, match="CUBLAS_STATUS_NOT_SUPPORTED"), dispatch.forced_route("block_scaled"), error:
        by_torch(operands()[0], None)


def test_threads_that_multiply_the_first_products_share_one_answer(blackwell, cublaslt, fresh):
    codes, _ = operands()
    results: list[np.ndarray] = []
    together = threading.Barrier(4)

    def multiply() -> None:
        together.wait()
        results.append(by_torch(codes, None))

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(cublaslt.calls) == 4
    assert cublaslt.questions == 1
    for y in results:
        check(y, codes, None, "float32", "e4m3")


# --- ONNX Runtime ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch) -> Any:
    with machine(monkeypatch) as gpu:
        monkeypatch.setattr(gpu, "capability", (10, 0))
        gpu.start(STREAM)
        yield gpu


@pytest.fixture
def provider(gpu, cublaslt) -> Any:
    provider = CudaProvider(own_library("block scaled"), gpu)
    loader.give(provider.library)
    before = gpu.allocations
    yield provider
    assert gpu.allocations == before


def in_ort(
    provider: CudaProvider,
    codes: list[np.ndarray],
    bias: np.ndarray | None,
    a_format: str = "e4m3",
    dtype: str = "float32",
    **options: Any,
) -> np.ndarray:
    inputs = [*codes, *([] if bias is None else [bias])]
    kinds = [CODES[a_format], contract.UINT8, CODES["e4m3"], contract.UINT8, contract.FLOAT][: len(inputs)]
    (y,) = provider.run(contract.GEMM, inputs, kinds, output_dtype=CODES[dtype], **options)
    return y


def ran(gpu: Driver) -> list[str]:
    return [launched.kernel.partition("<")[0] for launched in gpu.launches]


@looped("dtype, with_bias, x_format", pairwise(dtype=DTYPES, bias=[False, True], x=["e4m3", "e5m2"]))
def test_onnx_runtime_multiplies_by_cublaslt(provider, gpu, cublaslt, dtype, with_bias, x_format):  # noqa: PLR0917
    cublaslt.library.start()
    codes, bias = operands(x_format)
    bias = bias if with_bias else None
    gpu.start(STREAM)
    check(in_ort(provider, codes, bias, x_format, dtype), codes, bias, dtype, x_format)
    assert ran(gpu) == ["swizzle_scales", "swizzle_scales", *(["finish"] if with_bias else [])]
    assert cublaslt.calls == [((M, N, K), (x_format, "e4m3", "float32" if with_bias else dtype), STREAM)]


def test_the_scales_of_a_constant_weight_are_swizzled_once(provider, gpu, cublaslt):
    codes, _ = operands()
    at_creation: list[Any] = []

    def created() -> None:
        at_creation[:] = gpu.launches
        layout = gpu.read(at_creation[0].parameters[1], planner.swizzled_bytes(N, K))
        assert_same(np.frombuffer(layout, np.uint8), swizzle(codes[3]), "layout")
        gpu.start(STREAM)

    provider.created = created
    gpu.start(LEGACY_STREAM)
    y = in_ort(provider, codes, None, constants=frozenset({2, 3}))
    check(y, codes, None, "float32", "e4m3")
    assert [launched.kernel for launched in at_creation] == ["swizzle_scales"]
    assert ran(gpu) == ["swizzle_scales"], "for x alone"


@pytest.mark.parametrize("change", ["capability", "columns", "k", "format of b", "values of x"])
def test_other_weights_keep_no_scales(provider, gpu, monkeypatch, change):
    codes, _ = operands()
    if change == "capability":
        monkeypatch.setattr(gpu, "capability", (9, 0))
    if change == "columns":
        codes = [*codes[:2], codes[2][:40], codes[3][:40]]
    if change == "k":
        codes = [each[:, : 150 if i % 2 == 0 else 5] for i, each in enumerate(codes)]
    kinds = [CODES["e4m3"], contract.UINT8, CODES["e5m2" if change == "format of b" else "e4m3"], contract.UINT8]
    op, constants = contract.GEMM, frozenset({2, 3})
    if change == "values of x":
        op, codes, kinds, constants = contract.WEIGHT_GEMM, [heavy_tailed((M, K)), *codes[2:]], [1, *kinds[2:]], {1, 2}
    made: list[str] = []
    provider.created = lambda: made.extend(ran(gpu)) or gpu.start(STREAM)
    gpu.start(LEGACY_STREAM)
    provider.run(op, codes, kinds, constants=frozenset(constants), output_dtype=1)
    assert made == []
    assert "swizzle_scales" not in ran(gpu)
    assert change != "capability" or "swizzle_scales" not in gpu.loaded


def test_weights_in_bfloat16_and_scales_are_kept_together(gpu, cublaslt):
    """Rows that cuBLASLt refuses still have the weight in bfloat16."""
    provider = CudaProvider(own_library("both kept"), gpu, keep_wide=True)
    loader.give(provider.library)
    codes, _ = operands()
    made: list[str] = []
    provider.created = lambda: made.extend(ran(gpu)) or gpu.start(STREAM)
    for refusal in (0, cublaslt_emulation.STATUS):
        cublaslt.library.start()
        cublaslt.refuse(refusal)
        made.clear()
        gpu.start(LEGACY_STREAM)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            rows = [each[: M - refusal] for each in codes[:2]]  # another shape: the library is asked again
            y = in_ort(provider, [*rows, *codes[2:]], None, constants=frozenset({2, 3}))
        check(y, [*rows, *codes[2:]], None, "float32", "e4m3")
        assert made == ["dequantize", "swizzle_scales"]
        assert ran(gpu) == (["dequantize", "gemm_float32", "gemm_float32"] if refusal else ["swizzle_scales"])
        assert len(warned) == (1 if refusal else 0)


def test_onnx_runtime_takes_the_next_row(gpu, words):
    provider = CudaProvider(own_library(f"refuses: {words.rstrip(': ')}"), gpu)  # it has no answers yet
    loader.give(provider.library)
    codes, bias = operands()
    gpu.start(STREAM)
    with pytest.warns(UserWarning, match="take the next row of the dispatch table") as warned:
        y = in_ort(provider, codes, bias)
    check(y, codes, bias, "float32", "e4m3")
    (warning,) = warned
    assert str(warning.message).startswith("MXFP8Gemm 'the node': ")
    assert words in str(warning.message)
    assert "swizzle_scales" not in ran(gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(in_ort(provider, codes, bias), codes, bias, "float32", "e4m3")


# --- the profile, the layout, the library ----------------------------------------------------------------------------


def test_a_profile_has_the_row_that_a_product_took(blackwell, cublaslt):
    codes, bias = operands()
    with cpu.profiled() as written:
        by_torch(codes, bias)
        by_torch([*(each[:3] for each in codes[:2]), *codes[2:]], bias)
        torch_cuda.quantize(torch.ones(3, 32))
        calls = written.calls()
    assert [(call.isa, call.gemms) for call in calls] == [
        ("cuda", ("block_scaled",)),
        ("cuda", ("skinny",)),
        ("cuda", ()),
    ]


def test_the_layout_of_scales_is_that_of_torchao():
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    for shape in ((1, 1), (130, 5), (70, 8), (256, 12)):
        scales = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        layout = np.zeros(planner.swizzled_bytes(shape[0], 32 * shape[1]), np.uint8)
        queue()  # the device that `launch` uses
        launch("swizzle_scales", -(-layout.size // 4096), scales.ctypes.data, layout.ctypes.data, *shape)
        assert_same(layout, to_blocked(torch.from_numpy(scales)).numpy().reshape(-1), f"layout of {shape}")


def test_cublaslt_is_the_loaded_one_or_the_newest(monkeypatch, cublaslt, tmp_path):
    copies = [tmp_path / f"libcublasLt.so.{version}" for version in (14, 12)]
    for copy in copies:
        copy.write_bytes(Path(cublaslt.path.decode()).read_bytes())
    paths = [str(tmp_path / "absent.so"), *map(str, copies)]
    monkeypatch.setattr(system, "candidates", lambda *_: paths)
    assert FIND() == paths[1].encode()
    monkeypatch.setattr(system, "candidates", lambda *_: [paths[0], str(tmp_path / "text"), cublaslt.path.decode()])
    assert FIND() == cublaslt.path
    monkeypatch.setattr(system, "candidates", lambda *_: [paths[2], paths[1]])
    assert FIND() == paths[1].encode(), "the loaded one, though the other comes first"
    monkeypatch.setattr(system, "candidates", lambda *_: paths[:1])
    assert FIND() is None


FIND = loader.cublaslt.__wrapped__


def test_the_first_products_on_a_gpu_are_right_by_every_row(blackwell, cublaslt, capsys):
    gpu_start.products("cpu")
    printed = capsys.readouterr().out
    assert printed.count("relative L2 difference from float64") == len(planner.routes()), printed
