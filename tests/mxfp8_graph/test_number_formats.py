"""Emulated formats against implementations we did not write, bit by bit: torchao's, ml_dtypes', torch's, gfloat's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from grids import looped, pairwise

from mxfp8_graph.tools.compare.fake_quantize import fake_quantizer
from mxfp8_graph.tools.compare.number_formats import E2M1, E2M3, E3M2, PEERS, Quantizer, ScaleRule
from mxfp8_ops import numpy_nodes
from mxfp8_ops.formats import E4M3, Minifloat

COUNT, K = 50_000, 384


def values() -> np.ndarray:
    """Returns [rows, K] float32: normal rows, heavy-tailed ones, ties, rows of all magnitudes, and one of zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((-(-COUNT // K), K)).astype(np.float32)
    x[1::4] = rng.standard_t(2, x[1::4].shape)
    x[2::4] *= np.exp2(rng.integers(-60, 60, (len(x[2::4]), 1))).astype(np.float32)
    x[3::4] = rng.integers(-64, 65, x[3::4].shape) / np.float32(8)  # many are halfway between two elements
    x[0] = 0
    return x


def assert_same_bits(found: np.ndarray, expected: Any, x: np.ndarray) -> None:
    expected = np.asarray(expected, np.float32)
    differing = np.argwhere(found.view(np.uint32) != expected.view(np.uint32))
    shown = [f"at {list(i)}: {x[tuple(i)]!r} -> {found[tuple(i)]!r}, not {expected[tuple(i)]!r}" for i in differing[:5]]
    assert not len(differing), f"{len(differing)} of {x.size} differ: " + "; ".join(shown)


@looped("rounding, columns", [("ceil", K), ("floor", 70), ("even", K), ("ceil", 70)])
def test_mxfp8_is_what_the_reference_computes(rounding: ScaleRule, columns: int) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (COUNT // K, K), dtype=np.uint64).astype(np.uint32)
    for x in (values()[:, :columns].copy(), np.nan_to_num(bits.view(np.float32))[:, :columns].copy()):
        found = fake_quantizer(Quantizer(E4M3, rounding, (1, 32)))(x)
        assert_same_bits(found, numpy_nodes.dequantize(*numpy_nodes.quantize(x, scale_rounding=rounding)), x)


@looped(
    "element, block, rounding",
    pairwise(element=[E4M3, E3M2, E2M3, E2M1], block=[16, 32, 64], rounding=["floor", "even", "ceil"]),
)
def test_mx_formats_are_torchaos(element: Minifloat, block: int, rounding: ScaleRule) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    torch = pytest.importorskip("torch")
    names = {
        "e4m3": torch.float8_e4m3fn,
        "e3m2": mx.DTYPE_FP6_E3M2,
        "e2m3": mx.DTYPE_FP6_E2M3,
        "e2m1": torch.float4_e2m1fn_x2,
    }
    modes = {"floor": "FLOOR", "even": "EVEN", "ceil": "RCEIL"}
    x = values()
    x = x[np.abs(x).max(-1) > 0]  # torchao gives a block of zeros another scale; it stays zeros
    if rounding == "ceil":
        x = without_torchaos_defect(x, block, element)
    mode = getattr(mx.ScaleCalculationMode, modes[rounding])
    expected = mx.MXTensor.to_mx(torch.from_numpy(x), names[element.name], block, mode).dequantize(torch.float32)
    assert_same_bits(fake_quantizer(Quantizer(element, rounding, (1, block)))(x), expected.numpy(), x)


def without_torchaos_defect(x: np.ndarray, block: int, element: Minifloat) -> np.ndarray:
    """Returns `x` with ones in the few blocks whose scale torchao 0.18 rounds down where ceil rounds up.

    It takes a logarithm in float32, of a quotient in float32: off by one where amax is just above max * 2^k.
    """
    blocks = x.reshape(-1, block).copy()
    amax = np.abs(blocks).max(-1).astype(np.float64)
    mantissas = np.frexp(np.where(amax, amax, 1) / element.max)[0] * 2  # 1 to below 2
    close = (mantissas > 1) & (mantissas < 1 + 1e-5)
    assert close.mean() < 1e-3
    blocks[close] = 1
    return blocks.reshape(x.shape)


def test_nvfp4_is_torchaos() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    torch = pytest.importorskip("torch")
    x = values()
    x = np.where(np.abs(x) < 1e6, x, 0).astype(np.float32)  # the scale of the tensor is that of its largest value
    tensor = torch.from_numpy(x)
    whole = nvfp4.per_tensor_amax_to_scale(tensor.abs().max())
    expected = nvfp4.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=whole).dequantize(torch.float32)
    assert_same_bits(fake_quantizer(PEERS["nvfp4"].activations)(x), expected.numpy(), x)


@looped(
    "element, dtype",
    [
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E3M2, ml_dtypes.float6_e3m2fn),
        (E2M3, ml_dtypes.float6_e2m3fn),
        (E2M1, ml_dtypes.float4_e2m1fn),
    ],
)
def test_elements_are_those_of_ml_dtypes(element: Minifloat, dtype: Any) -> None:
    assert float(ml_dtypes.finfo(dtype).max) == element.max
    x = np.clip(values(), -element.max, element.max)
    x[:, ::32] = element.max  # so that every block has the scale 1
    found = fake_quantizer(Quantizer(element, "ceil", (1, 32)))(x)
    assert_same_bits(found, x.astype(dtype).astype(np.float32), x)


def test_mxint8_by_its_definition() -> None:
    """OCP MX v1.0, 6.3: the scale is the largest power of two in the block; elements are integers times 2^-6."""
    x = values()
    blocks = x.reshape(-1, 32).astype(np.float64)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.floor(np.log2(np.where(amax, amax, 1))))
    expected = (np.clip(np.rint(blocks / scale * 64), -127, 127) / 64 * scale).reshape(x.shape)  # -128 is not used
    np.testing.assert_array_equal(fake_quantizer(PEERS["mxint8-block32"].activations)(x), expected)
    codes = numpy_nodes.quantize(x, element_format="int8", scale_rounding="floor")
    np.testing.assert_array_equal(numpy_nodes.dequantize(*codes, element_format="int8"), expected)


@looped(
    "name, side",
    pairwise(name=["float8-current", "float8-block", "float8-block-float32"], side=["weights", "activations"]),
)
def test_transformer_engines_formats_by_their_definition(name: str, side: str) -> None:
    """TransformerEngine: scale = max / amax, its mantissa cleared on request; cast(x * scale) * (1 / scale)."""
    torch = pytest.importorskip("torch")
    quantizer = getattr(PEERS[name], side)
    x = values()
    n = len(x) // 128 * 128
    x = x[:n]
    rows, columns = quantizer.tile[0] or n, quantizer.tile[1] or K
    tiles = torch.from_numpy(x).reshape(n // rows, rows, K // columns, columns)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = torch.tensor(448.0) / amax
    if quantizer.scale == "divide_pow2":
        scale = torch.exp2(torch.floor(torch.log2(scale.double()))).float()
    scale = torch.where(amax == 0, 1.0, scale)
    expected = (tiles * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / scale)
    assert_same_bits(fake_quantizer(quantizer)(x), expected.reshape(x.shape).numpy(), x)


def test_int8_per_row_by_its_definition() -> None:
    x = values()[1:]
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    expected = np.clip(np.rint(x / scale), -127, 127) * scale
    assert_same_bits(fake_quantizer(PEERS["int8"].weights)(x), expected, x)


@looped("name", PEERS)
def test_zeros_stay_zeros_and_values_that_are_not_finite_stay_so(name: str) -> None:
    x = np.zeros((3, 70), np.float32)
    assert not fake_quantizer(PEERS[name].weights)(x).any()
    for bad in (np.nan, np.inf):
        x = np.ones((2, 64), np.float32)
        x[0, 5] = bad
        assert not np.isfinite(fake_quantizer(PEERS[name].weights)(x)[0]).all(), bad


SHAPES = [(3, 70), (2, 3, 70), (2, 0, 70), (130, 200), (0, 64)]


@looped("name, shape", pairwise(name=["mxfp4", "float8-block", "nvfp4", "int8-token"], shape=SHAPES))
def test_any_shape_is_kept(name: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = fake_quantizer(PEERS[name].weights)(x)
    assert found.shape == shape
    if x.size and x.ndim == 3 and name != "nvfp4":  # whose scale is that of the whole tensor
        assert np.array_equal(found[1], fake_quantizer(PEERS[name].weights)(x[1]))


@looped(
    "name, size",
    [
        ("mxfp8-block32", 200 * 300 + 200 * 10),
        ("mxfp6-e2m3", 200 * 300 * 6 // 8 + 200 * 10),
        ("nvfp4", 200 * 300 // 2 + 200 * 19 + 4),
        ("float8-block", 200 * 300 + 2 * 3 * 4),
        ("float8-current", 200 * 300 + 4),
        ("int8", 200 * 300 + 200 * 4),
    ],
)
def test_bytes_of_a_weight(name: str, size: int) -> None:
    assert PEERS[name].weights.stored_bytes((200, 300)) == size
