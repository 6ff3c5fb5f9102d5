"""Products whose x is rounded to bfloat16 first: the rounding bit by bit, then the product of what was rounded.

The NumPy reference, the kernels of every instruction set, the function body in stock ONNX Runtime, the node and the
torch op; the GPU's kernels are in test_cuda_gemms.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from mxfp8_ops import contract, cpu, native, numerics, onnx_functions, ort
from mxfp8_ops.errors import ContractError, ShapeError

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("float32", "float16")
ONE = np.array([[0x38]], np.uint8), np.array([[127]], np.uint8)
"""1.0 as a packed weight [1, 1]."""

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest):
    with cpu.forced_isa(request.param):
        yield request.param


def patterns(dtype: str) -> np.ndarray:
    """Returns every float16; of float32 every upper half with the lower halves around a tie."""
    if dtype == "float16":
        return np.arange(65536, dtype=np.uint16).view(np.float16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((np.arange(65536, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """Returns what ml_dtypes rounds `x` to, as float32; a sum that begins with +0 has no -0."""
    return x.astype(BF16).astype(np.float32) + np.float32(0)


def assert_same(actual: np.ndarray, expected: np.ndarray, x: np.ndarray | None = None) -> None:
    """Fails with the first bits that differ; any NaN is as good as another."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    both_nan = np.isnan(actual) & np.isnan(expected)
    wrong = np.argwhere((actual.view(np.uint32) != expected.view(np.uint32)) & ~both_nan)
    if len(wrong):
        at = tuple(wrong[0])
        source = "" if x is None else f", of {x[at]!r}"
        pytest.fail(f"{len(wrong)} of {actual.size} differ; at {at} {actual[at]!r}, expected {expected[at]!r}{source}")


def heavy_tailed(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(2, shape).astype(dtype)


def packed(n: int, k: int, element_format: str = "e4m3") -> tuple[np.ndarray, np.ndarray]:
    return numerics.quantize(heavy_tailed((n, k), seed=1), element_format=element_format)


# --- the reference and the kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_rounds_as_ml_dtypes_does(dtype):
    x = patterns(dtype).reshape(-1, 1)
    assert_same(numerics.weight_gemm(x, *ONE, activation_dtype="bfloat16"), rounded(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 100, 256])
def test_every_instruction_set_rounds_as_ml_dtypes_does(isa, dtype, rows):
    x = patterns(dtype)
    if rows < 100:  # a call each
        x = np.concatenate([x[:64], x[:: len(x) // 256], x[-64:]])
    x = x[: len(x) // rows * rows].reshape(-1, rows, 1)
    actual = np.stack([cpu.weight_gemm(one, *ONE, activation_dtype="bfloat16") for one in x])
    assert_same(actual, rounded(x), x)


SHAPES = [(1, 7, 64), (3, 130, 4096), (16, 65, 1000), (17, 40, 33), (150, 64, 2100), (200, 70, 1025), (300, 48, 31)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("b_format", ["e4m3", "e5m2"])
def test_the_product_is_that_of_the_rounded_values(isa, shape, dtype, b_format):
    m, n, k = shape
    x, b, bias = heavy_tailed((m, k), dtype), packed(n, k, b_format), heavy_tailed((n,), seed=2)
    x[0, :5] = [0.0, -0.0, 1e-6, -65504.0, 2.0**-24]
    expected = cpu.weight_gemm(x.astype(BF16), *b, bias, b_format=b_format)
    assert_same(cpu.weight_gemm(x, *b, bias, b_format=b_format, activation_dtype="bfloat16"), expected)


@pytest.mark.parametrize("m", [1, 20, 200])
@pytest.mark.parametrize("values", [(1e-40, 1.0), (3e38, 3.4e38, 1.0), (np.inf, 1.0), (np.nan, 1.0)])
def test_values_that_the_dot_product_cannot_take_are_rounded_too(isa, m, values):
    x = np.resize(np.array(values, np.float32), (m, 70)) * heavy_tailed((m, 70)).clip(0.5, 1)
    b = packed(48, 70)
    assert_same(cpu.weight_gemm(x, *b, activation_dtype="bfloat16"), cpu.weight_gemm(x.astype(BF16), *b))


def test_bfloat16_values_stay_as_they_are(isa):
    x, b = heavy_tailed((20, 100)).astype(BF16), packed(48, 100)
    assert_same(cpu.weight_gemm(x, *b, activation_dtype="bfloat16"), cpu.weight_gemm(x, *b))


@pytest.mark.parametrize("function", [numerics.weight_gemm, cpu.weight_gemm])
def test_another_dtype_is_refused(function):
    with pytest.raises(ContractError) as caught:
        function(heavy_tailed((2, 64)), *packed(3, 64), activation_dtype="float16")
    assert str(caught.value) == "activation_dtype: 'float16'; expected one of bfloat16; correct the name"


def test_the_library_refuses_another_code():
    x, (b, b_scales), y = heavy_tailed((2, 64)), packed(3, 64), np.empty((2, 3), np.float32)
    status = native.load().mxfp8_weight_gemm(
        1, x.ctypes.data, 64, 10, 17, b.ctypes.data, b_scales.ctypes.data, None, 2, 3, 64, 1, y.ctypes.data, 3, 1
    )
    with pytest.raises(ShapeError, match=r"activation_dtype is 10; expected one of 1 \(float\), 16 \(bfloat16\)"):
        native.check("weight_gemm", status)


# --- the node --------------------------------------------------------------------------------------------------------


def model(x_dtype: str, n: int, k: int, opset: int = 21, **attributes: int) -> bytes:
    """Returns a model of one MXFP8WeightGemm with its function body, x [m, k] and y float32."""
    b, b_scales = packed(n, k)
    elements = helper.make_tensor("B", contract.FLOAT8E4M3FN, b.shape, b.tobytes(), raw=True)
    scales = helper.make_tensor("B_scales", contract.UINT8, b_scales.shape, b_scales.tobytes(), raw=True)
    node = helper.make_node(
        "MXFP8WeightGemm", ["x", "B", "B_scales"], ["y"], "linear", domain=contract.DOMAIN, output_dtype=1, **attributes
    )
    code = helper.np_dtype_to_tensor_dtype(np.dtype(x_dtype))
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("x", code, ["m", k])],
        [helper.make_tensor_value_info("y", contract.FLOAT, ["m", n])],
        [elements, scales],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    proto.functions.extend(onnx_functions.functions(opset, ["MXFP8WeightGemm"]))
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


def run(proto: bytes, x: np.ndarray, *, kernels: bool) -> np.ndarray:
    """Returns y, by the kernel or by the function body in stock ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if kernels:
        ort.register(options)
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", [False, True], ids=["body", "kernel"])
def test_the_node_rounds_as_ml_dtypes_does(dtype, kernels):
    x = patterns(dtype)
    x = np.unique(x[np.isfinite(x)])[:, None]
    proto = onnx.ModelProto.FromString(model(dtype, 1, 1, activation_dtype=contract.BFLOAT16))
    proto.graph.initializer[0].raw_data, proto.graph.initializer[1].raw_data = (codes.tobytes() for codes in ONE)
    assert_same(run(proto.SerializeToString(), x, kernels=kernels), rounded(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_body_agree(dtype):
    proto, x = model(dtype, 48, 200, activation_dtype=contract.BFLOAT16), heavy_tailed((9, 200), dtype)
    exact = numerics.weight_gemm(x, *packed(48, 200), activation_dtype="bfloat16")
    bound = numerics.gemm_error_bound(rounded(x), numerics.dequantize(*packed(48, 200)))
    for kernels in (False, True):
        assert (np.abs(run(proto, x, kernels=kernels).astype(float) - exact) <= bound).all()


@pytest.mark.parametrize("kernels", [False, True], ids=["body", "kernel"])
def test_without_the_attribute_values_are_as_they_are(kernels):
    x = heavy_tailed((3, 64))
    plain = run(model("float32", 7, 64), x, kernels=kernels)
    assert_same(plain, run(model("float32", 7, 64, activation_dtype=contract.FLOAT), x, kernels=kernels))
    assert (plain != run(model("float32", 7, 64, activation_dtype=contract.BFLOAT16), x, kernels=kernels)).any()


def test_a_node_with_another_dtype_does_not_load():
    with pytest.raises(Exception, match=r"activation_dtype 10; expected 1 \(float\) or 16 \(bfloat16\)"):
        run(model("float32", 7, 64, activation_dtype=contract.FLOAT16), heavy_tailed((3, 64)), kernels=True)
