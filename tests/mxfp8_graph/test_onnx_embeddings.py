"""Lookups in tables: which Gathers become MXFP8Embedding, what they give, and why the others are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from builders import Shape, language_model, model, node, weight
from oracle import initializers, kinds, quantized, reasons, refusal, rewrite, run

from mxfp8_graph import Recipe, Rule

F32 = np.float32
TABLES = Recipe(name="tables", embeddings=True)
TABLE = weight(96, 70)
IDS = np.array([[3, 95], [0, -96]])
KEPT = "embedding: ids pick its rows; set embeddings: true to quantize it"

pytestmark = pytest.mark.usefixtures("runtime")


def lookup(
    op: str = "Gather",
    inputs: str = "table ids",
    *,
    table: np.ndarray = TABLE,
    ids: Shape = ("batch", "n"),
    dtype: Any = np.int64,
    before: Sequence[onnx.NodeProto] = (),
    constants: dict[str, np.ndarray] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """y = -op(inputs): one lookup called "look"; "ids" is an input, "table" an initializer, and so are `constants`."""
    nodes = [*before, node(op, inputs, "h", "look", **attributes), node("Neg", "h", "y")]
    used = {"ids": (dtype, ids)} if any("ids" in n.input for n in nodes) else {"x": (dtype, ids)}
    shape = [*ids[: -1 if op == "GatherND" else None], None][-3:]
    y = np.float16 if any(n.op_type == "Cast" for n in before) else table.dtype
    return model(nodes, used, {"y": (y, shape)}, {"table": table, **(constants or {})})


def check(proto: onnx.ModelProto, rows: np.ndarray, ids: np.ndarray) -> None:
    """Fails if the model does not pick exactly the rows that quantizing the table leaves."""
    (y,) = run(proto, {"ids": ids})
    expected = -quantized(rows)[ids]
    np.testing.assert_array_equal(y.astype(np.float64), expected.astype(y.dtype).astype(np.float64))


class TestGather:
    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_it_becomes_a_lookup_in_the_packed_table(self, dtype):
        rewritten, report = rewrite(lookup(dtype=dtype), TABLES)
        assert kinds(rewritten) == {"MXFP8Embedding": 1, "Neg": 1}
        assert initializers(rewritten) == ["table_mxfp8", "table_mxfp8_scales"]
        assert reasons(report) == {"look": "embedding, by recipe 'tables'"}
        check(rewritten, TABLE, IDS.astype(dtype))

    def test_its_site_has_the_ids_as_m_and_the_table_as_n_and_k(self):
        (site,) = rewrite(lookup(), TABLES)[1].sites
        seen = site.decision.site
        assert (seen.role, seen.op, seen.m, seen.n, seen.k) == ("embedding", "Gather", "batch*n", 96, 70)
        assert (seen.weight, site.bytes_before, site.bytes_after) == ("table", 96 * 70 * 4, 96 * (70 + 3))

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_its_dtype_stays(self, dtype):
        table = TABLE.astype(dtype)
        nodes = [node("Gather", "table ids", "h"), node("Cast", "h", "y", to=onnx.TensorProto.FLOAT)]
        proto = model(nodes, {"ids": (np.int64, ["b", "n"])}, {"y": (F32, ["b", "n", 70])}, {"table": table})
        (y,) = run(rewrite(proto, TABLES)[0], {"ids": IDS})  # strict inference has seen that the dtype is the Cast's
        np.testing.assert_array_equal(y, quantized(table)[IDS].astype(dtype).astype(F32))

    def test_ids_of_unknown_rank_give_float16_through_a_cast(self):
        nodes = [node("Reshape", "ids dims", "i"), node("Gather", "table i", "h"), node("Reshape", "h flat", "y")]
        inputs = {"ids": (np.int64, ["n"]), "dims": (np.int64, ["rank"])}
        constants = {"table": TABLE.astype(np.float16), "flat": np.array([-1])}
        rewritten, _ = rewrite(model(nodes, inputs, {"y": (np.float16, ["all"])}, constants), TABLES)
        assert kinds(rewritten) == {"MXFP8Embedding": 1, "Cast": 1, "Reshape": 2}
        (y,) = run(rewritten, {"ids": IDS.reshape(-1), "dims": np.array(IDS.shape)})
        np.testing.assert_array_equal(y, quantized(constants["table"])[IDS].astype(np.float16).reshape(-1))

    def test_one_id(self):
        check(rewrite(lookup(ids=[]), TABLES)[0], TABLE, np.array(5))

    def test_a_table_behind_views(self):
        before = [node("Reshape", "table shape", "wide"), node("Transpose", "wide", "seen")]
        constants = {"shape": np.array([70, 96])}
        proto = lookup(inputs="seen ids", before=before, constants=constants)
        check(rewrite(proto, TABLES)[0], TABLE.reshape(70, 96).T, IDS)

    def test_a_table_behind_a_cast(self):
        before = [node("Cast", "table", "half", to=onnx.TensorProto.FLOAT16)]
        check(rewrite(lookup(inputs="half ids", before=before), TABLES)[0], TABLE.astype(np.float16), IDS)

    def test_in_a_subgraph(self):
        from builders import value
        from onnx import helper

        branches = {
            f"{name}_branch": helper.make_graph([n], name, [], [value("b", F32, ["n", 70])])
            for name, n in (("then", node("Gather", "table ids", "b", "look")), ("else", node("Identity", "x", "b")))
        }
        nodes = [helper.make_node("If", ["yes"], ["h"], "if", **branches), node("Neg", "h", "y")]
        inputs = {"ids": (np.int64, ["n"]), "x": (F32, ["n", 70]), "yes": (np.bool_, [])}
        rewritten, report = rewrite(model(nodes, inputs, {"y": (F32, ["n", 70])}, {"table": TABLE}), TABLES)
        assert report.sites[0].decision.site.subgraph == "if/then_branch"
        (y,) = run(rewritten, {"ids": IDS[0], "x": np.zeros((2, 70), F32), "yes": np.array(True)})
        np.testing.assert_array_equal(y, -quantized(TABLE)[IDS[0]].astype(F32))

    def test_in_a_function(self):
        from builders import value
        from onnx import helper, numpy_helper

        body = [node("Gather", "t i", "r", "look")]
        function = helper.make_function("local", "Lookup", ["t", "i"], ["r"], body, [helper.make_opsetid("", 21)])
        nodes = [node("Lookup", "table ids", "h", domain="local"), node("Neg", "h", "y")]
        tables = [numpy_helper.from_array(TABLE, "table")]
        graph = helper.make_graph(nodes, "g", [value("ids", np.int64, ["n"])], [value("y", F32, ["n", 70])], tables)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
        proto = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)
        check(rewrite(proto, TABLES)[0], TABLE, IDS[0])


class TestGatherND:
    def test_ids_of_one_number_each_pick_rows(self):
        rewritten, _ = rewrite(lookup("GatherND", ids=["batch", "n", 1]), TABLES)
        assert kinds(rewritten) == {"Constant": 1, "Squeeze": 1, "MXFP8Embedding": 1, "Neg": 1}
        (y,) = run(rewritten, {"ids": IDS[..., None]})
        np.testing.assert_array_equal(y, -quantized(TABLE)[IDS].astype(F32))

    @pytest.mark.parametrize("last", [2, "unknown"])
    def test_ids_that_may_pick_single_values_are_kept(self, last):
        assert refusal(lookup("GatherND", ids=["n", last]), TABLES) == (
            "it picks single values of its table, or how many is unknown; expected rows (ids [..., 1])"
        )


class TestKept:
    def test_by_default_with_the_reason(self):
        _, report = rewrite(language_model())
        assert reasons(report)["Gather_tokens"] == reasons(report)["Gather_places"] == KEPT

    @pytest.mark.parametrize(
        ("proto", "reason"),
        [
            (lookup(axis=1), "it picks columns of its table; expected rows (axis 0)"),
            (
                lookup(inputs="table few", before=[node("Shape", "x", "s")], constants={"few": np.array([1, 2])}),
                "its ids are constant; fold the constants of the model first",
            ),
            (lookup(table=weight(31, 64)), "tiny: N = 31 is below min_dim = 32; lower min_dim to quantize it"),
            (
                lookup(table=TABLE.astype(np.float64)),
                "dtype double; expected float32, float16 or bfloat16; cast the model first",
            ),
            (
                lookup(inputs="twice ids", before=[node("Add", "table table", "twice")]),
                "weight 'twice' comes through Add; expected only Identity, Transpose, Cast, Reshape, Squeeze, "
                "Unsqueeze, Split, Slice; fold the constants first",
            ),
        ],
        ids=["axis 1", "constant ids", "tiny", "float64", "computed"],
    )
    def test_what_cannot_be_one_with_the_reason(self, proto, reason):
        assert refusal(proto, TABLES) == reason

    def test_a_table_that_a_caller_may_replace(self):
        proto = lookup()
        proto.graph.input.append(onnx.helper.make_tensor_value_info("table", onnx.TensorProto.FLOAT, [96, 70]))
        assert refusal(proto, TABLES) == (
            "weight 'table' is also a graph input that a caller may replace; remove it from the inputs"
        )

    @pytest.mark.parametrize(
        "table",
        [np.arange(96), np.ones((96, 64), np.int64), weight(64), weight(96, 64, 64)],
        ids=["shape", "table of ids", "vector", "experts"],
    )
    def test_what_is_clearly_none_is_no_site(self, table):
        nodes = [
            node("Gather", "table ids", "h"),
            node("MatMul", "x w", "m", "linear"),
            node("Neg", "m", "z"),
        ]
        inputs = {"ids": (np.int64, ["n"]), "x": (F32, ["n", 64])}
        outputs = {"h": (table.dtype, [None] * table.ndim), "z": (F32, ["n", 96])}
        _, report = rewrite(model(nodes, inputs, outputs, {"table": table, "w": weight(64, 96)}), TABLES)
        assert list(reasons(report)) == ["linear"]


class TestRecipes:
    def test_the_preset_all_has_them(self):
        rewritten, _ = rewrite(language_model(), "all")
        assert kinds(rewritten)["MXFP8Embedding"] == 2

    def test_a_rule_that_quantizes_overrides_the_default(self):
        _, report = rewrite(language_model(), Recipe(name="one", rules=(Rule(name="tokens", weight_format="e5m2"),)))
        assert reasons(report)["Gather_tokens"] == "rules.0: name='tokens' -> quantize, weight_format=e5m2"
        assert reasons(report)["Gather_places"] == KEPT

    def test_weight_only_quantizes_them_too(self):
        rewritten, _ = rewrite(lookup(), Recipe(name="r", embeddings=True, activations="unchanged"))
        assert kinds(rewritten) == {"MXFP8Embedding": 1, "Neg": 1}

    def test_the_headline_counts_them_apart(self):
        from mxfp8_graph.report.data import headline

        _, report = rewrite(language_model())
        assert headline(report).startswith("2 of 3 matmuls and 0 of 2 embeddings rewritten")
