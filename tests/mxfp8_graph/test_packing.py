"""Packing: the bytes of `numpy_nodes`, whatever way a weight is stored and however it is cut into slices."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from grids import looped, pairwise
from models import weight

from mxfp8_graph import packing
from mxfp8_graph.onnx_pass.lazy_weights import _reader, rows_of
from mxfp8_graph.onnx_pass.views import Static
from mxfp8_graph.packing import NonFiniteError, QuantizedWeight, pack, packed_bytes
from mxfp8_ops import numpy_nodes
from mxfp8_ops.errors import ContractError

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def stored(array: np.ndarray, folder: Path | None) -> ir.TensorProtocol:
    """Returns `array` as a tensor: in memory, or behind 100 other bytes of an external file in `folder`."""
    tensor = ir.Tensor(array, name="w")
    if folder is None:
        return tensor
    (folder / "w.data").write_bytes(bytes(100) + tensor.tobytes() + bytes(50))
    shape = ir.Shape(array.shape)
    return ir.ExternalTensor("w.data", 100, tensor.nbytes, tensor.dtype, shape=shape, name="w", base_dir=folder)


def packed(
    array: np.ndarray, transposed: bool, folder: Path | None, steps: Any = (), **options: Any
) -> QuantizedWeight:
    tensor, value = stored(array, folder), ir.Value(name="w")
    static = Static(value=value, tensor=tensor, shape=array.shape, dtype=int(tensor.dtype), steps=steps)
    rows, flipped = rows_of(static)
    return pack(rows, transposed=transposed != flipped, **options)


@pytest.fixture
def packed_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., QuantizedWeight]:
    """Returns `packed` with the size of slices, and whether the weight lies in a file of its own."""

    def packed_as(slices: int, external: bool, array: np.ndarray, transposed: bool, *steps: Any, **options: Any) -> Any:
        monkeypatch.setattr(packing, "SLICE_BYTES", slices)
        return packed(array, transposed, tmp_path if external else None, *steps, **options)

    return packed_as


BOTH = [False, True]
WAYS = {"slices": [1, 20_000, 1 << 30], "external": BOTH}
"""Slices of 32 rows, some slices and one; inline and external."""


def check(result: QuantizedWeight, w: np.ndarray, **options: Any) -> None:
    """Fails unless `result` is `w` [..., N, K] as `numpy_nodes` quantizes it, with the errors that this makes."""
    elements, scales = numpy_nodes.quantize(w, **options)
    np.testing.assert_array_equal(result.elements, elements)
    np.testing.assert_array_equal(result.scales, scales)
    values = numpy_nodes.dequantize(elements, scales, element_format=options.get("element_format", "e4m3"))
    exact = w.astype(np.float64)
    assert result.signal == pytest.approx((exact**2).sum(), rel=1e-6)
    assert result.noise == pytest.approx(((exact - values) ** 2).sum(), rel=1e-6)
    assert result.relative_l2 == pytest.approx(np.linalg.norm(exact - values) / np.linalg.norm(exact), rel=1e-6)


SHAPES = [(96, 64), (97, 70), (33, 31), (1, 1), (2, 500), (2, 3, 70, 40)]


@looped("dtype, transposed, shape, slices, external", pairwise(dtype=DTYPES, transposed=BOTH, shape=SHAPES, **WAYS))
def test_a_matrix_or_a_stack(packed_as, *, dtype, transposed, shape, slices, external):
    w = weight(*shape, dtype=dtype)
    result = packed_as(slices, external, w, transposed)
    check(result, np.ascontiguousarray(w.swapaxes(-1, -2)) if transposed else w)
    assert packed_bytes(shape, transposed=transposed) == result.elements.nbytes + result.scales.nbytes


OPTIONS = [{"element_format": "e5m2"}, {"scale_rounding": "floor"}, {"scale_rounding": "even"}]


@looped("options, slices, external", pairwise(options=OPTIONS, **WAYS))
def test_formats_and_roundings_and_a_factor_before_them(packed_as, options, slices, external):
    w = weight(70, 96, dtype=np.float16)
    check(packed_as(slices, external, w, True, **options), np.ascontiguousarray(w.T), **options)
    result = packed_as(slices, external, w, False, factor=0.3, **options)
    check(result, w.astype(np.float32) * np.float32(0.3), **options)


STEPS = {
    "transpose": ((("Transpose", (1, 0)),), (64, 96), lambda w: w.T),
    "identity transpose": ((("Transpose", (0, 1)),), (96, 64), lambda w: w),
    "cast": ((("Cast", (10,)), ("Cast", (1,))), (96, 64), lambda w: w.astype(np.float16).astype(np.float32)),
    "reshape": ((("Reshape", (96, 64)),), (64, 96), lambda w: w.reshape(96, 64)),
    "reshape, transpose, cast": (
        (("Reshape", (64, 96)), ("Transpose", (1, 0)), ("Cast", (16,))),
        (32, 192),
        lambda w: w.reshape(64, 96).T.astype(ml_dtypes.bfloat16),
    ),
    "transpose, reshape": ((("Transpose", (1, 0)), ("Reshape", (96, 64))), (64, 96), lambda w: w.T.reshape(96, 64)),
    "three axes": (
        (("Transpose", (2, 0, 1)), ("Reshape", (96, 64))), (8, 8, 96),
        lambda w: w.transpose(2, 0, 1).reshape(96, 64),
    ),
    "swap of the last two": ((("Transpose", (0, 2, 1)),), (3, 64, 96), lambda w: w.swapaxes(-1, -2)),
}  # fmt: skip


@looped("name, slices, external", pairwise(name=list(STEPS), **WAYS))
def test_steps_between_the_stored_tensor_and_the_matmul(packed_as, name, slices, external):
    steps, shape, see = STEPS[name]
    w = weight(*shape)
    check(packed_as(slices, external, w, False, steps), np.ascontiguousarray(see(w)))


PLACES = [(0, 0), (69, 95), (33, 40), (1, 2, 69, 39)]


@looped("at, transposed, slices, external", pairwise(at=PLACES, transposed=BOTH, **WAYS))
def test_the_index_of_a_nan_does_not_depend_on_the_slices(packed_as, at, transposed, slices, external):
    w = weight(*((70, 96) if len(at) == 2 else (2, 3, 70, 40)))
    w[at] = np.nan if len(at) == 2 else -np.inf
    found = "nan" if len(at) == 2 else "-inf"
    with pytest.raises(NonFiniteError, match=rf"^weight 'w': {found} at index {re.escape(str([*at]))}; "):
        packed_as(slices, external, w, transposed)


def test_an_all_zero_weight_has_no_error():
    assert packed(np.zeros((64, 64), np.float32), False, None).relative_l2 == 0.0


@pytest.mark.parametrize("values", [weight(50, 20), np.arange(1000).reshape(50, 20).astype(ml_dtypes.int4)])
def test_a_run_of_values_at_any_place(tmp_path, values):
    fetch = _reader(stored(values, tmp_path))
    for first, count in ((0, 1000), (3, 7), (999, 1), (500, 500)):
        np.testing.assert_array_equal(fetch(first, count), values.reshape(-1)[first : first + count])


def test_a_file_that_shrinks_after_it_was_measured(tmp_path):
    tensor, data = stored(weight(50, 20), tmp_path), tmp_path / "w.data"
    data.write_bytes(data.read_bytes()[:200])
    with pytest.raises(ContractError) as caught:
        _reader(tensor)(0, 1000)
    assert str(caught.value) == (
        f"{data}: became shorter while tensor 'w' was read; expected the whole file; rewrite the model again"
    )
