"""Constant weights in the layout of the kernel: the same results within the bound, from the first call to the last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from compare import assert_same, assert_within, heavy_tailed
from grids import looped, pairwise
from onnx import TensorProto
from ort_models import model, node

from mxfp8_ops import cpu, native, numpy_nodes, ort
from mxfp8_ops.errors import BackendError, ShapeError

SHAPES = [(1, 32), (16, 70), (33, 513), (70, 1100)]
"""N and K: one panel, a part of one, several; a whole block, a part of one, several chunks."""
ROWS = (3, 1, 2, 5, 7, 13, 200)
"""Those of the first call make the panels."""
STATUS = Path("/proc/self/status")
Packed = tuple[np.ndarray, np.ndarray]
KINDS = ["e4m3", "e5m2", "int8", "bfloat16", "float32"]


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest):
    with cpu.forced_isa(request.param):
        yield request.param


def weight_of(shape: tuple[int, int], fmt: str, seed: int = 2) -> Packed:
    return numpy_nodes.quantize(heavy_tailed(shape, seed), element_format=fmt)


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    line = next(each for each in STATUS.read_text(encoding="utf-8").splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


class Product(NamedTuple):
    """A product with a weight: the function with all operands but the weight, the result, and its bound."""

    run: Callable[..., np.ndarray]
    expected: np.ndarray
    bound: np.ndarray


def product(b: Packed, m: int, kind: str, fmt: str, *, power: int = 0) -> Product:
    """Returns the product of M rows of some kind, times 2^power, with a weight."""
    x = np.ldexp(heavy_tailed((m, b[0].shape[1]), m), power)
    wide = numpy_nodes.dequantize(*b, element_format=fmt)
    if kind in ("bfloat16", "float32"):
        options = {"b_format": fmt, "activation_dtype": "bfloat16" if kind == "bfloat16" else None}
        run, expected = functools.partial(cpu.weight_gemm, x, **options), numpy_nodes.weight_gemm(x, *b, **options)
    else:
        a, options = numpy_nodes.quantize(x, element_format=kind), {"a_format": kind, "b_format": fmt}
        run, expected = functools.partial(cpu.gemm, *a, **options), numpy_nodes.gemm(*a, *b, **options)
        x = numpy_nodes.dequantize(*a, element_format=kind)
    return Product(run, expected, numpy_nodes.gemm_error_bound(x, wide))


def check(weight: native.ConstantWeight, b: Packed, of: Product) -> None:
    """Fails if the product with a constant weight is out of the bound."""
    assert_within(of.run(*b, weight=weight), of.expected, of.bound, f"{len(of.expected)} rows")


@functools.cache
def products(shape: tuple[int, int], kind: str, fmt: str) -> tuple[Product, ...]:
    """Every instruction set has the same."""
    return tuple(product(weight_of(shape, fmt), m, kind, fmt) for m in ROWS)


@looped("shape, kind, fmt", pairwise(shape=SHAPES, kind=KINDS, fmt=["e4m3", "e5m2", "int8"]))
def test_products_with_a_constant_weight_are_within_the_bound(isa, shape, kind, fmt):
    b, weight = weight_of(shape, fmt), native.ConstantWeight()
    for each in products(shape, kind, fmt):
        check(weight, b, each)


@looped("codes, fmt", pairwise(codes=[(0,), (1, 2), (250,), (254,), (255,), (60, 200)], fmt=["e4m3", "int8"]))
def test_columns_with_scales_that_no_panel_holds_leave_the_others_as_they_are(isa, codes, fmt):
    """Columns with such scales are read from the weight, or by another kernel: the others keep their bits."""
    b, x = weight_of((70, 640), fmt), heavy_tailed((20, 640), 3)
    a = numpy_nodes.quantize(x, element_format=fmt)
    for code in codes:
        b[1][33, 3], b[1][69, 19] = code, code
    with np.errstate(all="ignore"):
        without, kept = (
            cpu.gemm(*a, *b, a_format=fmt, b_format=fmt, weight=weight) for weight in (None, native.ConstantWeight())
        )
    assert_same(np.isnan(kept), np.isnan(without), "NaN")
    finite = np.isfinite(without)
    assert_same(kept[finite], without[finite], "bits with panels")


@looped("kind, m", pairwise(kind=["e4m3", "float32"], m=[20, 200]))
def test_subnormal_products_are_not_flushed(isa, kind, m):
    """Dot products of bfloat16 flush them: panels may be exact for the A of one call and not for the next."""
    b, weight = numpy_nodes.quantize(np.ldexp(heavy_tailed((40, 640), 1), -62)), native.ConstantWeight()
    for power in (0, -66):
        check(weight, b, product(b, m, kind, "e4m3", power=power))


def test_panels_are_what_is_multiplied(isa):
    """From the second call on, b is not read; a block of zeros does not change that. Sets without panels of E4M3 have
    some in float32 for a small weight, unless they multiply integers."""
    w = heavy_tailed((70, 640), 2)
    w[5, :32] = 0
    b, weight, y = numpy_nodes.quantize(w), native.ConstantWeight(), []
    for m in (20, 20, 200):
        y.append(cpu.gemm(*numpy_nodes.quantize(heavy_tailed((m, 640), 1)), *b, weight=weight))
        b[0][:] = 0
    assert [each.any() for each in y] == [True, *[isa not in ("avx2_vnni", "avx512_vnni")] * 2]


@pytest.mark.parametrize("m", [3, 4, 5, 40])
def test_from_three_rows_on_panels_change_no_bit(isa, m):
    """Not with a block of zeros either whose scale, were it of other elements, would be too small for this A."""
    rng = np.random.default_rng(m)
    a, b = (rng.integers(0, 0x7E, (rows, 64), dtype=np.uint8) for rows in (m, 8))
    a_scales, b_scales = np.full((m, 2), 30, np.uint8), np.full((8, 2), 127, np.uint8)
    b[2, :32], b_scales[2, 0] = 0, 100
    expected, weight = cpu.gemm(a, a_scales, b, b_scales), native.ConstantWeight()
    for _ in range(2):
        assert_same(cpu.gemm(a, a_scales, b, b_scales, weight=weight), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_of_int8_has_the_same_bits_alone_and_beside_any_rows(isa, threads):
    """Its own blocks, its neighbours' and the weight's may have scales that float32 cannot multiply, or NaN."""
    if isa in ("amx_bf16", "portable", "avx512"):
        pytest.skip(f"{isa} has no kernel for INT8, and another one for few rows")
    rng, multiply = np.random.default_rng(0), functools.partial(cpu.gemm, a_format="int8", b_format="int8")
    scales = rng.choice(np.array([127, 127, 0, 60, 180], np.uint8), (200, 35))
    scales[7], scales[9, 3] = 127, 255
    elements = rng.integers(-127, 128, (200, 1100)).astype(np.int8).view(np.uint8)
    elements[11, 96:128], scales[11, 3] = 0x80, 254  # infinite, where a block of the weight is out of the range too
    b, weight = weight_of((70, 1100), "int8"), native.ConstantWeight()
    b[0][33, 96:128] = 1
    b[1][33, 3], b[1][69, 19], b[0][5, :32], b[1][5, 0] = 0, 190, 0, 1
    with np.errstate(all="ignore"):
        expected = numpy_nodes.gemm(elements, scales, *b, a_format="int8", b_format="int8")
        bound = numpy_nodes.gemm_error_bound(
            *(numpy_nodes.dequantize(*each, element_format="int8") for each in ((elements, scales), b))
        )
    together = multiply(elements, scales, *b, weight=weight, threads=threads)
    finite = np.isfinite(expected)
    assert_within(together[finite], expected[finite], bound[finite], "200 rows")
    assert_same(np.isnan(together[9]), np.ones(70, bool), "a row with a NaN scale")
    assert together[11, 33] == expected[11, 33] == -np.inf
    for first, last in ((0, 1), (6, 9), (7, 8), (100, 165)):
        part = multiply(elements[first:last], scales[first:last], *b, weight=weight, threads=threads)
        assert_same(part, together[first:last], f"rows {first} to {last}")


def test_panels_serve_only_the_weight_that_they_were_made_of(isa):
    """Another b, other scales, other sizes and another format are read as they are given."""
    b, other, weight = weight_of((40, 96), "int8", 1), weight_of((40, 96), "int8", 2), native.ConstantWeight()
    cases = [(b, "int8"), (other, "int8"), ((b[0], other[1]), "int8"), (b, "e4m3"), ((b[0][:8], b[1][:8]), "int8")]
    for each, fmt in (*cases, (b, "int8")):
        check(weight, each, product(each, 20, "bfloat16", fmt))


@pytest.mark.skipif(not STATUS.exists(), reason="reads the memory of the process where Linux shows it")
def test_weights_of_equal_contents_share_panels_until_the_last_is_freed():
    """Six copies of 16 MiB at six addresses take one set of panels."""
    w, scales = np.ones((2048, 8192), np.uint8), np.full((2048, 256), 127, np.uint8)
    a, owners, copies = numpy_nodes.quantize(heavy_tailed((20, 8192), 1), element_format="int8"), [], []
    expected = cpu.gemm(*a, w, scales, a_format="int8", b_format="int8")
    for _ in range(6):
        owners.append(native.ConstantWeight())
        copies.append(w.copy())
        before = resident()
        assert_same(cpu.gemm(*a, copies[-1], scales, a_format="int8", b_format="int8", weight=owners[-1]), expected)
        grown = resident() - before
        del owners[:-1], copies[:-1]  # the earlier owners are freed first
    assert grown < w.nbytes / 2


def test_a_product_with_a_freed_weight_is_an_error():
    b, x = weight_of((40, 96), "int8"), np.ones((4, 96), np.float32)
    weight = native.ConstantWeight()
    cpu.weight_gemm(x, *b, b_format="int8", weight=weight)
    native.load().mxfp8_weight_free(weight.number)
    with pytest.raises(ShapeError, match=rf"weight is {weight.number}; expected 0, or the number of a weight"):
        cpu.weight_gemm(x, *b, b_format="int8", weight=weight)
    native.load().mxfp8_weight_free(weight.number)  # freed twice: nothing happens


def test_rows_that_are_multiplied_with_panels(isa):
    """Any number, but on AMX from four on: with fewer, b is read as it lies."""
    b, weight = weight_of((40, 96), "int8"), native.ConstantWeight()

    def gemms(m: int) -> tuple[str, ...]:
        a = numpy_nodes.quantize(heavy_tailed((m, 96), m), element_format="int8")
        with cpu.profiled() as profile:
            cpu.gemm(*a, *b, a_format="int8", b_format="int8", weight=weight)
            return profile.calls()[-1].gemms

    kernel = gemms(20)
    assert [m for m in (1, 2, 3, 4) if gemms(m) == kernel] == ([4] if isa == "amx_bf16" else [1, 2, 3, 4])


def test_a_weight_without_a_place_for_its_number_is_refused():
    with pytest.raises(ShapeError, match=r"weight is NULL"):
        native.check("weight", native.load().mxfp8_weight_new(None))


# --- sessions --------------------------------------------------------------------------------------------------------


def linear(b: Packed, nodes: int = 1) -> bytes:
    """Returns x [M, K] times an INT8 weight [N, K], in as many nodes that share it."""
    n, k = b[0].shape
    products = [
        node("MXFP8WeightGemm", "x b b_scales", f"y{i}", activation_dtype=TensorProto.BFLOAT16) for i in range(nodes)
    ]
    outputs = {f"y{i}": (TensorProto.FLOAT, ["M", n]) for i in range(nodes)}
    constants = {"b": b[0].view(np.int8), "b_scales": b[1]}
    return model(products, {"x": (TensorProto.FLOAT, ["M", k])}, outputs, **constants)


def check_session(session: onnxruntime.InferenceSession, m: int, b: Packed) -> None:
    """Fails if an output of `linear` is out of the bound for M rows."""
    x = heavy_tailed((m, b[0].shape[1]), m)
    expected = numpy_nodes.weight_gemm(x, *b, b_format="int8", activation_dtype="bfloat16")
    bound = numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*b, element_format="int8"))
    for y in session.run(None, {"x": x}):
        assert_within(y, expected, bound, f"{m} rows")


def test_sessions_of_every_setting_are_within_the_bound():
    b = weight_of((70, 200), "int8")
    for prepack in native.PREPACK:
        session = ort.session(linear(b, nodes=2), prepack=prepack)
        for m in ROWS:
            check_session(session, m, b)


def test_a_wrong_setting_of_a_session_is_refused():
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("mxfp8.prepack", "always")
    with pytest.raises(BackendError, match=r"mxfp8\.prepack: 'always'; expected auto or never"):
        ort.session(linear(weight_of((32, 64), "int8")), session_options=options)
    with pytest.raises(BackendError, match="prepack 'always'; expected one of auto, never"):
        ort.session(linear(weight_of((32, 64), "int8")), prepack="always")


def test_threads_may_share_a_session():
    """The first calls of all come at once: one of them makes the panels."""
    b = weight_of((256, 512), "int8")
    session = ort.session(linear(b, nodes=4))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: check_session(session, 64, b), range(8)))


@pytest.mark.parametrize("prepack", native.PREPACK)
@pytest.mark.parametrize("op", ["MXFP8Gemm", "MXFP8WeightGemm", "MXFP8GroupedWeightGemm"])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_nodes_that_share_elements_have_their_own_scales(fmt, op, prepack):
    """A pass that merges equal initializers leaves one B with two B_scales where a weight is 8 times another."""
    b, scales = weight_of((32, 64), fmt)
    x = heavy_tailed((5, 64), 1)
    dtype = {"e4m3": TensorProto.FLOAT8E4M3FN, "int8": TensorProto.INT8}[fmt]
    quantize, grouped = [], op == "MXFP8GroupedWeightGemm"
    left, options = "x", {} if op == "MXFP8Gemm" else {"activation_dtype": TensorProto.FLOAT}
    if op == "MXFP8Gemm":
        left, quantize = "e s", [node("MXFP8Quantize", "x", "e s", output_dtype=dtype)]
    experts = " i" if grouped else ""
    nodes = [node(op, f"{left} b s{n}{experts}", f"y{n}", **options) for n in (1, 2)]
    constants = {"b": b, "s1": scales, "s2": scales + 3}
    if grouped:
        constants = {name: each[None] for name, each in constants.items()} | {"i": np.zeros((), np.int64)}
    constants["b"] = constants["b"].view(ml_dtypes.float8_e4m3fn if fmt == "e4m3" else np.int8)
    ports = {"x": (TensorProto.FLOAT, ["M", 64])}, {f"y{n}": (TensorProto.FLOAT, ["M", 32]) for n in (1, 2)}
    session = ort.session(model([*quantize, *nodes], *ports, **constants), prepack=prepack)
    first, second = session.run(None, {"x": x})
    assert_same(second, 8 * first, "the product with scales 8 times as large")


def convolution(b: Packed) -> onnx.ModelProto:
    """Returns y = the convolution of x [4, 256, 1] and a weight [256, 256] as [256, 1, 256]."""
    elements, scales = (each[:, None] for each in b)
    x, y = ({name: (TensorProto.FLOAT, ["n", 256, "d"])} for name in ("x", "y"))
    return onnx.load_from_string(model([node("MXFP8Conv", "x b s", "y")], x, y, b=elements.view(np.int8), s=scales))


@pytest.mark.parametrize("op", ["MXFP8Gemm", "MXFP8Conv"])
def test_sessions_that_threads_open_and_drop_multiply_with_their_own_weights(tmp_path, op):
    """External data is unmapped before kernels end, so the next session's weights may get the same addresses."""
    x = np.ones((4, 256, 1) if op == "MXFP8Conv" else (4, 256), np.float32)
    paths = [tmp_path / f"{seed}.onnx" for seed in range(6)]
    for seed, path in enumerate(paths):
        b = weight_of((256, 256), "int8", seed)
        proto = convolution(b) if op == "MXFP8Conv" else onnx.load_from_string(linear(b, nodes=2))
        onnx.save(proto, path, save_as_external_data=True, location=f"{seed}.data", size_threshold=0)

    def run(index: int) -> np.ndarray:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return ort.session(str(paths[index]), session_options=options).run(None, {"x": x})[-1]

    expected = [run(index) for index in range(len(paths))]
    order = np.random.default_rng(0).integers(0, len(paths), 1200).tolist()
    with ThreadPoolExecutor(8) as pool:
        wrong = [i for i, y in zip(order, pool.map(run, order), strict=True) if not np.array_equal(y, expected[i])]
    assert not wrong
