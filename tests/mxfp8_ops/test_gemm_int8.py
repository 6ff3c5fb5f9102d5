"""Gemms on dot products of bytes: a block's sum is exact, and added once, so every instruction set has these bits."""

from __future__ import annotations

import numpy as np
import pytest
from compare import assert_same

from mxfp8_ops import cpu

ISAS = [isa for isa in cpu.available_isas() if isa not in ("portable", "avx512", "amx_bf16")]
"""Those that have the kernel."""

pytestmark = pytest.mark.skipif(not ISAS, reason="no processor with dot products of bytes")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codes", [(-128, 128), (-128, -127)], ids=["any", "all -128"])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 64), (7, 33, 1056), (13, 70, 600)])
def test_sums_of_blocks_are_exact_and_added_in_order(isa, codes, m, n, k):
    rng = np.random.default_rng(m)
    a, b = (rng.integers(*codes, (rows, k)).astype(np.int8) for rows in (m, n))
    a_scales, b_scales = (rng.integers(117, 125, (rows, -(-k // 32)), dtype=np.uint8) for rows in (m, n))
    expected = np.zeros((m, n), np.float32)
    for block in range(a_scales.shape[1]):
        x, w = (part[:, 32 * block : 32 * block + 32].astype(np.float64) / 64 for part in (a, b))
        scales = np.ldexp(1.0, a_scales[:, block, None].astype(int) + b_scales[:, block].astype(int) - 254)
        expected = (expected + (x @ w.T) * scales).astype(np.float32)  # in float64 the sum is exact
    with cpu.forced_isa(isa), cpu.profiled() as profile:
        y = cpu.gemm(a.view(np.uint8), a_scales, b.view(np.uint8), b_scales, a_format="int8", b_format="int8")
        assert profile.calls()[-1].gemms == ("gemm_int8",)
    assert_same(y, expected)
