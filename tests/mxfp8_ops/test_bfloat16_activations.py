"""Products whose x is rounded to bfloat16 first are those of what was rounded, on instruction sets and in nodes.

The rounding itself, bit by bit, is in test_backends.py; the GPU's kernels are in test_cuda_gemms.py.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compare import FORMATS, assert_same, assert_within, heavy_tailed
from grids import looped, pairwise
from one_node import NUMPY, one_node_model, run

from mxfp8_ops import contract, cpu, numpy_nodes
from mxfp8_ops.contract import BFLOAT16, FLOAT, FLOAT8E4M3FN, FLOAT16, UINT8

BF16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


def packed(n: int, k: int, element_format: str = "e4m3") -> tuple[np.ndarray, np.ndarray]:
    return numpy_nodes.quantize(heavy_tailed((n, k), 1), element_format=element_format)


SHAPES = [(1, 7, 64), (3, 130, 4096), (16, 65, 1000), (17, 40, 33), (150, 64, 2100), (200, 70, 1025), (300, 48, 31)]


@looped("shape, dtype, b_format", pairwise(shape=SHAPES, dtype=["float32", "float16"], b_format=FORMATS))
def test_the_product_is_that_of_the_rounded_values(isa, shape, dtype, b_format):
    m, n, k = shape
    x, b, bias = heavy_tailed((m, k)).astype(dtype), packed(n, k, b_format), heavy_tailed((n,), 2)
    x[0, :5] = [0.0, -0.0, 1e-6, -65504.0, 2.0**-24]
    expected = cpu.weight_gemm(x.astype(BF16), *b, bias, b_format=b_format)
    assert_same(cpu.weight_gemm(x, *b, bias, b_format=b_format, activation_dtype="bfloat16"), expected)


UNUSUAL = [(1e-40, 1.0), (3e38, 3.4e38, 1.0), (np.inf, 1.0), (np.nan, 1.0)]


@looped("m, values", pairwise(m=[1, 20, 200], values=UNUSUAL))
def test_values_that_the_dot_product_cannot_take_are_rounded_too(isa, m, values):
    x = np.resize(np.array(values, np.float32), (m, 70)) * heavy_tailed((m, 70)).clip(0.5, 1)
    b = packed(48, 70)
    assert_same(cpu.weight_gemm(x, *b, activation_dtype="bfloat16"), cpu.weight_gemm(x.astype(BF16), *b))


def test_bfloat16_values_stay_as_they_are(isa):
    x, b = heavy_tailed((20, 100)).astype(BF16), packed(48, 100)
    assert_same(cpu.weight_gemm(x, *b, activation_dtype="bfloat16"), cpu.weight_gemm(x, *b))


# --- the node --------------------------------------------------------------------------------------------------------


def product(x: np.ndarray, *, kernels: bool, **attributes: int) -> np.ndarray:
    """Returns float32 x times a packed [48, K], by the kernel or by the function body in stock ONNX Runtime."""
    b, b_scales = packed(48, x.shape[1])
    code = next(code for code, dtype in NUMPY.items() if dtype == x.dtype)
    inputs = {"X": (x, code), "B": (b, FLOAT8E4M3FN), "B_scales": (b_scales, UINT8)}
    attributes = {"output_dtype": FLOAT, **attributes}
    constants = ("B", "B_scales")
    model = one_node_model("MXFP8WeightGemm", inputs, {"Y": FLOAT}, 21, attributes, constants=constants)
    return run(model, inputs, kernels=kernels)[0]


@pytest.mark.parametrize("kernels", [False, True], ids=["body", "kernel"])
def test_the_node_multiplies_what_was_rounded(kernels):
    for dtype in ("float32", "float16"):
        x, b = heavy_tailed((9, 200)).astype(dtype), packed(48, 200)
        exact = numpy_nodes.weight_gemm(x, *b, activation_dtype="bfloat16")
        bound = numpy_nodes.gemm_error_bound(x.astype(BF16).astype(np.float32), numpy_nodes.dequantize(*b))
        assert_within(product(x, kernels=kernels, activation_dtype=BFLOAT16), exact, bound)


@pytest.mark.parametrize("kernels", [False, True], ids=["body", "kernel"])
def test_without_the_attribute_values_are_as_they_are(kernels):
    x = heavy_tailed((3, 64))
    plain = product(x, kernels=kernels)
    assert_same(plain, product(x, kernels=kernels, activation_dtype=FLOAT))
    assert (plain != product(x, kernels=kernels, activation_dtype=BFLOAT16)).any()


def test_a_node_with_another_dtype_does_not_load():
    assert contract.FLOAT16 not in contract.ACTIVATIONS
    with pytest.raises(Exception, match=r"activation_dtype 10; expected 1 \(float\) or 16 \(bfloat16\)"):
        product(heavy_tailed((3, 64)), kernels=True, activation_dtype=FLOAT16)
