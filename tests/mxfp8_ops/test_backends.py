"""Every implementation and `numpy_nodes`, bit by bit: kernels per instruction set, torch ops, nodes, function bodies.

The kernels for CUDA have the same tests in test_cuda_emulated.py, where their launches are counted too.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import ROUNDINGS, assert_same, heavy_tailed
from grids import instruction_sets, looped, pairwise
from one_node import NUMPY, Feed, one_node_model, run
from scale_definition import FIRST_NORMAL, boundary_values, codes_by_definition, near
from torch_front_end import Torch

from mxfp8_ops import contract, cpu, numerics, numpy_nodes
from mxfp8_ops.contract import UINT8
from mxfp8_ops.formats import ELEMENT_FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")

DTYPES, FORMATS = tuple(numerics.VALUE_DTYPES), tuple(ELEMENT_FORMATS)
CODES = {name: code for code, name in contract.VALUE_NAMES.items()}


class Cpu:
    """The kernels on one instruction set."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def __getattr__(self, name: str) -> Any:
        def call(*operands: np.ndarray, **options: Any) -> Any:
            with cpu.forced_isa(self.isa):
                return getattr(cpu, name)(*operands, **options)

        return call


class Onnx:
    """The nodes in ONNX Runtime: by our kernels, or by the function bodies for an opset."""

    def __init__(self, opset: int = 0) -> None:
        self.opset = opset

    def run(self, op: str, inputs: dict[str, Feed], outputs: dict[str, int], **attributes: Any) -> list[np.ndarray]:
        model = one_node_model(op, inputs, outputs, self.opset or 21, attributes)
        if not self.opset:
            del model.functions[:]
        return run(model, inputs, kernels=not self.opset)

    def quantize(self, x: np.ndarray, *, element_format: str = "e4m3", **options: Any) -> tuple[np.ndarray, ...]:
        code = ELEMENT_FORMATS[element_format].onnx_dtype
        outputs = {"elements": code, "scales": UINT8}
        return tuple(self.run("MXFP8Quantize", {"X": _value(x)}, outputs, output_dtype=code, **options))

    def dequantize(
        self, elements: np.ndarray, scales: np.ndarray, *, element_format: str, dtype: str, axis: int = -1
    ) -> np.ndarray:
        inputs = {"elements": (elements, ELEMENT_FORMATS[element_format].onnx_dtype), "scales": (scales, UINT8)}
        return self.run("MXFP8Dequantize", inputs, {"Y": CODES[dtype]}, output_dtype=CODES[dtype], axis=axis)[0]

    def embedding(
        self, ids: np.ndarray, b: np.ndarray, b_scales: np.ndarray, *, b_format: str = "e4m3", dtype: str = "float32"
    ) -> np.ndarray:
        index = contract.INT32 if ids.dtype == np.int32 else contract.INT64
        inputs = {
            "indices": (ids, index),
            "B": (b, ELEMENT_FORMATS[b_format].onnx_dtype),
            "B_scales": (b_scales, UINT8),
        }
        return self.run("MXFP8Embedding", inputs, {"Y": CODES[dtype]}, output_dtype=CODES[dtype])[0]

    def weight_gemm(
        self, x: np.ndarray, b: np.ndarray, b_scales: np.ndarray, *, activation_dtype: str, dtype: str
    ) -> np.ndarray:
        inputs = {"X": _value(x), "B": (b, contract.FLOAT8E4M3FN), "B_scales": (b_scales, UINT8)}
        attributes = {"activation_dtype": CODES[activation_dtype], "output_dtype": CODES[dtype]}
        return self.run("MXFP8WeightGemm", inputs, {"Y": CODES[dtype]}, **attributes)[0]


def _value(x: np.ndarray) -> Feed:
    return x, next(code for code, numpy in NUMPY.items() if numpy == x.dtype)


BACKENDS: dict[str, Any] = {f"cpu {isa}": Cpu(isa) for isa in instruction_sets()}
BACKENDS |= {"torch": Torch(), "node": Onnx(), "body at 21": Onnx(21), "body at 26": Onnx(26)}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param]


# --- Quantizing ------------------------------------------------------------------------------------------------------


@functools.cache
def hard_blocks(dtype: str) -> np.ndarray:
    """Returns blocks [n, 32]: all leading bit patterns, NaN and Inf among them, subnormals, ties and boundaries."""
    rng = np.random.default_rng(0)
    upper = np.arange(1 << 16, dtype=np.uint16)
    if dtype != "float32":
        return np.concatenate([upper, rng.permutation(upper)]).view(numerics.value_dtype(dtype)).reshape(-1, 32)
    patterns = (upper.astype(np.uint32) << 16).view(np.float32)
    subnormal = (rng.integers(0, 1 << 23, 1 << 12, dtype=np.uint32) | (upper[: 1 << 12] % 2 << 31)).view(np.float32)
    # Random mantissas under every exponent, and blocks whose amax is one bit around a boundary of any rounding.
    spread = np.ldexp(rng.standard_normal((1 << 12, 32)), rng.integers(-149, 127, (1 << 12, 1))).astype(np.float32)
    at = np.float32(
        [m * 2.0**e for m in (1, 1.75, 1.875, 1.9375, 127 / 64, 255 / 128, 2 - 2.0**-23) for e in range(-126, 127)]
    )
    around = np.stack([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(2) * at)]).reshape(-1, 1)
    boundary = around * rng.uniform(-1, 1, (len(around), 32)).astype(np.float32)
    boundary[:, 5] = -around[:, 0]
    # Values halfway between elements, at every binade that an element has, under a scale of 1.
    ties = np.ldexp(np.float32(1) + np.arange(1, 64) / np.float32(64), np.arange(-18, 10)[:, None]).astype(np.float32)
    ties = np.pad(np.concatenate([ties, -ties])[:, :62].reshape(-1, 31), ((0, 0), (1, 0)), constant_values=256)
    random_bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    parts = [patterns, rng.permutation(patterns), random_bits, subnormal, spread, boundary, ties]
    return np.concatenate([part.reshape(-1, 32) for part in parts])


LAYOUTS: dict[str, tuple[tuple[int, int], int]] = {
    "blocks in rows": ((-1, 32), -1),
    "blocks in columns": ((32, -1), 0),
    "values alone in rows": ((-1, 1), -1),
    "values alone in columns": ((1, -1), 0),
}
"""A shape and its blocked axis."""


@functools.cache
def hard_case(dtype: str, element_format: str, scale_rounding: str, layout: str) -> tuple[np.ndarray, ...]:
    """Returns hard blocks, or values at every step of a scale that stand alone, and the codes of `numpy_nodes`."""
    shape, axis = LAYOUTS[layout]
    x = boundary_values() if "alone" in layout and dtype == "float32" else hard_blocks(dtype)
    x = (x[:2048] if "alone" in layout and dtype != "float32" else x).reshape(shape)
    return x, *numpy_nodes.quantize(x, axis=axis, element_format=element_format, scale_rounding=scale_rounding)


KINDS = [*itertools.product(DTYPES, FORMATS, ROUNDINGS)]


@looped(
    "dtype, element_format, scale_rounding, layout",
    [(*kind, "blocks in rows") for kind in KINDS] + pairwise(a=DTYPES, b=FORMATS, c=ROUNDINGS, layout=[*LAYOUTS][1:]),
)
def test_quantize_gives_the_bytes_of_the_reference(backend, dtype, element_format, scale_rounding, layout):
    x, elements, scales = hard_case(dtype, element_format, scale_rounding, layout)
    assert (scales == 255).any()
    axis = LAYOUTS[layout][1]
    got = backend.quantize(x, axis=axis, element_format=element_format, scale_rounding=scale_rounding)
    assert_same(got[1], scales, "scales")
    assert_same(got[0], elements, "elements", x)


@pytest.mark.slow
@looped("fmt, rounding", itertools.product(ELEMENT_FORMATS, ROUNDINGS))
def test_kernels_give_the_definition_of_all_values_around_powers_of_two(fmt: str, rounding: str) -> None:
    """2^24 float32 values: 2^16 around each power of two, and with them every subnormal where scale codes step."""
    for exponent in range(256):
        start = (exponent << 23) - (1 << 15)
        bits = np.arange(start, start + (1 << 16))
        if exponent == 1:
            bits = np.concatenate([bits, near(FIRST_NORMAL, 0x20000)])
        x = bits[(bits >= 0)].astype(np.uint32).view(np.float32)
        elements, scales = codes_by_definition(x[:, None], ELEMENT_FORMATS[fmt], rounding)
        for isa in instruction_sets():
            with cpu.forced_isa(isa):
                got = cpu.quantize(x[:, None], element_format=fmt, scale_rounding=rounding)
            assert_same(got[1], scales, f"scales, {isa}, around 2^{exponent - 127}", x[:, None])
            assert_same(got[0], elements, f"elements, {isa}, around 2^{exponent - 127}", x[:, None])


SHAPES = [
    *[((k,), 0) for k in (0, 1, 70)],
    *[((k, 3, 70), 0) for k in (1, 31, 32, 33, 95, 200)],
    *[((2, k, 70), 1) for k in (31, 33, 200)],
    *[((50, k), -1) for k in (1, 7, 31, 32, 33, 95, 200, 1607)],
    *[((2, 70, 3), -2), ((2, 3, 4, 33), 3), ((2, 40, 1, 5), -3), ((0, 64), 0), ((0, 64), 1), ((3, 0), 0), ((3, 0), 1)],
    *[((2, 0, 40), 2), ((2, 40, 0), 1), ((0, 0), 1)],
]


@looped("shape_and_axis, kind", zip(2 * SHAPES, itertools.cycle(KINDS), strict=False))
def test_every_shape_and_axis_gives_the_bytes_of_the_reference(backend, shape_and_axis, kind):
    (shape, axis), (dtype, element_format, scale_rounding) = shape_and_axis, kind
    x = heavy_tailed(shape).astype(numerics.value_dtype(dtype))
    x.flat[5:6], x.flat[-1:] = np.nan, -np.inf
    options = {"axis": axis, "element_format": element_format}
    elements, scales = numpy_nodes.quantize(x, scale_rounding=scale_rounding, **options)
    got = backend.quantize(x, scale_rounding=scale_rounding, **options)
    assert_same(got[1], scales, "scales")
    assert_same(got[0], elements, "elements", x)
    expected = np.ascontiguousarray(numpy_nodes.dequantize(elements, scales, dtype=dtype, **options))
    assert_same(backend.dequantize(elements, scales, dtype=dtype, **options), expected, "dequantized")


@looped("rows, axis, fmt", pairwise(rows=[1, 3], axis=[0, 1], fmt=FORMATS))
def test_minus_zero_survives_beside_a_poisoned_block(backend, rows, axis, fmt):
    # ONNX Runtime's Where has a path for each shape, and they treat -0 differently.
    x = np.zeros((3, 32), np.float32)
    x[0], x[1, :2], x[2, :3] = -0.0, [-0.0, 1], [-np.nan, -0.0, -np.inf]
    x = np.moveaxis(x[:rows], 1, axis).copy()
    got = backend.quantize(x, axis=axis, element_format=fmt)
    for codes, expected in zip(got, numpy_nodes.quantize(x, axis=axis, element_format=fmt), strict=True):
        assert_same(codes, expected)


# --- Dequantizing, and rows of a table -------------------------------------------------------------------------------


def every_code() -> tuple[np.ndarray, np.ndarray]:
    """Returns a row with every element under each scale, in an order of its own, and a partial block behind them."""
    codes = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (256, 1)), axis=1)
    return np.concatenate([codes, codes[:, :13]], 1), np.repeat(np.arange(256, dtype=np.uint8)[:, None], 9, 1)


@looped("dtype, fmt, axis", itertools.product(DTYPES, FORMATS, (1, 0)))
def test_dequantize_gives_every_element_under_every_scale(backend, dtype, fmt, axis):
    elements, scales = (np.ascontiguousarray(codes if axis else codes.T) for codes in every_code())
    options = {"axis": axis, "element_format": fmt, "dtype": dtype}
    expected = np.ascontiguousarray(numpy_nodes.dequantize(elements, scales, **options))
    assert_same(backend.dequantize(elements, scales, **options), expected, source=elements)


@looped("dtype, fmt, index", itertools.product(DTYPES, FORMATS, (np.int32, np.int64)))
def test_embedding_gives_every_element_under_every_scale(backend, dtype, fmt, index):
    b = every_code()
    ids = np.random.default_rng(1).permutation(np.arange(-256, 256)).reshape(2, 256).astype(index)
    options = {"b_format": fmt, "dtype": dtype}
    assert_same(backend.embedding(ids, *b, **options), numpy_nodes.embedding(ids, *b, **options), source=b[0][ids])


@looped(
    "d, shape, v, index",
    pairwise(
        d=[0, 1, 31, 32, 33, 96, 700],
        shape=[(), (0,), (3, 0), (1,), (2, 3), (600,)],
        v=[1, 7],
        index=[np.int32, np.int64],
    ),
)
def test_embeddings_of_every_shape_give_the_bytes_of_the_reference(backend, d, shape, v, index):
    b = numpy_nodes.quantize(heavy_tailed((v, d)))
    ids = np.asarray(np.random.default_rng(0).integers(-v, v, shape), index)
    assert_same(backend.embedding(ids, *b), numpy_nodes.embedding(ids, *b))


# --- Activations rounded to bfloat16 ---------------------------------------------------------------------------------

ONE = np.array([[0x38]], np.uint8), np.array([[127]], np.uint8)
"""1.0 as a packed weight [1, 1]: the product is the activation."""


@functools.cache
def patterns(dtype: str) -> np.ndarray:
    """Returns every float16; of float32 every upper half with the lower halves around a tie."""
    if dtype == "float16":
        return np.arange(65536, dtype=np.uint16).view(np.float16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((np.arange(65536, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1).view(np.float32)


@looped("dtype, rows", itertools.product(("float32", "float16"), (1, 16, 100, 256)))
def test_activations_are_rounded_as_ml_dtypes_does(backend, dtype, rows):
    """A product of so many rows at a time: the kernels have ways of their own for few."""
    x = patterns(dtype)
    if rows < 100:
        x = np.concatenate([x[:64], x[:: len(x) // 256], x[-64:]])
    x = x[: len(x) // rows * rows].reshape(-1, rows, 1)
    # A call for each number of rows; ONNX Runtime, whose sessions cost more than the products, does all in one.
    calls = [x] if isinstance(backend, Onnx) else x
    got = [backend.weight_gemm(one, *ONE, activation_dtype="bfloat16", dtype="float32") for one in calls]
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32) + np.float32(0)  # a sum that begins with +0 has no -0
    assert_same(np.stack(got).reshape(x.shape), expected, source=x)


@looped("dtype", ["float32", "float16"])
def test_the_reference_rounds_activations_as_ml_dtypes_does(dtype):
    x = patterns(dtype).reshape(-1, 1)
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32) + np.float32(0)
    assert_same(numpy_nodes.weight_gemm(x, *ONE, activation_dtype="bfloat16"), expected, source=x)
