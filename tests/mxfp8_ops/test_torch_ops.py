"""The inference ops: the reference's bytes on every layout, and what torch expects of an op."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import compare
import numpy as np
import pytest
import tensors
from compare import assert_within
from grids import looped
from tensors import array, assert_equal
from tensors import name as name_of

from mxfp8_ops import numpy_nodes
from mxfp8_ops.cuda import device
from mxfp8_ops.errors import BackendError, ShapeError

torch = pytest.importorskip("torch")
torch_ops = pytest.importorskip("mxfp8_ops.torch_ops")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

ops = torch.ops.mxfp8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
K = 2080
"""K of the gemm tests: long enough that the order of a sum shows, and no multiple of 64."""

values = functools.partial(tensors.values, spread=1.5)


def assert_same(got: torch.Tensor, expected: np.ndarray, what: str) -> None:
    compare.assert_same(array(got.contiguous()), np.ascontiguousarray(expected), what)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "row slice": lambda x: x[:, 8:77],
    "row slice, transposed": lambda x: x[:, 8:77].t(),
    "every other row": lambda x: x[::2],
    "every other column": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "3-D": lambda x: x.reshape(7, 10, 100),
    "3-D permuted": lambda x: x.reshape(7, 10, 100).permute(1, 0, 2),
    "3-D, blocked axis strided": lambda x: x.reshape(7, 10, 100).transpose(1, 2),
    "3-D row slice": lambda x: x.reshape(7, 10, 100)[:, :, 3:68],
    "vector": lambda x: x[0],
    "strided vector": lambda x: x[:, 0],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
}


# --- The reference's results --------------------------------------------------------------------------------------


@looped("layout, dtype", [*itertools.product(LAYOUTS, DTYPES)])
def test_quantize_gives_the_bytes_of_the_reference_on_every_layout_and_axis(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](values(70, 100, dtype=dtype))
    for axis in range(-x.dim(), x.dim()):
        for element_format, rounding in (("e4m3", "ceil"), ("e5m2", "floor")):
            got = ops.quantize(x, axis, element_format, rounding)
            expected = numpy_nodes.quantize(array(x), axis=axis, element_format=element_format, scale_rounding=rounding)
            for name, t, reference in zip(("elements", "scales"), got, expected, strict=True):
                assert_same(t, reference, f"{name}, axis {axis}, {element_format}, {rounding}")
                assert t.is_contiguous()


def test_quantize_gives_the_bytes_of_the_reference_on_special_values() -> None:
    x = values(12, 96)
    x[0, 3], x[1, 40], x[2, 95], x[3] = float("nan"), float("inf"), -float("inf"), -0.0
    x[4], x[5] = x[4] * 2.0**-130, 3e38
    for t, axis in ((x, -1), (x, 0), (x.t(), -1), (x[:, :65], -1)):
        for got, expected in zip(ops.quantize(t, axis), numpy_nodes.quantize(array(t), axis=axis), strict=True):
            assert_same(got, expected, f"axis {axis}")


@looped("dtype, element_format", [*itertools.product(DTYPES, ("e4m3", "e5m2"))])
def test_dequantize_gives_the_bits_of_the_reference(dtype: torch.dtype, element_format: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    elements, scales = codes.repeat(256, 1), codes[:, None].expand(256, 8)
    for e, s, axis in ((elements, scales, -1), (elements.t(), scales.t(), 0), (elements.t(), scales.t(), -2)):
        options = {"axis": axis, "element_format": element_format, "dtype": name_of(dtype)}
        assert_same(
            ops.dequantize(e, s, axis, element_format, dtype),
            numpy_nodes.dequantize(e.numpy(), s.numpy(), **options),
            f"axis {axis}",
        )


SHAPES = {
    "matrix": ((33, K), (40, K)),
    "vector": ((K,), (40, K)),
    "3-D a": ((2, 5, K), (40, K)),
    "batched": ((3, 5, K), (3, 7, K)),
    "broadcast": ((2, 1, 5, K), (3, 7, K)),
    "vector, batched b": ((K,), (3, 7, K)),
    "M = 0": ((0, K), (40, K)),
    "N = 0": ((5, K), (0, K)),
    "K = 0": ((5, 0), (7, 0)),
    "ragged K": ((5, 45), (7, 45)),
}


@looped("shapes, dtype", [*itertools.product(SHAPES, DTYPES)])
def test_gemms_are_within_the_bound_of_the_reference(shapes: str, dtype: torch.dtype) -> None:
    name, (a_shape, b_shape) = name_of(dtype), SHAPES[shapes]
    x, b, bias = values(*a_shape), ops.quantize(values(*b_shape, seed=1) / 64), values(b_shape[-2], seed=2)
    a, wide_b = ops.quantize(x, -1, "e5m2"), numpy_nodes.dequantize(*map(array, b))  # no overflow of float16
    expected = numpy_nodes.gemm(*map(array, (*a, *b, bias)), a_format="e5m2", dtype=name)
    wide_a = numpy_nodes.dequantize(*map(array, a), element_format="e5m2")
    bound = numpy_nodes.gemm_error_bound(wide_a, wide_b, name, array(bias))
    assert_within(array(ops.gemm(*a, *b, bias, "e5m2", "e4m3", dtype)), expected, bound)

    x = x.to(dtype)
    expected = numpy_nodes.weight_gemm(*map(array, (x, *b, bias)), dtype=name)
    got = ops.weight_gemm(x, *b, bias)
    assert got.dtype == dtype
    assert_within(array(got), expected, numpy_nodes.gemm_error_bound(array(x), wide_b, name, array(bias)))


@looped("layout", LAYOUTS)
def test_gemms_take_every_layout(layout: str) -> None:
    x = LAYOUTS[layout](values(70, 100))
    a, b, bias = ops.quantize(x), ops.quantize(values(9, x.shape[-1], seed=1)), values(18, seed=2)[::2]
    strided = [t.t().contiguous().t() for t in b]
    assert torch.equal(
        ops.weight_gemm(x, *strided), ops.weight_gemm(x.clone(memory_format=torch.contiguous_format), *b)
    )
    transposed = [t.mT.contiguous().mT if t.dim() > 1 else t for t in a]
    assert torch.equal(ops.gemm(*transposed, *strided, bias), ops.gemm(*a, *b, bias.clone()))


@looped("layout", ["contiguous", "transposed", "row slice", "row slice, transposed", "every other row"])
def test_quantize_and_weight_gemm_do_not_copy_strided_matrices(layout: str) -> None:
    x = LAYOUTS[layout](values(2048, 2048))
    b = ops.quantize(values(8, x.shape[-1]))
    calls = [lambda: ops.quantize(x)] + ([lambda: ops.weight_gemm(x, *b)] if x.stride(1) == 1 else [])
    for call in calls:
        with torch.profiler.profile(profile_memory=True) as profile:
            call()
        names = {event.name for event in profile.events()}
        assert not names & {"aten::contiguous", "aten::clone", "aten::copy_"}, names


@looped("dtype", DTYPES)
def test_weight_gemm_of_values_rounded_to_bfloat16_is_that_of_bfloat16(dtype: torch.dtype) -> None:
    x, b = values(6, 70).to(dtype), ops.quantize(values(8, 70, seed=1))
    got = ops.weight_gemm(x, *b, activation_dtype=torch.bfloat16)
    assert got.dtype == dtype
    assert torch.equal(got, ops.weight_gemm(x.bfloat16(), *b, dtype=dtype))


# --- Tensors that are not what they seem -----------------------------------------------------------------------------

X, W = values(6, 64), values(8, 64, seed=1)
B = ops.quantize(W)


def test_codes_are_bytes() -> None:
    """What else is refused is in test_bad_calls.py."""
    message = "elements have dtype float8_e4m3fn and scales uint8; expected uint8 codes; pass .view"
    with pytest.raises(ShapeError, match=f"weight_gemm: {message}"):
        ops.weight_gemm(X, B[0].view(torch.float8_e4m3fn), B[1])


def operands(name: str) -> dict[str, torch.Tensor]:
    """Returns what the op takes, by argument."""
    x, w, (b, b_scales) = X.clone(), W.clone(), ops.quantize(W)
    elements, scales = ops.quantize(x)
    a, product = {"a": elements, "a_scales": scales}, {"b": b, "b_scales": b_scales, "bias": values(8)}
    offs = torch.tensor([6])
    groups = *ops.quantize_groups(x, offs), *ops.quantize_groups(x, offs)
    return {
        "quantize": {"x": x},
        "quantize_both": {"x": x},
        "dequantize": {"elements": elements, "scales": scales},
        "gemm": a | product,
        "weight_gemm": {"x": x} | product,
        "embedding": {"indices": torch.tensor([5, 0]), "b": elements, "b_scales": scales},
        "conv": {"x": x.view(1, 64, 6), "b": b[:, None], "b_scales": b_scales[:, None], "bias": values(8)},
        "product": {"a": x, "b": w},
        "linear_packed": {"x": x} | product,
        "linear_train": {"x": x, "weight": w, "bias": values(8).half()},
        "grouped_linear_train": {"x": x, "weight": w[None], "offs": offs},
        "quantize_groups": {"x": x, "offs": offs},
        "grouped_wgrad": dict(zip(("a", "a_scales", "b", "b_scales", "offs"), (*groups, offs), strict=True)),
        "grouped_gemm": a | {"b": b[None], "b_scales": b_scales[None], "offs": offs},
    }[name]


OPERANDS = [(op.name, argument) for op in torch_ops.OPS for argument in operands(op.name)]


@looped("op, argument, kept", [(*each, kept) for each in OPERANDS for kept in ("nothing", "all but a byte")])
def test_a_storage_without_its_tensors_values_is_refused(op: str, argument: str, kept: str) -> None:
    arguments = operands(op)
    storage = arguments[argument].untyped_storage()
    storage.resize_(0 if kept == "nothing" else storage.nbytes() - 1)
    with pytest.raises(
        ShapeError, match=r"the storage of \w+ has \d+ bytes; expected \d+ for shape .*; give the storage"
    ):
        getattr(ops, op)(**arguments)


@looped("view", [lambda x: x.t(), lambda x: x[2:], lambda x: x[:, 1:], lambda x: x[:1].expand(3, -1)])
def test_a_view_beyond_its_storage_is_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(values(6, 64))
    x.untyped_storage().resize_(4 * 60)
    for call in (lambda: ops.quantize(x), lambda: ops.weight_gemm(x, *ops.quantize(values(8, x.shape[1])))):
        with pytest.raises(ShapeError, match="the storage of x has 240 bytes"):
            call()


def test_a_tensor_without_values_needs_no_storage() -> None:
    empty = values(0, 64)
    empty.untyped_storage().resize_(0)
    assert ops.quantize(empty)[0].shape == (0, 64)
    assert ops.weight_gemm(empty, *B).shape == (0, 8)


@looped("op, argument", OPERANDS)
def test_operands_on_two_devices_are_refused(op: str, argument: str) -> None:
    """Without the error, the result would be memory that was never written."""
    arguments = operands(op)
    moved = arguments | {argument: arguments[argument].to("meta")}
    if argument == "offs":
        # As torch has it: offsets may be elsewhere, and here have no data.
        assert not getattr(ops, op)(**moved)[0].is_meta
    elif arguments.keys() <= {argument, "offs"}:
        assert getattr(ops, op)(**moved)[0].device.type == "meta"
    else:
        with pytest.raises(ShapeError, match="tensors on cpu, meta; expected one device"):
            getattr(ops, op)(**moved)


def test_negative_conjugate_and_functional_tensors_are_read_as_what_they_stand_for() -> None:
    z = torch.complex(values(6, 64), values(6, 64, seed=1))
    negative, plain = z.conj().imag, -z.imag
    assert negative.is_neg()
    run = lambda x: (*ops.quantize(x), ops.weight_gemm(x, *B))  # noqa: E731
    assert_equal(run(negative), run(plain))
    assert_equal(torch.func.functionalize(run)(plain), run(plain))
    with pytest.raises(ShapeError, match="quantize: dtype complex64; expected one of"):
        ops.quantize(z.conj())


@looped("name", ["quantize", "dequantize", "gemm", "weight_gemm"])
def test_a_cuda_tensor_meets_a_kernel_that_says_what_to_do(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mxfp8::{name}", "CUDA")
    if not device.available():
        with pytest.raises(BackendError, match=r"cuda: .*; expected .*; .*use the CPU kernels|pip install cupy"):
            device.device(0)


# --- Cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_importing_loads_no_more_than_it_must_and_works_in_any_mode() -> None:
    code = """
import os, sys, mxfp8_ops
assert "torch" not in sys.modules
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
for mode in (FakeTensorMode(), torch.inference_mode()):
    if (child := os.fork()) == 0:
        with mode:
            import mxfp8_ops.torch_ops
        x = torch.ones(2, 64)
        elements, scales = torch.ops.mxfp8.quantize(x)
        y = torch.ops.mxfp8.dequantize(elements, scales)
        assert torch.equal(x, y) and not y.is_inference()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, mode
import mxfp8_ops.torch_ops
from mxfp8_ops import native
assert native.load.cache_info().currsize == 0
assert "onnx" not in sys.modules and "onnxruntime" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
