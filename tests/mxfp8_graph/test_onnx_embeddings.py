"""Lookups in tables: which Gathers become MXFP8Embedding, why the others are kept, tables that a projection shares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import models as b
import numpy as np
import onnx
import pytest
from grids import looped
from models import Shape, language_model, model, node, steps, value, weight
from oracle import expect, initializers, kinds, quantized, reasons, refusal, rewrite, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe, Rule
from mxfp8_graph.onnx_pass.ops import VIEW_OPS

F32, F16 = np.float32, np.float16
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
    before: str = "",
    constants: dict[str, np.ndarray] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """y = -op(inputs): one lookup called "look"; "ids" is an input, "table" an initializer, and so are `constants`."""
    first = steps(before) if before else []
    nodes = [*first, node(op, inputs, "h", "look", **attributes), node("Neg", "h", "y")]
    used = {"ids" if any("ids" in n.input for n in nodes) else "x": (dtype, ids)}
    shape = [*ids[: -1 if op == "GatherND" else None], None][-3:]
    y = F16 if any(n.op_type == "Cast" for n in first) else table.dtype
    return model(nodes, used, {"y": (y, shape)}, {"table": table, **(constants or {})})


def check(proto: onnx.ModelProto, rows: np.ndarray, ids: np.ndarray) -> None:
    """Fails if the model does not pick exactly the rows that quantizing the table leaves."""
    (y,) = run(proto, {"ids": ids})
    expected = -quantized(rows)[ids]
    np.testing.assert_array_equal(y.astype(np.float64), expected.astype(y.dtype).astype(np.float64))


@looped("dtype", [np.int32, np.int64])
def test_a_gather_becomes_a_lookup_in_the_packed_table(dtype: Any) -> None:
    rewritten, report = rewrite(lookup(dtype=dtype), TABLES)
    assert kinds(rewritten) == {"MXFP8Embedding": 1, "Neg": 1}
    assert initializers(rewritten) == ["table_mxfp8", "table_mxfp8_scales"]
    assert reasons(report) == {"look": "embedding, by recipe 'tables'"}
    check(rewritten, TABLE, IDS.astype(dtype))
    (site,) = report.sites  # its ids are M, its table N and K
    seen = site.decision.site
    assert (seen.role, seen.op, seen.m, seen.n, seen.k) == ("embedding", "Gather", "batch*n", 96, 70)
    assert (seen.weight, site.bytes_before, site.bytes_after) == ("table", 96 * 70 * 4, 96 * (70 + 3))


@looped("dtype", [F16, ml_dtypes.bfloat16])
def test_the_dtype_of_a_table_stays_that_of_its_rows(dtype: Any) -> None:
    nodes = steps("Gather table ids>h; Cast h>y|to=1")
    outputs, table = {"y": (F32, ["b", "n", 70])}, TABLE.astype(dtype)
    proto = model(nodes, {"ids": (np.int64, ["b", "n"])}, outputs, {"table": table})
    (y,) = run(rewrite(proto, TABLES)[0], {"ids": IDS})  # strict inference has seen that the dtype is the Cast's
    np.testing.assert_array_equal(y, quantized(table)[IDS].astype(dtype).astype(F32))


def test_ids_of_unknown_rank_give_float16_through_a_cast() -> None:
    nodes = steps("Reshape ids dims>i; Gather table i>h; Reshape h flat>y")
    inputs = {"ids": (np.int64, ["n"]), "dims": (np.int64, ["rank"])}
    constants = {"table": TABLE.astype(F16), "flat": np.array([-1])}
    rewritten, _ = rewrite(model(nodes, inputs, {"y": (F16, ["all"])}, constants), TABLES)
    assert kinds(rewritten) == {"MXFP8Embedding": 1, "Cast": 1, "Reshape": 2}
    (y,) = run(rewritten, {"ids": IDS.reshape(-1), "dims": np.array(IDS.shape)})
    np.testing.assert_array_equal(y, quantized(constants["table"])[IDS].astype(F16).reshape(-1))


def test_one_id_and_tables_behind_views_and_casts_are_looked_up() -> None:
    check(rewrite(lookup(ids=[]), TABLES)[0], TABLE, np.array(5))
    before, shape = "Reshape table shape>wide; Transpose wide>seen", {"shape": np.array([70, 96])}
    viewed = lookup(inputs="seen ids", before=before, constants=shape)
    check(rewrite(viewed, TABLES)[0], TABLE.reshape(70, 96).T, IDS)
    cast = lookup(inputs="half ids", before="Cast table>half|to=10")
    check(rewrite(cast, TABLES)[0], TABLE.astype(F16), IDS)


def test_a_lookup_in_a_subgraph_or_a_function_is_one_too() -> None:
    nodes = [b.choose("look:Gather table ids>b", "Identity x>b"), node("Neg", "h", "y")]
    inputs = {"ids": (np.int64, ["n"]), "x": (F32, ["n", 70]), "yes": (np.bool_, [])}
    rewritten, report = rewrite(model(nodes, inputs, {"y": (F32, ["n", 70])}, {"table": TABLE}), TABLES)
    assert report.sites[0].decision.site.subgraph == "choose/then_branch"
    (y,) = run(rewritten, {"ids": IDS[0], "x": np.zeros((2, 70), F32), "yes": np.array(True)})
    np.testing.assert_array_equal(y, -quantized(TABLE)[IDS[0]].astype(F32))
    nodes, ends = steps("Lookup table ids>h; Neg h>y"), ({"ids": (np.int64, ["n"])}, {"y": (F32, ["n", 70])})
    function = b.local_function("Lookup", "t i", "look:Gather t i>r")
    proto = b.calling(model(nodes, *ends, {"table": TABLE}, checked=False), function)
    check(rewrite(proto, TABLES)[0], TABLE, IDS[0])


def test_a_gathernd_whose_ids_are_of_one_number_each_picks_rows() -> None:
    rewritten, _ = rewrite(lookup("GatherND", ids=["batch", "n", 1]), TABLES)
    assert kinds(rewritten) == {"Constant": 1, "Squeeze": 1, "MXFP8Embedding": 1, "Neg": 1}
    (y,) = run(rewritten, {"ids": IDS[..., None]})
    np.testing.assert_array_equal(y, -quantized(TABLE)[IDS].astype(F32))


def replaceable() -> onnx.ModelProto:
    proto = lookup()
    proto.graph.input.append(value("table", F32, [96, 70]))
    return proto


SINGLE = "it picks single values of its table, or how many is unknown; expected rows (ids [..., 1])"
NO_LOOKUPS = {
    "two numbers per id": (lookup("GatherND", ids=["n", 2]), SINGLE),
    "numbers per id that are not known": (lookup("GatherND", ids=["n", "unknown"]), SINGLE),
    "axis 1": (lookup(axis=1), "it picks columns of its table; expected rows (axis 0)"),
    "constant ids": (
        lookup(inputs="table few", before="Shape x>s", constants={"few": np.array([1, 2])}),
        "its ids are constant; fold the constants of the model first",
    ),
    "tiny": (lookup(table=weight(31, 64)), "tiny: N = 31 is below min_dim = 32; lower min_dim to quantize it"),
    "float64": (
        lookup(table=TABLE.astype(np.float64)),
        "dtype double; expected float32, float16 or bfloat16; cast the model first",
    ),
    "computed": (
        lookup(inputs="twice ids", before="Add table table>twice"),
        f"weight 'twice' comes through Add; expected only {', '.join(VIEW_OPS)}; fold the constants first",
    ),
    "a caller may replace it": (
        replaceable(),
        "weight 'table' is also a graph input that a caller may replace; remove it from the inputs: "
        "python -m onnxruntime.tools.remove_initializer_from_input --input MODEL --output NEW_MODEL",
    ),
}


@looped("name", NO_LOOKUPS)
def test_a_lookup_that_cannot_be_packed_is_kept_with_the_reason(name: str) -> None:
    proto, reason = NO_LOOKUPS[name]
    assert refusal(proto, TABLES) == reason


@looped("table", [np.arange(96), np.ones((96, 64), np.int64), weight(64), weight(96, 64, 64)])
def test_a_gather_of_a_shape_of_ids_of_a_vector_or_of_experts_is_no_lookup(table: np.ndarray) -> None:
    nodes = steps("Gather table ids>h; linear:MatMul x w>m; Neg m>z")
    inputs = {"ids": (np.int64, ["n"]), "x": (F32, ["n", 64])}
    outputs = {"h": (table.dtype, [None] * table.ndim), "z": (F32, ["n", 96])}
    _, report = rewrite(model(nodes, inputs, outputs, {"table": table, "w": weight(64, 96)}), TABLES)
    assert list(reasons(report)) == ["linear"]


def test_embeddings_are_kept_unless_the_recipe_quantizes_them() -> None:
    _, report = rewrite(language_model())
    assert reasons(report)["Gather_tokens"] == reasons(report)["Gather_places"] == KEPT
    assert report.answer().startswith("Rewrote 2 of 3 matmuls and 0 of 2 embeddings")
    assert "kB are weights of embeddings in high precision: --set embeddings=true packs them" in report.advice
    whole, report = rewrite(language_model(), "all")
    assert kinds(whole)["MXFP8Embedding"] == 2
    assert "in high precision" not in report.advice
    _, report = rewrite(language_model(), Recipe(name="one", rules=(Rule(name="tokens", weight_format="e5m2"),)))
    assert reasons(report)["Gather_tokens"] == "rules.0: name='tokens' -> quantize, weight_format=e5m2"
    assert reasons(report)["Gather_places"] == KEPT
    rewritten, _ = rewrite(lookup(), Recipe(name="r", embeddings=True, activations="unchanged"))
    assert kinds(rewritten) == {"MXFP8Embedding": 1, "Neg": 1}


# --- A table that an embedding and an output projection share ---

TIED, ROW_IDS = weight(96, 64), np.array([3, 95, 0])
BOTH = Recipe(name="both", embeddings=True, output_projections=True)

HEADS = {
    "MatMul": "Transpose table>head|perm=[1,0]; lm_head:MatMul e head>logits",
    "Gemm transB": "lm_head:Gemm e table>logits|transB=1",
    "MatMul of float32": "Cast table>wide|to=1; Transpose wide>head|perm=[1,0]; lm_head:MatMul e head>logits",
    "two transposes": "Transpose table>there; Transpose there>back; lm_head:Gemm e back>logits|transB=1",
}


def tied(head: str = "MatMul", look: str = "wte:Gather table ids>e", table: np.ndarray = TIED) -> onnx.ModelProto:
    """ids -> Gather -> lm_head -> logits, with one table for both."""
    logits = F32 if "wide" in HEADS[head] else table.dtype, ["m", len(table)]
    return model(steps(f"{look}; {HEADS[head]}"), {"ids": (np.int64, ["m"])}, {"logits": logits}, {"table": table})


@looped("head", HEADS)
def test_lookup_and_projection_share_one_packed_copy(head: str) -> None:
    rewritten, report = rewrite(tied(head), BOTH)
    assert initializers(rewritten) == ["table_mxfp8", "table_mxfp8_scales"]
    assert kinds(rewritten) == {"MXFP8Embedding": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1}
    assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
    rows = quantized(TIED)[ROW_IDS].astype(F32)
    expect(rows, TIED).check(run(rewritten, {"ids": ROW_IDS})[0])


def test_a_float16_table_and_its_float32_copy_are_one_weight() -> None:
    proto = tied("MatMul of float32", "wte:Gather table ids>half; Cast half>e|to=1", TIED.astype(F16))
    assert initializers(rewrite(proto, BOTH)[0]) == ["table_mxfp8", "table_mxfp8_scales"]


@looped("settings", [{"weight_format": "e5m2"}, {"scale_rounding": "floor"}])
def test_settings_that_differ_need_two_packed_copies(settings: dict[str, str]) -> None:
    recipe = Recipe(name="two", embeddings=True, output_projections=True, rules=(Rule(name="wte", **settings),))
    assert len(initializers(rewrite(tied(), recipe)[0])) == 4


COPIES = "both copies are stored, and the file is larger than with neither quantized"
COSTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "the embedding alone, by a rule": (
        {"rules": (Rule(name="wte"),)}, "wte",
        "rules.0: name='wte' -> quantize; its table is also the weight of 'lm_head', which is kept: "
        f"{COPIES}; set output_projections: true to share one",
    ),
    "the projection alone": (
        {"output_projections": True}, "lm_head",
        "output projection, by recipe 'one'; its weight is also the table of 'wte', which is kept: "
        f"{COPIES}; set embeddings: true to share one",
    ),
}  # fmt: skip


@looped("case", COSTS)
def test_the_reason_says_what_quantizing_one_of_them_costs(case: str) -> None:
    fields, name, reason = COSTS[case]
    rewritten, report = rewrite(tied(), Recipe(name="one", **fields))
    assert reasons(report)[name] == reason
    assert initializers(rewritten) == ["table", "table_mxfp8", "table_mxfp8_scales"]
    assert (report.bytes_after or 0) > report.bytes_before


@looped(
    "fields, advice",
    [
        ({"embeddings": True}, "set output_projections: true to share one"),
        ({"embeddings": True, "output_projections": True, "exclude": ("lm_head",)}, "see why"),
    ],
)
def test_an_embedding_is_kept_whose_table_stays_for_the_projection(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(NothingEligibleError) as raised:
        rewrite(tied(), Recipe(name="one", **fields))
    assert raised.value.decisions[0].reason == (
        "embedding: its table is also the weight of 'lm_head', which is kept: packed alone it would make the file "
        f"larger; {advice}"
    )


def test_unpack_gives_the_table_once() -> None:
    weights = mxfp8_graph.unpack(rewrite(tied(), BOTH)[0])
    assert list(weights) == ["table"]
    np.testing.assert_array_equal(weights["table"].dequantize(), quantized(TIED).astype(F32))


HELD_BYTES = """
import sys
from pathlib import Path
import numpy as np
from mxfp8_ops import ort

sizes, sessions = [], []
for path in sys.argv[1:]:  # the first one for the memory of the runtime itself
    sessions.append(ort.session(path))
    sessions[-1].run(None, {"ids": np.arange(4)})
    sizes.append(1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]))
print(sizes[1] - sizes[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_a_session_holds_the_table_once(tmp_path: Path) -> None:
    paths = []
    for rows in (96, 1 << 15):
        proto = tied("Gemm transB", table=np.resize(weight(96, 1024), (rows, 1024)).astype(F16))
        paths.append(b.save(mxfp8_graph.rewrite(proto, BOTH)[0], tmp_path / f"{rows}.onnx", external=True))
    command = [sys.executable, "-c", HELD_BYTES, *map(str, paths)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    held = int(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout) / (
        (1 << 15) * (1024 + 32)
    )
    assert held <= 1.1, f"the session holds {held:.2f}x the packed table"
