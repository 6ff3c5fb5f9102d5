"""What a recipe chooses: formats, rounding, weight-only, per rule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from grids import looped, pairwise
from models import neg_model, text_model, weight
from oracle import Expected, computes, expect, kinds, normal, reasons, relu, rewrite, run

from mxfp8_graph import Recipe, Rule
from mxfp8_ops import contract

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
SEEN_AS: dict[str, Any] = {
    "mxfp8": {},
    "mxfp8-bf16": {"formats": ("bfloat16", "e4m3")},
    "mxfp8-weight-only": {"weight_only": True},
}
"""The activations' format by preset, as `expect` takes it."""

pytestmark = pytest.mark.usefixtures("runtime")


@looped(
    "activations, weights, rounding",
    pairwise(activations=["e4m3", "e5m2"], weights=["e4m3", "e5m2"], rounding=["ceil", "floor", "even"]),
)
def test_a_gemm_has_the_formats_and_the_rounding_of_the_recipe(activations: str, weights: str, rounding: str) -> None:
    recipe, x = Recipe(activations=activations, weight_format=weights, scale_rounding=rounding), normal(3, 64)
    y = expect(x, weight(64, 96).T, formats=(activations, weights), scale_rounding=rounding).then(np.negative)
    computes(neg_model("MatMul", ("m", 64), ("m", 96), {"w": weight(64, 96)}), y, recipe=recipe, x=x)


def test_a_rule_overrides_the_recipe_for_its_sites() -> None:
    weights, x = {"w": weight(64, 96), "v": weight(96, 64, seed=1)}, normal(3, 64)
    proto = text_model("one:MatMul x w>a; Relu a>b; two:MatMul b v>c; Neg c>y", y=("m", 64), **weights)
    rule = Rule(name="two", activations="unchanged", weight_format="e5m2", scale_rounding="floor")
    rewritten, report = rewrite(proto, Recipe(name="r", rules=(rule,)))
    nodes = {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1, "MXFP8WeightGemm": 1, "Neg": 1}
    assert kinds(rewritten) == nodes
    assert reasons(report)["two"].startswith("rules.0: name='two' -> quantize, activations=unchanged")
    first = expect(x, weights["w"].T).then(relu)
    settings: Any = {"weight_only": True, "formats": ("", "e5m2"), "scale_rounding": "floor"}
    second = expect(first.y.astype(F32), weights["v"].T, **settings)
    # What the first gemm may be off, the second one multiplies by at most |w|.
    slack = (first.bound + 2.0**-24 * np.abs(first.y)) @ np.abs(weights["v"].astype(float)) * 1.5
    Expected(-second.y, second.bound + slack).check(run(rewritten, {"x": x})[0])
    rewritten, report = rewrite(proto, Recipe(rules=(Rule(name="two", activations="bfloat16"),)))
    assert kinds(rewritten) == nodes
    assert reasons(report)["two"] == "rules.0: name='two' -> quantize, activations=bfloat16"
    assert [s.decision.activations for s in report.sites] == ["e4m3", "bfloat16"]


@looped(
    "recipe, left, dtype",
    [
        *pairwise(recipe=["mxfp8-weight-only", "mxfp8-bf16"], left=[False, True], dtype=[F32, F16]),
        ("mxfp8-bf16", False, BF16),
    ],
)
def test_weight_only_leaves_activations_alone_and_bfloat16_rounds_them(recipe: str, left: bool, dtype: Any) -> None:
    w, x = weight(96, 64, dtype=dtype) if left else weight(64, 96, dtype=dtype), normal(3, 64, dtype=dtype)
    x_shape, y_shape = ((64, "m"), (96, "m")) if left else (("m", 64), ("m", 96))
    proto = neg_model("MatMul", x_shape, y_shape, {"w": w}, "w x" if left else "x w", dtype=dtype)
    rewritten, report = rewrite(proto, recipe)
    more = {**({"Transpose": 2} if left else {}), **({"Cast": 1} if dtype is F16 else {})}
    assert kinds(rewritten) == {**more, "MXFP8WeightGemm": 1, "Neg": 1}
    assert reasons(report) == {"linear": f"linear, by recipe {recipe!r}"}
    (gemm,) = (n for n in rewritten.graph.node if n.op_type == "MXFP8WeightGemm")
    rounded = {a.name: a.i for a in gemm.attribute}.get("activation_dtype") == contract.BFLOAT16
    assert rounded == (recipe == "mxfp8-bf16")
    if dtype is BF16:  # ONNX Runtime's CPU provider has no bfloat16 Neg
        return
    y = expect(x, w if left else w.T, **SEEN_AS[recipe], dtype=np.dtype(dtype).name).then(np.negative)
    actual = run(rewritten, {"x": np.ascontiguousarray(x.T) if left else x})[0]
    y.check(actual.T if left else actual)


@looped("before, recipe", pairwise(before=["Softmax", "Abs", "Gelu"], recipe=list(SEEN_AS)))
def test_float16_is_right_beside_ops_that_onnx_runtime_has_in_float32_only(before: str, recipe: str) -> None:
    """ONNX Runtime runs the gemm in float32 too, whatever its output_dtype says."""
    w, x = weight(64, 96, dtype=F16), normal(3, 64, dtype=F16)
    rewritten, _ = rewrite(text_model(f"{before} x>s; linear:MatMul s w>h; Neg h>y", dtype=F16), recipe)
    result = run(rewritten, {"x": x})[0]
    seen = run(text_model(f"{before} x>y", y=("m", 64), dtype=F16), {"x": x})[0]
    y = expect(seen, w.T, **SEEN_AS[recipe], dtype="float16").then(np.negative)
    # ONNX Runtime may leave out the roundings to float16 around a node it runs in float32.
    slack = {"mxfp8": 2.0**-4, "mxfp8-bf16": 2.0**-8}.get(recipe, 2.0**-10)
    Expected(y.y, y.bound + slack * np.abs(seen) @ np.abs(w)).check(result)
