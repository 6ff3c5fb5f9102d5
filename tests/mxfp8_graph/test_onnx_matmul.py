"""MatMul and Gemm in every form: which operand is static, vectors, stacks, transpositions, biases, products, dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import oracle
import pytest
from builders import gemm_model, matmul_model, model, neg_model, node, weight
from grids import looped, pairwise
from onnx import helper, numpy_helper
from oracle import (
    GEMM,
    Expected,
    computes,
    expect,
    initializers,
    kinds,
    normal,
    reasons,
    refusal,
    relu,
    rewrite,
    run,
)

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe, Rule
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


def form(
    x: np.ndarray,
    y: Expected,
    inputs: str = "x w",
    more: Any = (),
    *,
    op: str = "MatMul",
    w: Any = W,
    **rest: Any,
) -> tuple[onnx.ModelProto, np.ndarray, Expected, dict[str, int]]:
    """Returns y = -op(inputs), x, y and the nodes; the axes of x with 2, 3 or 5 values are of unknown size."""
    attributes = {name: value for name, value in rest.items() if not isinstance(value, np.ndarray)}
    stored = {name: value for name, value in rest.items() if isinstance(value, np.ndarray)}
    shape = [f"d{axis}" if size in {2, 3, 5} else size for axis, size in enumerate(x.shape)]
    proto = neg_model(op, shape, [None] * y.y.ndim, {"w": w, **stored}, inputs, **attributes)
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
def test_dynamic_batch_and_sequence_even_empty(shape: tuple[int, int]) -> None:
    x = normal(*shape, 64)
    computes(matmul_model(64, 96, bias=True), expect(x, W.T, B).then(relu), x=x)


def test_a_float16_activation_of_unknown_rank_loads_with_and_without_the_library() -> None:
    # ONNX Runtime takes the dtype of a custom op from its shape inference, which has no shape to give here.
    nodes = [node("Reshape", "x shape", "r"), node("MatMul", "r w", "m", "linear"), node("Relu", "m", "act")]
    w, x = weight(64, 64, dtype=F16), normal(4, 64).astype(F16)
    proto = model(
        [*nodes, node("Reshape", "act flat", "y")],
        {"x": (F16, [4, 64]), "shape": (np.int64, ["rank"])},
        {"y": (F16, [256])},
        {"w": w, "flat": np.array([-1])},
    )
    expected = expect(x.reshape(-1, 64), w.T, dtype="float16").then(lambda y: relu(y).reshape(-1))
    rewritten, report = computes(proto, expected, x=x, shape=np.array([2, 2, 64]))
    assert reasons(report) == {"linear": LINEAR}
    assert run(rewritten, {"x": x, "shape": np.array([2, 2, 64])})[0].dtype == F16


def test_the_transpose_in_front_of_a_right_activation_is_used_not_doubled() -> None:
    before = [node("Transpose", "x", "xt", perm=[0, 2, 1])]
    x = normal(2, 5, 64)
    proto = neg_model("MatMul", x.shape, [2, 96, 5], {"w": weight(96, 64)}, "w xt", before=before)
    product = expect(x, weight(96, 64)).then(lambda v: v.swapaxes(-1, -2)).then(np.negative)
    computes(proto, product, {**GEMM, "Transpose": 1, "Neg": 1}, x=x)


@looped("dtype", [F16, ml_dtypes.bfloat16])
def test_models_of_16_bits_keep_their_dtype(dtype: Any) -> None:
    w, x = weight(64, 96, dtype=dtype), normal(4, 64, dtype=dtype)
    proto = model([node("MatMul", "x w", "y")], {"x": (dtype, [4, 64])}, {"y": (dtype, [4, 96])}, {"w": w})
    rewritten, _ = rewrite(proto, Recipe(name="heads", output_projections=True))
    y = Session(rewritten, kernels=oracle.runtime.kernels).run({"x": x})["y"]  # which takes bfloat16
    assert y.dtype == dtype
    expect(x, w.T, dtype=np.dtype(dtype).name).check(y)


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
    before = [node("MatMul", "a b", "c", "folded")]
    proto = neg_model("MatMul", [4, 64], [4, 96], {"a": weight(64, 32), "b": weight(32, 96)}, "x c", before=before)
    with pytest.raises(NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto)
    assert [d.reason for d in caught.value.decisions] == [
        "both operands are constant; fold the constants of the model first",
        "weight 'c' comes through MatMul; expected only Identity, Transpose, Cast, Reshape, Squeeze, Unsqueeze, "
        "Split, Slice; fold the constants first",
    ]


def test_a_weight_that_a_caller_may_replace_is_kept_and_below_ir_version_4_it_is_static() -> None:
    proto = matmul_model(opset=8)
    proto.graph.input.append(helper.make_tensor_value_info("w", 1, [64, 96]))
    reason = "weight 'w' is also a graph input that a caller may replace; remove it from the inputs"
    assert refusal(proto) == reason
    proto.ir_version = 3
    onnx.checker.check_model(proto)
    rewritten, _ = computes(proto, expect(ROWS, W.T).then(relu), x=ROWS)
    assert [i.name for i in rewritten.graph.input] == ["x"]


@looped("order, shape", pairwise(order=["h b", "b h"], shape=[(96,), (1, 96), (1, 1, 96), (1,), ()]))
def test_a_following_add_of_a_value_per_column_is_absorbed_in_either_order(order: str, shape: Any) -> None:
    b = np.asarray(weight(*shape, seed=1), F32)
    nodes = [node("MatMul", "x w", "h", "linear"), node("Add", order, "s"), node("Neg", "s", "y")]
    proto = model(nodes, {"x": (F32, [2, "seq", 64])}, {"y": (F32, [2, "seq", 96])}, {"w": W, "b": b})
    _, report = computes(proto, expect(ROWS, W.T, b).then(np.negative), {**GEMM, "Neg": 1}, x=ROWS)
    assert report.sites[0].decision.site.has_bias


BATCHES, OF_BATCHES = normal(4, 3, 64), expect(normal(4, 3, 64), STACK.swapaxes(1, 2))
ADDENDS = {
    "a value per row": (ROWS, W, expect(ROWS, W.T), (5, 1)),
    "a value per element": (ROWS, W, expect(ROWS, W.T), (5, 96)),
    "a value per batch and column": (ROWS, W, expect(ROWS, W.T), (2, 1, 96)),
    "one dimension more": (ROWS, W, expect(ROWS, W.T), (1, 1, 1, 96)),
    "a value per column of each of a batch": (BATCHES, STACK, OF_BATCHES, (4, 1, 96)),
}


@looped("name", ADDENDS)
def test_any_other_addend_stays_an_add(name: str) -> None:
    x, w, product, shape = ADDENDS[name]
    b = weight(*shape, seed=1)
    nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
    y = plus(product, b).then(np.negative)
    proto = model(nodes, {"x": (F32, x.shape)}, {"y": (F32, y.y.shape)}, {"w": w, "b": b})
    computes(proto, y, {**GEMM, "Add": 1, "Neg": 1}, roundings=1, x=x)


def test_a_static_left_operand_with_a_bias_per_row_keeps_its_add() -> None:
    x = normal(2, 64, 8)
    y = plus(swapped(x, weight(96, 64)), weight(96, 1, seed=1)).then(relu)
    proto, nodes = matmul_model(64, 96, left=True, bias=True), {**GEMM, "Transpose": 2, "Add": 1, "Relu": 1}
    assert not computes(proto, y, nodes, roundings=1, x=x)[1].sites[0].decision.site.has_bias


@looped("second", ["output", "consumer", "subgraph"])
def test_a_product_that_is_used_elsewhere_keeps_its_add(second: str) -> None:
    nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
    if second == "consumer":
        nodes.append(node("Abs", "h", "z"))
    elif second == "subgraph":
        value = helper.make_empty_tensor_value_info("t")
        branch = helper.make_graph([node("Abs", "h", "t")], "branch", [], [value])
        nodes.append(helper.make_node("If", ["yes"], ["z"], "if", then_branch=branch, else_branch=branch))
    outputs = {"y": (F32, ["m", 96]), "h" if second == "output" else "z": (F32, ["m", 96])}
    weights = {"w": W, "b": B, **({"yes": np.array(True)} if second == "subgraph" else {})}
    recipe = Recipe(name="mxfp8", output_projections=True)
    rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, weights), recipe)
    x = normal(3, 64)
    assert kinds(rewritten)["Add"] == 1
    y, other = run(rewritten, {"x": x})
    exact = expect(x, W.T)
    (exact if second == "output" else exact.then(np.abs)).check(other)
    plus(exact, B).then(np.negative).check(y, roundings=1)


def test_a_bias_stored_after_the_matmul_is_there_when_the_gemm_runs() -> None:
    constant = helper.make_node("Constant", [], ["b"], value=numpy_helper.from_array(B))
    nodes = [node("MatMul", "x w", "h", "linear"), constant, node("Add", "h b", "s"), node("Neg", "s", "y")]
    proto, x = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, {"w": W}), normal(3, 64)
    computes(proto, expect(x, W.T, B).then(np.negative), {**GEMM, "Neg": 1}, x=x)


def test_a_16_bit_bias_is_added_in_float32() -> None:
    x, b = normal(2, 5, 64, dtype=F16), weight(96, seed=1, dtype=F16)
    y = expect(x, weight(64, 96, dtype=F16).T, b, dtype="float16").then(relu)
    rewritten, _ = computes(matmul_model(64, 96, bias=True, dtype=F16), y, x=x)
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales", "b_f32"]


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


@looped("shape", [(96,), (1, 96), (1,), (), (1, 1)])
def test_a_c_of_a_value_per_column_is_absorbed(shape: tuple[int, ...]) -> None:
    c, x = np.asarray(weight(*shape, seed=1), F32), normal(3, 64)
    proto, _, y, nodes = form(x, expect(x, W.T, c), "x w c", op="Gemm", c=c)
    computes(proto, y.then(np.negative), nodes, x=x)


@looped("shape, beta", [((3, 1), 1.0), ((3, 96), 0.5)])
def test_a_c_with_rows_stays_an_add(shape: tuple[int, ...], beta: float) -> None:
    c, x = weight(*shape, seed=1), normal(3, 64)
    proto = neg_model("Gemm", (3, 64), (3, 96), {"w": W, "c": c}, "x w c", beta=beta)
    y = plus(expect(x, W.T), c.astype(float) * beta).then(np.negative)
    rewritten, report = computes(proto, y, roundings=2, x=x)
    assert kinds(rewritten)["Add"] == 1
    assert not report.sites[0].decision.site.has_bias


def test_a_c_computed_at_run_time_stays_an_add() -> None:
    nodes = [node("Gemm", "x w c", "h", "linear", alpha=2.0, beta=3.0), node("Neg", "h", "y")]
    inputs = {"x": (F32, ["batch", 64]), "c": (F32, [96])}
    x, c = normal(3, 64), normal(96, seed=5)
    y = plus(expect(x, W.T * 2), 3.0 * c).then(np.negative)
    computes(model(nodes, inputs, {"y": (F32, ["batch", 96])}, {"w": W}), y, roundings=3, x=x, c=c)


@looped("trans_a, trans_b", pairwise(trans_a=[0, 1], trans_b=[0, 1]))
def test_a_gemm_with_a_static_left_operand(trans_a: int, trans_b: int) -> None:
    w, c, x = weight(*((64, 96) if trans_a else (96, 64))), weight(96, 1, seed=1), normal(3, 64)
    y = plus(expect(x, (w.T if trans_a else w) * F32(0.7)).then(np.transpose), c)
    x = x if trans_b else np.ascontiguousarray(x.T)
    proto, *_ = form(x, y, "w x c", op="Gemm", w=w, c=c, alpha=0.7, transA=trans_a, transB=trans_b)
    computes(proto, y.then(np.negative), roundings=1, x=x)


def test_gemm_operands_are_matrices_even_where_their_shape_is_unknown() -> None:
    nodes = [node("Reshape", "x shape", "x2"), node("Gemm", "x2 w", "h", "linear", transA=1), node("Neg", "h", "y")]
    inputs, x = {"x": (F32, [64, 3]), "shape": (np.int64, ["rank"])}, normal(64, 3)
    y = expect(x.T, W.T).then(np.negative)
    computes(model(nodes, inputs, {"y": (F32, [3, 96])}, {"w": W}), y, x=x, shape=np.array([64, 3]))


MATMULS, GEMMS = (Recipe(name="all", rules=(Rule(op=op),)) for op in ("MatMul", "Gemm"))


def product(op: str = "MatMul", a: Any = (2, 3, 64), b: Any = (2, 64, 40), y: Any = (2, 3, 40), **attributes: Any):
    nodes = [node(op, "a b", "h", "product", **attributes), node("Neg", "h", "y")]
    return model(nodes, {"a": (F32, a), "b": (F32, b)}, {"y": (F32, y)})


@looped("a_shape, b_shape", [((2, 3, 64), (2, 64, 40)), ((2, 1, 3, 64), (5, 64, 40))])
def test_a_rule_quantizes_both_operands_along_k(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    y = expect(a, b.swapaxes(-1, -2)).then(np.negative)
    nodes = {"Transpose": 1, "MXFP8Quantize": 2, "MXFP8Gemm": 1, "Neg": 1}
    computes(product(a=a_shape, b=b_shape, y=y.y.shape), y, nodes, MATMULS, a=a, b=b)


def test_a_rule_quantizes_a_tensor_times_itself() -> None:
    nodes, a = [node("MatMul", "a a", "h", "square"), node("Neg", "h", "y")], normal(64, 64)
    proto = model(nodes, {"a": (F32, [64, 64])}, {"y": (F32, [64, 64])})
    computes(proto, expect(a, a.T).then(np.negative), recipe=MATMULS, a=a)


@looped("trans_a, trans_b", pairwise(trans_a=[0, 1], trans_b=[0, 1]))
def test_a_rule_quantizes_both_operands_of_a_gemm_with_alpha(trans_a: int, trans_b: int) -> None:
    a_shape, b_shape = ((64, 3) if trans_a else (3, 64)), ((40, 64) if trans_b else (64, 40))
    proto = product("Gemm", a_shape, b_shape, (3, 40), transA=trans_a, transB=trans_b, alpha=0.3)
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    y = expect(a.T if trans_a else a, b if trans_b else b.T)
    computes(proto, Expected(-y.y * float(F32(0.3)), y.bound * 0.3001), recipe=GEMMS, roundings=1, a=a, b=b)


def test_a_product_that_is_kept_with_the_reason() -> None:
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
