"""Folding: one scale per row instead of one per block, and the error that is reported for it."""

from __future__ import annotations

import numpy as np
import pytest
from grids import looped

from mxfp8_ops import formats, numerics, numpy_nodes
from mxfp8_ops.cuda import folding
from mxfp8_ops.errors import ShapeError


def test_a_row_takes_the_largest_scale_and_the_others_shift_their_elements():
    elements = np.tile(np.array([0x7E, 0x38, 0x08, 0x01, 0x81, 0x03, 0x80, 0x7F], np.uint8), (1, 8))
    scales = np.array([[127, 125]], np.uint8)
    folded, row_scales = folding.fold(elements, scales)
    assert row_scales.tolist() == [127]
    assert (folded[0, :32] == elements[0, :32]).all()
    # 448 / 4 = 112; 1 / 4; 2^-6 / 4 is the subnormal 2^-8; 2^-9 / 4 rounds to 0; 3 * 2^-9 / 4 to 2^-9; -0; NaN
    assert folded[0, 32:40].tolist() == [0x6E, 0x28, 0x02, 0x00, 0x80, 0x01, 0x80, 0x7F]


def test_every_element_under_every_shift_is_rounded_once():
    elements = np.repeat(np.arange(256, dtype=np.uint8), 32)[None].repeat(40, 0)
    scales = np.arange(200, 160, -1, dtype=np.uint8)[:, None].repeat(256, 1)
    scales = np.concatenate([np.full((40, 1), 200, np.uint8), scales], 1)
    elements = np.concatenate([np.zeros((40, 32), np.uint8), elements], 1)
    folded, row_scales = folding.fold(elements, scales)
    assert (row_scales == 200).all()
    with np.errstate(invalid="ignore"):
        values = numerics.decode(elements, formats.E4M3).astype(np.float64) * 2.0 ** -np.repeat(200.0 - scales, 32, 1)
    expected = numerics.encode(values.astype(np.float32), formats.E4M3)
    assert (folded == expected).all()


def test_equal_scales_change_nothing():
    elements, _ = numpy_nodes.quantize(np.random.default_rng(0).standard_normal((3, 100)).astype(np.float32))
    scales = np.full((3, 4), 130, np.uint8)
    folded, row_scales = folding.fold(elements, scales)
    assert (folded == elements).all()
    assert (row_scales == 130).all()
    assert folding.fold_error(elements, scales) == folding.FoldError(0.0, 0.0, 0)


def test_nan_blocks_stay_nan_and_do_not_count_for_the_scale():
    elements, scales = np.full((2, 64), 0x38, np.uint8), np.array([[255, 120], [255, 255]], np.uint8)
    folded, row_scales = folding.fold(elements, scales)
    assert row_scales.tolist() == [120, 0]
    assert (folded[0] == [*[0x7F] * 32, *[0x38] * 32]).all()
    assert (folded[1] == 0x7F).all()
    assert folding.fold_error(elements, scales).relative == 0


def test_a_matrix_without_columns():
    folded, row_scales = folding.fold(np.zeros((3, 0), np.uint8), np.zeros((3, 0), np.uint8))
    assert folded.shape == (3, 0)
    assert row_scales.tolist() == [0, 0, 0]


@looped("name", ["gauss", "t3", "outlier"])
def test_the_reported_error_is_far_below_that_of_quantizing(name):
    generator = np.random.default_rng(0)
    x = generator.standard_t(3, (64, 4096)) if name == "t3" else generator.standard_normal((64, 4096))
    if name == "outlier":
        x *= np.where(generator.random(4096) < 0.005, 50, 1)
    x = x.astype(np.float32)
    elements, scales = numpy_nodes.quantize(x)
    quantizing = np.linalg.norm(numpy_nodes.dequantize(elements, scales) - x) / np.linalg.norm(x)
    error = folding.fold_error(elements, scales)
    assert 0 < error.relative < 1e-3 * quantizing
    assert 0 < error.changed < 0.05
    assert error.largest_shift >= 2
    assert f"relative error {error.relative:.2e}" in str(error)


def test_the_reported_error_is_that_of_a_product():
    """What `fold_error` says of two operands bounds what their product loses, with random signs in quadrature."""
    generator = np.random.default_rng(1)
    pairs = [numpy_nodes.quantize(generator.standard_t(2, (128, 4096)).astype(np.float32)) for _ in range(2)]
    exact = [numpy_nodes.dequantize(*pair).astype(np.float64) for pair in pairs]
    folded = []
    for pair in pairs:
        elements, scales = folding.fold(*pair)
        folded.append(
            numerics.decode(elements, formats.E4M3) * numerics.decode_scale(scales)[:, None].astype(np.float64)
        )
    lost = np.linalg.norm(folded[0] @ folded[1].T - exact[0] @ exact[1].T)
    norms = np.linalg.norm(exact[0]) * np.linalg.norm(exact[1])
    assert lost <= sum(folding.fold_error(*pair).relative for pair in pairs) * norms


def test_scales_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"fold: scales have shape \(2, 1\); expected \(2, 2\)"):
        folding.fold(np.zeros((2, 64), np.uint8), np.zeros((2, 1), np.uint8))
