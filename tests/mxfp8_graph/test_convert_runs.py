"""Converted models in what runs them: stock ONNX Runtime, onnx's ReferenceEvaluator, OpenVINO where it is installed.

OpenVINO 2026.4 converts float32 to float8 by way of float16, and to bfloat16 with errors: so where a model rounds
activations, results are near and not equal there. Weights alone are.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import attention_models
import builders as b
import numpy as np
import onnx
import oracle
import properties  # noqa: F401 - sets hypothesis up
import pytest
import structures
from grids import looped
from hypothesis import given, settings
from onnx.reference import ReferenceEvaluator
from releases import release
from test_convert import DIALECTS, LOSSES, codes_of, relative
from test_random_graphs import LENGTHS, RECIPES, SEEDS, grown

import mxfp8_graph
from mxfp8_graph.running.inputs import make_inputs
from mxfp8_graph.running.runner import open_runnable
from mxfp8_graph.running.sessions import Session
from mxfp8_ops.errors import ContractError

SMALL = {
    "chain": lambda: b.chain_model((64, 128, 64)),
    "partial blocks": lambda: b.chain_model((70, 96, 64)),
    "attention": b.attention_model,
    "language model": b.language_model,
    "decoder": attention_models.decoder,
}


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    signature, _ = open_runnable(proto)
    return make_inputs(signature)


@looped("name", SMALL)
def test_standard_ops_compute_what_the_function_bodies_do(name: str) -> None:
    proto = SMALL[name]()
    feeds = feeds_of(proto)
    for recipe in ("mxfp8", "mxfp8-bf16", "mxfp8-weight-only"):
        rewritten, _ = mxfp8_graph.rewrite(proto, recipe)
        standard, report = mxfp8_graph.convert(rewritten, "standard")
        assert {node.domain for node in standard.graph.node} == {""}, recipe
        assert not standard.functions, recipe
        assert not report.losses, recipe
        onnx.checker.check_model(standard, full_check=True)
        expected = oracle.run(rewritten, feeds)
        for result in (oracle.run(standard, feeds), ReferenceEvaluator(standard).run(None, feeds)):
            for one, other in zip(expected, result, strict=True):
                assert relative(other, one) < 1e-3, recipe


@looped("name", SMALL)
def test_qdq_is_the_same_in_onnx_runtime_and_the_reference_evaluator(name: str) -> None:
    proto = SMALL[name]()
    rewritten, _ = mxfp8_graph.rewrite(proto, "mxfp8-weight-only")
    qdq, _ = mxfp8_graph.convert(rewritten, "qdq")
    onnx.checker.check_model(qdq, full_check=True)
    assert {t.data_type for t in qdq.graph.initializer} >= {onnx.TensorProto.FLOAT8E8M0}
    feeds = feeds_of(proto)
    expected = oracle.run(rewritten, feeds)
    for result in (oracle.run(qdq, feeds), ReferenceEvaluator(qdq).run(None, feeds)):
        for one, other in zip(expected, result, strict=True):
            assert relative(other, one) < 1e-5


@pytest.mark.skipif(release("onnxruntime") < (1, 24), reason="fails on our models before ONNX Runtime 1.24")
@looped("name", ["chain", "attention", "language model", "decoder"])
def test_symbolic_shape_inference_of_onnx_runtime(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten, _ = mxfp8_graph.rewrite(SMALL[name]())
    monkeypatch.chdir(tmp_path)  # it leaves a file here if it fails
    for to in ("mxfp8", "trt", "qdq", "standard", "ort-cuda"):
        converted, _ = mxfp8_graph.convert(rewritten, to, allow=LOSSES.get(to, ()))
        assert ranks(symbolic(converted, to)) == ranks(SMALL[name]()), to


def symbolic(model: onnx.ModelProto, to: str) -> onnx.ModelProto:
    """Returns a model with the shapes that ONNX Runtime infers; ops that onnx does not know have those of an input."""
    pytest.importorskip("sympy")
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    guess = to in {"trt", "ort-cuda"}
    return SymbolicShapeInference.infer_shapes(model, auto_merge=True, guess_output_rank=guess)


def ranks(model: onnx.ModelProto) -> list[int]:
    return [len(output.type.tensor_type.shape.dim) for output in model.graph.output]


def openvino() -> str:
    """Returns an interpreter that has OpenVINO: this one, or that of the variable OPENVINO_PYTHON."""
    python = sys.executable if importlib.util.find_spec("openvino") else os.environ.get("OPENVINO_PYTHON")
    if not python:
        pytest.skip("OpenVINO is neither installed here nor in OPENVINO_PYTHON")
    return python


IN_OPENVINO = """
import sys
import numpy as np
import openvino
settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
model = openvino.Core().compile_model(sys.argv[1], "CPU", settings)
result = model(dict(np.load(sys.argv[2])))
np.savez(sys.argv[3], *[result[output] for output in model.outputs])
"""


def in_openvino(model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path) -> list[np.ndarray]:
    python = openvino()
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "in.npz", **feeds)
    files = [str(folder / name) for name in ("m.onnx", "in.npz", "out.npz")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", IN_OPENVINO, *files], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(files[2]) as arrays:
        return [arrays[name] for name in arrays.files]


@looped("name", ["chain", "attention", "language model"])
def test_openvino_runs_both(name: str, tmp_path: Path) -> None:
    proto = SMALL[name]()
    feeds = feeds_of(proto)
    for recipe, to, limit in (
        ("mxfp8-weight-only", "qdq", 1e-5),
        ("mxfp8-weight-only", "standard", 1e-5),
        ("mxfp8", "standard", 0.04),  # a linear's activations
    ):
        rewritten, _ = mxfp8_graph.rewrite(proto, recipe)
        converted, _ = mxfp8_graph.convert(rewritten, to)
        expected = oracle.run(rewritten, feeds)
        for one, other in zip(expected, in_openvino(converted, feeds, tmp_path), strict=True):
            assert relative(other, one) < limit, (recipe, to)


@settings(max_examples=6)
@given(SEEDS, LENGTHS, RECIPES)
def test_random_graphs_there_and_back(seed: int, ops: int, recipe: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(grown(seed, ops), recipe)
    feeds = feeds_of(rewritten)
    expected = oracle.run(rewritten, feeds)[0].astype(np.float64)
    for to in DIALECTS:
        if to == "trt" and any(w.shape[-1] % 32 for w in mxfp8_graph.unpack(rewritten).values()):
            with pytest.raises(ContractError, match="expected a multiple of 32"):
                mxfp8_graph.convert(rewritten, to, allow=["rounding"])
            continue
        there, report = mxfp8_graph.convert(rewritten, to, allow=[*LOSSES.get(to, ()), "rounding"])
        back, _ = mxfp8_graph.convert(there, "mxfp8")
        assert codes_of(back) == codes_of(rewritten)
        if not report.losses:
            assert to == "ort-cuda" or but_casts(back) == but_casts(rewritten)
            near(oracle.run(back, feeds)[0], expected)
            if to != "trt":
                near(oracle.run(there, feeds)[0], expected)


def but_casts(model: onnx.ModelProto) -> dict[str, int]:
    """Returns how many nodes there are of each op but Cast: a gemm takes over one that is behind it."""
    return {op: count for op, count in oracle.kinds(model).items() if op != "Cast"}


def near(actual: np.ndarray, expected: np.ndarray) -> None:
    """Sums of another order, in residual streams, past softmaxes: elements of activations round the other way."""
    assert np.linalg.norm(actual - expected) <= 0.1 * np.linalg.norm(expected) + 1e-6


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("minilm") / "m.onnx"
    onnx.save(structures.minilm(), path)
    path, _ = mxfp8_graph.rewrite(path)
    return path, feeds_of(onnx.load(path))


@pytest.mark.slow
@pytest.mark.parametrize("to", DIALECTS)
def test_minilm_there_and_back(
    minilm: tuple[Path, dict[str, np.ndarray]], to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, feeds = minilm
    there, report = mxfp8_graph.convert(path, to, output=tmp_path / "there.onnx", allow=LOSSES.get(to, ()))
    back, again = mxfp8_graph.convert(there, "mxfp8", output=tmp_path / "back.onnx")
    monkeypatch.chdir(tmp_path)
    assert ranks(symbolic(onnx.load(there), to)) == [3, 2]
    assert codes_of(back) == codes_of(path)
    assert report.to_dict()["found"]["mxfp8"]["weights"] == len(codes_of(path)) == again.gemms
    assert again.kept == ()
    expected, actual = (Session(str(file), kernels=True).run(feeds) for file in (path, back))
    if not report.losses:
        kinds, again = (oracle.kinds(onnx.load(file)) for file in (path, back))
        assert again == kinds
    for name, values in expected.items():  # without quantized activations, what these cost
        assert relative(actual[name], values) < 0.15 if report.losses else np.array_equal(actual[name], values), name
