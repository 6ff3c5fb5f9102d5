"""Weights behind views, repeated along the batch, in Constant nodes and shared: packed as the matmuls see them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, neg_model, steps, weight
from grids import looped
from onnx import helper, numpy_helper
from oracle import GEMM, Expected, computes, expect, initializers, kinds, normal, reasons, refusal, rewrite, run

from mxfp8_graph import Recipe, Rule

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
    "Reshape after Transpose": (
        "Transpose w>a; Reshape a shape>wt", weight(64, 96), lambda w: w.T.reshape(64, 96),
    ),
    "Reshape that copies a dimension": ("Reshape w copy>wt", weight(64, 4, 24), lambda w: w.reshape(64, 96)),
    "Unsqueeze and Squeeze from the end": ("Unsqueeze w end>a; Squeeze a end>wt", weight(64, 96), same),
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
def test_a_weight_behind_views_is_packed_as_the_matmul_reads_it(name: str) -> None:
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
def test_each_part_of_a_split_weight_is_packed_alone(split: str, first: int) -> None:
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


# --- Repeated along leading dimensions that the activation has too: Expand and Tile ---


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
REPEATED: dict[str, tuple[onnx.ModelProto, np.ndarray, np.ndarray]] = {
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


@looped("name", REPEATED)
def test_a_weight_repeated_along_the_batch_is_packed_once(name: str) -> None:
    proto, x, w = REPEATED[name]
    rewritten, report = computes(proto, expect(x, w.swapaxes(-1, -2)).then(np.negative), x=x)
    assert {op: n for op, n in kinds(rewritten).items() if op not in {"Shape", "Concat"}} == {**GEMM, "Neg": 1}
    assert "w" not in initializers(rewritten)
    assert report.sites[0].decision.site.weight_bytes == w.size * 4


ONLY = "expected only Identity, Transpose, Cast, Reshape, Squeeze, Unsqueeze, Split, Slice; fold the constants first"
EMPTY = {"none": np.zeros(0, np.int64), "huge": np.array([2**60, 0]), "zero": np.array([0])}
KEPT = {
    "a slice that ends before it starts": (
        viewed("Slice w fifty one one>wt", weight(64, 96), 0),
        "the weight is empty (shape [64, 0]); expected N and K above 0",
    ),
    "an axis of 2 that onnx does not see": (
        viewed("Identity axis>same; Squeeze w same>wt", weight(2, 64, 96)),
        f"weight 'wt' comes through Squeeze; {ONLY}",
    ),
    "a shape of other size that onnx does not see": (
        viewed("Identity matrix>same; Reshape w same>wt", weight(2, 64, 96)),
        f"weight 'wt' comes through Reshape; {ONLY}",
    ),
    "a shape of an empty tensor that NumPy does not have": (
        viewed(
            "Reshape none huge>none2|allowzero=1; Reshape none2 zero>axes|allowzero=1; Squeeze w axes>wt",
            weight(64, 96), **EMPTY,
        ),
        f"weight 'wt' comes through Squeeze; {ONLY}",
    ),
    "another op": (viewed("Neg w>a; Transpose a>wt", weight(96, 64)), f"weight 'wt' comes through Neg; {ONLY}"),
    "quantized already": (
        viewed("DequantizeLinear w s>a; Transpose a>wt", weight(96, 64).astype(np.int8), s=np.array(0.5, F32)),
        "weight 'wt' is quantized already, by DequantizeLinear, and would be rounded twice; rewrite the model it "
        "was quantized from",
    ),
    "repeated along a batch that the activation lacks": (
        repeated("Expand w sizes>wide", W, (3, 64), (5, 3, 96), sizes=[5, 64, 96]),
        "the weight is repeated along a batch that the activation lacks; expand the result instead",
    ),
    # onnx infers nothing of a repeat at run time, so that the batch of the activation may be another
    "repeated at run time": (
        repeated(f"{SIZES}; Tile w sizes>wide", weight(1, 64, 96), rest=[1, 1]),
        "weight 'w' is repeated along dimensions that are not constant; expected constant ones; "
        "give the model shape information",
    ),
    "repeated along N": (
        repeated("Tile w sizes>wide", weight(1, 64, 96), (1, 3, 64), (1, 3, 192), sizes=[1, 1, 2]),
        f"weight 'wide' comes through Tile; {ONLY}",
    ),
    "repeated along K": (
        repeated("Tile w sizes>wide", weight(1, 64, 96), (2, 3, 128), (2, 3, 96), sizes=[2, 2, 1]),
        f"weight 'wide' comes through Tile; {ONLY}",
    ),
}  # fmt: skip


@looped("name", KEPT)
def test_a_weight_that_cannot_be_packed_is_kept_with_the_reason(name: str) -> None:
    proto, reason = KEPT[name]
    assert refusal(proto) == reason


def test_a_repeated_bias_is_not_absorbed() -> None:
    """It makes the result larger than the product: the product stays what it is, and so does the Add."""
    weights = {"w": W, "b": weight(96, seed=1), "sizes": np.array([5, 1, 96])}
    nodes = steps("Expand b sizes>bias; linear:MatMul x w>h; Add h bias>z; Neg z>y")
    rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, [5, "m", 96])}, weights))
    assert kinds(rewritten)["Add"] == 1
    assert run(rewritten, {"x": normal(3, 64)})[0].shape == (5, 3, 96)


# --- What several matmuls share: weights, embeddings, activations ---

IN, OUT = {"x": (F32, ["m", 64])}, (F32, ["m", 96])


def test_two_matmuls_on_one_weight_pack_it_once() -> None:
    nodes = steps("first:MatMul x w>a; Neg a>ya; second:MatMul z w>b; Neg b>yb")
    proto = model(nodes, {**IN, "z": IN["x"]}, {"ya": OUT, "yb": OUT}, {"w": W})
    rewritten, report = rewrite(proto)
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
    feeds = {"x": normal(3, 64), "z": normal(3, 64, seed=4)}
    for x, y in zip(feeds.values(), run(rewritten, feeds), strict=True):
        expect(x, W.T).then(np.negative).check(y)


def test_one_weight_used_both_ways_is_packed_along_each_k() -> None:
    nodes = steps("up:MatMul x w>a; Relu a>b; down:Gemm b w>c|transB=1; Neg c>y")
    rewritten, _ = rewrite(model(nodes, IN, {"y": (F32, ["m", 64])}, {"w": W}))
    assert [tuple(t.dims) for t in rewritten.graph.initializer] == [(96, 64), (96, 2), (64, 96), (64, 3)]


def test_a_weight_used_by_a_kept_site_too_stays_for_it() -> None:
    nodes = steps("quantized:MatMul x w>a; Neg a>ya; kept:MatMul x w>b; Abs b>yb")
    rewritten, report = rewrite(
        model(nodes, IN, {"ya": OUT, "yb": OUT}, {"w": W}), Recipe(name="mxfp8", exclude=("kept",))
    )
    x = normal(3, 64)
    assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
    assert reasons(report) == {"quantized": LINEAR, "kept": "excluded by 'kept'"}
    ya, yb = run(rewritten, {"x": x})
    expect(x, W.T).then(np.negative).check(ya)
    np.testing.assert_allclose(yb, np.abs(x.astype(float) @ W), rtol=1e-4, atol=1e-4)


def test_gemms_on_one_activation_share_its_quantize_node_unless_they_want_another_format() -> None:
    weights, x = {n: weight(64, 64, seed=i) for i, n in enumerate("qkv")}, normal(3, 64)
    products = "; ".join(f"{n}:MatMul x {n}>h{n}" for n in weights)
    proto = model(steps(f"{products}; Sum hq hk hv>s; Neg s>y"), IN, {"y": (F32, ["m", 64])}, weights)
    parts = [expect(x, w.T) for w in weights.values()]
    total = Expected(-sum(p.y for p in parts), sum(p.bound for p in parts))
    computes(proto, total, {"MXFP8Quantize": 1, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}, roundings=3, x=x)
    mixed = Recipe(name="mixed", rules=(Rule(name="k", activations="e5m2"),))
    assert kinds(rewrite(proto, mixed)[0]) == {"MXFP8Quantize": 2, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}
