"""Models of 16-bit floats: a note on those that a CPU lacks kernels for, and the same in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import models as b
import numpy as np
import onnx
import pytest
from commands import run as command
from onnx import TensorProto, helper, numpy_helper
from oracle import kinds, normal

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.running.runner import run_model
from mxfp8_graph.running.sessions import Session
from mxfp8_ops.errors import BackendError, ContractError

BF16 = ml_dtypes.bfloat16
CPU = Recipe(runs_on="cpu")


def for_cpu(proto: onnx.ModelProto, **fields: Any) -> onnx.ModelProto:
    return mxfp8_graph.rewrite(proto, Recipe(runs_on="cpu", **fields))[0]


def outputs(proto: onnx.ModelProto, kernels: bool = True, **inputs: np.ndarray) -> np.ndarray:
    return next(iter(Session(proto, kernels=kernels).run(inputs).values()))


def notes(proto: onnx.ModelProto, recipe: Any = "mxfp8") -> str:
    return "; ".join(mxfp8_graph.rewrite(proto, recipe)[1].notes)


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def casts(proto: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(n.input[0], n.output[0]) for n in proto.graph.node if n.op_type == "Cast"]


def stored(proto: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in proto.graph.initializer}


def lookup_model() -> onnx.ModelProto:
    """Returns relu(table[ids]) and a linear of it, so that there is something to rewrite."""
    nodes = b.steps("Gather table ids>rows; Relu rows>y; linear:MatMul rows w>h; Relu h>z")
    weights = {"table": b.weight(100, 64, dtype=BF16), "w": b.weight(64, 96, dtype=BF16)}
    ends = {"y": (BF16, ["b", "s", 64]), "z": (BF16, ["b", "s", 96])}
    return b.model(nodes, {"ids": (np.int64, ["b", "s"])}, ends, weights)


IN_FLOAT32 = "computes in float32 instead of 16 bits"
NOTE = (
    "computes in bfloat16, for which ONNX Runtime's CPU provider lacks most kernels; "
    "rewrite the original with --for cpu (runs_on: cpu) for a model that does"
)


def test_a_rewrite_in_bfloat16_has_a_note() -> None:
    rewritten, report = mxfp8_graph.rewrite(b.matmul_model(dtype=BF16), Recipe(fuse=False))
    assert report.notes == (NOTE,)
    with pytest.raises(BackendError, match="Relu"):
        Session(rewritten, kernels=True)
    planned = mxfp8_graph.rewrite(b.matmul_model(dtype=BF16), Recipe(fuse=False), dry_run=True)[1]
    assert planned.notes == report.notes
    for recipe, dtype in ((Recipe(fuse=False), np.float16), (Recipe(), BF16)):  # the Relu is part of a node of ours
        assert notes(b.matmul_model(dtype=dtype), recipe) == ""


# --- With runs_on: cpu ---
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "bodies"])
def test_a_bfloat16_model_gives_what_the_float32_model_gives(kernels: bool) -> None:
    proto, wide, x = b.chain_model(dtype=BF16), b.chain_model(), normal(8, 64).astype(BF16)
    for ours, theirs in zip(wide.graph.initializer, proto.graph.initializer, strict=True):
        ours.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(theirs).astype(np.float32), ours.name))
    y = outputs(for_cpu(proto), kernels, x=x)
    expected = outputs(mxfp8_graph.rewrite(wide)[0], kernels, x=x.astype(np.float32))
    assert (y == expected.astype(BF16)).all(), distance(y, expected)


def test_a_float32_model_stays_as_it_is_and_float16_becomes_float32() -> None:
    plain, wide = (mxfp8_graph.rewrite(b.attention_model(), recipe)[0] for recipe in (Recipe(), CPU))
    assert wide.graph == plain.graph
    half, report = mxfp8_graph.rewrite(b.attention_model(dtype=np.float16), CPU)
    assert report.notes == (f"{IN_FLOAT32}, with casts at inputs, outputs, lookups and large tensors",)
    assert casts(half) == [("x", "x_f32"), ("y_f32", "y")]
    gemms = [node for node in half.graph.node if node.op_type == "MXFP8Gemm"]
    assert {a.i for node in gemms for a in node.attribute if a.name == "output_dtype"} == {TensorProto.FLOAT}
    ends = (*half.graph.input, *half.graph.output)
    assert [value.type.tensor_type.elem_type for value in ends] == [TensorProto.FLOAT16] * 2


def test_a_matrix_keeps_its_bytes_and_a_vector_is_stored_in_float32() -> None:
    rewritten = for_cpu(b.chain_model((64, 128, 64), head=True, dtype=BF16))
    assert stored(rewritten)["layers.1.weight"] == TensorProto.BFLOAT16
    assert ("layers.1.weight", "layers.1.weight_f32") in casts(rewritten)
    assert stored(for_cpu(b.matmul_model(dtype=BF16, bias=True))) == {
        "b": TensorProto.FLOAT,
        "w_mxfp8": TensorProto.FLOAT8E4M3FN,
        "w_mxfp8_scales": TensorProto.UINT8,
    }


def test_rows_of_a_table_are_cast_and_not_the_table() -> None:
    rewritten = for_cpu(lookup_model())
    assert stored(rewritten)["table"] == TensorProto.BFLOAT16
    assert ("rows", "rows_f32") in casts(rewritten), casts(rewritten)
    assert "table" not in {value for value, _ in casts(rewritten)}


def test_a_packed_table_gives_float32_rows() -> None:
    rewritten, ids = for_cpu(lookup_model(), embeddings=True), np.array([[3, 1]])
    assert kinds(rewritten).get("MXFP8Embedding") == 1
    table = numpy_helper.to_array(lookup_model().graph.initializer[0]).astype(np.float32)
    assert distance(outputs(rewritten, kernels=False, ids=ids), np.maximum(table[ids], 0)) < 0.05


def test_casts_that_would_do_nothing_are_removed() -> None:
    nodes = "linear:MatMul x w>h; Cast h>h32|to=1; Softmax h32>p32; Cast p32>p|to=16; Relu p>y"
    rewritten = for_cpu(b.text_model(nodes, dtype=BF16), fuse=False)
    assert casts(rewritten) == [("x", "x_f32"), ("y_f32", "y")]


def test_stored_inputs_and_outputs_keep_their_dtype() -> None:
    vector, inputs, outputs = np.arange(96).astype(BF16), {"bias": (BF16, [96])}, {"k": (BF16, [96])}
    nodes = "linear:MatMul x w>h; Add h bias>a; Relu a>y"
    proto = b.text_model(nodes, inputs=inputs, outputs=outputs, dtype=BF16, k=vector)
    proto.graph.initializer.append(numpy_helper.from_array(vector, "bias"))
    x, session = normal(4, 64).astype(BF16), Session(for_cpu(proto), kernels=True)
    stored, stated = session.run({"x": x}), session.run({"x": x, "bias": vector})
    assert (stored["y"] == stated["y"]).all()
    assert stored["k"].dtype == BF16
    assert (stored["k"] == vector).all()


def test_an_input_that_is_an_output_is_not_cast() -> None:
    proto = b.matmul_model(dtype=BF16)
    proto.graph.output.append(proto.graph.input[0])
    x = normal(1, 2, 64).astype(BF16)
    assert (Session(for_cpu(proto), kernels=True).run({"x": x})["x"] == x).all()


def test_external_data_stays_external(tmp_path: Path) -> None:
    source = b.save(b.chain_model((64, 128, 64), head=True, dtype=BF16), tmp_path / "m.onnx", external=True)
    path, _ = mxfp8_graph.rewrite(source, CPU)
    x = normal(8, 64).astype(BF16)
    assert distance(outputs(path, x=x), outputs(for_cpu(onnx.load(source)), x=x)) == 0
    assert (tmp_path / "m.mxfp8.onnx.data").is_file()


def test_a_model_that_is_packed_already_is_not_changed() -> None:
    packed = mxfp8_graph.rewrite(b.matmul_model(dtype=BF16), Recipe(fuse=False))[0]
    assert NOTE in notes(packed, Recipe(fuse=False, runs_on="cpu"))
    packed = mxfp8_graph.rewrite(b.matmul_model())[0]
    assert notes(packed, CPU) == ""


def test_the_command_line_has_the_option(tmp_path: Path) -> None:
    source = b.save(b.matmul_model(dtype=BF16), tmp_path / "m.onnx")
    done = command("rewrite", str(source), "--for", "cpu")
    assert done.exit_code == 0, done.output
    assert IN_FLOAT32 in " ".join(done.output.split())


# --- Values of the main graph that subgraphs read, and values of their own ---


def test_branches_compute_in_float32() -> None:
    then, other = (f"MatMul {x} w>p{x}; Relu p{x}>r{x}" for x in ("x", "minus"))
    w, x = b.weight(64, 96, dtype=BF16), normal(4, 64).astype(BF16)
    nodes = [*b.steps("Neg x>minus"), b.choose(then, other, "y")]
    proto = b.text_model(nodes, inputs={"yes": (np.bool_, [])}, dtype=BF16)
    rewritten, product = for_cpu(proto), x.astype(np.float32) @ w.astype(np.float32)
    for yes, expected in ((True, product), (False, -product)):
        assert distance(outputs(rewritten, x=x, yes=np.array(yes)), np.maximum(expected, 0)) < 0.06


def test_the_state_of_a_loop_is_float32() -> None:
    inputs = [b.value("i", np.int64, []), b.value("go", np.bool_, []), b.value("state", BF16, ["m", 64])]
    nodes = "linear:MatMul state w>p; Tanh p>t; Add t one>next; Identity go>on"
    body = b.subgraph(nodes, "on next", inputs, one=np.ones(1, BF16))
    w = b.weight(64, 64, dtype=BF16)
    nodes = [b.node("Loop", "count - x", "h", "loop", body=body), *b.steps("Relu h>y")]
    proto = b.text_model(nodes, y=("m", 64), dtype=BF16, w=w, count=np.array(3))
    x = normal(4, 64).astype(BF16)
    h = x.astype(np.float32)
    for _ in range(3):
        h = np.tanh(h @ w.astype(np.float32)) + 1
    assert distance(outputs(for_cpu(proto), x=x), np.maximum(h, 0)) < 0.06


def test_bitcasts_of_values_and_sequences_at_the_ends_are_refused() -> None:
    nodes, bits = "MatMul x w>h; Relu h>y; BitCast y>bits|to=4", {"bits": (np.uint16, ["m", 96])}
    with pytest.raises(ContractError, match=r"node 'BitCast_bits' \(BitCast\) reinterprets the bits of values"):
        for_cpu(b.text_model(nodes, outputs=bits, dtype=BF16, opset=26))
    proto = b.matmul_model(dtype=BF16)
    kind = helper.make_sequence_type_proto(proto.graph.output[0].type)
    proto.graph.node.append(b.node("SequenceConstruct", "y", "all"))
    proto.graph.output.append(helper.make_value_info("all", kind))
    with pytest.raises(ContractError, match="'all' is no tensor; expected values that can be float32"):
        for_cpu(proto)


SAID = f"runs as a copy that {IN_FLOAT32}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return b.save(b.chain_model((64, 128, 64), head=True, dtype=BF16), folder / "m.onnx")


# --- Commands that run a bfloat16 model run a copy of it and say so in a note ---


def test_run_and_verify_take_a_copy_in_float32(original: Path, tmp_path: Path) -> None:
    ran = run_model(original, repeat=1)
    assert ran.timing.outputs["y"].dtype == BF16
    assert SAID in ran.note
    rewritten, _ = mxfp8_graph.rewrite(original, CPU, output=tmp_path / "cpu.onnx")
    report = mxfp8_graph.verify(original, rewritten)
    assert report.passed, report.failures
    assert 0 < report.outputs[0].rewritten.relative_l2 < 0.06
    assert f"{original} {SAID}" in report.notes[0]
    rewritten, _ = mxfp8_graph.rewrite(original, Recipe(fuse=False), output=tmp_path / "any.onnx")
    with pytest.raises(BackendError, match=r"Relu.*; rewrite the original with --for cpu"):
        mxfp8_graph.verify(original, rewritten)
    half = b.save(b.chain_model(dtype=np.float16), tmp_path / "half.onnx")
    assert run_model(half, repeat=1).note == "", "float16 runs as it is"


def test_large_tensors_outside_of_the_main_graph_do_not_hide_what_is_missing(tmp_path: Path) -> None:
    weights = [b.weight(256, 256, seed=seed).astype(BF16) for seed in range(3)]
    constant = numpy_helper.from_array(weights[1], "v")
    nodes = [b.node("Constant", "", "k", value=constant), *b.steps("MatMul x u>h0; MatMul h0 k>y0")]
    nodes = [b.choose(b.subgraph(nodes, u=weights[0]), "Identity x>y0", yes="c"), b.node("MatMul", "h w", "y")]
    proto = b.text_model(nodes, ("m", 256), ("m", 256), dtype=BF16, w=weights[2], c=np.array(True))
    path = b.save(proto, tmp_path / "m.onnx", external=True)
    recipe = Recipe(runs_on="cpu", output_projections=True)
    rewritten, report = mxfp8_graph.rewrite(path, recipe, output=tmp_path / "cpu.onnx")
    assert any(IN_FLOAT32 in note for note in report.notes), report.notes
    assert mxfp8_graph.verify(path, rewritten).passed


def test_compare_analyze_and_tune_take_a_copy_in_float32(original: Path) -> None:
    compared = mxfp8_graph.compare(original, ["mxfp8", "mxint8"], repeat=1)
    assert [row.problem for row in compared.rows] == [""] * 3
    assert all(0 < row.scores[0].mean < 0.06 for row in compared.rows[1:])
    analyzed = mxfp8_graph.analyze(original)
    assert 0 < analyzed.everything["relative_l2"].mean < 0.06
    for result in (compared, analyzed):
        assert any(IN_FLOAT32 in note for note in result.notes), result.notes
    tuned = mxfp8_graph.tune(original, budget="cosine>=0.99")
    assert mxfp8_graph.load_recipe(Path(tuned.output) / "recipe.yaml").runs_on == "cpu"
