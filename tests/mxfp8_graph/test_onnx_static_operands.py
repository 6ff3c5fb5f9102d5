"""Weights behind views and in Constant nodes: packed as the matmul sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, neg_model, node, weight
from onnx import helper, numpy_helper
from oracle import expect, initializers, kinds, normal, reasons, refusal, rewrite, run

from mxfp8_ops.errors import ContractError

F32 = np.float32
LINEAR = "linear, by recipe 'mxfp8'"

pytestmark = pytest.mark.usefixtures("runtime")


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
    "Slice of rows": (_rows(("Slice", {}, "two end_of_66")), weight(68, 96), lambda w: w[2:66]),
    "Slice of columns from the end": (
        _rows(("Slice", {}, "minus_99 minus_3 end"), ("Transpose", {}, ""), ("Transpose", {}, "")),
        weight(64, 99),
        lambda w: w[:, :96],
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
            "two": np.array([2]),
            "end_of_66": np.array([66]),
            "minus_99": np.array([-99]),
            "minus_3": np.array([-3]),
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

    @pytest.mark.parametrize("sizes", [True, False], ids=["sizes", "equal parts"])
    def test_parts_of_one_weight_are_packed_each_and_the_weight_goes(self, sizes):
        """As torch's exporter writes the packed projections of cross attention."""
        nodes = [
            node("Split", "w sizes", "w0 w1", axis=0) if sizes else node("Split", "w", "w0 w1", axis=0, num_outputs=2),
            node("Transpose", "w0", "w0t"),
            node("Transpose", "w1", "w1t"),
            node("MatMul", "x w0t", "h0", "query"),
            node("MatMul", "x w1t", "h1", "key"),
            node("Neg", "h0", "y0"),
            node("Neg", "h1", "y1"),
        ]
        first = 64 if sizes else 80
        weights = {"w": weight(160, 64), **({"sizes": np.array([64, 96])} if sizes else {})}
        outputs = {"y0": (F32, ["m", first]), "y1": (F32, ["m", 160 - first])}
        rewritten, report = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, weights))
        x = normal(3, 64)
        assert reasons(report) == {"query": LINEAR, "key": LINEAR}
        assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 2, "Neg": 2}
        assert not {"w", "sizes"} & set(initializers(rewritten))
        results = run(rewritten, {"x": x})
        for part, result in zip((weight(160, 64)[:first], weight(160, 64)[first:]), results, strict=True):
            expect(x, part).then(np.negative).check(result)

    def test_uneven_parts_end_with_the_smallest(self):
        nodes = [node("Split", "w", "w0 w1 w2", axis=1, num_outputs=3)]
        nodes += [node("MatMul", f"x w{i}", f"h{i}", f"part{i}") for i in range(3)]
        nodes += [node("Neg", f"h{i}", f"y{i}") for i in range(3)]
        outputs = {f"y{i}": (F32, ["m", n]) for i, n in enumerate((54, 54, 52))}  # as ONNX Runtime splits it
        rewritten, report = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, {"w": weight(64, 160)}, opset=18))
        x = normal(3, 64)
        assert reasons(report) == dict.fromkeys(("part0", "part1", "part2"), LINEAR)
        parts = np.split(weight(64, 160), [54, 108], axis=1)
        for part, result in zip(parts, run(rewritten, {"x": x}), strict=True):
            expect(x, part.T).then(np.negative).check(result)

    def test_parts_that_onnx_does_not_have_are_refused(self):
        """Before opset 18 parts are equal; since then the last may be smaller, but not less than empty."""
        old = [node("Split", "w", "w0 w1", axis=1), node("MatMul", "x w0", "h"), node("Neg", "h", "y")]
        x, y = (F32, ["m", 64]), (F32, ["m", None])
        with pytest.raises(ContractError, match="not evenly splittable"):
            rewrite(model(old, {"x": x}, {"y": y}, {"w": weight(64, 159)}, opset=13))
        short = [node("Split", "w", "w0 w1 w2 w3", axis=1, num_outputs=4)]
        proto = neg_model("MatMul", ("m", 64), ("m", None), {"w": weight(64, 5)}, "x w0", before=short)
        assert refusal(proto).startswith("weight 'w0' comes through Split")

    def test_a_slice_that_ends_before_it_starts_is_empty(self):
        views = [node("Slice", "w two one one", "wt")]
        weights = {"w": weight(64, 96), "two": np.array([50]), "one": np.array([1])}
        reason = refusal(neg_model("MatMul", ("m", 64), ("m", 0), weights, "x wt", before=views))
        assert reason == "the weight is empty (shape [64, 0]); expected N and K above 0"

    @pytest.mark.parametrize("op", ["Squeeze", "Reshape"])
    def test_a_view_of_other_size_is_not_followed(self, op):
        """An axis of more than 1, where onnx does not see it."""
        views = [node("Identity", "axes", "same"), node(op, "w same", "wt")]
        weights = {"w": weight(2, 64, 96), "axes": np.array([0] if op == "Squeeze" else [64, 96])}
        reason = refusal(neg_model("MatMul", ("m", 64), ("m", 96), weights, "x wt", before=views))
        assert reason.startswith(f"weight 'wt' comes through {op}")

    def test_a_shape_of_an_empty_tensor_that_numpy_does_not_have(self):
        views = [
            node("Reshape", "none huge", "none2", allowzero=1),
            node("Reshape", "none2 zero", "axes", allowzero=1),
            node("Squeeze", "w axes", "wt"),
        ]
        empty = {"none": np.zeros(0, np.int64), "huge": np.array([2**60, 0]), "zero": np.array([0])}
        proto = neg_model("MatMul", ("m", 64), ("m", 96), {"w": weight(64, 96), **empty}, "x wt", before=views)
        assert refusal(proto).startswith("weight 'wt' comes through Squeeze")

    def test_a_part_that_nobody_packs_keeps_the_weight(self):
        nodes = [
            node("Split", "w", "w0 w1", axis=1, num_outputs=2),
            node("MatMul", "x w0", "h", "linear"),
            node("Neg", "h", "y"),
            node("Abs", "w1", "z"),
        ]
        outputs = {"y": (F32, ["m", 48]), "z": (F32, [64, 48])}
        rewritten, _ = rewrite(model(nodes, {"x": (F32, ["m", 64])}, outputs, {"w": weight(64, 96)}))
        x = normal(3, 64)
        assert kinds(rewritten) == {"Split": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1, "Neg": 1, "Abs": 1}
        expect(x, weight(64, 96)[:, :48].T).then(np.negative).check(run(rewritten, {"x": x})[0])

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
        views = [node("Neg", "w", "negated"), node("Transpose", "negated", "wt")]
        weights = {"w": weight(96, 64)}
        reason = refusal(neg_model("MatMul", ("m", 64), ("m", 96), weights, "x wt", before=views))
        assert reason == (
            "weight 'wt' comes through Neg; expected only Identity, Transpose, Cast, Reshape, Squeeze, Unsqueeze, "
            "Split, Slice; fold the constants first"
        )

    def test_a_weight_that_is_quantized_already_is_kept_as_it_is(self):
        views = [node("DequantizeLinear", "w s", "values"), node("Transpose", "values", "wt")]
        weights = {"w": weight(96, 64).astype(np.int8), "s": np.array(0.5, F32)}
        reason = refusal(neg_model("MatMul", ("m", 64), ("m", 96), weights, "x wt", before=views))
        assert reason == (
            "weight 'wt' is quantized already, by DequantizeLinear, and would be rounded twice; rewrite the model it "
            "was quantized from"
        )
