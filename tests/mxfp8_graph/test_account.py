"""The account of stored bytes: what holds each tensor, what became of it and why. conftest.py checks the sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save
from onnx import helper

import mxfp8_graph
from mxfp8_graph.report.account import MOST_ROWS, StoredTensor
from mxfp8_graph.report.data import RewriteReport

LOOKUP, CONVOLUTION, RECURRENT = "a lookup, no matmul", "a convolution, no matmul", "a recurrent layer, no matmul"

IMAGE, SEQUENCE, IDS = (np.float32, [1, 4, 8, 8]), (np.float32, [5, 1, 32]), (np.int64, [1, 3])


def beside(op: str, inputs: str, given: Any, weights: dict[str, np.ndarray], **attributes: Any) -> onnx.ModelProto:
    """Returns a model of one matmul and, beside it, `op` of the input "i" (dtype, shape) and `weights`."""
    nodes = [
        b.node("MatMul", "x w", "h", "linear"),
        b.node("Relu", "h", "y"),
        b.node(op, inputs, "o", **attributes),
        b.node("Identity", "o", "z"),
    ]
    return helper.make_model(
        helper.make_graph(
            nodes,
            "beside",
            [b.value("x", np.float32, ["m", 64]), b.value("i", *given)],
            [b.value("y", np.float32, ["m", 64]), b.value("z", np.float32, None)],
            [onnx.numpy_helper.from_array(v, k) for k, v in {"w": b.weight(64, 64), **weights}.items()],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=b.IR_VERSION,
    )


def tensor(report: RewriteReport, name: str) -> StoredTensor:
    (found,) = (t for t in report.account.tensors if t.name == name)
    return found


def told(report: RewriteReport, name: str = "held") -> tuple[str, int, int, str]:
    """Returns (outcome, bytes before, bytes after, reason) of a tensor."""
    found = tensor(report, name)
    return found.outcome, found.bytes_before, found.bytes_after, found.reason


FLOAT = np.float32


@pytest.mark.parametrize(
    ("op", "given", "shape", "reason", "attributes"),
    [
        ("Conv", IMAGE, (8, 4, 3, 3), CONVOLUTION, {}),
        ("ConvTranspose", IMAGE, (4, 8, 3, 3), CONVOLUTION, {}),
        ("LSTM", SEQUENCE, (1, 128, 32), RECURRENT, {"hidden_size": 32}),
        ("GRU", SEQUENCE, (1, 96, 32), RECURRENT, {"hidden_size": 32}),
        ("RNN", SEQUENCE, (1, 32, 32), RECURRENT, {"hidden_size": 32}),
        ("Gather", IDS, (4, 100, 64), LOOKUP, {}),
    ],
)
def test_a_weight_of_an_op_that_is_no_matmul(
    op: str, given: Any, shape: tuple[int, ...], reason: str, attributes: dict[str, Any]
) -> None:
    held = b.weight(*shape)
    recurrent = {"LSTM", "GRU", "RNN"}
    inputs = "held i" if op == "Gather" else "i held again" if op in recurrent else "i held"
    weights = {"held": held, **({"again": held} if op in recurrent else {})}
    _, report = mxfp8_graph.rewrite(beside(op, inputs, given, weights, **attributes))
    assert told(report) == ("other op", held.nbytes, held.nbytes, f"{op}: {reason}")
    assert tensor(report, "held").to_dict()["used_by"] == {op: 1}


def test_a_table_that_ids_pick_rows_from() -> None:
    held = b.weight(100, 64)
    _, report = mxfp8_graph.rewrite(beside("Gather", "held i", IDS, {"held": held}))
    reason = "embedding: ids pick its rows; set embeddings: true to quantize it"
    assert told(report) == ("kept", held.nbytes, held.nbytes, reason)


SCALE, ZERO = np.ones((), FLOAT), np.zeros((), np.int8)


QUANTIZED = {
    "MatMulNBits": ("i held scale", np.ones((64, 2, 16), np.uint8), {"K": 64, "N": 64, "bits": 4, "block_size": 32}),
    "MatMulInteger": ("i held", np.ones((64, 64), np.int8), {}),
    "QLinearMatMul": ("i scale zero held scale zero scale zero", np.ones((64, 64), np.int8), {}),
    "QLinearConv": ("i scale zero held scale zero scale zero", np.ones((8, 4, 3, 3), np.int8), {}),
    "ConvInteger": ("i held", np.ones((8, 4, 3, 3), np.int8), {}),
    "QAttention": ("i held scale scale scale", np.ones((64, 192), np.int8), {"num_heads": 2}),
    "QGemm": ("i scale zero held scale zero", np.ones((64, 64), np.int8), {}),
}
"""Inputs, weight and attributes of each op."""

CONTRIBUTED = {"MatMulNBits", "QAttention", "QGemm"}


@pytest.mark.parametrize("op", QUANTIZED)
def test_what_is_quantized_already(op: str) -> None:
    inputs, held, attributes = QUANTIZED[op]
    shape = [1, 4, 8, 8] if "Conv" in op else [1, 4, 64] if op == "QAttention" else ["m", 64]
    dtype = FLOAT if op == "MatMulNBits" else np.int8 if "zero" in inputs else np.uint8
    others = {name: value for name, value in {"scale": SCALE, "zero": ZERO}.items() if name in inputs}
    domain = "com.microsoft" if op in CONTRIBUTED else ""
    proto = beside(op, inputs, (dtype, shape), {"held": held, **others}, domain=domain, **attributes)
    _, report = mxfp8_graph.rewrite(proto)
    assert told(report) == ("quantized already", held.nbytes, held.nbytes, f"quantized already, by {op}")


def test_a_weight_behind_dequantize_linear() -> None:
    held = np.ones((64, 64), np.int8)
    before = [b.node("DequantizeLinear", "held scale", "w0")]
    proto = b.neg_model("MatMul", ["m", 64], ["m", 64], {"held": held, "scale": SCALE}, "x w0", before=before)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto)
    assert str(caught.value).endswith("100% of its 4.1 kB are in 1 DequantizeLinear, quantized already")


def test_matmuls_kept_and_rewritten_small_ones_and_constants() -> None:
    _, report = mxfp8_graph.rewrite(b.language_model())
    output = "output projection: its result is a graph output; set output_projections: true to quantize it"
    assert told(report, "lm_head.weight") == ("kept", 25600, 25600, output)
    assert told(report, "ffn.up.weight") == ("rewritten", 32768, 128 * (64 + 2), "linear, by recipe 'mxfp8'")
    assert told(report, "last") == ("other", 8, 8, "shapes, indices and other constants")
    _, report = mxfp8_graph.rewrite(b.gemm_model())
    assert told(report, "b") == ("small", 384, 384, "biases, normalization weights and other vectors")


def test_what_nothing_uses() -> None:
    proto = b.matmul_model()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(b.weight(8, 8), "spare"))
    assert told(mxfp8_graph.rewrite(proto)[1], "spare") == ("other", 256, 256, "nothing uses it")


def test_a_tied_table_is_counted_once_and_says_who_needs_it() -> None:
    nodes = [
        b.node("Gather", "table ids", "e"),
        b.node("MatMul", "e w", "h", "inner"),
        b.node("Relu", "h", "a"),
        b.node("Transpose", "table", "turned", perm=[1, 0]),
        b.node("MatMul", "a turned", "y", "head"),
    ]
    weights = {"table": b.weight(100, 64), "w": b.weight(64, 64)}
    proto = b.model(nodes, {"ids": (np.int64, ["m"])}, {"y": (FLOAT, ["m", 100])}, weights)
    assert tensor(mxfp8_graph.rewrite(proto)[1], "table").to_dict()["used_by"] == {"Gather": 1, "MatMul": 1}
    _, report = mxfp8_graph.rewrite(proto, mxfp8_graph.Recipe(output_projections=True))
    found = tensor(report, "table")
    assert (found.bytes_before, found.bytes_kept, found.bytes_new) == (25600, 25600, 100 * 66)
    assert found.reason.endswith("stays as it is too, for 1 Gather")


def test_a_weight_that_a_local_function_uses_is_held_by_the_op_inside() -> None:
    body = [helper.make_node("Conv", ["a", "k"], ["c"])]
    function = helper.make_function("own", "Block", ["a", "k"], ["c"], body, [helper.make_opsetid("", 21)])
    held = b.weight(8, 4, 3, 3)
    proto = beside("Block", "i held", IMAGE, {"held": held}, domain="own")
    proto.functions.append(function)
    proto.opset_import.add(domain="own", version=1)
    _, report = mxfp8_graph.rewrite(proto)
    assert told(report) == ("other op", held.nbytes, held.nbytes, f"Conv: {CONVOLUTION}")


def test_the_short_account_folds_the_smallest_groups_and_ends_with_the_total() -> None:
    names = [f"layers.{i}.linear" for i in range(10)]
    rules = [{"name": f"^{name}$", "quantize": False, "min_n": i} for i, name in enumerate(names[1:])]
    _, report = mxfp8_graph.rewrite(b.chain_model((64,) * 11), mxfp8_graph.Recipe(rules=rules))
    rows = report.account.rows()
    assert (len(rows), rows[0][0], rows[-2][4], rows[-1][0]) == (MOST_ROWS + 1, "rewritten", "4 more reasons", "total")


@pytest.mark.usefixtures("own_folder")
class TestCommandLine:
    def test_a_dry_run_prints_the_account_of_the_real_run(self) -> None:
        source = save(b.language_model(), "lm.onnx")
        planned = run("rewrite", source, "--dry-run").stdout.splitlines()
        done = run("rewrite", source).stdout.splitlines()
        start = next(i for i, line in enumerate(done) if line.split()[:2] == ["weights", "before"])
        account = done[start : start + 7]
        assert account[-1].split() == ["total", "124.9", "kB", "76.3", "kB"]
        assert [line for line in planned if line in account] == account

    def test_verbose_has_a_line_per_tensor(self) -> None:
        lines = run("rewrite", save(b.language_model(), "lm.onnx"), "-v").stdout.splitlines()
        (line,) = (line for line in lines if line.startswith("wpe"))
        reason = "embedding: ids pick its rows; set embeddings: true to quantize it"
        assert " ".join(line.split()) == f"wpe float32 8.2 kB 8.2 kB kept 1 Gather {reason}"

    def test_json_has_every_tensor(self) -> None:
        run("rewrite", save(b.language_model(), "lm.onnx"), "--report", "r.json")
        account = json.loads(Path("r.json").read_text())["account"]
        assert (account["bytes_before"], account["bytes_after"], len(account["tensors"])) == (124936, 76296, 6)
        assert account["groups"][0] == {
            "outcome": "rewritten",
            "reason": "linear, by recipe 'mxfp8'",
            "tensors": 2,
            "used_by": "2 MatMul",
            "bytes_before": 65536,
            "bytes_after": 16896,
        }

    def test_nothing_eligible_says_which_ops_hold_the_weights(self) -> None:
        held = b.weight(8, 4, 3, 3)
        proto = b.model(
            [b.node("Conv", "i held", "o"), b.node("Relu", "o", "y")],
            {"i": IMAGE},
            {"y": (FLOAT, [1, 8, 6, 6])},
            {"held": held},
        )
        assert refused("rewrite", save(proto), code=3) == (
            "error: m.onnx: no MatMul or Gemm in the model; expected at least one; nothing to rewrite: "
            "100% of its 1.2 kB are in 1 Conv, which is no matmul"
        )
