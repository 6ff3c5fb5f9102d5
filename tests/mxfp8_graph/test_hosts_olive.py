"""Olive: the pass and the model of `mxfp8_graph.integrations.olive` in workflows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import models as b
import numpy as np
import pytest

from mxfp8_graph import load_recipe, rewrite
from mxfp8_ops import cpu
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.usefixtures("own_folder")

OPTIONS = {"graph_optimization_level": 1, "extra_session_config": {"key": "0"}}
SOURCE = {"type": "ONNXModel", "model_path": "model.onnx", "inference_settings": {"session_options": OPTIONS}}
LATENCY = {"name": "latency", "type": "latency", "sub_types": [{"name": "avg"}]}
EVALUATED = {"evaluators": {"all": {"metrics": [LATENCY]}}, "evaluator": "all"}
X = {"x": np.ones((4, 64), np.float32)}


def test_without_olive_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "olive", None)
    monkeypatch.delitem(sys.modules, "mxfp8_graph.integrations.olive", raising=False)
    with pytest.raises(BackendError, match=r"olive: cannot be imported .*; pip install olive-ai==0.13.0"):
        importlib.import_module("mxfp8_graph.integrations.olive")


@pytest.fixture
def run(monkeypatch):
    """Runs a workflow of the pass with options; returns Olive's model of what it saved."""
    monkeypatch.setenv("CI", "1")  # without it Olive sends telemetry
    workflows = pytest.importorskip("olive.workflows", reason="needs the extra hosts-olive")
    package = importlib.import_module("mxfp8_graph.integrations.olive").package_config()
    model = b.chain_model()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4  # Olive makes inputs of static shapes alone
    b.save(model, Path("model.onnx"))

    def call(more=None, **options):
        passes = {"passes": {"mx": {"type": "MXQuantization", **options}}, "cache_dir": "cache", "output_dir": "out"}
        workflows.run({"input_model": SOURCE, **passes, **(more or {})}, package_config=package)
        return sys.modules["olive.model"].ModelConfig.parse_file_or_obj("out/model_config.json").create_model()

    return call


def ops(call, *args, **options) -> set[str]:
    with cpu.profiled() as profile:
        call(*args, **options)
        return {each.op for each in profile.calls()} - {""}


def test_the_pass_writes_the_bytes_of_rewrite_and_sessions_of_its_model_run_our_kernels(run) -> None:
    for _ in range(2):  # the second time from Olive's cache
        model = run(recipe="mxint8")
        session = model.prepare_session()
        assert ops(session.run, None, X) == {"MXFP8Quantize", "MXFP8FusedGemm"}
    assert Path(model.model_path).read_bytes() == rewrite("model.onnx", "mxint8")[0].read_bytes()
    opened = session.get_session_options()
    assert (int(opened.graph_optimization_level), opened.get_session_config_entry("key")) == (1, "0")


def test_the_evaluator_runs_our_kernels_for_each_recipe_of_a_search_and_without_native_the_bodies(run) -> None:
    Path("mxint8").mkdir()  # Olive makes a path of a name that is one
    search = {"search_strategy": {"execution_order": "joint", "sampler": "sequential"}}
    assert ops(run, {**EVALUATED, **search}, recipe=["mxint8", "mxfp8"])
    assert len({path.read_bytes() for path in Path("cache").rglob("models/model.onnx")}) == 2
    assert not ops(run, EVALUATED, recipe="mxint8", native=False)


def test_fields_of_the_recipe_reach_the_rewrite_and_a_changed_file_is_read_again(run) -> None:
    for elements in ("int8", "e5m2"):
        Path("r.yaml").write_text(f"weight_format: {elements}\n")
        model = run(recipe="r.yaml", exclude=["layers.0"])
    expected = rewrite("model.onnx", load_recipe("r.yaml", exclude=["layers.0"]))[0].read_bytes()
    assert Path(model.model_path).read_bytes() == expected


def test_external_data_stays_external_also_of_a_model_that_is_rewritten_already(run) -> None:
    b.save(b.chain_model(), Path("model.onnx"), external=True)
    rewrite("model.onnx", "mxint8")
    for name in ("model.onnx", "model.mxint8.onnx"):
        model = run({"input_model": {**SOURCE, "model_path": ".", "onnx_file_name": name}}, recipe="mxint8")
        assert Path(f"{model.model_path}.data").exists()
        assert ops(model.prepare_session().run, None, X)


def test_a_wrong_option_ends_the_workflow_with_an_error_that_says_what_is_wrong(run) -> None:
    for name, value, message in (
        ("embedings", True, r"'embedings'; expected one of .*; did you mean embeddings\?"),
        ("embeddings", 3, "embeddings: 3; expected a valid boolean"),
        ("recipe", "mxint9", r"'mxint9'; expected one of .*did you mean mxint8\?"),
        ("exclude", ["linear"], "none of its 2 matmuls is eligible"),
    ):
        with pytest.raises(ValueError, match=message):
            run(**{name: value})
