"""Weights behind views, repeated along the batch, in Constant nodes and shared: packed as the matmuls read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from grids import looped
from models import Shape, node, read_by, steps, text_model, value, weight
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from oracle import GEMM, Expected, computes, expect, initializers, kinds, normal, reasons, refusal, rewrite, run

from mxfp8_graph import Recipe, Rule
from mxfp8_graph.onnx_pass.ops import VIEW_OPS

F32, F16 = np.float32, np.float16
LINEAR = "linear, by recipe 'mxfp8'"
X, W, OUT = normal(3, 64), weight(64, 96), (F32, ["m", 96])
NEG = {**GEMM, "Neg": 1}

pytestmark = pytest.mark.usefixtures("runtime")

NUMBERS = {
    "shape": [64, -1], "matrix": [64, 96], "turned": [96, 64], "ones": [1, 1], "fives": [5, 1, 1],
    "stack": [5, 4, 64, 96], "axis": [0], "copy": [0, -1], "end": [-1], "one": [1], "two": [2], "fifty": [50],
    "end_of_66": [66], "minus_99": [-99], "minus_3": [-3],
}  # fmt: skip
"""Shapes, axes and places that views read."""


def viewed(views: str, w: np.ndarray, x: Shape = ("m", 64), n: int = 96, **more: Any) -> onnx.ModelProto:
    """y = -(x @ wt), with views that make wt of w."""
    nodes = steps(f"{views}; linear:MatMul x wt>h; Neg h>y")
    used = {name: numbers for name, numbers in NUMBERS.items() if name in read_by(nodes)}
    return text_model(nodes, x, [*x[:-1], n], w=w, **used, **more)


def repeat(rest: str, to: str = "wt", w: str = "w") -> str:
    """Returns views that repeat w as often as x has batches."""
    return f"Shape x>batch|start=0 end=1; Concat batch {rest}>sizes|axis=0; Expand {w} sizes>{to}"


TURNED, TALL, ROWS, FIVES = weight(96, 64), weight(1, 64, 96), ("b", 3, 64), (5, 3, 64)
VIEWS: dict[str, tuple[np.ndarray, Shape]] = {
    "Identity w>wt": (W, ("m", 64)),
    "Transpose w>wt|perm=[1,0]": (TURNED, ("m", 64)),
    "Transpose w>wt": (TURNED, ("m", 64)),
    "Transpose w>a; Transpose a>wt": (W, ("m", 64)),
    "Cast w>wt|to=1": (W.astype(F16), ("m", 64)),
    "Cast w>a|to=10; Cast a>wt|to=1": (W, ("m", 64)),
    "Cast w>a|to=1; Identity a>wt": ((W * 300).astype(np.int8), ("m", 64)),
    "Transpose w>a; Reshape a shape>wt": (W, ("m", 64)),
    "Reshape w copy>wt": (weight(64, 4, 24), ("m", 64)),
    "Unsqueeze w end>a; Squeeze a end>wt": (W, ("m", 64)),
    "Squeeze w>wt": (weight(1, 64, 1, 96), ("m", 64)),
    "Unsqueeze w axis>a; Transpose a>b|perm=[0,2,1]; Squeeze b axis>wt": (TURNED, ("m", 64)),
    "Slice w two end_of_66>wt": (weight(68, 96), ("m", 64)),
    "Slice w minus_99 minus_3 end>a; Transpose a>b; Transpose b>wt": (weight(64, 99), ("m", 64)),
    "Transpose w>a|perm=[2,1,0]; Reshape a shape>wt": (weight(96, 4, 16), ("m", 64)),
    repeat("matrix"): (W, ROWS),
    repeat("ones"): (W, ROWS),
    repeat("matrix", w="w "): (TALL, ROWS),
    f"{repeat('turned', 'a')}; Transpose a>wt|perm=[0,2,1]": (TURNED, ROWS),
    f"Transpose w>a; {repeat('matrix', w='a')}": (TURNED, ROWS),
    f"{repeat('matrix', 'a')}; Cast a>wt|to=1": (W.astype(F16), ROWS),
    "Expand w fives>wt": (TALL, FIVES),
    "Tile w fives>wt": (TALL, FIVES),
    "Expand w stack>wt": (weight(4, 64, 96), (5, 4, 3, 64)),
}


@looped("views", VIEWS)
def test_a_weight_behind_views_is_packed_as_the_matmul_reads_it(views: str) -> None:
    w, shape = VIEWS[views]
    proto, x = viewed(views, w, shape), normal(*({"m": 3, "b": 2}.get(str(size), size) for size in shape))
    seen = viewed(views, w, shape)
    seen.graph.output[0].name = "wt"
    (wt,) = ReferenceEvaluator(seen).run(["wt"], {"x": x})
    rewritten, report = computes(proto, expect(x, np.ascontiguousarray(wt.swapaxes(-1, -2))).then(np.negative), x=x)
    assert {op: n for op, n in kinds(rewritten).items() if op not in {"Shape", "Concat"}} == NEG
    assert not {"w", "wt"} & {*initializers(rewritten)}
    assert reasons(report) == {"linear": LINEAR}
    assert w.dtype != F32 or w.size > wt.size or report.sites[0].decision.site.weight_bytes == w.nbytes


def replaceable(views: str, w: np.ndarray) -> onnx.ModelProto:
    """Returns the model with its weight as an input, too."""
    proto = viewed(views, w)
    proto.graph.input.append(value("w", w.dtype, w.shape))
    return proto


ONLY = f"expected only {', '.join(VIEW_OPS)}; fold the constants first"
EMPTY = {"none": np.zeros(0, np.int64), "huge": np.array([2**60, 0]), "zero": np.array([0])}
KEPT = {
    "a slice that ends before it starts": (
        viewed("Slice w fifty one one>wt", W, n=0), "the weight is empty (shape [64, 0]); expected N and K above 0",
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
        viewed("Reshape none huge>a|allowzero=1; Reshape a zero>axes|allowzero=1; Squeeze w axes>wt", W, **EMPTY),
        f"weight 'wt' comes through Squeeze; {ONLY}",
    ),
    "another op": (viewed("Neg w>a; Transpose a>wt", TURNED), f"weight 'wt' comes through Neg; {ONLY}"),
    "quantized already": (
        viewed("DequantizeLinear w s>a; Transpose a>wt", TURNED.astype(np.int8), s=np.array(0.5, F32)),
        "weight 'wt' is quantized already, by DequantizeLinear, and would be rounded twice; rewrite the model it "
        "was quantized from",
    ),
    "decoded from codes": (
        viewed(
            "Cast w>c|to=1; Cast zero>z|to=1; Sub c z>d; Mul d s>e; Transpose e>wt", TURNED.astype(np.int8),
            zero=np.zeros((96, 1), np.uint8), s=np.ones((96, 1), F32),
        ),
        "weight 'wt' is quantized already, by Mul, and would be rounded twice; rewrite the model it "
        "was quantized from",
    ),
    "multiplied by a mask": (
        viewed("Cast mask>m|to=1; Mul w m>a; Transpose a>wt", TURNED, mask=np.ones((96, 64), np.uint8)),
        f"weight 'wt' comes through Mul; {ONLY}",
    ),
    "a view of what a caller may replace": (
        replaceable("Transpose w>a; Identity a>wt", TURNED),
        "weight 'w' is also a graph input that a caller may replace; remove it from the inputs: "
        "python -m onnxruntime.tools.remove_initializer_from_input --input MODEL --output NEW_MODEL",
    ),
    "repeated along a batch that the activation lacks": (
        text_model("Expand w sizes>wt; MatMul x wt>h; Neg h>y", (3, 64), (5, 3, 96), sizes=[5, 64, 96]),
        "the weight is repeated along a batch that the activation lacks; expand the result instead",
    ),
    # onnx infers nothing of a repeat at run time, so that the batch of the activation may be another
    "repeated at run time": (
        viewed(repeat("ones").replace("Expand", "Tile"), TALL, ROWS),
        "weight 'w' is repeated along dimensions that are not constant; expected constant ones; "
        "give the model shape information",
    ),
    "repeated along N": (
        viewed("Tile w sizes>wt", TALL, (1, 3, 64), 192, sizes=[1, 1, 2]), f"weight 'wt' comes through Tile; {ONLY}",
    ),
    "repeated along K": (
        viewed("Tile w sizes>wt", TALL, (2, 3, 128), sizes=[2, 2, 1]), f"weight 'wt' comes through Tile; {ONLY}",
    ),
}  # fmt: skip


@looped("name", KEPT)
def test_a_weight_that_cannot_be_packed_is_kept_with_the_reason(name: str) -> None:
    proto, reason = KEPT[name]
    assert refusal(proto) == reason


def split_model(split: str, w: np.ndarray, ends: list[int], part: str, **more: Any) -> onnx.ModelProto:
    """Returns y0 = -(x @ part0) and so on, for parts of N columns that a Split of w gives."""
    products = "; ".join(f"part{i}:MatMul x {part}{i}>h{i}; Neg h{i}>y{i}" for i in range(len(ends)))
    outputs = {f"y{i}": (F32, ["m", n]) for i, n in enumerate(ends)}
    proto = text_model(f"Identity x>y; {split}; {products}", y=("m", 64), outputs=outputs, w=w, **more)
    del proto.graph.output[0], proto.graph.node[0]
    return proto


SPLIT = "; Transpose w0>t0; Transpose w1>t1"
SPLITS = {
    "by sizes": (f"Split w sizes>w0 w1|axis=0{SPLIT}", 0, [64, 96], "t", {"sizes": [64, 96]}),
    "in equal parts": (f"Split w>w0 w1|axis=0 num_outputs=2{SPLIT}", 0, [80, 80], "t", {}),
    "as ONNX Runtime splits uneven parts": (
        "Split w>w0 w1 w2|axis=1 num_outputs=3",
        1,
        [54, 54, 52],
        "w",
        {"opset": 18},
    ),
}


@looped("name", SPLITS)
def test_each_part_of_a_split_weight_is_packed_alone(name: str) -> None:
    """torch's exporter splits the packed projections of cross attention."""
    text, axis, ends, part, more = SPLITS[name]
    w = weight(64, 160) if axis else weight(160, 64)
    rewritten, report = rewrite(split_model(text, w, ends, part, **more))
    assert reasons(report) == {f"part{i}": LINEAR for i in range(len(ends))}
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": len(ends), "Neg": len(ends)}
    assert not {"w", "sizes"} & set(initializers(rewritten))
    parts = np.split(w.T if axis else w, np.cumsum(ends)[:-1])
    for each, result in zip(parts, run(rewritten, {"x": X}), strict=True):
        expect(X, each).then(np.negative).check(result)


def test_a_part_or_a_view_that_another_node_reads_stays() -> None:
    nodes = "Split w>w0 w1|axis=1 num_outputs=2; linear:MatMul x w0>h; Neg h>y; Abs w1>z"
    proto = text_model(nodes, y=("m", 48), outputs={"z": (F32, [64, 48])})
    computes(proto, expect(X, W[:, :48].T).then(np.negative), {"Split": 1, **NEG, "Abs": 1}, x=X)
    nodes = "Transpose w>wt; linear:MatMul x wt>h; Neg h>y; Abs wt>z"
    rewritten, _ = rewrite(text_model(nodes, outputs={"z": (F32, [64, 96])}, w=TURNED))
    assert kinds(rewritten) == {"Transpose": 1, **NEG, "Abs": 1}
    assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
    assert np.array_equal(run(rewritten, {"x": X})[1], np.abs(TURNED.T))


def test_weights_and_shapes_in_constant_nodes_are_read() -> None:
    constants = [node("Constant", "", "w", value=numpy_helper.from_array(TURNED))]
    constants += [node("Constant", "", "shape", value_ints=[64, 96])]
    proto = text_model([*constants, *steps("Reshape w shape>wt; MatMul x wt>h; Neg h>y")])
    computes(proto, expect(X, TURNED.reshape(64, 96).T).then(np.negative), NEG, x=X)


def test_a_repeated_bias_is_not_absorbed() -> None:
    """It makes the result larger than the product: the product and the Add stay as they are."""
    text = "Expand b sizes>bias; linear:MatMul x w>h; Add h bias>z; Neg z>y"
    rewritten, _ = rewrite(text_model(text, y=(5, "m", 96), b=weight(96, seed=1), sizes=[5, 1, 96]))
    assert kinds(rewritten)["Add"] == 1
    assert run(rewritten, {"x": X})[0].shape == (5, 3, 96)


# --- What several matmuls share: weights and activations ---


def test_a_weight_of_two_matmuls_is_packed_once() -> None:
    text = "first:MatMul x w>a; Neg a>y; second:MatMul z w>b; Neg b>yb"
    rewritten, report = rewrite(text_model(text, inputs={"z": (F32, ["m", 64])}, outputs={"yb": OUT}))
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
    feeds = {"x": X, "z": normal(3, 64, seed=4)}
    for x, y in zip(feeds.values(), run(rewritten, feeds), strict=True):
        expect(x, W.T).then(np.negative).check(y)


def test_a_weight_that_is_read_both_ways_is_packed_along_each_k() -> None:
    text = "up:MatMul x w>a; Relu a>b; down:Gemm b w>c|transB=1; Neg c>y"
    rewritten, _ = rewrite(text_model(text, y=("m", 64)))
    assert [tuple(t.dims) for t in rewritten.graph.initializer] == [(96, 64), (96, 2), (64, 96), (64, 3)]


def test_a_weight_that_a_kept_site_reads_stays_for_it() -> None:
    text = "quantized:MatMul x w>a; Neg a>y; kept:MatMul x w>b; Abs b>yb"
    rewritten, report = rewrite(text_model(text, outputs={"yb": OUT}), Recipe(name="mxfp8", exclude=("kept",)))
    assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
    assert reasons(report) == {"quantized": LINEAR, "kept": "excluded by 'kept'"}
    y, yb = run(rewritten, {"x": X})
    expect(X, W.T).then(np.negative).check(y)
    np.testing.assert_allclose(yb, np.abs(X.astype(float) @ W), rtol=1e-4, atol=1e-4)


def test_gemms_on_one_activation_share_its_quantize_node_if_they_have_one_format() -> None:
    weights = {n: weight(64, 64, seed=i) for i, n in enumerate("qkv")}
    products = "; ".join(f"{n}:MatMul x {n}>h{n}" for n in weights)
    proto = text_model(f"{products}; Sum hq hk hv>s; Neg s>y", y=("m", 64), **weights)
    parts = [expect(X, w.T) for w in weights.values()]
    total = Expected(-sum(p.y for p in parts), sum(p.bound for p in parts))
    computes(proto, total, {"MXFP8Quantize": 1, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}, roundings=3, x=X)
    mixed = Recipe(name="mixed", rules=(Rule(name="k", activations="e5m2"),))
    assert kinds(rewrite(proto, mixed)[0]) == {"MXFP8Quantize": 2, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}
