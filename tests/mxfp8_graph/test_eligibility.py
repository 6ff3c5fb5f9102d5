"""What shapes and dtypes alone say of a matmul; the same for every front end."""

from __future__ import annotations

from typing import Any

import pytest

from mxfp8_graph.policy.eligibility import dtype_blocker, is_bias, sizes, weight_blocker


@pytest.mark.parametrize(
    ("x", "w", "expected"),
    [
        ((3, 64), (96, 64), (3, 96, 64)),
        ((2, 3, 64), (5, 96, 64), (6, 96, 64)),
        (("b", 1, 3, 64), (96, "k"), ("b*3", 96, "k")),
        ((64,), (96, 64), (1, 96, 64)),
        ((3, 64), (64,), (3, None, None)),
        (("b", 64), None, ("b", None, None)),
        ((-1, 64), (96, -1), ("?", 96, None)),
        ((3, None, 64), (96, 64), ("3*?", 96, 64)),
        (None, (96, None), (None, 96, None)),
    ],
)
def test_sizes_are_those_of_both_operands(x: Any, w: Any, expected: Any) -> None:
    assert sizes(x, w) == expected


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((96,), 2, True),
        ((), 1, True),
        ((1,), 1, True),
        ((1, 96), 2, True),
        ((1, 96), 1, False),
        ((3, 96), 2, False),
        ((95,), 2, False),
        ((96, 1), 2, False),
    ],
)
def test_a_bias_is_one_value_per_column_or_one_for_all(shape: Any, rank: int, expected: bool) -> None:
    assert is_bias(shape, "float16", n=96, rank=rank) is expected
    assert not is_bias(shape, "float64", n=96, rank=rank)


def test_a_dtype_or_a_weight_that_cannot_be_packed_has_a_reason() -> None:
    assert dtype_blocker("bfloat16", "cast it") is None
    assert dtype_blocker(None, "cast it") == "dtype unknown; expected float32, float16 or bfloat16; cast it"
    assert dtype_blocker("int8", "cast it", owner="the activation") == (
        "the activation has dtype int8; expected float32, float16 or bfloat16; cast it"
    )
    assert weight_blocker((96, 64)) is None
    assert weight_blocker((96,)) == "the static operand is a vector; expected a matrix"
    assert weight_blocker((96, 0)) == "the weight is empty (shape [96, 0]); expected N and K above 0"
