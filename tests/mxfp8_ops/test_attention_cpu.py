"""MXFP8Attention's kernel, on every instruction set, against the reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from attention_cases import CASES, Case, widened
from compare import assert_within
from grids import looped, pairwise

from mxfp8_ops import cpu
from mxfp8_ops.nodes import attention as reference

ROUNDINGS = (None, "bfloat16")


@functools.cache
def right(case: Case, activation_dtype: str | None, dtype: str, size: float) -> tuple[Any, ...]:
    """Returns operands, Q times `size`; settings; the exact result and how far others may be from it; the presents."""
    q, *rest = case.operands(dtype)
    operands, settings = (q * q.dtype.type(size), *rest), {**case.settings, "activation_dtype": activation_dtype}
    bound = reference.attention_error_bound(*operands, **settings)
    presents = reference.attention(*operands, **settings)[1:]
    return operands, settings, (reference.attention(*widened(operands), **settings)[0], bound), presents


def assert_right(
    case: Case, activation_dtype: str | None = None, *, dtype: str = "float32", size: float = 1, threads: int = 0
) -> None:
    operands, settings, expected, expected_presents = right(case, activation_dtype, dtype, size)
    y, *presents = cpu.attention(*operands, **settings, threads=threads)
    assert_within(y.astype(np.float32), *expected)
    for present, other in zip(presents, expected_presents, strict=True):
        np.testing.assert_array_equal(present.view(np.uint8), other.view(np.uint8))


@looped("activation_dtype, case", pairwise(activation_dtype=ROUNDINGS, case=CASES))
def test_every_case(case: Case, activation_dtype: str | None, isa: str) -> None:
    assert_right(case, activation_dtype)


@looped("rows, dtype, activation_dtype", pairwise(r=[3, 20], d=["float16", "bfloat16"], a=ROUNDINGS))
def test_every_dtype(rows: int, dtype: str, activation_dtype: str | None, isa: str) -> None:
    for case in (
        Case("narrow", rows=rows, keys=rows, past=50, d=40, dv=33, mask=(rows, rows + 50), causal=True),
        Case("narrow, bool", rows=rows, keys=rows, d=64, dv=64, mask=(2, 1, 1, rows), boolean=True),
    ):
        assert_right(case, activation_dtype, dtype=dtype)


@looped("threads, rows", pairwise(threads=[1, 2, 7], rows=[1, 30]))
def test_keys_are_split_where_heads_are_few(threads: int, rows: int, isa: str) -> None:
    case = Case("split", batch=1, rows=rows, keys=rows, past=2100, q_heads=2, kv_heads=1, d=32, causal=True)
    assert_right(case, threads=threads)


@looped("activation_dtype", ROUNDINGS)
def test_rows_are_split_into_blocks_of_several_heads(activation_dtype: str | None, isa: str) -> None:
    case = Case("blocks", batch=1, rows=180, keys=180, q_heads=6, kv_heads=2, d=32, dv=48, mask=(180, 180), causal=True)
    assert_right(case, activation_dtype)


@looped("activation_dtype, size", pairwise(activation_dtype=ROUNDINGS, size=[1e-30, 1e-3, 30.0, 1e4]))
def test_scores_of_every_size(activation_dtype: str | None, size: float, isa: str) -> None:
    assert_right(Case(f"size {size}", rows=12, keys=200, d=32), activation_dtype, size=size)


@looped("nan_guard, rows, activation_dtype", pairwise(nan_guard=[False, True], rows=[4, 20], a=ROUNDINGS))
def test_rows_without_a_softmax(nan_guard: bool, rows: int, activation_dtype: str | None, isa: str) -> None:
    case = Case("bad rows", rows=rows, keys=300, mask=(rows, 300))
    q, k, v, mask, _ = case.operands()
    mask[0] = -np.inf
    q[0, 1, :4] = np.nan
    mask[2, 170] = np.inf
    mask[3] = -np.inf
    mask[3, 299] = 0  # the last key alone
    settings = {**case.settings, "activation_dtype": activation_dtype, "nan_guard": nan_guard}
    got = cpu.attention(q, k, v, mask, **settings)[0]
    expected = reference.attention(q, k, v, mask, **settings)[0]
    assert np.isnan(expected).any() != nan_guard
    bad = np.isnan(reference.attention(q, k, v, mask, **case.settings)[0])
    np.testing.assert_array_equal(got[bad], expected[bad])
    np.testing.assert_allclose(got[~bad], expected[~bad], rtol=0.02, atol=0.02)


def test_a_row_hidden_with_the_lowest_number_is_a_mean(isa: str) -> None:
    case = Case("lowest", rows=10, keys=40, mask=(40,))
    q, k, v, mask, _ = case.operands()
    mask[:] = np.finfo(np.float32).min
    y = cpu.attention(q, k, v, mask, **case.settings)[0]
    np.testing.assert_allclose(y, np.broadcast_to(v.mean(1, keepdims=True), y.shape), rtol=1e-5, atol=1e-6)


@looped("differs", ["nothing", "the last row", "rows of the last batch", "the last batch"])
def test_masks_of_rows_that_are_equal(differs: str, isa: str) -> None:
    case = Case("equal rows", rows=9, keys=40, mask=(2, 1, 9, 40), boolean=True)
    q, k, v, mask, _ = case.operands()
    if differs == "the last batch":
        mask[0] = True
    if differs != "rows of the last batch":
        mask[1] = mask[1, :, :1]  # as an exporter expands a mask of keys
    mask[0] = mask[0, :, :1]
    if differs == "the last row":
        mask[1, :, -1, 1:] ^= True
    y = cpu.attention(q, k, v, mask, **case.settings)[0]
    bound = reference.attention_error_bound(q, k, v, mask, **case.settings)
    assert_within(y, reference.attention(q, k, v, mask, **case.settings)[0], bound)


def test_operands_may_lie_anywhere(isa: str) -> None:
    case = Case("strided", rows=10, keys=12, past=5, mask=(2, 4, 10, 17))
    q, k, v, mask, past = case.operands()
    scattered = tuple(np.asfortranarray(x) for x in (q, k, v, mask))
    y = cpu.attention(*scattered, tuple(np.asfortranarray(x) for x in past), **case.settings)[0]
    np.testing.assert_array_equal(y, cpu.attention(q, k, v, mask, past, **case.settings)[0])
