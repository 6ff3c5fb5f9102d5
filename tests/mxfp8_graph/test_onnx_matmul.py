"""MatMul in every form: which operand is static, vectors, stacks, sizes, dtypes, weights that are graph inputs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from builders import matmul_model, model, neg_model, node, weight
from onnx import helper
from oracle import Expected, expect, initializers, kinds, normal, reasons, refusal, relu, rewrite, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe

F32 = np.float32
LINEAR = "linear, by recipe 'mxfp8'"

pytestmark = pytest.mark.usefixtures("runtime")


class TestMatMul:
    def test_a_static_right_operand_becomes_quantize_and_gemm(self):
        proto = matmul_model(64, 96)
        rewritten, report = rewrite(proto)
        x, w = normal(2, 5, 64), weight(64, 96)
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 1, "Relu": 1}
        assert reasons(report) == {"linear": LINEAR}
        assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
        expect(x, w.T).then(relu).check(run(rewritten, {"x": x})[0])

    def test_a_float16_activation_of_unknown_rank_loads_with_and_without_the_library(self):
        # ONNX Runtime takes the dtype of a custom op from its shape inference, which has no shape to give here.
        nodes = [node("Reshape", "x shape", "r"), node("MatMul", "r w", "m", "linear"), node("Relu", "m", "act")]
        nodes += [node("Reshape", "act flat", "y")]
        proto = model(
            nodes,
            {"x": (np.float16, [4, 64]), "shape": (np.int64, ["rank"])},
            {"y": (np.float16, [256])},
            {"w": weight(64, 64, dtype=np.float16), "flat": np.array([-1])},
        )
        rewritten, report = rewrite(proto)
        assert reasons(report) == {"linear": LINEAR}
        x = normal(4, 64).astype(np.float16)
        found = run(rewritten, {"x": x, "shape": np.array([2, 2, 64])})[0]
        assert found.dtype == np.float16
        w = weight(64, 64, dtype=np.float16)
        expect(x.reshape(-1, 64), w.T, dtype="float16").then(lambda y: relu(y).reshape(-1)).check(found)

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
            "weight 'c' comes through MatMul; expected only Identity, Transpose, Cast, Reshape, Squeeze, Unsqueeze, "
            "Split, Slice; fold the constants first",
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
