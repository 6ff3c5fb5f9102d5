"""Weights behind Expand and Tile: repeated along leading dimensions that the activation has too, they are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, steps, weight
from grids import looped
from oracle import GEMM, computes, expect, initializers, kinds, normal, refusal, rewrite, run

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


def repeated(before: str, w: np.ndarray, x: Any = ("b", 3, 64), y: Any = ("b", 3, 96), **numbers: Any) -> Any:
    """y = -(x @ wide), where `before` makes wide of w."""
    stored = {"w": w, **{name: np.array(values) for name, values in numbers.items()}}
    nodes = steps(f"{before}; linear:MatMul x wide>h; Neg h>y")
    return model(nodes, {"x": (F32, x)}, {"y": (F32, y)}, stored)


SIZES = "Shape x>batch|start=0 end=1; Concat batch rest>sizes|axis=0"
"""As many as x has batches, and then `rest`."""
EXPAND, FIRST = f"{SIZES}; Expand w sizes>wide", f"{SIZES}; Expand w sizes>before"
W, BATCH, WIDE = weight(64, 96), normal(2, 3, 64), (5, 3, 64)
TURNED = f"{FIRST}; Transpose before>wide|perm=[0,2,1]"
CASES: dict[str, tuple[onnx.ModelProto, np.ndarray, np.ndarray]] = {
    "to the batch": (repeated(EXPAND, W, rest=[64, 96]), BATCH, W),
    "to the batch, ones": (repeated(EXPAND, W, rest=[1, 1]), BATCH, W),
    "of a leading one": (repeated(EXPAND, weight(1, 64, 96), rest=[64, 96]), BATCH, weight(1, 64, 96)[0]),
    "then Transpose": (repeated(TURNED, weight(96, 64), rest=[96, 64]), BATCH, weight(96, 64).T),
    "behind Transpose": (
        repeated(f"Transpose w>t; {SIZES}; Expand t sizes>wide", weight(96, 64), rest=[64, 96]), BATCH,
        weight(96, 64).T,
    ),
    "then Cast": (
        repeated(f"{FIRST}; Cast before>wide|to=1", weight(64, 96, dtype=np.float16), rest=[64, 96]), BATCH,
        weight(64, 96, dtype=np.float16).astype(F32),
    ),
    "a fixed batch": (
        repeated("Expand w sizes>wide", weight(1, 64, 96), WIDE, (5, 3, 96), sizes=[5, 1, 1]), normal(*WIDE),
        weight(1, 64, 96)[0],
    ),
    "a fixed batch, Tile": (
        repeated("Tile w sizes>wide", weight(1, 64, 96), WIDE, (5, 3, 96), sizes=[5, 1, 1]), normal(*WIDE),
        weight(1, 64, 96)[0],
    ),
    "a stack along the batch": (
        repeated("Expand w sizes>wide", weight(4, 64, 96), (5, 4, 3, 64), (5, 4, 3, 96), sizes=[5, 4, 64, 96]),
        normal(5, 4, 3, 64), weight(4, 64, 96),
    ),
}  # fmt: skip


@looped("name", CASES)
def test_a_weight_repeated_along_the_batch_is_packed_once(name: str) -> None:
    proto, x, w = CASES[name]
    rewritten, report = computes(proto, expect(x, w.swapaxes(-1, -2)).then(np.negative), x=x)
    assert {op: n for op, n in kinds(rewritten).items() if op not in {"Shape", "Concat"}} == {**GEMM, "Neg": 1}
    assert "w" not in initializers(rewritten)
    assert report.sites[0].decision.site.weight_bytes == w.size * 4


KEPT = {
    "the weight is repeated along a batch that the activation lacks; expand the result instead": repeated(
        "Expand w sizes>wide", W, (3, 64), (5, 3, 96), sizes=[5, 64, 96]
    ),
    # onnx infers nothing of what a run-time repeat makes, so that nothing tells that the activation has as many
    "weight 'w' is repeated while the model runs, nobody knows along which dimensions; "
    "give the model shape information": repeated(f"{SIZES}; Tile w sizes>wide", weight(1, 64, 96), rest=[1, 1]),
    "weight 'wide' comes through Tile; expected only Identity, ...": repeated(
        "Tile w sizes>wide", weight(1, 64, 96), (1, 3, 64), (1, 3, 192), sizes=[1, 1, 2]
    ),
    "weight 'wide' comes through Tile; expected only ...": repeated(
        "Tile w sizes>wide", weight(1, 64, 96), (2, 3, 128), (2, 3, 96), sizes=[2, 2, 1]
    ),
}


@looped("reason", KEPT)
def test_what_is_kept_with_the_reason(reason: str) -> None:
    found = refusal(KEPT[reason])
    assert found.startswith(reason[:-3]) if reason.endswith("...") else found == reason


def test_a_repeated_bias_is_not_absorbed() -> None:
    """It makes the result larger than the product: the product stays what it is, and so does the Add."""
    weights = {"w": W, "b": weight(96, seed=1), "sizes": np.array([5, 1, 96])}
    nodes = steps("Expand b sizes>bias; linear:MatMul x w>h; Add h bias>z; Neg z>y")
    rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, [5, "m", 96])}, weights))
    assert kinds(rewritten)["Add"] == 1
    assert run(rewritten, {"x": normal(3, 64)})[0].shape == (5, 3, 96)
