"""CuPy arrays and torch tensors on CUDA without a GPU: a stand-in for CuPy, emulated kernels behind both."""

from __future__ import annotations

import re
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from compare import assert_same, assert_within, heavy_tailed
from cuda_emulation import FORMATS
from cupy_stand_in import array, sources, stand_in
from grids import looped, pairwise

from mxfp8_ops import cuda, numerics, numpy_nodes
from mxfp8_ops.errors import ShapeError

torch = pytest.importorskip("torch")
torch_training = pytest.importorskip("mxfp8_ops.torch_ops.training")
torch_cuda = pytest.importorskip("mxfp8_ops.torch_ops.cuda")
import tensors  # noqa: E402
from torch_stand_in import cupy, emulated  # noqa: E402

__all__ = ["cupy", "emulated"]
pytestmark = pytest.mark.cuda

DTYPES = tuple(numerics.VALUE_DTYPES)


def tensor(x: np.ndarray) -> Any:
    bfloat16 = x.dtype.name == "bfloat16"
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) if bfloat16 else torch.from_numpy(x.copy())


class FrontEnd(NamedTuple):
    ops: Any
    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    dtype: Callable[[str], Any]


FRONT_ENDS = {
    "CuPy": FrontEnd(cuda, array, np.asarray, str),
    "torch": FrontEnd(torch_cuda, tensor, tensors.array, lambda name: getattr(torch, name)),
}
EACH = pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)


# --- both ----------------------------------------------------------------------------------------------------------


@EACH
@looped("dtype, fmt, rounding", pairwise(dtype=DTYPES, fmt=FORMATS, rounding=("ceil", "floor")))
def test_quantize_and_dequantize_give_the_bytes_of_the_reference(emulated, front_end, dtype, fmt, rounding):
    ops, put, get, _ = front_end
    for shape, axis in (((5, 96), -1), ((3, 40, 48), 1), ((37,), 0), ((0, 64), -1), ((4, 0), 1)):
        x = heavy_tailed(shape).astype(numerics.value_dtype(dtype))
        codes = {"element_format": fmt}
        expected = numpy_nodes.quantize(x, axis=axis, **codes, scale_rounding=rounding)
        by_name = {"axis": axis, **codes, "scale_rounding": rounding}
        got = ops.quantize(put(x), **by_name) if ops is cuda else ops.quantize(put(x), axis, fmt, rounding)
        for name, a, b in zip(("elements", "scales"), got, expected, strict=True):
            assert_same(get(a), b, name)
        y = (
            ops.dequantize(*got, axis=axis, **codes, dtype=dtype)
            if ops is cuda
            else ops.dequantize(*got, axis, fmt, getattr(torch, dtype))
        )
        assert_same(get(y), numpy_nodes.dequantize(*expected, axis=axis, **codes, dtype=dtype), "values")


SHAPES = (((3, 96), (5, 96)), ((96,), (5, 96)), ((2, 3, 96), (5, 96)), ((2, 1, 3, 96), (4, 5, 96)), ((96,), (4, 5, 96)))


@EACH
@looped("shapes, dtype, formats", pairwise(shapes=SHAPES, dtype=DTYPES, formats=(("e5m2", "e4m3"), ("int8", "int8"))))
def test_gemms_are_within_the_bound_of_the_reference(emulated, front_end, shapes, dtype, formats):
    (ops, put, get, named), (a_format, b_format) = front_end, formats
    x, w, bias = (heavy_tailed(shape, seed) for seed, shape in enumerate((*shapes, (5,))))
    a, b = numpy_nodes.quantize(x, element_format=a_format), numpy_nodes.quantize(w, element_format=b_format)
    weight = numpy_nodes.dequantize(*b, element_format=b_format)
    x = x.astype(numerics.value_dtype(dtype))
    rounded = x.astype(numerics.value_dtype("bfloat16"))
    one = {"b_format": b_format, "dtype": named(dtype)}
    for got, values, added in (
        (
            ops.gemm(*map(put, (*a, *b, bias)), a_format=a_format, **one),
            numpy_nodes.dequantize(*a, element_format=a_format),
            bias,
        ),
        (ops.weight_gemm(*map(put, (x, *b)), **one), x, None),
        (ops.weight_gemm(*map(put, (x, *b)), **one, activation_dtype=named("bfloat16")), rounded, None),
    ):
        y, expected = get(got), numpy_nodes.weight_gemm(values, *b, added, b_format=b_format)
        bound = numpy_nodes.gemm_error_bound(np.atleast_2d(values), weight, dtype, added).reshape(y.shape)
        assert_within(y, expected, bound)


# --- CuPy ----------------------------------------------------------------------------------------------------------


def test_cupy_quantizes_into_the_callers_arrays(cupy):
    x = array(heavy_tailed((130, 160)))
    expected = cuda.quantize(x)
    out = tuple(array(np.full_like(codes, 0xAA)) for codes in expected)
    got = cuda.quantize(x, out=out)
    assert (got[0] is out[0], got[1] is out[1]) == (True, True)
    for name, codes, right in zip(("elements", "scales"), out, expected, strict=True):
        assert_same(np.asarray(codes), np.asarray(right), name)
    with pytest.raises(ShapeError, match="out: scales are uint8 of shape"):
        cuda.quantize(x, axis=0, out=out)
    with pytest.raises(ShapeError, match="share memory"):
        cuda.quantize(x, out=(x.view(np.uint8).ravel()[: x.size].reshape(x.shape), out[1]))


def test_cupy_picks_rows_of_a_table(cupy):
    table, indices = (
        numpy_nodes.quantize(heavy_tailed((40, 96)), element_format="e5m2"),
        np.array([3, -1, 39], np.int32),
    )
    options = {"b_format": "e5m2", "dtype": "bfloat16"}
    y = cuda.embedding(*map(array, (indices, *table)), **options)
    assert_same(np.asarray(y), numpy_nodes.embedding(indices, *table, **options), "rows")


def test_cupy_errors(cupy):
    b = [*map(array, numpy_nodes.quantize(heavy_tailed((5, 64))))]
    with pytest.raises(ShapeError, match="gemm: scales"):
        cuda.weight_gemm(array(heavy_tailed((3, 64))), b[0], b[1][:, :1])
    with pytest.raises(ShapeError, match="same K"):
        cuda.weight_gemm(array(heavy_tailed((3, 32))), *b)
    with pytest.raises(ShapeError, match="dtype float64"):
        cuda.quantize(array(np.ones((2, 32))))


# --- torch -----------------------------------------------------------------------------------------------------------


def values(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    return torch.from_numpy(heavy_tailed(shape, seed)).to(dtype)


@looped("dtype, fmt", pairwise(dtype=[torch.float32, torch.float16, torch.bfloat16], fmt=FORMATS))
def test_torch_quantizes_every_layout(emulated, dtype, fmt):
    x = values(40, 96, dtype=dtype)
    for source in (x.t(), x[:, 1:70], x[::2], x.reshape(4, 10, 96).permute(1, 0, 2), x[0], x[:0], x[3].expand(5, -1)):
        for axis in range(source.dim()):
            expected = numpy_nodes.quantize(tensors.array(source), axis=axis, element_format=fmt)
            got = torch_cuda.quantize(source, axis, fmt)
            for name, a, b in zip(("elements", "scales"), got, expected, strict=True):
                assert_same(a.numpy(), b, name)


@looped("shape", [(64, 96), (37, 50), (0, 64), (5, 0)])
def test_torch_quantizes_both_ways_for_training(emulated, shape):
    x = values(*shape)
    got = torch_cuda.quantize_both(x, "e5m2")
    expected = *torch_cuda.quantize(x, -1, "e5m2"), *torch_cuda.quantize(x.t(), -1, "e5m2")
    for name, a, b in zip(("rows", "scales", "columns", "scales"), got, expected, strict=True):
        assert_same(a.numpy(), b.numpy(), name)
        assert a.is_contiguous()


def test_torch_quantizes_a_transposed_matrix_without_a_transposition(emulated, monkeypatch):
    x = values(64, 96)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    elements, scales = torch_cuda.quantize(x.t(), -1)
    assert emulated.launched == ["quantize_columns<BF16, E4M3, TRANSPOSED, false>"]
    assert (elements.shape, scales.shape) == ((96, 64), (96, 2))


def test_a_training_step_reads_each_gradient_once(emulated, monkeypatch):
    """linear_train on the kernels of CUDA tensors: which run, and that their results are those of the CPU."""
    x, w, dy = (values(*s, seed=i, dtype=torch.float32) for i, s in enumerate(((64, 96), (32, 96), (64, 32))))

    def step(ops: Any) -> list[Any]:
        monkeypatch.setattr(torch.ops, "mxfp8", ops)
        context = types.SimpleNamespace(needs_input_grad=(True, True, False))
        context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
        y = torch_training.linear_train(x, w)
        torch_training.setup_context(context, (x, w, None, "HYBRID", "ceil"), y)
        return [y, *torch_training.backward(context, dy)[:2]]

    on_the_cpu, on_cuda = torch.ops.mxfp8, types.SimpleNamespace()
    for name in ("quantize", "quantize_both", "gemm"):
        setattr(on_cuda, name, types.SimpleNamespace(default=getattr(torch_cuda, name)))
    with torch.no_grad():
        got = step(on_cuda)
        launched = [name for name in emulated.launched if name.startswith("quantize")]
        wanted = step(on_the_cpu)
    rows, columns = "quantize_rows<F32, E4M3, false>", "quantize_columns<F32, E4M3, TRANSPOSED, false>"
    assert launched == [rows, rows, columns, "quantize_columns<F32, E5M2, BOTH, false>", columns]
    for name, a, b in zip(("y", "dx", "dw"), got, wanted, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-3, err_msg=name)


def test_torch_uses_a_kept_weight_until_it_changes(emulated):
    x, b = values(70, 64), torch_cuda.quantize(values(6, 64, seed=1))

    def kernels(x: Any = x, fmt: str = "e4m3") -> list[str]:
        emulated.launched.clear()
        torch_cuda.weight_gemm(x, *b, None, fmt)
        return sources(emulated)

    assert kernels()[0] == "dequantize"
    torch_cuda.keep_wide(*b)
    assert kernels(fmt="e5m2")[0] == "dequantize"  # the same codes in another format are another weight
    assert kernels() == ["matmul_bf16 bfloat16", "gemm_float32"]
    assert "dequantize" not in kernels(x.float())
    b[0].add_(1)
    assert kernels()[0] == "dequantize"
    torch_cuda.keep_wide(*b)
    torch_cuda.forget_kept()
    assert kernels()[0] == "dequantize"
    with torch.inference_mode():
        b = torch_cuda.quantize(values(6, 64, seed=1))
        torch_cuda.keep_wide(*b)
        assert kernels()[0] == "matmul_bf16 bfloat16"


def test_torch_gemms_take_empty_operands_on_one_device(emulated):
    b, bias = torch_cuda.quantize(values(6, 64)), values(6, dtype=torch.float32)
    assert torch_cuda.weight_gemm(values(0, 64), *b).shape == (0, 6)
    none = torch_cuda.quantize(values(6, 0))
    assert torch.equal(torch_cuda.weight_gemm(values(3, 0), *none, bias), bias.bfloat16().expand(3, 6))
    with pytest.raises(ShapeError, match="tensors on cpu, meta; expected one device"):
        torch_cuda.weight_gemm(values(2, 64).to("meta"), *b)


def test_the_sample_of_cupy_arrays_runs(monkeypatch, cupy, capsys):
    here = stand_in()
    here.asnumpy = np.asarray
    monkeypatch.setitem(sys.modules, "cupy", here)
    runpy.run_path(str(Path(__file__).parents[2] / "samples/19_cupy/multiply.py"))
    errors = {
        name: float(error) for name, error in re.findall(r"(\w+) +relative L2 error ([.\d]+)", capsys.readouterr().out)
    }
    assert errors == {"gemm": pytest.approx(0.037, abs=1e-3), "weight_gemm": pytest.approx(0.0265, abs=1e-3)}
