"""MatMul and Gemm in every form: which operand is static, vectors, stacks, transpositions, biases, products, dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import oracle
import pytest
from grids import looped, pairwise
from models import choose, gemm_model, matmul_model, neg_model, node, steps, subgraph, text_model, value, weight
from onnx import helper, numpy_helper
from oracle import GEMM, Expected, computes, expect, initializers, kinds, normal, reasons, refusal, relu, rewrite, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe, Rule
from mxfp8_graph.onnx_pass.ops import VIEW_OPS
from mxfp8_graph.running.sessions import Session

F32, F16 = np.float32, np.float16
LINEAR = "linear, by recipe 'mxfp8'"
W, B, STACK = weight(64, 96), weight(96, seed=1), weight(4, 64, 96)

pytestmark = pytest.mark.usefixtures("runtime")


def swapped(x: np.ndarray, w: np.ndarray) -> Expected:
    """Returns what w [..., N, K] @ x [..., K, M] is, of which the gemm computes the transpose."""
    return expect(x.swapaxes(-1, -2), w).then(lambda v: v.swapaxes(-1, -2))


def plus(product: Expected, addend: np.ndarray) -> Expected:
    total = product.y + addend
    return Expected(total, np.broadcast_to(product.bound, total.shape))


Form = tuple[onnx.ModelProto, np.ndarray, Expected, dict[str, int]]


def form(x: np.ndarray, y: Expected, inputs: str = "x w", more: Any = (), *, w: Any = W) -> Form:
    """Returns y = -(MatMul of inputs), x, y and the nodes; the axes of x with 2, 3 or 5 values are of unknown size."""
    shape = [f"d{axis}" if size in {2, 3, 5} else size for axis, size in enumerate(x.shape)]
    proto = neg_model("MatMul", shape, [None] * y.y.ndim, {"w": w}, inputs)
    return proto, x, y, {**GEMM, "Neg": 1, **dict(more)}


ROWS, VECTOR, COLUMNS, TURNED = normal(2, 5, 64), normal(64), normal(4, 64, 3), {"Transpose": 2}
FORMS = {
    "a static right operand": form(ROWS, expect(ROWS, W.T)),
    "a static left operand": form(COLUMNS, swapped(COLUMNS, W.T), "w x", TURNED, w=W.T),
    "a vector times a matrix": form(VECTOR, expect(VECTOR, W.T)),
    "a matrix times a vector": form(VECTOR, expect(VECTOR, W.T), "w x", w=W.T),
    "a matrix per batch": form(normal(4, 3, 64), expect(normal(4, 3, 64), STACK.swapaxes(1, 2)), w=STACK),
    "a static left stack": form(COLUMNS, swapped(COLUMNS, STACK.swapaxes(1, 2)), "w x", TURNED, w=STACK.swapaxes(1, 2)),
    "a static left stack and a matrix": form(
        normal(64, 3), swapped(normal(64, 3), STACK.swapaxes(1, 2)), "w x", TURNED, w=STACK.swapaxes(1, 2)
    ),
    "a matrix and a stack": form(normal(3, 64), expect(normal(3, 64), STACK.swapaxes(1, 2)), w=STACK),
    "many heavy-tailed values": form(
        normal(4, 4096), expect(normal(4, 4096), normal(4096, 64, seed=3).T), w=normal(4096, 64, seed=3)
    ),
    **{
        f"K = {k}, a partial last block": form(normal(4, k), expect(normal(4, k), weight(k, 33).T), w=weight(k, 33))
        for k in (1, 31, 33, 70)
    },
}


@looped("name", FORMS)
def test_a_matmul_gives_the_product_of_its_quantized_operands(name: str) -> None:
    proto, x, product, nodes = FORMS[name]
    rewritten, report = computes(proto, product.then(np.negative), nodes, Recipe(name="mxfp8", min_dim=0), x=x)
    assert reasons(report) == {"linear": LINEAR}
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]


@looped("shape", [(0, 5), (3, 0), (1, 1), (7, 3)])
def test_a_dynamic_batch_and_sequence_may_be_empty(shape: tuple[int, int]) -> None:
    x = normal(*shape, 64)
    computes(matmul_model(64, 96, bias=True), expect(x, W.T, B).then(relu), x=x)


def test_the_transpose_in_front_of_a_right_activation_is_used_not_doubled() -> None:
    before = [node("Transpose", "x", "xt", perm=[0, 2, 1])]
    x = normal(2, 5, 64)
    proto = neg_model("MatMul", x.shape, [2, 96, 5], {"w": weight(96, 64)}, "w xt", before=before)
    product = expect(x, weight(96, 64)).then(lambda v: v.swapaxes(-1, -2)).then(np.negative)
    computes(proto, product, {**GEMM, "Transpose": 1, "Neg": 1}, x=x)


@looped("dtype", [F16, ml_dtypes.bfloat16])
def test_models_of_16_bits_keep_their_dtype(dtype: Any) -> None:
    proto, x = text_model("MatMul x w>y", dtype=dtype), normal(4, 64, dtype=dtype)
    rewritten, _ = rewrite(proto, Recipe(name="heads", output_projections=True))
    y = Session(rewritten, kernels=oracle.runtime.kernels).run({"x": x})["y"]  # which takes bfloat16
    assert y.dtype == dtype
    expect(x, weight(64, 96, dtype=dtype).T, dtype=np.dtype(dtype).name).check(y)


VECTOR_WEIGHT = "the static operand is a vector; expected a matrix"
KEPT = {
    "a vector on the right": (neg_model("MatMul", (8, 64), (8,), {"w": weight(64)}), VECTOR_WEIGHT),
    "a vector on the left": (neg_model("MatMul", (64, 8), (8,), {"w": weight(64)}, "w x"), VECTOR_WEIGHT),
    "K = 0": (
        neg_model("MatMul", ("batch", 0), ("batch", 96), {"w": np.zeros((0, 96), F32)}),
        "the weight is empty (shape [0, 96]); expected N and K above 0",
    ),
    "float64": (
        matmul_model(dtype=np.float64),
        "dtype double; expected float32, float16 or bfloat16; cast the model or give it shape information",
    ),
}


@looped("name", KEPT)
def test_a_matmul_that_cannot_be_packed_is_kept_with_the_reason(name: str) -> None:
    proto, reason = KEPT[name]
    assert refusal(proto) == reason


def test_a_constant_product_is_kept_with_the_reason() -> None:
    proto = text_model("folded:MatMul a b>c; linear:MatMul x c>h; Neg h>y", a=weight(64, 32), b=weight(32, 96))
    with pytest.raises(NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto)
    assert [d.reason for d in caught.value.decisions] == [
        "both operands are constant; fold the constants of the model first",
        f"weight 'c' comes through MatMul; expected only {', '.join(VIEW_OPS)}; fold the constants first",
    ]


# --- Biases ---

ADD, GEMM_C = "MatMul x w>h; Add h b>s", "Gemm x w b>s"
ADDENDS = [
    *((ADD, shape, True) for shape in ((96,), (1, 96), (1, 1, 96), (1,), ())),
    *(("MatMul x w>h; Add b h>s", shape, True) for shape in ((96,), (1,), ())),
    *((ADD, shape, False) for shape in ((5, 1), (5, 96), (2, 1, 96), (1, 1, 1, 96))),
    *((GEMM_C, shape, True) for shape in ((96,), (1, 96), (1,), (), (1, 1))),
    *((GEMM_C, shape, False) for shape in ((3, 1), (3, 96))),
]


@looped("nodes, shape, absorbed", ADDENDS)
def test_an_addend_is_absorbed_if_it_is_one_value_per_column_or_one_for_all(
    nodes: str, shape: tuple[int, ...], absorbed: bool
) -> None:
    b, x = np.asarray(weight(*shape, seed=1), F32), normal(3, 64) if nodes == GEMM_C else ROWS
    y = plus(expect(x, W.T), b).then(np.negative)
    proto = text_model(f"linear:{nodes}; Neg s>y", x.shape, y.y.shape, b=b)
    counts = {**GEMM, **({} if absorbed else {"Add": 1}), "Neg": 1}
    _, report = computes(proto, y, counts, roundings=2, x=x)
    assert report.sites[0].decision.site.has_bias == absorbed


def test_a_static_left_operand_with_a_bias_per_row_keeps_its_add() -> None:
    x = normal(2, 64, 8)
    y = plus(swapped(x, weight(96, 64)), weight(96, 1, seed=1)).then(relu)
    proto, nodes = matmul_model(64, 96, left=True, bias=True), {**GEMM, "Transpose": 2, "Add": 1, "Relu": 1}
    assert not computes(proto, y, nodes, roundings=1, x=x)[1].sites[0].decision.site.has_bias


READERS: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "the caller": ([], "h"),
    "another node": (steps("Abs h>z"), "z"),
    "a branch": ([choose("Abs h>t", "Abs h>t", "z")], "z"),
}


@looped("reader", READERS)
def test_a_product_that_something_else_reads_keeps_its_add(reader: str) -> None:
    more, output = READERS[reader]
    stored = {"b": B, **({"yes": np.array(True)} if reader == "a branch" else {})}
    nodes = [*steps("linear:MatMul x w>h; Add h b>s; Neg s>y"), *more]
    proto, x = text_model(nodes, outputs={output: (F32, ["m", 96])}, **stored), normal(3, 64)
    rewritten, _ = rewrite(proto, Recipe(name="mxfp8", output_projections=True))
    assert kinds(rewritten)["Add"] == 1
    y, other = run(rewritten, {"x": x})
    exact = expect(x, W.T)
    (exact if output == "h" else exact.then(np.abs)).check(other)
    plus(exact, B).then(np.negative).check(y, roundings=1)


def test_a_bias_stored_after_the_matmul_is_in_front_of_the_gemm() -> None:
    constant = node("Constant", "", "b", value=numpy_helper.from_array(B))
    product, *rest = steps("linear:MatMul x w>h; Add h b>s; Neg s>y")
    y = expect(normal(3, 64), W.T, B).then(np.negative)
    computes(text_model([product, constant, *rest]), y, {**GEMM, "Neg": 1}, x=normal(3, 64))


def test_a_16_bit_bias_is_added_in_float32() -> None:
    x, b = normal(2, 5, 64, dtype=F16), weight(96, seed=1, dtype=F16)
    y = expect(x, weight(64, 96, dtype=F16).T, b, dtype="float16").then(relu)
    rewritten, _ = computes(matmul_model(64, 96, bias=True, dtype=F16), y, x=x)
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales", "b_f32"]


# --- Gemm ---


@looped("trans_a, trans_b, factors", pairwise(trans_a=[0, 1], trans_b=[0, 1], factors=[(1.0, 1.0), (0.3, 1.7)]))
def test_a_gemm_is_packed_with_alpha_and_beta_in_its_weight_and_bias(
    trans_a: int, trans_b: int, factors: tuple[float, float]
) -> None:
    alpha, beta = factors
    proto = gemm_model(64, 96, transA=trans_a, transB=trans_b, alpha=alpha, beta=beta)
    x, w = normal(3, 64), weight(96, 64) if trans_b else W.T
    y = expect(x, w * F32(alpha), B * F32(beta)).then(relu)
    nodes = {**GEMM, **({"Transpose": 1} if trans_a else {}), "Relu": 1}
    _, report = computes(proto, y, nodes, x=np.ascontiguousarray(x.T) if trans_a else x)
    assert report.sites[0].decision.site.has_bias


def test_a_c_computed_at_run_time_stays_an_add() -> None:
    x, c = normal(3, 64), normal(96, seed=5)
    proto = text_model("linear:Gemm x w c>h|alpha=2.0 beta=3.0; Neg h>y", inputs={"c": (F32, [96])})
    computes(proto, plus(expect(x, W.T * 2), 3.0 * c).then(np.negative), roundings=3, x=x, c=c)


@looped("trans_a, trans_b", pairwise(trans_a=[0, 1], trans_b=[0, 1]))
def test_a_gemm_with_a_static_left_operand_is_transposed(trans_a: int, trans_b: int) -> None:
    w, c, x = weight(*((64, 96) if trans_a else (96, 64))), weight(96, 1, seed=1), normal(3, 64)
    y = plus(expect(x, (w.T if trans_a else w) * F32(0.7)).then(np.transpose), c)
    x = x if trans_b else np.ascontiguousarray(x.T)
    attributes = {"alpha": 0.7, "transA": trans_a, "transB": trans_b}
    proto = neg_model("Gemm", x.shape, y.y.shape, {"w": w, "c": c}, "w x c", **attributes)
    computes(proto, y.then(np.negative), roundings=1, x=x)


def test_operands_of_gemm_are_matrices_where_their_shape_is_unknown() -> None:
    text, shape = "Reshape x shape>x2; linear:Gemm x2 w>h|transA=1; Neg h>y", {"shape": (np.int64, ["rank"])}
    x = normal(64, 3)
    proto = text_model(text, (64, 3), (3, 96), inputs=shape)
    computes(proto, expect(x.T, W.T).then(np.negative), x=x, shape=np.array([64, 3]))


# --- Products of two activations ---

MATMULS, GEMMS = (Recipe(name="all", rules=(Rule(op=op),)) for op in ("MatMul", "Gemm"))


def product(
    op: str = "MatMul", a: Any = (2, 3, 64), b: Any = (2, 64, 40), y: Any = (2, 3, 40), **attributes: Any
) -> Any:
    """y = -op(x, b)."""
    nodes = [node(op, "x b", "h", "product", **attributes), node("Neg", "h", "y")]
    return text_model(nodes, a, y, inputs={"b": (F32, b)})


@looped("a_shape, b_shape", [((2, 3, 64), (2, 64, 40)), ((2, 1, 3, 64), (5, 64, 40))])
def test_a_rule_quantizes_both_operands_along_k(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    y = expect(a, b.swapaxes(-1, -2)).then(np.negative)
    nodes = {"Transpose": 1, "MXFP8Quantize": 2, "MXFP8Gemm": 1, "Neg": 1}
    computes(product(a=a_shape, b=b_shape, y=y.y.shape), y, nodes, MATMULS, x=a, b=b)


def test_a_rule_quantizes_a_tensor_times_itself() -> None:
    x = normal(64, 64)
    proto = text_model("square:MatMul x x>h; Neg h>y", (64, 64), (64, 64))
    computes(proto, expect(x, x.T).then(np.negative), recipe=MATMULS, x=x)


@looped("trans_a, trans_b", pairwise(trans_a=[0, 1], trans_b=[0, 1]))
def test_a_rule_quantizes_both_operands_of_a_gemm_with_alpha(trans_a: int, trans_b: int) -> None:
    a_shape, b_shape = ((64, 3) if trans_a else (3, 64)), ((40, 64) if trans_b else (64, 40))
    proto = product("Gemm", a_shape, b_shape, (3, 40), transA=trans_a, transB=trans_b, alpha=0.3)
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    y = expect(a.T if trans_a else a, b if trans_b else b.T)
    computes(proto, Expected(-y.y * float(F32(0.3)), y.bound * 0.3001), recipe=GEMMS, roundings=1, x=a, b=b)


def test_a_product_of_activations_is_kept_with_the_reason() -> None:
    assert refusal(product()) == (
        "both operands are computed at run time; add a rule with quantize: true to quantize it"
    )
    assert refusal(product(a=(64,), b=(64, 40), y=(40,)), MATMULS) == (
        "an operand's rank is unknown or below 2; give the model shape information"
    )
    weight_only = Recipe(name="wo", activations="unchanged", rules=(Rule(op="MatMul"),))
    assert refusal(product(), weight_only) == (
        "activations: unchanged, and this product has no static weight; set activations: e4m3 for it to quantize it"
    )


# --- Activations whose rank only a run knows ---

PRODUCT = "MatMul h w>p; Relu p>r"
LOOP_INPUTS = [value("i", np.int64, []), value("go", np.bool_, []), helper.make_empty_tensor_value_info("h")]
LOOP = subgraph(f"Identity go>on; {PRODUCT}", "on r", LOOP_INPUTS)
WAYS = {
    "by an input": steps(f"Reshape typed to>h; {PRODUCT}; Identity r>a"),
    "in a loop": [*steps("Reshape typed to>start"), node("Loop", "once yes start", "a", body=LOOP)],
    "in a branch": [*steps("Reshape typed to>h"), choose(PRODUCT, "Relu h>q", "a")],
}
"""Nodes from typed to a that give the activation h another rank."""


@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8", "mxint8-weight-only"])
@looped("way, dtype, fuse", pairwise(way=WAYS, dtype=[F32, F16], fuse=[False, True]))
def test_an_activation_of_unknown_rank_is_quantized(recipe: str, way: str, dtype: Any, fuse: bool) -> None:
    w, ends = weight(64, 64, dtype=dtype), {"inputs": {"to": (np.int64, ["rank"])}, "once": 1, "yes": True}
    last = steps("Reshape a flat>b; Cast b>y|to=1")
    cast = node("Cast", "x", "typed", to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    proto = text_model([cast, *WAYS[way], *last], y=("n",), w=w, flat=[-1], **ends)
    rewritten, report = rewrite(proto, recipe, fuse=fuse)
    assert [site.decision.quantize for site in report.sites] == [True]
    formats, rounding = (("int8", "int8"), "floor") if "int8" in recipe else (("e4m3", "e4m3"), "ceil")
    settings: Any = {"formats": formats, "scale_rounding": rounding, "weight_only": recipe.endswith("weight-only")}
    x = normal(6, 64).astype(dtype)
    for shape in ((6, 64), (2, 3, 64), (1, 2, 3, 64)):
        y = expect(x.reshape(shape), w.T, dtype=np.dtype(dtype).name, **settings).then(relu).then(np.ravel)
        y.check(run(rewritten, {"x": x.astype(F32), "to": np.array(shape)})[0])
