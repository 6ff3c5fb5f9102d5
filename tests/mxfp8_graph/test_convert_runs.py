"""Converted models in what runs them: stock ONNX Runtime, onnx's ReferenceEvaluator, OpenVINO where it is installed.

OpenVINO 2026.4 converts float32 to float8 by way of float16, and to bfloat16 with errors: so where a model rounds
activations, results are near and not equal there. Weights alone are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attention_models
import commands
import dialect_models as d
import models as b
import numpy as np
import onnx
import onnxruntime
import oracle
import pytest
from dialect_models import INT8_DIALECTS, codes_of, relative
from grids import looped, pairwise
from onnx.reference import ReferenceEvaluator
from releases import release

import mxfp8_graph
from mxfp8_graph.running.inputs import make_inputs
from mxfp8_graph.running.runner import open_runnable
from mxfp8_ops.errors import ContractError

SMALL = {
    "chain": lambda: b.chain_model((64, 128, 64)),
    "partial blocks": lambda: b.chain_model((70, 96, 64)),
    "attention": b.attention_model,
    "language model": b.language_model,
    "decoder": attention_models.decoder,
}


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return make_inputs(open_runnable(proto)[0])


def check_outputs(converted: onnx.ModelProto, rewritten: onnx.ModelProto, limit: float) -> None:
    """Fails unless ONNX Runtime and onnx's ReferenceEvaluator compute what the function bodies do."""
    onnx.checker.check_model(converted, full_check=True)
    feeds = feeds_of(rewritten)
    expected = oracle.run(rewritten, feeds)
    for result in (oracle.run(converted, feeds), ReferenceEvaluator(converted).run(None, feeds)):
        for one, other in zip(expected, result, strict=True):
            assert relative(other, one) < limit


@looped("name, recipe", zip(SMALL, ["mxfp8-bf16", "mxfp8-weight-only", "mxfp8", "mxfp8-bf16", "mxfp8"], strict=True))
def test_standard_ops_compute_what_the_function_bodies_do(name: str, recipe: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(SMALL[name](), recipe)
    standard, report = mxfp8_graph.convert(rewritten, "standard")
    assert {node.domain for node in standard.graph.node} == {""}
    assert not standard.functions
    assert not report.losses
    check_outputs(standard, rewritten, 1e-3)


@looped("name", SMALL)
def test_qdq_is_the_same_in_onnx_runtime_and_the_reference_evaluator(name: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(SMALL[name](), "mxfp8-weight-only")
    qdq, _ = mxfp8_graph.convert(rewritten, "qdq")
    assert {t.data_type for t in qdq.graph.initializer} >= {onnx.TensorProto.FLOAT8E8M0}
    check_outputs(qdq, rewritten, 1e-5)


# --- MXINT8 in ONNX Runtime ------------------------------------------------------------------------------------------


def integers(weight: np.ndarray) -> onnx.ModelProto:
    """Returns y = relu(x @ w) with MXINT8 weights; x is [3, K] or [.., 3, K]."""
    *batch, k, n = weight.shape
    shapes = {"x": (np.float32, [*batch, 3, k])}, {"y": (np.float32, [*batch, 3, n])}
    model = b.model(b.steps("MatMul x w>h; Relu h>y"), *shapes, {"w": weight})
    return mxfp8_graph.rewrite(model, "mxint8-weight-only")[0]


def in_stock(model: onnx.ModelProto, feeds: dict[str, np.ndarray], level: int | None = None) -> np.ndarray:
    """Returns the first output of ONNX Runtime, whose fused Q/DQ has this accuracy_level."""
    options = onnxruntime.SessionOptions()
    if level is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0])


@looped("to, shape", [*pairwise(to=INT8_DIALECTS, shape=[(64, 33), (70, 33)]), ("qdq", (2, 64, 33))])
def test_stock_onnx_runtime_runs_mxint8_weights(to: str, shape: tuple[int, ...]) -> None:
    """Blocks of zeros too, whose scales are below what E8M0 can store for integers."""
    weight = b.weight(*shape)
    weight[..., :32, :] = 0
    ours = integers(weight)
    there, _ = mxfp8_graph.convert(ours, to, **({"accuracy_level": 0} if to == "nbits" else {}))
    assert all(node.domain != "mxfp8" for node in there.graph.node)
    feeds = {"x": oracle.normal(*shape[:-2], 3, shape[-2])}
    # A float32 sum in another order.
    assert relative(in_stock(there, feeds, level=0), oracle.run(ours, feeds)[0]) < 1e-6
    assert codes_of(mxfp8_graph.convert(there, "mxfp8")[0]) == codes_of(ours)


@looped("to, yes", pairwise(to=INT8_DIALECTS, yes=[True, False]))
def test_stock_onnx_runtime_runs_mxint8_weights_that_a_subgraph_reads(to: str, yes: bool) -> None:
    """ONNX Runtime fuses Q/DQ, and refuses the model if it does not find the weight beside it."""
    state = [b.value(name, *of) for name, *of in (("i", np.int64, []), ("go", np.bool_, []), ("v", np.float32, None))]
    body = [*b.steps("Identity go>on"), b.choose("MatMul v w>t", "MatMul v u>e", "new")]
    loop = b.subgraph(body, "on new", state, u=b.weight(64, 64, seed=1))
    nodes = [b.node("Loop", "n - x", "last", body=loop), *b.steps("MatMul last w>h; Relu h>y")]
    stored = {"w": b.weight(64, 64), "n": np.array(2)}
    ends = {"x": (np.float32, [3, 64]), "yes": (np.bool_, [])}, {"y": (np.float32, [3, 64])}
    ours, _ = mxfp8_graph.rewrite(b.model(nodes, *ends, stored), "mxint8-weight-only")
    there, report = mxfp8_graph.convert(ours, to, **({"accuracy_level": 0} if to == "nbits" else {}))
    assert any("w_mxfp8: a subgraph reads it" in note for note in report.notes) == (to == "qdq")
    feeds = {"x": oracle.normal(3, 64), "yes": np.array(yes)}
    assert relative(in_stock(there, feeds, level=0), oracle.run(ours, feeds)[0]) < 1e-6
    assert codes_of(mxfp8_graph.convert(there, "mxfp8")[0]) == codes_of(ours)


@looped("to, k", [("qdq", 64), ("nbits", 70)])
def test_int8_activations_of_onnx_runtime_are_as_far_off_as_int8_is(to: str, k: int) -> None:
    """An activation is off by half a step at most, and a step is the largest of its block over 127."""
    ours = integers(b.weight(k, 33))
    there, report = mxfp8_graph.convert(ours, to)
    assert "rounds activations to int8 (accuracy_level 4), a relative L2 error of 0.0055" in report.notes[-1]
    x = oracle.normal(3, k)
    blocks = np.abs(np.pad(x, ((0, 0), (0, -k % 32))).reshape(3, -1, 32)).max(axis=-1)
    (weight,) = mxfp8_graph.unpack(ours).values()
    values = np.abs(weight.dequantize().astype(np.float64))
    bound = np.repeat(blocks / 254, 32, axis=-1)[:, :k] @ values.T + k * 2.0**-23 * (np.abs(x) @ values.T)
    error = np.abs(in_stock(there, {"x": x}) - oracle.run(ours, {"x": x})[0])
    assert np.all(error <= bound), (to, k, error, bound)


@pytest.mark.skipif(release("onnxruntime") < (1, 31), reason="before ONNX Runtime 1.31 no Q/DQ is fused at 8 bits")
@looped("name, recipe", pairwise(name=("attention", "partial blocks"), recipe=("mxint8", "mxint8-weight-only")))
def test_onnx_runtime_fuses_every_weight_of_qdq(name: str, recipe: str, tmp_path: Path) -> None:
    there, _ = mxfp8_graph.convert(mxfp8_graph.rewrite(SMALL[name](), recipe)[0], "qdq", allow=["activations"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(there.SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx").graph.node
    before, after = oracle.kinds(there)["DequantizeLinear"], [n for n in optimized if n.op_type == "MatMulNBits"]
    assert before > 0
    assert [len(after), sum(node.op_type == "DequantizeLinear" for node in optimized)] == [before, 0]
    assert {a.i for node in after for a in node.attribute if a.name == "accuracy_level"} == {4}


def test_gemms_of_one_weight_share_it_in_qdq() -> None:
    ends = {"x": (np.float32, [3, 64])}, {"y": (np.float32, [3, 64])}
    model = b.model(b.steps("MatMul x w>h; Relu h>r; MatMul r w>s; Relu s>y"), *ends, {"w": b.weight(64, 64)})
    ours, _ = mxfp8_graph.rewrite(model, "mxint8-weight-only")
    there, report = mxfp8_graph.convert(ours, "qdq")
    assert report.notes[-1].startswith("w_mxfp8: several gemms read it, so ONNX Runtime decodes it"), report.notes
    assert oracle.kinds(there)["DequantizeLinear"] == 1
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    assert {t.name for t in back.graph.initializer} == {"w_mxfp8", "w_mxfp8_scales"}
    assert codes_of(back) == codes_of(ours)


def level_of(model: onnx.ModelProto) -> int:
    (node,) = (node for node in model.graph.node if node.op_type == "MatMulNBits")
    return next(a.i for a in node.attribute if a.name == "accuracy_level")


@pytest.mark.usefixtures("own_folder")
@looped("recipe, level", pairwise(recipe=("mxint8", "mxint8-weight-only"), level=(None, 4, 0)))
def test_nbits_has_the_accuracy_level_that_is_asked_for(recipe: str, level: int | None) -> None:
    settings: Any = {} if level is None else {"accuracy_level": level}
    ours, _ = mxfp8_graph.rewrite(b.matmul_model(bias=True), recipe)
    there, report = mxfp8_graph.convert(ours, "nbits", allow=["activations"], **settings)
    assert level_of(there) == (4 if level is None else level)
    assert any("rounds activations to int8" in note for note in report.notes) == (level != 0)
    how = "are not quantized any more" if level == 0 else "are quantized as ONNX Runtime does (accuracy_level 4)"
    assert all(loss.startswith(f"activations {how}") for loss in report.losses), report.losses


@pytest.mark.usefixtures("own_folder")
def test_the_command_has_the_accuracy_level_too() -> None:
    b.save(integers(b.weight(64, 33)), Path("m.onnx"))
    assert commands.run("convert", "m.onnx", "--to", "nbits", "--accuracy-level", "0").exit_code == 0
    assert level_of(onnx.load("m.nbits.onnx")) == 0
    said = commands.refused("convert", "m.onnx", "--to", "qdq", "--accuracy-level", "0")
    assert "qdq has no accuracy level; expected nbits, whose op has one; leave --accuracy-level 0 out" in said


def nbits(**changes: Any) -> onnx.ModelProto:
    """Returns a model with one MatMulNBits as others write it: scales [N * K / 32], zero points of 128."""
    rng = np.random.default_rng(0)
    tensors = {
        "b": rng.integers(0, 256, (96, 2, 32), np.uint8),
        "s": np.exp2(rng.integers(-12, -4, 192)).astype(np.float32),
        "z": np.full(192, 128, np.uint8),
    }
    node = {"K": 64, "N": 96, "bits": 8, "block_size": 32, "accuracy_level": 4}
    for name in tensors.keys() & changes.keys():
        tensors[name][-1] = changes.pop(name)
    nodes = [b.node("MatMulNBits", "x b s z", "y", domain="com.microsoft", **node | changes)]
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()]
    return d.made(nodes, stored, x=[5, 64], domain="com.microsoft")


def test_matmulnbits_of_others_is_read() -> None:
    ours, _ = mxfp8_graph.convert(nbits(), "mxfp8")
    assert oracle.kinds(ours) == {"MXFP8WeightGemm": 1}
    feeds = {"x": oracle.normal(5, 64)}
    assert relative(oracle.run(ours, feeds)[0], in_stock(nbits(accuracy_level=0), feeds)) < 1e-6


@looped(
    "changes, message",
    [
        ({"block_size": 64}, "quantized, but not in MXFP8 .*MatMulNBits"),
        ({"z": 127}, "zero points 'z'; expected none, or stored ones of 128"),
        ({"s": 0.3}, "its scales are not stored powers of two"),
        ({"N": 97}, r"B \[96, 2, 32\] and scales \[192\]; expected \[97, 2, 32\]"),
    ],
)
def test_matmulnbits_of_another_format_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.convert(nbits(**changes), "mxfp8")


# --- Other tools -----------------------------------------------------------------------------------------------------


@looped(
    "recipe, to, limit",
    [
        ("mxfp8-weight-only", "qdq", 1e-5),
        ("mxfp8-weight-only", "standard", 1e-5),
        ("mxfp8", "standard", 0.04),  # the activations of a linear
    ],
)
def test_openvino_runs_both(recipe: str, to: str, limit: float, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    for name in ("chain", "attention", "language model"):
        rewritten, _ = mxfp8_graph.rewrite(SMALL[name](), recipe)
        onnx.save(mxfp8_graph.convert(rewritten, to)[0], tmp_path / "m.onnx")
        model = openvino.Core().compile_model(str(tmp_path / "m.onnx"), "CPU", settings)
        feeds = feeds_of(rewritten)
        result = model(feeds)
        for one, output in zip(oracle.run(rewritten, feeds), model.outputs, strict=True):
            assert relative(result[output], one) < limit, name
