"""Experts in ONNX: weights picked from a stack while the model runs. One multiply per row, and no copy of a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from expert_models import STACK, experts
from grids import looped
from models import model, save, steps, value
from oracle import Expected, computes, expect, initializers, kinds, normal, refusal, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe

F32, I64 = np.float32, np.int64
CHOSEN = np.array([3, 0, 0, 2, -1])
X = normal(5, 1, 70)
WEIGHT_ONLY = Recipe(name="weight only", activations="unchanged")
TURNED = "Gather stack i>w; Transpose w>wt|perm=[0,2,1]; "
"""Picks the matrices of `i` and turns them for x @ wt."""

pytestmark = pytest.mark.usefixtures("runtime")


def predict(x: np.ndarray, index: np.ndarray, **settings: Any) -> Expected:
    """Returns -(x [..., M, K] times the transposes of what `index` picks)."""
    return expect(x, STACK[index], **settings).then(np.negative)


BATCHED = {
    "the weight first, as torch.onnx writes it": experts(
        "Reshape x flat>rows; Unsqueeze i end>i1; GatherND stack i1>w; Unsqueeze rows end>column; "
        "linear:MatMul w column>h1; Squeeze h1 end>h2; Unsqueeze h2 one>h",
        end=np.array([-1]), one=np.array([1]), flat=np.array([-1, 70]),
    ),
    "transposed after the gather": experts(TURNED + "linear:MatMul x wt>h"),
    "cast after the gather": experts(
        "Gather stack i>w; Cast w>wide|to=1; Transpose wide>wt|perm=[0,2,1]; Identity wt>same; linear:MatMul x same>h"
    ),
    "transposed before the gather": experts(
        "Transpose stack>stack_t|perm=[0,2,1]; Gather stack_t i>w|axis=-3; linear:MatMul x w>h"
    ),
}  # fmt: skip


@looped("name, weight_only", [(name, only) for name in BATCHED for only in (False, True)])
def test_batched_experts_stay_packed(name: str, weight_only: bool) -> None:
    expected = predict(X, CHOSEN, weight_only=weight_only)
    recipe = WEIGHT_ONLY if weight_only else "mxfp8"
    rewritten, report = computes(BATCHED[name], expected, recipe=recipe, x=X, i=CHOSEN)
    (site,) = report.rewritten
    assert (site.decision.site.weight, site.decision.site.n, site.decision.site.k) == ("stack", 40, 70)
    assert kinds(rewritten)["MXFP8GroupedWeightGemm" if weight_only else "MXFP8GroupedGemm"] == 1
    assert not {"MatMul", "Gather", "GatherND"} & kinds(rewritten).keys()
    assert "stack" not in initializers(rewritten)
    run(rewritten, {"x": X[:0], "i": CHOSEN[:0]})  # no token at all


@looped("weight_only", [False, True])
def test_one_expert_in_float16_for_all_rows_as_a_loop_picks_it(weight_only: bool) -> None:
    stack, x = STACK.astype(np.float16), normal(6, 70, dtype=np.float16)
    nodes = "Gather stack i>w; Transpose w>wt|perm=[1,0]; linear:MatMul x wt>h"
    expected = expect(x, stack[2], weight_only=weight_only, dtype="float16").then(np.negative)
    recipe = WEIGHT_ONLY if weight_only else "mxfp8"
    proto = experts(nodes, x=["m", 70], index=[], stack=stack)
    computes(proto, expected, recipe=recipe, roundings=4096, x=x, i=np.array(2))


@looped(
    "nodes, x, i",
    [
        ("Transpose w>wt|perm=[1,0]", normal(6, 70), np.array(2)),
        ("Squeeze w first>w1; Transpose w1>wt|perm=[1,0]", normal(6, 70), np.array([1])),
        ("Transpose w>wt|perm=[0,1,3,2]", normal(3, 1, 1, 70), np.array([[0, 3], [1, 1], [2, 0]], np.int32)),
    ],
)
def test_rows_and_indices_broadcast_as_in_the_model(nodes: str, x: np.ndarray, i: np.ndarray) -> None:
    more = {"first": np.array([0])} if "first" in nodes else {}
    nodes = f"Gather stack i>w; {nodes}; linear:MatMul x wt>h"
    proto = experts(nodes, x=x.shape, index=i.shape, index_dtype=i.dtype, rank=x.ndim, **more)
    computes(proto, predict(x, i.squeeze() if more else i), x=x, i=i)


def test_in_the_body_of_a_loop() -> None:
    nodes = "Gather stack turn>w; linear:Gemm x w>h|transB=1; Relu h>r; Add before r>after; Identity more>go_on"
    body = onnx.helper.make_graph(
        steps(nodes),
        "body",
        [value("turn", I64, []), value("more", np.bool_, []), value("before", F32, ["m", 40])],
        [value("go_on", np.bool_, []), value("after", F32, ["m", 40])],
    )
    loop = onnx.helper.make_node("Loop", ["trips", "", "start"], ["y"], name="loop", body=body)
    inputs = {"x": (F32, ["m", 70]), "trips": (I64, []), "start": (F32, ["m", 40])}
    proto, x = model([loop], inputs, {"y": (F32, ["m", 40])}, {"stack": STACK}), normal(3, 70)
    parts = [expect(x, STACK[e]) for e in range(4)]
    total = Expected(sum(np.maximum(p.y, 0) for p in parts), sum(p.bound for p in parts))
    start = np.zeros((3, 40), F32)
    rewritten, report = computes(proto, total, roundings=8, x=x, trips=np.array(4), start=start)
    assert [site.decision.site.subgraph for site in report.rewritten] == ["loop/body"]
    assert initializers(rewritten) == ["stack_mxfp8", "stack_mxfp8_scales"]


def test_a_bias_per_expert_or_of_all_is_not_absorbed_but_added() -> None:
    product, biases, bias = expect(X, STACK[CHOSEN]), normal(4, 40, seed=3), normal(40, seed=3)
    nodes = TURNED + "linear:MatMul x wt>h0; Gather biases i>b0; Unsqueeze b0 one>b; Add h0 b>h"
    expected = Expected(-(product.y + biases[CHOSEN][:, None]), product.bound)
    computes(experts(nodes, biases=biases, one=np.array([1])), expected, roundings=2, x=X, i=CHOSEN)
    proto = experts(TURNED + "linear:MatMul x wt>h0; Add h0 bias>h", bias=bias)
    _, report = computes(proto, Expected(-(product.y + bias), product.bound), roundings=2, x=X, i=CHOSEN)
    assert not report.rewritten[0].decision.site.has_bias


def test_a_stack_of_several_products_is_packed_once() -> None:
    nodes = TURNED + "MatMul x wt>h0; Gather stack j>w2; Transpose w2>w2t|perm=[0,2,1]; MatMul x w2t>h1; Add h0 h1>h"
    proto = experts(nodes, j=CHOSEN)
    proto.graph.input.append(value("j", I64, ["s"]))
    del proto.graph.initializer[1:]  # j is an input
    rewritten, report = rewrite(proto)
    assert [site.decision.site.shared_with for site in report.rewritten] == [1, 1]
    assert initializers(rewritten) == ["stack_mxfp8", "stack_mxfp8_scales"]
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8GroupedGemm": 2, "Add": 1, "Neg": 1}


def test_a_stack_that_something_else_reads_stays_too() -> None:
    rewritten, _ = rewrite(experts(TURNED + "linear:MatMul x wt>h0; ReduceMax w>top|keepdims=0; Add h0 top>h"))
    assert set(initializers(rewritten)) == {"stack", "stack_mxfp8", "stack_mxfp8_scales"}
    assert kinds(rewritten)["Gather"] == 1


AS_THEY_ARE = "expected the picked matrices as they are, or transposed; export the model so"
REFUSED: tuple[tuple[str, Any, Any, int, str], ...] = (
    ("Gather stack i>w|axis=1; MatMul x w>h", [4, 1, "s"], ["s"], 3,
     "along axis 1; expected axis 0; export the model with the experts first"),
    ("Reshape stack four>more; Gather more i>w; MatMul x w>h", ["s", 2, 3, 40], ["s"], 4,
     "from shape [2, 2, 40, 70]; expected [E, N, K]; export the model so"),
    ("GatherND stack i>w; MatMul x w>h", [6, 3, 8], [6, 8, 2], 3,
     "by GatherND of more than axis 0; expected one index per matrix; use Gather"),
    ("Gather stack i>w; Reshape w wide>w1; MatMul x w1>h", ["m", 40], ["s"], 2,
     f"and then changed by Reshape; {AS_THEY_ARE}"),
    ("Gather stack i>w; Transpose w>wt|perm=[1,0,2]; MatMul x wt>h", [40, 3, "s"], ["s"], 2,
     f"and then changed by Transpose; {AS_THEY_ARE}"),
    ("Gather stack i>w; MatMul w x>h", [70], ["s"], 2,
     "the activation's rank is unknown or below 2; give the model shape information"),
)  # fmt: skip
"""Nodes, shapes of x and of the index, the rank of y, the reason."""


@looped("nodes, x, index, rank, reason", REFUSED)
def test_other_gathers_are_kept_with_the_reason(nodes: str, x: Any, index: Any, rank: int, reason: str) -> None:
    shapes = {"four": np.array([2, 2, 40, 70]), "wide": np.array([-1, 70])}
    where = "weight 'stack' holds experts that are gathered while the model runs, "
    more = {key: shape for key, shape in shapes.items() if f" {key}>" in nodes}
    proto = experts(nodes, x=x, index=index, rank=rank, **more)
    assert refusal(proto).removeprefix(where) == reason


def test_experts_are_unpacked_and_verified_and_record_their_recipe(tmp_path: Path) -> None:
    path = save(BATCHED["transposed after the gather"], tmp_path / "experts.onnx")
    rewritten, _ = mxfp8_graph.rewrite(path)
    stack = mxfp8_graph.unpack(rewritten)["stack"]
    assert (stack.shape, stack.weight_only) == ((4, 40, 70), False)
    assert np.abs(stack.dequantize() - STACK).max() < 0.04 * np.abs(STACK).max()
    mxfp8_graph.export_safetensors(rewritten, tmp_path / "experts.safetensors")
    assert (tmp_path / "experts.safetensors").stat().st_size > stack.elements.nbytes
    report = mxfp8_graph.verify(path, rewritten, shapes={"s": 9})
    assert report.failures == ()
    assert [check.op for check in report.nodes] == ["MXFP8Quantize", "MXFP8GroupedGemm"]
    assert report.nodes[1].excess < 0.1
    assert " gemm_" in report.nodes[1].kernel
    assert mxfp8_graph.rewrite(rewritten)[1].already_rewritten
