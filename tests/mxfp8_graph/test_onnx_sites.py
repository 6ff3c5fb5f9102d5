"""Every form in which a matmul appears: what it becomes, why, and what it computes."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import oracle
import pytest
from builders import gemm_model, matmul_model, model, node, weight
from onnx import helper, numpy_helper
from oracle import Expected, check_well_formed, expect, initializers, kinds, normal, reasons, relu

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe, Rule

F32 = np.float32
LINEAR = "linear, by recipe 'mxfp8'"


@pytest.fixture(autouse=True, params=[False, True], ids=["bodies", "kernels"])
def kernels(request: Any, monkeypatch: Any) -> None:
    """Every form must run by its function bodies and by our kernels."""
    monkeypatch.setitem(globals(), "run", functools.partial(oracle.run, kernels=request.param))


run = oracle.run


def rewrite(proto: onnx.ModelProto, recipe: Any = "mxfp8") -> tuple[onnx.ModelProto, Any]:
    rewritten, report = mxfp8_graph.rewrite(proto, recipe)
    check_well_formed(rewritten)
    return rewritten, report


def refusal(proto: onnx.ModelProto, recipe: Any = "mxfp8") -> str:
    """Returns the reason of the only site of a model in which nothing is eligible."""
    with pytest.raises(NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto, recipe)
    (decision,) = caught.value.decisions
    return decision.reason


def neg_model(op: str, x: tuple[Any, ...], y: tuple[Any, ...], weights: dict[str, Any], inputs: str = "x w", **kw: Any):
    """y = -op(x, ...): a matmul that is not an output projection."""
    dtype = kw.pop("dtype", F32)
    before, opset = kw.pop("before", []), kw.pop("opset", 21)
    nodes = [*before, node(op, inputs, "h", "linear", **kw), node("Neg", "h", "y", "neg")]
    return model(nodes, {"x": (dtype, x)}, {"y": (dtype, y)}, weights, opset=opset)


class TestMatMul:
    def test_a_static_right_operand_becomes_quantize_and_gemm(self):
        proto = matmul_model(64, 96)
        rewritten, report = rewrite(proto)
        x, w = normal(2, 5, 64), weight(64, 96)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1}
        assert reasons(report) == {"linear": LINEAR}
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        expect(x, w.T).then(relu).check(run(rewritten, {"x": x})[0])

    def test_a_static_left_operand_is_computed_transposed(self):
        rewritten, report = rewrite(matmul_model(64, 96, left=True))
        x, w = normal(2, 64, 8), weight(96, 64)
        assert kinds(rewritten) == {"Transpose": 2, "MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1}
        assert reasons(report) == {"linear": LINEAR}
        swapped = expect(x.swapaxes(-1, -2), w)
        swapped.then(lambda v: relu(v.swapaxes(-1, -2))).check(run(rewritten, {"x": x})[0])

    def test_a_left_operand_with_a_bias_per_row_keeps_its_add(self):
        rewritten, report = rewrite(matmul_model(64, 96, left=True, bias=True))
        x, w, b = normal(2, 64, 8), weight(96, 64), weight(96, 1, seed=1)
        assert kinds(rewritten) == {"Transpose": 2, "MXFP8Quantize": 1, "MXFP8Gemm": 1, "Add": 1, "Relu": 1}
        assert not report.sites[0].decision.site.has_bias
        y = expect(x.swapaxes(-1, -2), w).then(lambda v: v.swapaxes(-1, -2))
        y = Expected(y.y + b, y.bound).then(relu)
        y.check(run(rewritten, {"x": x})[0], roundings=1)

    def test_the_transpose_in_front_of_a_right_activation_is_used_not_doubled(self):
        nodes = [
            node("Transpose", "x", "xt", perm=[0, 2, 1]),
            node("MatMul", "w xt", "h", "linear"),
            node("Neg", "h", "y"),
        ]
        proto = model(nodes, {"x": (F32, [2, 5, 64])}, {"y": (F32, [2, 96, 5])}, {"w": weight(96, 64)})
        rewritten, _ = rewrite(proto)
        x = normal(2, 5, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Transpose": 1, "Neg": 1}
        y = expect(x, weight(96, 64)).then(lambda v: v.swapaxes(-1, -2)).then(np.negative)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_vector_times_a_matrix(self):
        proto = neg_model("MatMul", (64,), (96,), {"w": weight(64, 96)})
        rewritten, _ = rewrite(proto)
        x = normal(64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(64, 96).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_matrix_times_a_vector_needs_no_transpose(self):
        proto = neg_model("MatMul", (64,), (96,), {"w": weight(96, 64)}, "w x")
        rewritten, _ = rewrite(proto)
        x = normal(64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(96, 64)).then(np.negative).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("inputs", ["x w", "w x"])
    def test_a_vector_weight_is_kept_with_the_reason(self, inputs):
        x, y = ((8, 64), (8,)) if inputs == "x w" else ((64, 8), (8,))
        reason = refusal(neg_model("MatMul", x, y, {"w": weight(64)}, inputs))
        assert reason == "the static operand is a vector; expected a matrix"

    @pytest.mark.parametrize("k", [1, 31, 33, 70, 100])
    def test_any_k_a_partial_last_block_counts_as_zero_padded(self, k):
        recipe = Recipe(name="mxfp8", min_dim=0)
        rewritten, _ = rewrite(neg_model("MatMul", (4, k), (4, 33), {"w": weight(k, 33)}), recipe)
        x = normal(4, k)
        expect(x, weight(k, 33).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_an_accumulation_over_many_heavy_tailed_values_stays_within_the_bound(self):
        rewritten, _ = rewrite(neg_model("MatMul", (4, 4096), (4, 64), {"w": normal(4096, 64, seed=3)}))
        x = normal(4, 4096)
        expect(x, normal(4096, 64, seed=3).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (7, 3)])
    def test_dynamic_batch_and_sequence_even_empty(self, shape):
        rewritten, _ = rewrite(matmul_model(64, 96, bias=True))
        x = normal(*shape, 64)
        y = expect(x, weight(64, 96).T, weight(96, seed=1)).then(relu)
        y.check(run(rewritten, {"x": x})[0])

    def test_k_0_is_kept_with_the_reason(self):
        reason = refusal(neg_model("MatMul", ("batch", 0), ("batch", 96), {"w": np.zeros((0, 96), F32)}))
        assert reason == "the weight is empty (shape [0, 96]); expected N and K above 0"

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_16_bit_models_keep_their_dtype(self, dtype):
        nodes = [node("MatMul", "x w", "y", "linear")]
        weights = {"w": weight(64, 96, dtype=dtype)}
        proto = model(nodes, {"x": (dtype, [4, 64])}, {"y": (dtype, [4, 96])}, weights)
        rewritten, _ = rewrite(proto, Recipe(name="heads", output_projections=True))
        x = normal(4, 64, dtype=dtype)
        (gemm,) = [n for n in rewritten.graph.node if n.op_type == "MXFP8Gemm"]
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        assert {a.name: a.i for a in gemm.attribute} == {"output_dtype": code}
        y = expect(x, weights["w"].T, dtype=np.dtype(dtype).name)
        # ONNX Runtime's Python takes no bfloat16 arrays.
        y.check(run(rewritten, {"x": x})[0] if dtype is np.float16 else _run_bf16(rewritten, x))

    def test_float64_is_kept_with_the_reason(self):
        reason = refusal(matmul_model(dtype=np.float64))
        assert (
            reason == "dtype double; expected float32, float16 or bfloat16; cast the model or give it shape information"
        )

    def test_a_constant_product_is_kept_with_the_reason(self):
        nodes = [node("MatMul", "a b", "c", "folded"), node("MatMul", "x c", "h", "linear"), node("Neg", "h", "y")]
        weights = {"a": weight(64, 32), "b": weight(32, 96)}
        proto = model(nodes, {"x": (F32, [4, 64])}, {"y": (F32, [4, 96])}, weights)
        with pytest.raises(NothingEligibleError) as caught:
            mxfp8_graph.rewrite(proto)
        assert [d.reason for d in caught.value.decisions] == [
            "both operands are constant; fold the constants of the model first",
            "weight 'c' comes through MatMul; expected only Identity, Transpose, Cast, Reshape, Squeeze, Unsqueeze; "
            "fold the constants first",
        ]


def _run_bf16(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Runs a bfloat16 model by casting at its ends, which is exact."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = proto.graph
    for value, new in ((graph.input[0], "x_f32"), (graph.output[0], "y_f32")):
        value.name, value.type.tensor_type.elem_type = new, onnx.TensorProto.FLOAT
    nodes = [node("Cast", "x_f32", "x", to=onnx.TensorProto.BFLOAT16), *graph.node, node("Cast", "y", "y_f32", to=1)]
    del graph.node[:]
    graph.node.extend(nodes)
    return run(proto, {"x_f32": x.astype(F32)})[0]


class TestBatchedWeights:
    def test_a_weight_per_batch_entry_as_experts_have(self):
        w = weight(4, 64, 96)
        rewritten, _ = rewrite(neg_model("MatMul", (4, "batch", 64), (4, "batch", 96), {"w": w}))
        x = normal(4, 3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, w.swapaxes(-1, -2)).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_static_left_stack(self):
        w = weight(4, 96, 64)
        rewritten, _ = rewrite(neg_model("MatMul", (4, 64, "batch"), (4, 96, "batch"), {"w": w}, "w x"))
        x = normal(4, 64, 3)
        y = expect(x.swapaxes(-1, -2), w).then(lambda v: v.swapaxes(-1, -2)).then(np.negative)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_static_left_stack_broadcasts_over_a_matrix(self):
        w = weight(4, 96, 64)
        rewritten, _ = rewrite(neg_model("MatMul", (64, "batch"), (4, 96, "batch"), {"w": w}, "w x"))
        x = normal(64, 3)
        y = expect(x.T, w).then(lambda v: v.swapaxes(-1, -2)).then(np.negative)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_matrix_broadcasts_over_the_stack(self):
        w = weight(4, 64, 96)
        rewritten, _ = rewrite(neg_model("MatMul", ("batch", 64), (4, "batch", 96), {"w": w}))
        x = normal(3, 64)
        expect(x, w.swapaxes(-1, -2)).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_bias_per_batch_entry_stays_an_add(self):
        w, b = weight(4, 64, 96), weight(4, 1, 96, seed=1)
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, [4, "n", 64])}, {"y": (F32, [4, "n", 96])}, {"w": w, "b": b})
        rewritten, _ = rewrite(proto)
        x = normal(4, 3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Add": 1, "Neg": 1}
        y = expect(x, w.swapaxes(-1, -2))
        Expected(-(y.y + b), y.bound).check(run(rewritten, {"x": x})[0], roundings=1)


class TestGemm:
    @pytest.mark.parametrize("trans_a", [0, 1])
    @pytest.mark.parametrize("trans_b", [0, 1])
    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.3, 1.7)])
    def test_every_transposition_with_alpha_and_beta_folded(self, trans_a, trans_b, alpha, beta):
        proto = gemm_model(64, 96, transA=trans_a, transB=trans_b, alpha=alpha, beta=beta)
        rewritten, report = rewrite(proto)
        x = normal(3, 64)
        w = weight(96, 64) if trans_b else weight(64, 96).T
        assert kinds(rewritten) == {
            **({"Transpose": 1} if trans_a else {}),
            "MXFP8Quantize": 1,
            "MXFP8Gemm": 1,
            "Relu": 1,
        }
        assert report.sites[0].decision.site.has_bias
        y = expect(x, w * F32(alpha), weight(96, seed=1) * F32(beta)).then(relu)
        y.check(run(rewritten, {"x": np.ascontiguousarray(x.T) if trans_a else x})[0])

    @pytest.mark.parametrize("shape", [(96,), (1, 96), (1,), (), (1, 1)])
    def test_a_bias_per_column_is_absorbed(self, shape):
        c = np.asarray(weight(*shape, seed=1), F32)
        proto = neg_model("Gemm", ("batch", 64), ("batch", 96), {"w": weight(64, 96), "c": c}, "x w c")
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(64, 96).T, c).then(np.negative).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("shape", [(3, 1), (3, 96)])
    @pytest.mark.parametrize("beta", [1.0, 0.5])
    def test_a_c_with_rows_stays_an_add(self, shape, beta):
        c = weight(*shape, seed=1)
        proto = neg_model("Gemm", (3, 64), (3, 96), {"w": weight(64, 96), "c": c}, "x w c", beta=beta)
        rewritten, report = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten)["Add"] == 1
        assert not report.sites[0].decision.site.has_bias
        y = expect(x, weight(64, 96).T)
        Expected(-(y.y + c.astype(float) * beta), y.bound).check(run(rewritten, {"x": x})[0], roundings=2)

    def test_a_c_computed_at_run_time_stays_an_add(self):
        nodes = [node("Gemm", "x w c", "h", "linear", alpha=2.0, beta=3.0), node("Neg", "h", "y")]
        inputs = {"x": (F32, ["batch", 64]), "c": (F32, [96])}
        rewritten, _ = rewrite(model(nodes, inputs, {"y": (F32, ["batch", 96])}, {"w": weight(64, 96)}))
        x, c = normal(3, 64), normal(96, seed=5)
        y = expect(x, weight(64, 96).T * 2)
        Expected(-(y.y + 3.0 * c), y.bound).check(run(rewritten, {"x": x, "c": c})[0], roundings=3)

    @pytest.mark.parametrize("trans_a", [0, 1])
    @pytest.mark.parametrize("trans_b", [0, 1])
    def test_a_static_left_operand(self, trans_a, trans_b):
        w = weight(*((64, 96) if trans_a else (96, 64)))
        x_shape = ("batch", 64) if trans_b else (64, "batch")
        proto = neg_model(
            "Gemm",
            x_shape,
            (96, "batch"),
            {"w": w, "c": weight(96, 1, seed=1)},
            "w x c",
            alpha=0.7,
            transA=trans_a,
            transB=trans_b,
        )
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        y = expect(x, (w.T if trans_a else w) * F32(0.7)).then(np.transpose)
        actual = run(rewritten, {"x": x if trans_b else np.ascontiguousarray(x.T)})[0]
        Expected(-(y.y + weight(96, 1, seed=1)), y.bound).check(actual, roundings=1)

    def test_gemm_operands_are_matrices_even_where_their_shape_is_unknown(self):
        nodes = [
            node("Reshape", "x shape", "x2"),
            node("Gemm", "x2 w", "h", "linear", transA=1),
            node("Neg", "h", "y"),
        ]
        inputs = {"x": (F32, [64, 3]), "shape": (np.int64, ["rank"])}
        rewritten, _ = rewrite(model(nodes, inputs, {"y": (F32, [3, 96])}, {"w": weight(64, 96)}))
        x = normal(64, 3)
        y = expect(x.T, weight(64, 96).T).then(np.negative)
        y.check(run(rewritten, {"x": x, "shape": np.array([64, 3])})[0])


class TestBias:
    @pytest.mark.parametrize("order", ["h b", "b h"])
    @pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (1,), ()])
    def test_a_following_add_is_absorbed_in_either_order(self, order, shape):
        b = np.asarray(weight(*shape, seed=1), F32)
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", order, "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, [2, "seq", 64])}, {"y": (F32, [2, "seq", 96])}, {"w": weight(64, 96), "b": b})
        rewritten, report = rewrite(proto)
        x = normal(2, 5, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        assert report.sites[0].decision.site.has_bias
        expect(x, weight(64, 96).T, b).then(np.negative).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("shape", [(5, 1), (5, 96), (2, 1, 96), (1, 1, 1, 96)])
    def test_any_other_shape_stays_an_add(self, shape):
        b = weight(*shape, seed=1)
        rank = max(3, len(shape))
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
        proto = model(
            nodes, {"x": (F32, [2, 5, 64])}, {"y": (F32, [1, 2, 5, 96][4 - rank :])}, {"w": weight(64, 96), "b": b}
        )
        rewritten, _ = rewrite(proto)
        x = normal(2, 5, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Add": 1, "Neg": 1}
        y = expect(x, weight(64, 96).T)
        total = y.y + b
        Expected(-total, np.broadcast_to(y.bound, total.shape)).check(run(rewritten, {"x": x})[0], roundings=1)

    @pytest.mark.parametrize("second", ["output", "consumer", "subgraph"])
    def test_a_product_that_is_used_elsewhere_keeps_its_add(self, second):
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h b", "s"), node("Neg", "s", "y")]
        outputs = {"y": (F32, ["m", 96])}
        weights: dict[str, np.ndarray] = {"w": weight(64, 96), "b": weight(96, seed=1)}
        if second == "output":
            outputs["h"] = (F32, ["m", 96])
        elif second == "consumer":
            nodes.append(node("Abs", "h", "z"))
            outputs["z"] = (F32, ["m", 96])
        else:
            branch = helper.make_graph(
                [node("Abs", "h", "t")], "branch", [], [helper.make_empty_tensor_value_info("t")]
            )
            nodes.append(helper.make_node("If", ["yes"], ["z"], "if", then_branch=branch, else_branch=branch))
            outputs["z"] = (F32, ["m", 96])
            weights["yes"] = np.array(True)
        recipe = Recipe(name="mxfp8", output_projections=True)
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, weights), recipe)
        x = normal(3, 64)
        assert kinds(rewritten)["Add"] == 1
        y, other = run(rewritten, {"x": x})
        exact = expect(x, weight(64, 96).T)
        (exact if second == "output" else exact.then(np.abs)).check(other)
        Expected(-(exact.y + weights["b"]), exact.bound).check(y, roundings=1)

    def test_a_bias_stored_after_the_matmul_is_there_when_the_gemm_runs(self):
        constant = helper.make_node("Constant", [], ["b"], value=numpy_helper.from_array(weight(96, seed=1)))
        nodes = [node("MatMul", "x w", "h", "linear"), constant, node("Add", "h b", "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, {"w": weight(64, 96)})
        rewritten, _ = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(64, 96).T, weight(96, seed=1)).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_16_bit_bias_is_added_in_float32(self):
        rewritten, _ = rewrite(matmul_model(64, 96, bias=True, dtype=np.float16))
        x, b = normal(2, 5, 64, dtype=np.float16), weight(96, seed=1, dtype=np.float16)
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales", "b_f32"]
        y = expect(x, weight(64, 96, dtype=np.float16).T, b, dtype="float16").then(relu)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_residual_add_is_no_bias(self):
        nodes = [node("MatMul", "x w", "h", "linear"), node("Add", "h x", "s"), node("Neg", "s", "y")]
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, {"w": weight(64, 64)})
        assert kinds(rewrite(proto)[0]) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Add": 1, "Neg": 1}


def _rows(*ops: tuple[str, dict[str, Any], str]) -> list[onnx.NodeProto]:
    """Returns the nodes w -> ... -> wt, each (op, attributes, further inputs)."""
    names = ["w", *(f"w{i}" for i in range(1, len(ops))), "wt"]
    return [
        node(op, f"{names[i]} {more}".strip(), names[i + 1], f"view{i}", **attributes)
        for i, (op, attributes, more) in enumerate(ops)
    ]


VIEWS = {
    "Identity": (_rows(("Identity", {}, "")), weight(64, 96), lambda w: w),
    "Transpose": (_rows(("Transpose", {"perm": [1, 0]}, "")), weight(96, 64), np.transpose),
    "Transpose by default": (_rows(("Transpose", {}, "")), weight(96, 64), np.transpose),
    "Transpose twice": (_rows(("Transpose", {}, ""), ("Transpose", {}, "")), weight(64, 96), lambda w: w),
    "Cast up": (_rows(("Cast", {"to": 1}, "")), weight(64, 96, dtype=np.float16), lambda w: w.astype(F32)),
    "Cast down and up": (
        _rows(("Cast", {"to": 10}, ""), ("Cast", {"to": 1}, "")),
        weight(64, 96),
        lambda w: w.astype(np.float16).astype(F32),
    ),
    "Cast integers": (_rows(("Cast", {"to": 1}, "")), (weight(64, 96) * 300).astype(np.int8), lambda w: w.astype(F32)),
    "Reshape": (_rows(("Reshape", {}, "shape")), weight(96, 64), lambda w: w.reshape(64, 96)),
    "Reshape after Transpose": (
        _rows(("Transpose", {}, ""), ("Reshape", {}, "shape")),
        weight(64, 96),
        lambda w: w.T.reshape(64, 96),
    ),
    "Reshape that copies a dimension": (_rows(("Reshape", {}, "copy")), weight(64, 4, 24), lambda w: w.reshape(64, 96)),
    "Unsqueeze and Squeeze from the end": (
        _rows(("Unsqueeze", {}, "end"), ("Squeeze", {}, "end")),
        weight(64, 96),
        lambda w: w,
    ),
    "Squeeze": (_rows(("Squeeze", {}, "axis")), weight(1, 64, 96), lambda w: w[0]),
    "Squeeze all": (_rows(("Squeeze", {}, "")), weight(1, 64, 1, 96), lambda w: w[0, :, 0]),
    "Unsqueeze, Transpose, Squeeze": (
        _rows(("Unsqueeze", {}, "axis"), ("Transpose", {"perm": [0, 2, 1]}, ""), ("Squeeze", {}, "axis")),
        weight(96, 64),
        np.transpose,
    ),
    "Transpose of three axes": (
        _rows(("Transpose", {"perm": [2, 1, 0]}, ""), ("Reshape", {}, "shape")),
        weight(96, 4, 16),
        lambda w: w.transpose(2, 1, 0).reshape(64, 96),
    ),
}


class TestViews:
    @pytest.mark.parametrize("name", VIEWS)
    def test_a_weight_behind_views_is_packed_as_the_matmul_sees_it_and_the_views_go(self, name):
        views, w, see = VIEWS[name]
        weights = {
            "w": w,
            "shape": np.array([64, -1]),
            "axis": np.array([0]),
            "copy": np.array([0, -1]),
            "end": np.array([-1]),
        }
        used = {n for view in views for n in view.input}
        proto = neg_model(
            "MatMul", ("m", 64), ("m", 96), {k: v for k, v in weights.items() if k in used}, "x wt", before=views
        )
        rewritten, report = rewrite(proto)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        assert reasons(report) == {"linear": LINEAR}
        expect(x, np.ascontiguousarray(see(w).T)).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_weight_in_a_constant_node(self):
        constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight(64, 96)))
        rewritten, _ = rewrite(neg_model("MatMul", ("m", 64), ("m", 96), {}, before=[constant]))
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}
        expect(x, weight(64, 96).T).then(np.negative).check(run(rewritten, {"x": x})[0])

    def test_a_reshape_whose_shape_is_written_as_value_ints(self):
        shape = helper.make_node("Constant", [], ["shape"], value_ints=[64, 96])
        views = [shape, node("Reshape", "w shape", "wt")]
        rewritten, _ = rewrite(neg_model("MatMul", ("m", 64), ("m", 96), {"w": weight(96, 64)}, "x wt", before=views))
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1}

    def test_a_view_that_something_else_uses_stays(self):
        nodes = [
            node("Transpose", "w", "wt", "view"),
            node("MatMul", "x wt", "h", "linear"),
            node("Neg", "h", "y"),
            node("Abs", "wt", "z"),
        ]
        outputs = {"y": (F32, ["m", 96]), "z": (F32, [64, 96])}
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, {"w": weight(96, 64)}))
        assert kinds(rewritten) == {"Transpose": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1, "Abs": 1}
        assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
        assert np.array_equal(run(rewritten, {"x": normal(3, 64)})[1], np.abs(weight(96, 64).T))

    def test_dead_code_that_was_there_before_stays(self):
        nodes = [node("MatMul", "x w", "h", "linear"), node("Neg", "h", "y"), node("Identity", "other", "unused")]
        weights = {"w": weight(64, 96), "other": weight(3)}
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 96])}, weights))
        assert kinds(rewritten)["Identity"] == 1
        assert "other" in initializers(rewritten)

    def test_a_weight_behind_another_op_is_kept_and_the_reason_names_it(self):
        views = [node("DequantizeLinear", "w s", "wt")]
        weights = {"w": weight(64, 96).astype(np.int8), "s": np.array(0.5, F32)}
        reason = refusal(neg_model("MatMul", ("m", 64), ("m", 96), weights, "x wt", before=views))
        assert reason == (
            "weight 'wt' comes through DequantizeLinear; expected only Identity, Transpose, Cast, Reshape, Squeeze, "
            "Unsqueeze; fold the constants first"
        )


class TestSharedWeights:
    def test_two_matmuls_on_one_weight_pack_it_once(self):
        nodes = [
            node("MatMul", "x w", "a", "first"),
            node("Neg", "a", "ya"),
            node("MatMul", "z w", "b", "second"),
            node("Neg", "b", "yb"),
        ]
        inputs, outputs = (
            {"x": (F32, ["m", 64]), "z": (F32, ["m", 64])},
            {"ya": (F32, ["m", 96]), "yb": (F32, ["m", 96])},
        )
        rewritten, report = rewrite(model(nodes, inputs, outputs, {"w": weight(64, 96)}))
        x, z = normal(3, 64), normal(3, 64, seed=4)
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
        ya, yb = run(rewritten, {"x": x, "z": z})
        expect(x, weight(64, 96).T).then(np.negative).check(ya)
        expect(z, weight(64, 96).T).then(np.negative).check(yb)

    def test_one_weight_used_both_ways_is_packed_along_each_k(self):
        nodes = [
            node("MatMul", "x w", "a", "up"),
            node("Relu", "a", "b"),
            node("Gemm", "b w", "c", "down", transB=1),
            node("Neg", "c", "y"),
        ]
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, {"w": weight(64, 96)}))
        assert [tuple(t.dims) for t in rewritten.graph.initializer] == [(96, 64), (96, 2), (64, 96), (64, 3)]

    def test_a_tied_embedding_keeps_its_table_and_the_head_gets_one_packed_copy(self):
        nodes = [
            node("Gather", "table ids", "e"),
            node("Transpose", "table", "head", perm=[1, 0]),
            node("MatMul", "e head", "logits", "lm_head"),
        ]
        proto = model(nodes, {"ids": (np.int64, ["m"])}, {"logits": (F32, ["m", 96])}, {"table": weight(96, 64)})
        rewritten, _ = rewrite(proto, Recipe(name="heads", output_projections=True))
        ids = np.array([3, 95, 0])
        assert initializers(rewritten) == ["table", "table_mxfp8", "table_mxfp8_scales"]
        assert kinds(rewritten) == {"Gather": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1}
        expect(weight(96, 64)[ids], weight(96, 64)).check(run(rewritten, {"ids": ids})[0])

    def test_a_weight_used_by_a_kept_site_too_stays_for_it(self):
        nodes = [
            node("MatMul", "x w", "a", "quantized"),
            node("Neg", "a", "ya"),
            node("MatMul", "x w", "b", "kept"),
            node("Abs", "b", "yb"),
        ]
        outputs = {"ya": (F32, ["m", 96]), "yb": (F32, ["m", 96])}
        proto = model(nodes, {"x": (F32, ["m", 64])}, outputs, {"w": weight(64, 96)})
        rewritten, report = rewrite(proto, Recipe(name="mxfp8", exclude=("kept",)))
        x = normal(3, 64)
        assert initializers(rewritten) == ["w", "w_mxfp8", "w_mxfp8_scales"]
        assert reasons(report) == {"quantized": LINEAR, "kept": "excluded by 'kept'"}
        ya, yb = run(rewritten, {"x": x})
        expect(x, weight(64, 96).T).then(np.negative).check(ya)
        np.testing.assert_allclose(yb, np.abs(x.astype(float) @ weight(64, 96)), rtol=1e-4, atol=1e-4)


class TestGraphInputs:
    def test_a_weight_that_a_caller_may_replace_is_kept_with_the_reason(self):
        proto = matmul_model()
        proto.graph.input.append(helper.make_tensor_value_info("w", 1, [64, 96]))
        assert refusal(proto) == "weight 'w' is also a graph input that a caller may replace; remove it from the inputs"

    def test_below_ir_version_4_every_weight_is_a_graph_input_and_static(self):
        proto = matmul_model(opset=8)
        proto.ir_version = 3
        proto.graph.input.append(helper.make_tensor_value_info("w", 1, [64, 96]))
        onnx.checker.check_model(proto)
        rewritten, _ = rewrite(proto)
        x = normal(2, 5, 64)
        assert [i.name for i in rewritten.graph.input] == ["x"]
        expect(x, weight(64, 96).T).then(relu).check(run(rewritten, {"x": x})[0])


class TestSharedQuantize:
    def test_gemms_on_one_activation_share_its_quantize_node(self):
        nodes = [node("MatMul", f"x {n}", f"h{n}", n) for n in "qkv"] + [
            node("Sum", "hq hk hv", "s"),
            node("Neg", "s", "y"),
        ]
        weights = {n: weight(64, 64, seed=i) for i, n in enumerate("qkv")}
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights))
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 3, "Sum": 1, "Neg": 1}
        x = normal(3, 64)
        parts = [expect(x, w.T) for w in weights.values()]
        total = Expected(-sum(p.y for p in parts), sum(p.bound for p in parts))
        total.check(run(rewritten, {"x": x})[0], roundings=3)

    def test_gemms_that_want_another_format_do_not(self):
        nodes = [node("MatMul", f"x {n}", f"h{n}", n) for n in "qk"] + [
            node("Sum", "hq hk", "s"),
            node("Neg", "s", "y"),
        ]
        weights = {n: weight(64, 64, seed=i) for i, n in enumerate("qk")}
        recipe = Recipe(name="mixed", rules=(Rule(name="k", activation_format="e5m2"),))
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights)
        assert kinds(rewrite(proto, recipe)[0]) == {"MXFP8Quantize": 2, "MXFP8Gemm": 2, "Sum": 1, "Neg": 1}


class TestRecipes:
    @pytest.mark.parametrize("rounding", ["ceil", "floor", "even"])
    @pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
    def test_formats_and_rounding_are_those_of_the_recipe(self, rounding, formats):
        recipe = Recipe(name="r", activation_format=formats[0], weight_format=formats[1], scale_rounding=rounding)
        rewritten, _ = rewrite(neg_model("MatMul", ("m", 64), ("m", 96), {"w": weight(64, 96)}), recipe)
        x = normal(3, 64)
        y = expect(x, weight(64, 96).T, formats=formats, scale_rounding=rounding).then(np.negative)
        y.check(run(rewritten, {"x": x})[0])

    def test_a_rule_overrides_the_recipe_for_its_sites(self):
        nodes = [
            node("MatMul", "x w", "a", "one"),
            node("Relu", "a", "b"),
            node("MatMul", "b v", "c", "two"),
            node("Neg", "c", "y"),
        ]
        weights = {"w": weight(64, 96), "v": weight(96, 64, seed=1)}
        proto = model(nodes, {"x": (F32, ["m", 64])}, {"y": (F32, ["m", 64])}, weights)
        recipe = Recipe(
            name="r", rules=(Rule(name="two", weight_only=True, weight_format="e5m2", scale_rounding="floor"),)
        )
        rewritten, report = rewrite(proto, recipe)
        x = normal(3, 64)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1, "MXFP8WeightGemm": 1, "Neg": 1}
        assert reasons(report)["two"].startswith("rules.0: name='two' -> quantize, weight_only=True")
        first = expect(x, weights["w"].T).then(relu)
        second = expect(
            first.y.astype(F32), weights["v"].T, weight_only=True, formats=("", "e5m2"), scale_rounding="floor"
        )
        # What the first gemm may be off, the second one multiplies by at most |w|.
        slack = (first.bound + 2.0**-24 * np.abs(first.y)) @ np.abs(weights["v"].astype(float)) * 1.5
        Expected(-second.y, second.bound + slack).check(run(rewritten, {"x": x})[0])

    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("dtype", [F32, np.float16])
    def test_weight_only_leaves_activations_alone(self, left, dtype):
        w = weight(96, 64, dtype=dtype) if left else weight(64, 96, dtype=dtype)
        x_shape, y_shape = ((64, "m"), (96, "m")) if left else (("m", 64), ("m", 96))
        proto = neg_model("MatMul", x_shape, y_shape, {"w": w}, "w x" if left else "x w", dtype=dtype)
        rewritten, report = rewrite(proto, "mxfp8-weight-only")
        x = normal(3, 64, dtype=dtype)
        assert kinds(rewritten) == {**({"Transpose": 2} if left else {}), "MXFP8WeightGemm": 1, "Neg": 1}
        assert reasons(report) == {"linear": "linear, by recipe 'mxfp8-weight-only'"}
        y = expect(x, w if left else w.T, weight_only=True, dtype=np.dtype(dtype).name).then(np.negative)
        actual = run(rewritten, {"x": np.ascontiguousarray(x.T) if left else x})[0]
        y.check(actual.T if left else actual)


class TestProducts:
    """Both operands computed at run time: kept unless the recipe asks for them."""

    ALL = Recipe(name="all", rules=(Rule(op="MatMul"), Rule(op="Gemm")))

    @staticmethod
    def product(op: str = "MatMul", a: Any = (2, 3, 64), b: Any = (2, 64, 40), y: Any = (2, 3, 40), **attributes: Any):
        nodes = [node(op, "a b", "h", "product", **attributes), node("Neg", "h", "y")]
        return model(nodes, {"a": (F32, a), "b": (F32, b)}, {"y": (F32, y)})

    def test_by_default_it_is_kept_with_the_reason(self):
        assert refusal(self.product()) == (
            "both operands are computed at run time; add a rule with quantize: true to quantize it"
        )

    def test_a_rule_quantizes_both_operands_along_k(self):
        rewritten, _ = rewrite(self.product(), Recipe(name="all", rules=(Rule(op="MatMul"),)))
        a, b = normal(2, 3, 64), normal(2, 64, 40, seed=1)
        assert kinds(rewritten) == {"Transpose": 1, "MXFP8Quantize": 2, "MXFP8Gemm": 1, "Neg": 1}
        expect(a, b.swapaxes(-1, -2)).then(np.negative).check(run(rewritten, {"a": a, "b": b})[0])

    def test_broadcast_leading_dimensions(self):
        proto = self.product(a=(2, 1, 3, 64), b=(5, 64, 40), y=(2, 5, 3, 40))
        rewritten, _ = rewrite(proto, Recipe(name="all", rules=(Rule(op="MatMul"),)))
        a, b = normal(2, 1, 3, 64), normal(5, 64, 40, seed=1)
        expect(a, b.swapaxes(-1, -2)).then(np.negative).check(run(rewritten, {"a": a, "b": b})[0])

    def test_the_same_tensor_on_both_sides(self):
        nodes = [node("MatMul", "a a", "h", "square"), node("Neg", "h", "y")]
        proto = model(nodes, {"a": (F32, [64, 64])}, {"y": (F32, [64, 64])})
        rewritten, _ = rewrite(proto, Recipe(name="all", rules=(Rule(op="MatMul"),)))
        a = normal(64, 64)
        expect(a, a.T).then(np.negative).check(run(rewritten, {"a": a})[0])

    @pytest.mark.parametrize("trans_a", [0, 1])
    @pytest.mark.parametrize("trans_b", [0, 1])
    def test_gemm_with_alpha(self, trans_a, trans_b):
        a_shape, b_shape = ((64, 3) if trans_a else (3, 64)), ((40, 64) if trans_b else (64, 40))
        proto = self.product("Gemm", a_shape, b_shape, (3, 40), transA=trans_a, transB=trans_b, alpha=0.3)
        rewritten, _ = rewrite(proto, Recipe(name="all", rules=(Rule(op="Gemm"),)))
        a, b = normal(*a_shape), normal(*b_shape, seed=1)
        y = expect(a.T if trans_a else a, b if trans_b else b.T)
        scaled = Expected(-y.y * float(F32(0.3)), y.bound * 0.3001)
        scaled.check(run(rewritten, {"a": a, "b": b})[0], roundings=1)

    def test_vectors_are_kept_with_the_reason(self):
        reason = refusal(self.product(a=(64,), b=(64, 40), y=(40,)), Recipe(name="all", rules=(Rule(op="MatMul"),)))
        assert reason == "an operand's rank is unknown or below 2; give the model shape information"

    def test_weight_only_keeps_a_product_that_has_no_weight(self):
        recipe = Recipe(name="wo", weight_only=True, rules=(Rule(op="MatMul"),))
        assert refusal(self.product(), recipe) == (
            "weight_only, and this product has no static weight; set weight_only: false for it to quantize it"
        )
