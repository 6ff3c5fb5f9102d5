"""Experts in ONNX: weights picked from a stack while the model runs. One multiply per row, and no copy of a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, node, save, weight
from oracle import Expected, expect, initializers, kinds, normal, refusal, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe

F32, I64 = np.float32, np.int64
STACK = weight(4, 70, 40, seed=1).transpose(0, 2, 1).copy()
"""[E, N, K]: 4 experts, K no multiple of 32."""
CHOSEN = np.array([3, 0, 0, 2, -1])
WEIGHT_ONLY = Recipe(name="weight only", activations="unchanged")

pytestmark = pytest.mark.usefixtures("runtime")


def experts(
    nodes: str | list[onnx.NodeProto],
    *,
    x: list[Any],
    index: list[Any],
    stack: np.ndarray = STACK,
    dtype: Any = F32,
    index_dtype: Any = I64,
    **initializers: np.ndarray,
) -> onnx.ModelProto:
    """Returns a model that picks from `stack` by `i` and multiplies with `x`, giving `h`; its result is y = -h."""
    rank = max(len(x), len(index) + 2)
    given = [node("Gather", "stack i", "w"), node("MatMul", nodes, "h", "linear")] if isinstance(nodes, str) else nodes
    inputs = {"x": (dtype, x), "i": (index_dtype, index)}
    outputs = {"y": (dtype, [None] * rank)}
    return model([*given, node("Neg", "h", "y")], inputs, outputs, {"stack": stack, **initializers})


def predict(x: np.ndarray, index: np.ndarray, **settings: Any) -> Expected:
    """Returns -(x [..., M, K] times the transposes of what `index` picks)."""
    return expect(x, STACK[index], **settings).then(np.negative)


BATCHED: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], str]] = {
    "the weight first, as torch.onnx writes it": (
        [
            node("Unsqueeze", "i end", "i1"),
            node("GatherND", "stack i1", "w"),
            node("Unsqueeze", "rows end", "column"),
            node("MatMul", "w column", "h1", "linear"),
            node("Squeeze", "h1 end", "h2"),
            node("Unsqueeze", "h2 one", "h"),
        ],
        {"end": np.array([-1]), "one": np.array([1])},
        "GatherND",
    ),
    "transposed after the gather": (
        [
            node("Gather", "stack i", "w"),
            node("Transpose", "w", "wt", perm=[0, 2, 1]),
            node("MatMul", "x wt", "h", "linear"),
        ],
        {},
        "Gather",
    ),
    "cast after the gather": (
        [
            node("Gather", "stack i", "w"),
            node("Cast", "w", "wide", to=onnx.TensorProto.FLOAT),
            node("Transpose", "wide", "wt", perm=[0, 2, 1]),
            node("Identity", "wt", "same"),
            node("MatMul", "x same", "h", "linear"),
        ],
        {},
        "Gather",
    ),
    "transposed before the gather": (
        [
            node("Transpose", "stack", "stack_t", perm=[0, 2, 1]),
            node("Gather", "stack_t i", "w", axis=-3),
            node("MatMul", "x w", "h", "linear"),
        ],
        {},
        "Gather",
    ),
}
"""name -> nodes, their constants, the op that gathers."""


@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_experts_stay_packed(name: str, *, weight_only: bool) -> None:
    nodes, constants, gather = BATCHED[name]
    if any("rows" in n.input for n in nodes):
        constants = {**constants, "flat": np.array([-1, 70])}
        nodes = [node("Reshape", "x flat", "rows"), *nodes]
    proto = experts(nodes, x=["s", 1, 70], index=["s"], **constants)
    rewritten, report = rewrite(proto, WEIGHT_ONLY if weight_only else "mxfp8")
    (site,) = report.rewritten
    assert (site.decision.site.weight, site.decision.site.n, site.decision.site.k) == ("stack", 40, 70)
    assert kinds(rewritten)["MXFP8GroupedWeightGemm" if weight_only else "MXFP8GroupedGemm"] == 1
    assert "MatMul" not in kinds(rewritten)
    assert gather not in kinds(rewritten)
    assert "stack" not in initializers(rewritten)
    x = normal(5, 1, 70)
    expected = predict(x, CHOSEN, weight_only=weight_only)
    expected.check(run(rewritten, {"x": x, "i": CHOSEN})[0])
    run(rewritten, {"x": x[:0], "i": CHOSEN[:0]})  # no token at all


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("weight_only", [False, True])
def test_one_expert_for_all_rows_as_a_loop_picks_it(dtype: Any, *, weight_only: bool) -> None:
    stack = STACK.astype(dtype)
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[1, 0]),
        node("MatMul", "x wt", "h", "linear"),
    ]
    proto = experts(nodes, x=["m", 70], index=[], stack=stack, dtype=dtype)
    rewritten, _ = rewrite(proto, WEIGHT_ONLY if weight_only else "mxfp8")
    x = normal(6, 70, dtype=dtype)
    name = np.dtype(dtype).name
    expected = expect(x, stack[2], weight_only=weight_only, dtype=name).then(np.negative)
    expected.check(run(rewritten, {"x": x, "i": np.array(2)})[0], roundings=4096 * (name == "float16"))


def test_in_the_body_of_a_loop() -> None:
    body = onnx.helper.make_graph(
        [
            node("Gather", "stack turn", "w"),
            node("Gemm", "x w", "h", "linear", transB=1),
            node("Relu", "h", "r"),
            node("Add", "before r", "after"),
            node("Identity", "more", "go_on"),
        ],
        "body",
        [
            onnx.helper.make_tensor_value_info("turn", onnx.TensorProto.INT64, []),
            onnx.helper.make_tensor_value_info("more", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("before", onnx.TensorProto.FLOAT, ["m", 40]),
        ],
        [
            onnx.helper.make_tensor_value_info("go_on", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("after", onnx.TensorProto.FLOAT, ["m", 40]),
        ],
    )
    loop = onnx.helper.make_node("Loop", ["trips", "", "start"], ["y"], name="loop", body=body)
    inputs = {"x": (F32, ["m", 70]), "trips": (I64, []), "start": (F32, ["m", 40])}
    proto = model([loop], inputs, {"y": (F32, ["m", 40])}, {"stack": STACK})
    rewritten, report = rewrite(proto)
    assert [site.decision.site.subgraph for site in report.rewritten] == ["loop/body"]
    assert initializers(rewritten) == ["stack_mxfp8", "stack_mxfp8_scales"]
    x = normal(3, 70)
    parts = [expect(x, STACK[e]) for e in range(4)]
    total = Expected(sum(np.maximum(p.y, 0) for p in parts), sum(p.bound for p in parts))
    total.check(run(rewritten, {"x": x, "trips": np.array(4), "start": np.zeros((3, 40), F32)})[0], roundings=8)


def test_rows_and_indices_broadcast_as_in_the_model() -> None:
    chosen = np.array([[0, 3], [1, 1], [2, 0]], np.int32)
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[0, 1, 3, 2]),
        node("MatMul", "x wt", "h", "linear"),
    ]
    proto = experts(nodes, x=["t", 1, 1, 70], index=["t", 2], index_dtype=np.int32)
    rewritten, _ = rewrite(proto)
    x = normal(3, 1, 1, 70)
    predict(x, chosen).check(run(rewritten, {"x": x, "i": chosen})[0])


def test_axes_of_the_index_that_come_and_go() -> None:
    nodes = [
        node("Gather", "stack i", "w"),  # [1, N, K]
        node("Squeeze", "w first", "w1"),
        node("Transpose", "w1", "wt", perm=[1, 0]),
        node("MatMul", "x wt", "h", "linear"),
    ]
    proto = experts(nodes, x=["m", 70], index=[1], first=np.array([0]))
    del proto.graph.output[0].type.tensor_type.shape.dim[2:]
    rewritten, _ = rewrite(proto)
    x = normal(6, 70)
    predict(x, np.array(1)).check(run(rewritten, {"x": x, "i": np.array([1])})[0])


def test_a_bias_per_expert_is_still_added() -> None:
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[0, 2, 1]),
        node("MatMul", "x wt", "h0", "linear"),
        node("Gather", "biases i", "b0"),
        node("Unsqueeze", "b0 one", "b"),
        node("Add", "h0 b", "h"),
    ]
    biases = normal(4, 40, seed=3)
    rewritten, _ = rewrite(experts(nodes, x=["s", 1, 70], index=["s"], biases=biases, one=np.array([1])))
    x = normal(5, 1, 70)
    product = expect(x, STACK[CHOSEN])
    expected = Expected(-(product.y + biases[CHOSEN][:, None]), product.bound)
    expected.check(run(rewritten, {"x": x, "i": CHOSEN})[0], roundings=2)


def test_a_bias_of_all_experts_is_not_absorbed_but_added() -> None:
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[0, 2, 1]),
        node("MatMul", "x wt", "h0", "linear"),
        node("Add", "h0 bias", "h"),
    ]
    bias = normal(40, seed=3)
    rewritten, report = rewrite(experts(nodes, x=["s", 1, 70], index=["s"], bias=bias))
    assert not report.rewritten[0].decision.site.has_bias
    x = normal(5, 1, 70)
    product = expect(x, STACK[CHOSEN])
    Expected(-(product.y + bias), product.bound).check(run(rewritten, {"x": x, "i": CHOSEN})[0], roundings=2)


def test_a_stack_of_several_products_is_packed_once() -> None:
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[0, 2, 1]),
        node("MatMul", "x wt", "h0", "first"),
        node("Gather", "stack j", "w2"),
        node("Transpose", "w2", "w2t", perm=[0, 2, 1]),
        node("MatMul", "x w2t", "h1", "second"),
        node("Add", "h0 h1", "h"),
    ]
    proto = experts(nodes, x=["s", 1, 70], index=["s"], j=np.array([1, 1, 0, 3, 2]))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("j", onnx.TensorProto.INT64, ["s"]))
    del proto.graph.initializer[1:]
    rewritten, report = rewrite(proto)
    assert [site.decision.site.shared_with for site in report.rewritten] == [1, 1]
    assert initializers(rewritten) == ["stack_mxfp8", "stack_mxfp8_scales"]
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8GroupedGemm": 2, "Add": 1, "Neg": 1}


def test_a_stack_that_something_else_reads_stays_too() -> None:
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[0, 2, 1]),
        node("MatMul", "x wt", "h0", "linear"),
        node("ReduceMax", "w", "top", keepdims=0),
        node("Add", "h0 top", "h"),
    ]
    rewritten, _ = rewrite(experts(nodes, x=["s", 1, 70], index=["s"]))
    assert set(initializers(rewritten)) == {"stack", "stack_mxfp8", "stack_mxfp8_scales"}
    assert kinds(rewritten)["Gather"] == 1


WHERE = "weight 'stack' holds experts that are gathered while the model runs"
REFUSED: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], list[Any], list[Any], str]] = {
    "another axis": (
        [node("Gather", "stack i", "w", axis=1), node("MatMul", "x w", "h", "linear")],
        {},
        [4, 1, "s"],
        ["s"],
        f"{WHERE}, along axis 1; expected axis 0; export the model with the experts first",
    ),
    "a stack of stacks": (
        [
            node("Reshape", "stack four", "more"),
            node("Gather", "more i", "w"),
            node("MatMul", "x w", "h", "linear"),
        ],
        {"four": np.array([2, 2, 40, 70])},
        ["s", 2, 3, 40],
        ["s"],
        f"{WHERE}, from shape [2, 2, 40, 70]; expected [E, N, K]; export the model so",
    ),
    "rows of the matrices": (
        [node("GatherND", "stack i", "w"), node("MatMul", "x w", "h", "linear")],
        {},
        [6, 3, 8],
        [6, 8, 2],
        f"{WHERE}, by GatherND of more than axis 0; expected one index per matrix; use Gather",
    ),
    "reshaped after the gather": (
        [
            node("Gather", "stack i", "w"),
            node("Reshape", "w wide", "wide_w"),
            node("MatMul", "x wide_w", "h", "linear"),
        ],
        {"wide": np.array([-1, 70])},
        ["m", 40],
        ["s"],
        f"{WHERE}, and then changed by Reshape; expected the picked matrices as they are, or transposed; "
        "export the model so",
    ),
    "the axis of the experts moved": (
        [
            node("Gather", "stack i", "w"),
            node("Transpose", "w", "wt", perm=[1, 0, 2]),
            node("MatMul", "x wt", "h", "linear"),
        ],
        {},
        [40, 3, "s"],
        ["s"],
        f"{WHERE}, and then changed by Transpose; expected the picked matrices as they are, or transposed; "
        "export the model so",
    ),
    "a single row": (
        [node("Gather", "stack i", "w"), node("MatMul", "w x", "h", "linear")],
        {},
        [70],
        ["s"],
        "the activation's rank is unknown or below 2; give the model shape information",
    ),
}
"""name -> nodes, constants, shapes of x and of the index, the reason."""


@pytest.mark.parametrize("name", REFUSED)
def test_other_gathers_are_kept_with_the_reason(name: str) -> None:
    nodes, constants, x, index, reason = REFUSED[name]
    rank = {"a stack of stacks": 4, "rows of the matrices": 3, "another axis": 3}.get(name, 2)
    proto = model(
        [*nodes, node("Neg", "h", "y")],
        {"x": (F32, x), "i": (I64, index)},
        {"y": (F32, [None] * rank)},
        {"stack": STACK, **constants},
    )
    assert refusal(proto) == reason


def test_experts_are_unpacked_and_verified_and_record_their_recipe(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "stack i", "w"),
        node("Transpose", "w", "wt", perm=[0, 2, 1]),
        node("MatMul", "x wt", "h", "linear"),
    ]
    path = save(experts(nodes, x=["s", 1, 70], index=["s"]), tmp_path / "experts.onnx")
    rewritten, _ = mxfp8_graph.rewrite(path)
    stack = mxfp8_graph.unpack(rewritten)["stack"]
    assert (stack.shape, stack.weight_only) == ((4, 40, 70), False)
    assert np.abs(stack.dequantize() - STACK).max() < 0.04 * np.abs(STACK).max()
    mxfp8_graph.export_safetensors(rewritten, tmp_path / "experts.safetensors")
    assert (tmp_path / "experts.safetensors").stat().st_size > stack.elements.nbytes
    report = mxfp8_graph.verify(path, rewritten, shapes={"s": 9})
    assert report.failures == ()
    assert [check.op for check in report.nodes] == ["MXFP8Quantize", "MXFP8GroupedGemm"]
    assert mxfp8_graph.rewrite(rewritten)[1].already_rewritten
