"""Weights behind Expand and Tile: repeated along leading dimensions that the activation has too, they are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, node, weight
from oracle import expect, initializers, kinds, normal, refusal, rewrite, run

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


def repeated(
    before: list[onnx.NodeProto], w: np.ndarray, x: Any = ("b", 3, 64), y: Any = ("b", 3, 96), **more: np.ndarray
) -> onnx.ModelProto:
    """y = -(x @ wide), where `before` makes wide of w."""
    nodes = [*before, node("MatMul", "x wide", "h", "linear"), node("Neg", "h", "y")]
    return model(nodes, {"x": (F32, x)}, {"y": (F32, y)}, {"w": w, **more})


SIZES = [node("Shape", "x", "batch", start=0, end=1), node("Concat", "batch rest", "sizes", axis=0)]
"""As many as x has batches, and then `rest`."""
EXPAND = [*SIZES, node("Expand", "w sizes", "wide")]
EXPAND_FIRST = [*SIZES, node("Expand", "w sizes", "before")]

CASES = {
    "Expand to the batch": (EXPAND, weight(64, 96), [64, 96]),
    "Expand to the batch, ones": (EXPAND, weight(64, 96), [1, 1]),
    "Expand of a leading one": (EXPAND, weight(1, 64, 96), [64, 96]),
    "Expand, then Transpose": (
        [*EXPAND_FIRST, node("Transpose", "before", "wide", perm=[0, 2, 1])],
        weight(96, 64),
        [96, 64],
    ),
    "Transpose, then Expand": (
        [node("Transpose", "w", "t"), *SIZES, node("Expand", "t sizes", "wide")],
        weight(96, 64),
        [64, 96],
    ),
    "Expand, then Cast": (
        [*EXPAND_FIRST, node("Cast", "before", "wide", to=1)],
        weight(64, 96, dtype=np.float16),
        [64, 96],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_weight_repeated_along_the_batch_is_packed_once(name: str) -> None:
    before, w, rest = CASES[name]
    rewritten, report = rewrite(repeated(before, w, rest=np.array(rest)))
    assert {op: n for op, n in kinds(rewritten).items() if op not in {"Shape", "Concat"}} == {
        "MXFP8Quantize": 1,
        "MXFP8Gemm": 1,
        "Neg": 1,
    }
    assert "w" not in initializers(rewritten)
    assert report.sites[0].decision.site.weight_bytes == 64 * 96 * 4
    x = normal(2, 3, 64)
    matrix = w.reshape(w.shape[-2:]).astype(F32)
    expect(x, matrix if matrix.shape == (96, 64) else matrix.T).then(np.negative).check(run(rewritten, {"x": x})[0])


@pytest.mark.parametrize("op", ["Expand", "Tile"])
def test_a_fixed_batch(op: str) -> None:
    before = [node(op, "w sizes", "wide")]
    proto = repeated(before, weight(1, 64, 96), (5, 3, 64), (5, 3, 96), sizes=np.array([5, 1, 1]))
    rewritten, _ = rewrite(proto)
    x = normal(5, 3, 64)
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    expect(x, weight(1, 64, 96)[0].T).then(np.negative).check(run(rewritten, {"x": x})[0])


def test_a_stack_repeated_along_the_batch() -> None:
    before = [node("Expand", "w sizes", "wide")]
    proto = repeated(before, weight(4, 64, 96), (5, 4, 3, 64), (5, 4, 3, 96), sizes=np.array([5, 4, 64, 96]))
    rewritten, _ = rewrite(proto)
    x = normal(5, 4, 3, 64)
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
    expect(x, weight(4, 64, 96).swapaxes(1, 2)).then(np.negative).check(run(rewritten, {"x": x})[0])


def test_a_batch_that_the_activation_lacks_is_kept_with_the_reason() -> None:
    before = [node("Expand", "w sizes", "wide")]
    proto = repeated(before, weight(64, 96), (3, 64), (5, 3, 96), sizes=np.array([5, 64, 96]))
    reason = "the weight is repeated along a batch that the activation lacks; expand the result instead"
    assert refusal(proto) == reason


def test_a_tile_of_unknown_times_is_kept_with_the_reason() -> None:
    """onnx infers nothing of what a run-time repeat makes, so that nothing tells that the activation has as many."""
    proto = repeated([*SIZES, node("Tile", "w sizes", "wide")], weight(1, 64, 96), rest=np.array([1, 1]))
    assert refusal(proto) == (
        "weight 'w' is repeated along dimensions that are not constant; expected constant ones; "
        "give the model shape information"
    )


@pytest.mark.parametrize("repeats", [(1, 1, 2), (2, 2, 1)])
def test_a_tile_along_n_or_k_is_kept_with_the_reason(repeats: tuple[int, ...]) -> None:
    before = [node("Tile", "w sizes", "wide")]
    shape = (repeats[0], 3, 64 * repeats[1])
    y = (repeats[0], 3, 96 * repeats[2])
    assert refusal(repeated(before, weight(1, 64, 96), shape, y, sizes=np.array(repeats))).startswith(
        "weight 'wide' comes through Tile; expected only Identity, "
    )


def test_a_repeated_bias_is_not_absorbed() -> None:
    """It makes the result larger than the product: the product stays what it is, and so does the Add."""
    nodes = [
        node("Expand", "b sizes", "bias"),
        node("MatMul", "x w", "h", "linear"),
        node("Add", "h bias", "z"),
        node("Neg", "z", "y"),
    ]
    weights = {"w": weight(64, 96), "b": weight(96, seed=1), "sizes": np.array([5, 1, 96])}
    rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, [5, "m", 96])}, weights))
    x = normal(3, 64)
    assert kinds(rewritten)["Add"] == 1
    assert run(rewritten, {"x": x})[0].shape == (5, 3, 96)
