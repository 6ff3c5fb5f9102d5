"""The function bodies, run by stock ONNX Runtime with no library, against the reference numerics."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from releases import release

from mxfp8_ops import contract, fused_functions, numerics
from mxfp8_ops.contract import BFLOAT16, FLOAT, FLOAT8E4M3FN, FLOAT8E5M2, FLOAT16, UINT8
from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import ELEMENT_FORMATS, SCALE_ROUNDINGS
from mxfp8_ops.onnx_functions import functions

OPSETS = pytest.mark.parametrize("opset", [21, 23, 25, 26])  # comparisons up to 25, bits from 26 on
BOTH_WAYS = pytest.mark.parametrize("opset", [21, 26])
FORMATS = pytest.mark.parametrize("element_format", ELEMENT_FORMATS)
ROUNDINGS = pytest.mark.parametrize("scale_rounding", SCALE_ROUNDINGS)
DTYPES = pytest.mark.parametrize("dtype", [FLOAT, FLOAT16, BFLOAT16], ids=contract.VALUE_NAMES.get)

NUMPY = {code: numerics.value_dtype(name) for code, name in contract.VALUE_NAMES.items()}
NUMPY |= dict.fromkeys([UINT8, FLOAT8E4M3FN, FLOAT8E5M2], np.dtype(np.uint8))
# What the function bodies end in where an attribute is none of the contract's.
FAILED_IN = "running Reshape node" if release("onnxruntime") >= (1, 24) else r"reshape_helper\.h"
NO_SUCH_SHAPE = FAILED_IN + r".*requested shape:\{\}"

TYPED_BY_HAND = {BFLOAT16: np.uint16, FLOAT8E4M3FN: np.uint8, FLOAT8E5M2: np.uint8}
"""The dtypes that ONNX Runtime takes only as raw integers with the type beside them."""

Feed = tuple[np.ndarray, int]
"""An array and its ONNX dtype."""


# --- Running one node --------------------------------------------------------------------------------------------


def one_node_model(
    op_type: str,
    inputs: Mapping[str, Feed],
    outputs: Mapping[str, int],
    opset: int,
    attributes: Mapping[str, Any],
    *,
    constants: Sequence[str] = (),
) -> onnx.ModelProto:
    """Returns a model of one node and its function. Inputs named in `constants` become initializers."""
    ranks = {name: array.ndim for name, (array, _) in inputs.items()}
    node = helper.make_node(op_type, list(inputs), list(outputs), domain=contract.DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, dtype, [f"{name}_{i}" for i in range(ranks[name])])
            for name, (_, dtype) in inputs.items()
            if name not in constants
        ],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()],
        [
            helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)
            for name, (array, dtype) in inputs.items()
            if name in constants
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions(opset, [op_type]))


def run(model: onnx.ModelProto, inputs: Mapping[str, Feed]) -> list[np.ndarray]:
    """Returns the outputs of `model`, float8 ones as uint8."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    fed = {i.name for i in session.get_inputs()}
    feeds = {name: to_ort(*feed) for name, feed in inputs.items() if name in fed}
    outputs = {o.name: o.type.tensor_type.elem_type for o in model.graph.output}
    values = session.run_with_ort_values(list(outputs), feeds)
    return [from_ort(value, dtype) for value, dtype in zip(values, outputs.values(), strict=True)]


def to_ort(array: np.ndarray, dtype: int) -> ort.OrtValue:
    if dtype not in TYPED_BY_HAND:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(TYPED_BY_HAND[dtype]), dtype)


def from_ort(value: ort.OrtValue, dtype: int) -> np.ndarray:
    """Returns a copy of the memory of `value`: OrtValue.numpy() refuses float8_e5m2 and bfloat16."""
    size = int(np.prod(value.shape())) * NUMPY[dtype].itemsize
    raw = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(raw, NUMPY[dtype]).reshape(value.shape())


def ort_quantize(x: np.ndarray, opset: int, element_format: str = "e4m3", **attributes: Any) -> list[np.ndarray]:
    code = ELEMENT_FORMATS[element_format].onnx_dtype
    dtype = next(code for code, numpy in NUMPY.items() if numpy == x.dtype)
    inputs = {"X": (x, dtype)}
    attributes = {**contract.QUANTIZE.attributes, "output_dtype": code, **attributes}
    return run(one_node_model("MXFP8Quantize", inputs, {"e": code, "s": UINT8}, opset, attributes), inputs)


def ort_dequantize(
    elements: np.ndarray, scales: np.ndarray, opset: int, element_format: str = "e4m3", **attributes: Any
) -> np.ndarray:
    inputs = {"e": (elements, ELEMENT_FORMATS[element_format].onnx_dtype), "s": (scales, UINT8)}
    attributes = {**contract.DEQUANTIZE.attributes, **attributes}
    outputs = {"Y": attributes["output_dtype"]}
    return run(one_node_model("MXFP8Dequantize", inputs, outputs, opset, attributes), inputs)[0]


# --- Data and comparison -----------------------------------------------------------------------------------------


def random_values(seed: int, *shape: int) -> np.ndarray:
    """Returns float32 values over many magnitudes, so that the order of a sum matters."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape))).astype(np.float32)


def hard_blocks(dtype: int) -> np.ndarray:
    """Returns blocks [n, 32] of `dtype`: all its leading bit patterns, NaN and Inf among them, and every boundary."""
    rng = np.random.default_rng(0)
    upper = np.arange(1 << 16, dtype=np.uint16)
    if dtype != FLOAT:
        shuffled = rng.permutation(upper)
        return np.concatenate([upper, shuffled]).view(NUMPY[dtype]).reshape(-1, 32)
    patterns = (upper.astype(np.uint32) << 16).view(np.float32)
    subnormal = (rng.integers(0, 1 << 23, 1 << 12, dtype=np.uint32) | (upper[: 1 << 12] % 2 << 31)).view(np.float32)
    # Random mantissas under every exponent, and blocks whose amax is one bit around a boundary of any rounding.
    spread = np.ldexp(rng.standard_normal((1 << 12, 32)), rng.integers(-149, 127, (1 << 12, 1))).astype(np.float32)
    at = np.float32([m * 2.0**e for m in (1, 1.75, 1.875, 1.9375, 2 - 2.0**-23) for e in range(-126, 127)])
    around = np.stack([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(2) * at)]).reshape(-1, 1)
    boundary = around * rng.uniform(-1, 1, (len(around), 32)).astype(np.float32)
    boundary[:, 5] = -around[:, 0]
    random_bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    parts = [patterns, rng.permutation(patterns), random_bits, subnormal, spread, boundary]
    return np.concatenate([part.reshape(-1, 32) for part in parts])


def assert_same_codes(got: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    """Fails with the first coordinate, both bytes and the value (or block) they came from."""
    assert got.shape == expected.shape
    wrong = np.argwhere(got != expected)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        source = x[at] if x.shape == got.shape else x[at[:-1]]
        pytest.fail(f"{len(wrong)} differ, first {at}: got {got[at]:#04x}, expected {expected[at]:#04x}, from {source}")


def assert_same_values(got: np.ndarray, expected: np.ndarray, elements: np.ndarray) -> None:
    """Bitwise, but any NaN equals any NaN. Fails with the first coordinate, the element and both values."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    bits = np.dtype(f"u{got.dtype.itemsize}")
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    wrong = np.argwhere((got.view(bits) != expected.view(bits)) & ~both_nan)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        pytest.fail(
            f"{len(wrong)} differ, first {at}: got {got[at]!r}, expected {expected[at]!r}, element {elements[at]:#04x}"
        )


def assert_within(got: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Fails with the worst coordinate, both values and the bound there."""
    assert got.shape == expected.shape
    assert np.isfinite(expected).all()
    error = np.abs(got.astype(np.float64) - expected)
    if not (error <= bound).all():
        at = np.unravel_index(int(np.nanargmax(error - bound)), error.shape)
        pytest.fail(f"at {at}: got {got[at]!r}, expected {expected[at]!r}, off by {error[at]:g}, bound {bound[at]:g}")


# --- MXFP8Quantize -----------------------------------------------------------------------------------------------


@OPSETS
@DTYPES
@FORMATS
@ROUNDINGS
def test_quantize_gives_the_reference_bytes(opset: int, dtype: int, element_format: str, scale_rounding: str) -> None:
    x = hard_blocks(dtype)
    elements, scales = ort_quantize(x, opset, element_format, scale_rounding=scale_rounding)
    expected, expected_scales = numerics.quantize(x, element_format=element_format, scale_rounding=scale_rounding)
    assert (expected_scales == 255).any()
    assert_same_codes(scales, expected_scales, x)
    assert_same_codes(elements, expected, x)


SHAPES = [
    ((70,), 0),
    ((3, 70), -1),
    ((70, 3), 0),
    ((2, 70, 3), 1),
    ((2, 70, 3), -2),
    ((2, 3, 4, 33), 3),
    ((2, 40, 1, 5), -3),
    ((4, 31), 1),
    ((4, 32), 1),
    ((1,), -1),
    ((0, 64), 1),
    ((0, 64), 0),
    ((3, 0), 1),
    ((2, 0, 40), 2),
    ((2, 40, 0), 1),
]


@BOTH_WAYS
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_any_shape_and_axis(shape: tuple[int, ...], axis: int, opset: int) -> None:
    x = random_values(0, *shape)
    elements, scales = ort_quantize(x, opset, axis=axis)
    expected, expected_scales = numerics.quantize(x, axis=axis)
    assert scales.shape == expected_scales.shape
    assert scales.tolist() == expected_scales.tolist()
    assert_same_codes(elements, expected, x)
    values = ort_dequantize(elements, scales, opset, axis=axis)
    assert_same_values(values, numerics.dequantize(elements, scales, axis=axis), elements)


@BOTH_WAYS
@FORMATS
@pytest.mark.parametrize("axis", [0, 1])  # ONNX Runtime's Where has one path for each, and they treat -0 differently
def test_minus_zero_survives_beside_a_poisoned_block(axis: int, element_format: str, opset: int) -> None:
    x = np.zeros((3, 32), np.float32)
    x[0], x[1, :2], x[2, :3] = -0.0, [-0.0, 1], [-np.nan, -0.0, -np.inf]
    x = np.moveaxis(x, 1, axis).copy()
    elements, scales = ort_quantize(x, opset, element_format, axis=axis)
    elements = np.moveaxis(elements, axis, 1)
    assert set(elements[0]) == {0x80}
    assert elements[1, 0] == 0x80
    assert set(elements[2]) == {0x7F}
    assert scales.tolist() == numerics.quantize(x, axis=axis, element_format=element_format)[1].tolist()


@BOTH_WAYS
@pytest.mark.parametrize(
    ("attributes", "elements"),
    [
        ({"scale_rounding": "up"}, FLOAT8E4M3FN),
        ({"output_dtype": TensorProto.FLOAT8E4M3FNUZ}, TensorProto.FLOAT8E4M3FNUZ),
    ],
)
def test_an_illegal_attribute_fails_and_does_not_fall_back(attributes, elements: int, opset: int) -> None:
    inputs = {"X": (random_values(0, 2, 64), FLOAT)}
    model = one_node_model("MXFP8Quantize", inputs, {"e": elements, "s": UINT8}, opset, attributes)
    with pytest.raises(Exception, match=NO_SUCH_SHAPE):
        run(model, inputs)


@BOTH_WAYS
def test_attributes_left_out_take_the_defaults_of_the_contract(opset: int) -> None:
    x = random_values(0, 3, 70)
    inputs = {"X": (x, FLOAT)}
    model = one_node_model("MXFP8Quantize", inputs, {"e": FLOAT8E4M3FN, "s": UINT8}, opset, attributes={})
    elements, scales = run(model, inputs)
    expected, expected_scales = numerics.quantize(x)
    assert_same_codes(elements, expected, x)
    assert scales.tolist() == expected_scales.tolist()


# --- MXFP8Dequantize ---------------------------------------------------------------------------------------------


@OPSETS
@DTYPES
@FORMATS
def test_dequantize_gives_every_code_at_every_scale(opset: int, dtype: int, element_format: str) -> None:
    elements = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, -1)
    got = ort_dequantize(elements, scales, opset, element_format, output_dtype=dtype)
    name = contract.VALUE_NAMES[dtype]
    expected = numerics.dequantize(elements, scales, element_format=element_format, dtype=name)
    assert_same_values(got, expected, elements)


# --- The gemms ---------------------------------------------------------------------------------------------------

SMALL = np.float32(1 / 64)  # keeps the sums of products inside the range of float16
NO_DIVISION_BY_ZERO = pytest.mark.skipif(
    release("onnxruntime") < (1, 24),
    reason="ONNX Runtime before 1.24 divides by zero, and the process ends",
)
GEMMS = [
    pytest.param((16, 2048), (24, 2048), id="heavy-tailed"),
    pytest.param((2, 3, 5, 70), (7, 70), id="batched A"),
    pytest.param((2, 3, 5, 70), (2, 1, 7, 70), id="batched B"),
    pytest.param((70,), (7, 70), id="vector A"),
    pytest.param((3, 31), (2, 31), id="K below a block"),
    pytest.param((0, 64), (7, 64), id="M = 0"),
    pytest.param((5, 64), (0, 64), id="N = 0"),
    pytest.param((5, 0), (7, 0), id="K = 0", marks=NO_DIVISION_BY_ZERO),
]
BIAS = pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])


def gemm_bias(n: int) -> np.ndarray:
    return 100 * random_values(2, n)


@BOTH_WAYS
@BIAS
@DTYPES
@pytest.mark.parametrize(("a_shape", "b_shape"), GEMMS)
def test_gemm_is_within_the_float32_bound(a_shape, b_shape, dtype: int, with_bias: bool, opset: int) -> None:
    a = numerics.quantize(SMALL * random_values(0, *a_shape))
    b = numerics.quantize(SMALL * random_values(1, *b_shape), element_format="e5m2")
    bias = gemm_bias(b_shape[-2]) if with_bias else None
    inputs = {"A": (a[0], FLOAT8E4M3FN), "A_scales": (a[1], UINT8), "B": (b[0], FLOAT8E5M2), "B_scales": (b[1], UINT8)}
    inputs |= {"bias": (bias, FLOAT)} if bias is not None else {}
    model = one_node_model("MXFP8Gemm", inputs, {"Y": dtype}, opset, {"output_dtype": dtype})
    expected = numerics.gemm(*a, *b, bias, b_format="e5m2")
    values = numerics.dequantize(*a), numerics.dequantize(*b, element_format="e5m2")
    assert_within(
        run(model, inputs)[0], expected, numerics.gemm_error_bound(*values, contract.VALUE_NAMES[dtype], bias)
    )


@BOTH_WAYS
@BIAS
@DTYPES
@pytest.mark.parametrize(("x_shape", "b_shape"), GEMMS)
def test_weight_gemm_is_within_the_float32_bound(x_shape, b_shape, dtype: int, with_bias: bool, opset: int) -> None:
    x = (SMALL * random_values(0, *x_shape)).astype(NUMPY[dtype])
    b = numerics.quantize(SMALL * random_values(1, *b_shape))
    bias = gemm_bias(b_shape[-2]) if with_bias else None
    inputs = {"X": (x, dtype), "B": (b[0], FLOAT8E4M3FN), "B_scales": (b[1], UINT8)}
    inputs |= {"bias": (bias, FLOAT)} if bias is not None else {}
    # The weight as a runtime input and as an initializer, which ONNX Runtime decodes ahead of time.
    for constants in ((), ("B", "B_scales")):
        model = one_node_model(
            "MXFP8WeightGemm", inputs, {"Y": dtype}, opset, {"output_dtype": dtype}, constants=constants
        )
        bound = numerics.gemm_error_bound(x, numerics.dequantize(*b), contract.VALUE_NAMES[dtype], bias)
        assert_within(run(model, inputs)[0], numerics.weight_gemm(x, *b, bias), bound)


@BOTH_WAYS
def test_a_poisoned_weight_block_makes_its_column_nan(opset: int) -> None:
    weight = random_values(1, 7, 64)
    weight[3, 40] = np.inf
    x, b = random_values(0, 5, 64), numerics.quantize(weight)
    inputs = {"X": (x, FLOAT), "B": (b[0], FLOAT8E4M3FN), "B_scales": (b[1], UINT8)}
    (y,) = run(one_node_model("MXFP8WeightGemm", inputs, {"Y": FLOAT}, opset, {"output_dtype": FLOAT}), inputs)
    assert np.isnan(y).all(0).tolist() == [n == 3 for n in range(7)]
    assert np.isnan(y).sum() == 5


# --- MXFP8Embedding ----------------------------------------------------------------------------------------------


def embedding_model(
    ids: np.ndarray,
    b: Sequence[np.ndarray],
    opset: int,
    dtype: int = FLOAT,
    *,
    element_format: str = "e4m3",
    constants: Sequence[str] = (),
) -> tuple[onnx.ModelProto, dict[str, Feed]]:
    code = ELEMENT_FORMATS[element_format].onnx_dtype
    index = TensorProto.INT32 if ids.dtype == np.int32 else TensorProto.INT64
    inputs = {"indices": (ids, index), "B": (b[0], code), "B_scales": (b[1], UINT8)}
    attributes = {"output_dtype": dtype}
    return one_node_model("MXFP8Embedding", inputs, {"Y": dtype}, opset, attributes, constants=constants), inputs


@OPSETS
@DTYPES
@FORMATS
@pytest.mark.parametrize("constants", [(), ("B", "B_scales")], ids=["inputs", "initializers"])
def test_embedding_gives_every_code_at_every_scale(constants, element_format: str, dtype: int, opset: int) -> None:
    b = np.tile(np.arange(256, dtype=np.uint8), (256, 1)), np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, -1)
    ids = np.random.default_rng(0).permutation(np.arange(-256, 256)).reshape(2, 256)
    model, inputs = embedding_model(ids, b, opset, dtype, element_format=element_format, constants=constants)
    name = contract.VALUE_NAMES[dtype]
    expected = numerics.embedding(ids, *b, b_format=element_format, dtype=name)
    assert_same_values(run(model, inputs)[0], expected, b[0][ids])


@BOTH_WAYS
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("shape", "v", "d"), [((), 1, 33), ((0,), 3, 32), ((2, 0), 3, 5), ((2, 2), 3, 33), ((3,), 2, 0)]
)
def test_embeddings_of_any_shape(shape: tuple[int, ...], v: int, d: int, index, opset: int) -> None:
    b = numerics.quantize(random_values(0, v, d))
    ids = np.random.default_rng(0).integers(-v, v, shape).astype(index)
    model, inputs = embedding_model(ids, b, opset)
    assert_same_values(run(model, inputs)[0], numerics.embedding(ids, *b), b[0][ids])


@BOTH_WAYS
@pytest.mark.parametrize("wrong", [7, -8])
def test_an_index_that_names_no_row_is_an_error_that_names_it(wrong: int, opset: int) -> None:
    b = numerics.quantize(random_values(0, 7, 45))
    model, inputs = embedding_model(np.array([0, wrong]), b, opset)
    with pytest.raises(
        Exception, match=rf"out of data bounds, idx={wrong} must be within the inclusive range \[-7,6\]"
    ):
        run(model, inputs)


@BOTH_WAYS
@FORMATS
def test_onnx_s_reference_evaluator_gives_the_embedding_too(element_format: str, opset: int) -> None:
    b = numerics.quantize(random_values(0, 7, 45), element_format=element_format)
    ids = np.array([[3, -1], [0, -7]])
    model, inputs = embedding_model(ids, b, opset, element_format=element_format, constants=("B", "B_scales"))
    (got,) = onnx.reference.ReferenceEvaluator(model).run(None, {"indices": inputs["indices"][0]})
    assert_same_values(got, numerics.embedding(ids, *b, b_format=element_format), b[0][ids])


# --- The functions as parts of a model ---------------------------------------------------------------------------


def chain_model(opset: int) -> onnx.ModelProto:
    """Returns X -> MXFP8Quantize -> two MXFP8Gemm on one weight, with and without a bias."""
    attributes = contract.QUANTIZE.attributes
    operands = ["elements", "scales", "W", "W_scales"]
    nodes = [
        helper.make_node("MXFP8Quantize", ["X"], operands[:2], domain=contract.DOMAIN, **attributes),
        helper.make_node("MXFP8Gemm", operands, ["Y"], domain=contract.DOMAIN, output_dtype=FLOAT),
        helper.make_node("MXFP8Gemm", [*operands, "bias"], ["Z"], domain=contract.DOMAIN, output_dtype=FLOAT16),
    ]
    weight, scales = numerics.quantize(random_values(1, 7, 70))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("X", FLOAT, ["batch", 70])],
        [
            helper.make_tensor_value_info("Y", FLOAT, ["batch", 7]),
            helper.make_tensor_value_info("Z", FLOAT16, ["batch", 7]),
        ],
        [
            helper.make_tensor("W", FLOAT8E4M3FN, weight.shape, weight.tobytes(), raw=True),
            helper.make_tensor("W_scales", UINT8, scales.shape, scales.tobytes(), raw=True),
            helper.make_tensor("bias", FLOAT, [7], gemm_bias(7).tobytes(), raw=True),
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions(opset))


@OPSETS
def test_a_whole_model_runs(opset: int) -> None:
    x, bias = random_values(0, 5, 70), gemm_bias(7)
    a, b = numerics.quantize(x), numerics.quantize(random_values(1, 7, 70))
    y, z = run(chain_model(opset), {"X": (x, FLOAT)})
    values = numerics.dequantize(*a), numerics.dequantize(*b)
    assert_within(y, numerics.gemm(*a, *b), numerics.gemm_error_bound(*values))
    assert_within(z, numerics.gemm(*a, *b, bias), numerics.gemm_error_bound(*values, "float16", bias))


@OPSETS
def test_the_onnx_checker_accepts_the_model(opset: int) -> None:
    onnx.checker.check_model(chain_model(opset), full_check=True)


@OPSETS
def test_shape_inference_sees_through_the_functions(opset: int) -> None:
    model = chain_model(opset)
    for output in model.graph.output:  # forget what the body has to tell
        output.type.tensor_type.ClearField("elem_type")
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    infos = {info.name: info.type.tensor_type for info in [*inferred.graph.value_info, *inferred.graph.output]}
    seen = {
        name: (info.elem_type, [dim.dim_param or dim.dim_value for dim in info.shape.dim])
        for name, info in infos.items()
    }
    assert seen["elements"] == (FLOAT8E4M3FN, ["batch", 70])
    assert seen["scales"][0] == UINT8
    assert len(seen["scales"][1]) == 2
    assert seen["Y"] == (FLOAT, ["batch", 7])
    assert seen["Z"] == (FLOAT16, ["batch", 7])


def test_a_body_is_made_for_the_opset_and_the_signature_is_the_contract() -> None:
    for opset in (21, 26):
        for function, op in zip(functions(opset), contract.OPS.values(), strict=True):
            assert (function.domain, function.name) == (contract.DOMAIN, op.name)
            ours = [(contract.DOMAIN, contract.VERSION)] * (op.name in fused_functions.BODIES)
            assert [(i.domain, i.version) for i in function.opset_import] == [("", opset), *ours]
            assert list(function.input) == [port.name for port in op.inputs]
            assert list(function.output) == [port.name for port in op.outputs]
            assert [a.name for a in function.attribute_proto] == list(op.attributes)


def test_bitcast_appears_only_where_the_opset_has_it() -> None:
    def op_types(opset: int) -> set[str]:
        return {node.op_type for function in functions(opset) for node in function.node}

    assert op_types(26) - op_types(25) == {"BitCast"}
    assert "Log" in op_types(25)
    assert "Log" not in op_types(26)


def test_only_the_ops_asked_for() -> None:
    assert [f.name for f in functions(21, ["MXFP8WeightGemm"])] == ["MXFP8WeightGemm"]
    assert functions(21, []) == []


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ContractError, match=r"functions: opset 20; expected at least 21; convert the model up"):
        functions(20)
    with pytest.raises(ContractError, match=r"functions: no node 'MXFP4Gemm'; expected one of MXFP8Quantize, .*;"):
        functions(21, ["MXFP4Gemm"])
