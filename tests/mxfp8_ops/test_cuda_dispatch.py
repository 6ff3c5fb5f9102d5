"""Which row of the dispatch table a CUDA gemm takes."""

from __future__ import annotations

import pytest

from mxfp8_ops.cuda import dispatch as cuda_dispatch
from mxfp8_ops.errors import BackendError


def chosen(capability=(9, 0), kind="bfloat16", m=1, k=64, address=0, **options):
    return cuda_dispatch.route(capability, kind, m, k, (address,), **options)


def test_routes():
    assert chosen() == chosen(m=64) == chosen(kind="e4m3") == "skinny"
    assert chosen(m=65) == chosen(k=40) == chosen(address=8) == "large"
    assert chosen(kind="float16", m=32) == chosen(kind="float32", m=21) == "skinny"
    assert chosen(kind="float16", m=33) == chosen(kind="float32", m=22) == chosen(kind="float32", k=40) == "parts"
    with cuda_dispatch.forced_route("float32"):
        assert chosen() == "float32"
        assert chosen(forced=False) == "skinny"
    with pytest.raises(BackendError, match=r"compute capability 7\.5; expected compute capability 8\.0"):
        chosen((7, 5))


def test_library_routes_are_taken_only_by_those_who_bring_the_library():
    both = {"kind": "e4m3", "m": 100, "n": 64, "libraries": ("block_scaled", "fold")}
    assert chosen((10, 0), **both) == chosen((12, 0), **both | {"kind": "e5m2"}) == "block_scaled"
    assert chosen((9, 0), **both) == "large"
    for other in ({"libraries": ()}, {"n": 40}, {"b_kind": "e5m2"}, {"kind": "bfloat16"}, {"k": 40}, {"address": 8}):
        assert chosen((10, 0), **both | other) == "large"
    assert chosen((10, 0), **both | {"m": 64}) == "skinny"


def test_folding_is_never_chosen_unasked():
    both = {"kind": "e4m3", "m": 100, "n": 64, "libraries": ("block_scaled", "fold")}
    with cuda_dispatch.allowed("fold"):
        assert chosen((8, 9), **both) == chosen((9, 0), **both) == "fold"
        assert chosen((10, 0), **both) == "block_scaled"  # which is exact
        assert chosen((8, 0), **both) == "large"
        assert chosen(**both | {"m": 64}) == "skinny"  # as fast, and exact
        for other in ({"libraries": ()}, {"n": 40}, {"b_kind": "e5m2"}, {"kind": "e5m2"}, {"k": 40}, {"address": 8}):
            assert chosen(**both | other) == "large"
    assert chosen(**both) == "large"
    with pytest.raises(BackendError, match="expected one of skinny, "), cuda_dispatch.allowed("fast"):
        pass


def test_a_forced_route_is_used_or_refused():
    with cuda_dispatch.forced_route("large"):
        assert cuda_dispatch.route((9, 0), "bfloat16", 1, 64) == "large"
        with pytest.raises(BackendError, match="forced route 'large'"):
            cuda_dispatch.route((9, 0), "float32", 1, 64)
    with cuda_dispatch.forced_route("fold"):
        assert chosen(kind="e4m3", n=16, libraries=("fold",)) == "fold"
        with pytest.raises(BackendError, match="forced route 'fold'"):
            chosen(kind="e4m3", n=16)
    with (
        pytest.raises(BackendError, match="expected one of skinny, block_scaled, fold, fused, large, parts, float32"),
        cuda_dispatch.forced_route("fast"),
    ):
        pass
