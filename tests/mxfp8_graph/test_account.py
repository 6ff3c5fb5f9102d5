"""The account of stored bytes: which node holds each tensor, what the rewrite did with it and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save
from grids import looped
from onnx import helper
from rich.console import Console

import mxfp8_graph
from mxfp8_graph.report.account import MOST_ROWS, StoredTensor
from mxfp8_graph.report.data import RewriteReport

LOOKUP, CONVOLUTION, RECURRENT = "a lookup, no matmul", "a convolution, no matmul", "a recurrent layer, no matmul"

FLOAT = np.float32
IMAGE, SEQUENCE, IDS = (FLOAT, [1, 4, 8, 8]), (FLOAT, [5, 1, 32]), (np.int64, [1, 3])


def beside(op: str, inputs: str, given: Any, weights: dict[str, np.ndarray], **attributes: Any) -> onnx.ModelProto:
    """Returns a model of one matmul and, beside it, `op` of the input "i" (dtype, shape) and `weights`."""
    nodes = b.steps("linear:MatMul x w>h; Relu h>y; Identity o>z")
    nodes.insert(2, b.node(op, inputs, "o", **attributes))
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    stored = [onnx.numpy_helper.from_array(v, k) for k, v in {"w": b.weight(64, 64), **weights}.items()]
    inputs_of = [b.value("x", FLOAT, ["m", 64]), b.value("i", *given)]
    outputs = [b.value("y", FLOAT, ["m", 64]), b.value("z", FLOAT, None)]
    graph = helper.make_graph(nodes, "beside", inputs_of, outputs, stored)
    return helper.make_model(graph, opset_imports=imports, ir_version=b.IR_VERSION)


def tensor(report: RewriteReport, name: str) -> StoredTensor:
    (found,) = (t for t in report.account.tensors if t.name == name)
    return found


def told(report: RewriteReport, name: str = "held") -> tuple[str, int, int, str]:
    """Returns (outcome, bytes before, bytes after, reason) of a tensor."""
    found = tensor(report, name)
    return found.outcome, found.bytes_before, found.bytes_after, found.reason


@looped(
    "op, given, shape, reason, attributes",
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


EMBEDDING = "embedding: ids pick its rows; set embeddings: true to quantize it"


def test_a_table_that_ids_pick_rows_from_and_a_tensor_that_nothing_uses() -> None:
    held = b.weight(100, 64)
    proto = beside("Gather", "held i", IDS, {"held": held, "spare": b.weight(8, 8)})
    _, report = mxfp8_graph.rewrite(proto)
    assert told(report) == ("kept", held.nbytes, held.nbytes, EMBEDDING)
    assert told(report, "spare") == ("other", 256, 256, "nothing uses it")


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


@looped("op", QUANTIZED)
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


def test_a_tied_table_is_counted_once_and_says_who_needs_it() -> None:
    nodes = b.steps(
        "Gather table ids>e; inner:MatMul e w>h; Relu h>a; Transpose table>turned|perm=[1,0]; head:MatMul a turned>y"
    )
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


def test_a_terminal_shows_the_largest_groups_and_the_total() -> None:
    names = [f"layers.{i}.linear" for i in range(10)]
    rules = [{"name": f"^{name}$", "quantize": False, "min_n": i} for i, name in enumerate(names[1:])]
    _, report = mxfp8_graph.rewrite(b.chain_model((64,) * 11), mxfp8_graph.Recipe(rules=rules))
    terminal = Console(width=200)
    with terminal.capture() as shown:
        terminal.print(report.to_text())
    lines = [line.split() for line in shown.get().splitlines()]
    start = lines.index(["weights", "before", "after", "used", "by", "why"])
    named = [line[0] for line in lines[start + 2 : start + 3 + MOST_ROWS]]
    assert named == ["rewritten", *["kept"] * (MOST_ROWS - 1), "total"]
    rest = "... and 3 more, 49.2 kB before and 49.2 kB after; --verbose and --json have all"
    assert lines[start + 4 + MOST_ROWS] == rest.split()
    with terminal.capture() as shown:
        terminal.print(report.to_text(every=True))
    whole = [line.split()[:1] for line in shown.get().splitlines()]
    assert whole.count(["kept"]) == 2 * 9  # each has a reason of its own
    assert ["..."] not in whole


@pytest.mark.usefixtures("own_folder")
class TestCommandLine:
    def test_a_dry_run_prints_the_account_of_the_real_run_and_json_has_every_tensor(self) -> None:
        source = save(b.language_model(), "lm.onnx")
        planned = run("rewrite", source, "--dry-run").stdout.splitlines()
        done = run("rewrite", source, "--report", "r.json").stdout.splitlines()
        start = next(i for i, line in enumerate(done) if line.split()[:2] == ["weights", "before"])
        printed = done[start : start + 7]
        assert printed[-1].split() == ["total", "124.9", "kB", "76.3", "kB"]
        assert [line for line in planned if line in printed] == printed
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

    def test_verbose_has_a_line_per_tensor(self) -> None:
        lines = run("rewrite", save(b.language_model(), "lm.onnx"), "-v").stdout.splitlines()
        (line,) = (line for line in lines if line.startswith("wpe"))
        assert " ".join(line.split()) == f"wpe float32 8.2 kB 8.2 kB kept 1 Gather {EMBEDDING}"

    def test_nothing_eligible_says_which_ops_hold_the_weights(self) -> None:
        ends = {"i": IMAGE}, {"y": (FLOAT, [1, 8, 6, 6])}
        proto = b.model(b.steps("Conv i held>o; Relu o>y"), *ends, {"held": b.weight(8, 4, 3, 3)})
        assert refused("rewrite", save(proto), code=3) == (
            "error: m.onnx: no MatMul or Gemm in the model; expected at least one; nothing to rewrite: "
            "100% of its 1.2 kB are in 1 Conv, which is no matmul"
        )
