"""Weights behind views and in Constant nodes: packed as the matmul sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, neg_model, steps, weight
from grids import looped
from onnx import helper, numpy_helper
from oracle import GEMM, computes, expect, initializers, kinds, normal, reasons, refusal, rewrite, run

from mxfp8_ops.errors import ContractError

F32, F16 = np.float32, np.float16
LINEAR = "linear, by recipe 'mxfp8'"
X = normal(3, 64)
NEG = {**GEMM, "Neg": 1}

pytestmark = pytest.mark.usefixtures("runtime")

NUMBERS = {
    "shape": [64, -1], "matrix": [64, 96], "axis": [0], "copy": [0, -1], "end": [-1], "one": [1], "two": [2],
    "fifty": [50], "end_of_66": [66], "minus_99": [-99], "minus_3": [-3],
}  # fmt: skip
"""Shapes, axes and places that views read."""


def viewed(views: str, w: np.ndarray, n: Any = 96, **more: np.ndarray) -> onnx.ModelProto:
    """y = -(x @ wt), with views that make wt of w."""
    nodes = steps(views)
    used = {name for each in nodes for name in each.input}
    stored = {name: np.array(numbers) for name, numbers in NUMBERS.items() if name in used}
    return neg_model("MatMul", ("m", 64), ("m", n), {"w": w, **stored, **more}, "x wt", before=nodes)


def same(w: np.ndarray) -> np.ndarray:
    return w


VIEWS = {
    "Identity": ("Identity w>wt", weight(64, 96), same),
    "Transpose": ("Transpose w>wt|perm=[1,0]", weight(96, 64), np.transpose),
    "Transpose by default": ("Transpose w>wt", weight(96, 64), np.transpose),
    "Transpose twice": ("Transpose w>a; Transpose a>wt", weight(64, 96), same),
    "Cast up": ("Cast w>wt|to=1", weight(64, 96, dtype=F16), lambda w: w.astype(F32)),
    "Cast down and up": ("Cast w>a|to=10; Cast a>wt|to=1", weight(64, 96), lambda w: w.astype(F16).astype(F32)),
    "Cast integers": ("Cast w>wt|to=1", (weight(64, 96) * 300).astype(np.int8), lambda w: w.astype(F32)),
    "Reshape": ("Reshape w shape>wt", weight(96, 64), lambda w: w.reshape(64, 96)),
    "Reshape after Transpose": (
        "Transpose w>a; Reshape a shape>wt", weight(64, 96), lambda w: w.T.reshape(64, 96),
    ),
    "Reshape that copies a dimension": ("Reshape w copy>wt", weight(64, 4, 24), lambda w: w.reshape(64, 96)),
    "Unsqueeze and Squeeze from the end": ("Unsqueeze w end>a; Squeeze a end>wt", weight(64, 96), same),
    "Squeeze": ("Squeeze w axis>wt", weight(1, 64, 96), lambda w: w[0]),
    "Squeeze all": ("Squeeze w>wt", weight(1, 64, 1, 96), lambda w: w[0, :, 0]),
    "Unsqueeze, Transpose, Squeeze": (
        "Unsqueeze w axis>a; Transpose a>b|perm=[0,2,1]; Squeeze b axis>wt", weight(96, 64), np.transpose,
    ),
    "Slice of rows": ("Slice w two end_of_66>wt", weight(68, 96), lambda w: w[2:66]),
    "Slice of columns from the end": (
        "Slice w minus_99 minus_3 end>a; Transpose a>b; Transpose b>wt", weight(64, 99), lambda w: w[:, :96],
    ),
    "Transpose of three axes": (
        "Transpose w>a|perm=[2,1,0]; Reshape a shape>wt", weight(96, 4, 16),
        lambda w: w.transpose(2, 1, 0).reshape(64, 96),
    ),
}  # fmt: skip


@looped("name", VIEWS)
def test_a_weight_behind_views_is_packed_as_the_matmul_sees_it_and_the_views_go(name: str) -> None:
    views, w, see = VIEWS[name]
    product = expect(X, np.ascontiguousarray(see(w).T)).then(np.negative)
    rewritten, report = computes(viewed(views, w), product, NEG, x=X)
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert reasons(report) == {"linear": LINEAR}


def split_model(split: str, w: np.ndarray, ends: dict[str, int], use: str, **more: Any) -> onnx.ModelProto:
    """Returns -(x @ part) for each part of w (name -> N), which `use` makes of the outputs of the Split."""
    products = "; ".join(f"part{name}:MatMul x {use}{name}>h{name}; Neg h{name}>y{name}" for name in ends)
    outputs = {f"y{name}": (F32, ["m", n]) for name, n in ends.items()}
    opset = more.pop("opset", 21)
    return model(steps(f"{split}; {products}"), {"x": (F32, ["m", 64])}, outputs, {"w": w, **more}, opset=opset)


@looped("split, first", [("w sizes>w0 w1|axis=0", 64), ("w>w0 w1|axis=0 num_outputs=2", 80), ("w>w0 w1 w2", 54)])
def test_parts_of_one_weight_are_packed_each_and_the_weight_goes(split: str, first: int) -> None:
    """As torch's exporter writes the packed projections of cross attention; of uneven parts the last is smallest."""
    if first == 54:  # as ONNX Runtime splits it
        parts = [part.T for part in np.split(weight(64, 160), [54, 108], axis=1)]
        ends = {str(i): n for i, n in enumerate((54, 54, 52))}
        proto = split_model(f"Split {split}|axis=1 num_outputs=3", weight(64, 160), ends, "w", opset=18)
    else:
        parts = np.split(weight(160, 64), [first])
        sizes = {"sizes": np.array([64, 96])} if "sizes" in split else {}
        turned = f"Split {split}; Transpose w0>t0; Transpose w1>t1"
        proto = split_model(turned, weight(160, 64), {"0": first, "1": 160 - first}, "t", **sizes)
    rewritten, report = rewrite(proto)
    assert reasons(report) == {f"part{i}": LINEAR for i in range(len(parts))}
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": len(parts), "Neg": len(parts)}
    assert not {"w", "sizes"} & set(initializers(rewritten))
    for part, result in zip(parts, run(rewritten, {"x": X}), strict=True):
        expect(X, part).then(np.negative).check(result)


def test_parts_that_onnx_does_not_have_are_refused() -> None:
    """Before opset 18 parts are equal; since then the last may be smaller, but not less than empty."""
    with pytest.raises(ContractError, match="not evenly splittable"):
        rewrite(split_model("Split w>w0 w1|axis=1", weight(64, 159), {"0": 80}, "w", opset=13))
    short = viewed("Split w>wt w1 w2 w3|axis=1 num_outputs=4", weight(64, 5), None)
    assert refusal(short).startswith("weight 'wt' comes through Split")


ONLY = "expected only Identity, Transpose, Cast, Reshape, Squeeze, Unsqueeze, Split, Slice; fold the constants first"
EMPTY = {"none": np.zeros(0, np.int64), "huge": np.array([2**60, 0]), "zero": np.array([0])}
KEPT = {
    "a slice that ends before it starts": (
        viewed("Slice w fifty one one>wt", weight(64, 96), 0),
        "the weight is empty (shape [64, 0]); expected N and K above 0",
    ),
    "an axis of more than 1, where onnx does not see it": (
        viewed("Identity axis>same; Squeeze w same>wt", weight(2, 64, 96)), "weight 'wt' comes through Squeeze...",
    ),
    "a shape of other size, where onnx does not see it": (
        viewed("Identity matrix>same; Reshape w same>wt", weight(2, 64, 96)), "weight 'wt' comes through Reshape...",
    ),
    "a shape of an empty tensor that NumPy does not have": (
        viewed(
            "Reshape none huge>none2|allowzero=1; Reshape none2 zero>axes|allowzero=1; Squeeze w axes>wt",
            weight(64, 96), **EMPTY,
        ),
        "weight 'wt' comes through Squeeze...",
    ),
    "another op": (viewed("Neg w>a; Transpose a>wt", weight(96, 64)), f"weight 'wt' comes through Neg; {ONLY}"),
    "quantized already": (
        viewed("DequantizeLinear w s>a; Transpose a>wt", weight(96, 64).astype(np.int8), s=np.array(0.5, F32)),
        "weight 'wt' is quantized already, by DequantizeLinear, and would be rounded twice; rewrite the model it "
        "was quantized from",
    ),
}  # fmt: skip


@looped("name", KEPT)
def test_what_is_kept_with_the_reason(name: str) -> None:
    proto, reason = KEPT[name]
    found = refusal(proto)
    assert found.startswith(reason[:-3]) if reason.endswith("...") else found == reason


def test_a_part_or_a_view_that_something_else_uses_stays() -> None:
    nodes = "Split w>w0 w1|axis=1 num_outputs=2; linear:MatMul x w0>h; Neg h>y; Abs w1>z"
    outputs = {"y": (F32, ["m", 48]), "z": (F32, [64, 48])}
    proto = model(steps(nodes), {"x": (F32, ["m", 64])}, outputs, {"w": weight(64, 96)})
    product = expect(X, weight(64, 96)[:, :48].T).then(np.negative)
    computes(proto, product, {"Split": 1, **NEG, "Abs": 1}, x=X)
    outputs = {"y": (F32, ["m", 96]), "z": (F32, [64, 96])}
    nodes = "Transpose w>wt; linear:MatMul x wt>h; Neg h>y; Abs wt>z"
    rewritten, _ = rewrite(model(steps(nodes), {"x": (F32, ["m", 64])}, outputs, {"w": weight(96, 64)}))
    assert kinds(rewritten) == {"Transpose": 1, **NEG, "Abs": 1}
    assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
    assert np.array_equal(run(rewritten, {"x": X})[1], np.abs(weight(96, 64).T))


def test_weights_and_shapes_in_constant_nodes() -> None:
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight(64, 96)))
    proto = neg_model("MatMul", ("m", 64), ("m", 96), {}, before=[constant])
    computes(proto, expect(X, weight(64, 96).T).then(np.negative), NEG, x=X)
    views = [helper.make_node("Constant", [], ["shape"], value_ints=[64, 96]), *steps("Reshape w shape>wt")]
    proto = neg_model("MatMul", ("m", 64), ("m", 96), {"w": weight(96, 64)}, "x wt", before=views)
    assert kinds(rewrite(proto)[0]) == NEG


def test_dead_code_that_was_there_before_stays() -> None:
    nodes = steps("linear:MatMul x w>h; Neg h>y; Identity other>unused")
    weights = {"w": weight(64, 96), "other": weight(3)}
    rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, weights))
    assert kinds(rewritten)["Identity"] == 1
    assert "other" in initializers(rewritten)
