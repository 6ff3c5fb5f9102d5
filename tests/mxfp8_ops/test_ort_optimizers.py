"""Sessions with the library leave out what makes ONNX Runtime slower, and nothing that a user chose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from releases import release

from mxfp8_ops import ort

SINCE = ort.FASTER_WITHOUT["SkipLayerNormFusion"]
INSTALLED = release("onnxruntime")


def add_and_norm() -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, 64]) for name in ("x", "skip", "y")]
    weights = [numpy_helper.from_array(np.ones(64, np.float32), name) for name in ("scale", "bias")]
    nodes = [
        helper.make_node("Add", ["x", "skip"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale", "bias"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(nodes, "skip", values[:2], values[2:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def optimized(options: onnxruntime.SessionOptions, folder: Path, **kwargs: object) -> Counter[str]:
    """The ops of the model as a session runs it."""
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    ort.session(add_and_norm(), session_options=options, **kwargs)
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


@pytest.mark.skipif(INSTALLED < SINCE, reason=f"the fusion is slower since {SINCE}")
def test_a_session_leaves_out_the_slow_fusion(tmp_path: Path) -> None:
    assert optimized(onnxruntime.SessionOptions(), tmp_path) == {"Add": 1, "LayerNormalization": 1}


def test_a_version_in_which_the_fusion_is_faster_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.29.0")
    assert optimized(onnxruntime.SessionOptions(), tmp_path) == {"SkipLayerNormalization": 1}


def test_an_entry_of_the_user_stays(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(ort.DISABLE, "")
    assert optimized(options, tmp_path) == {"SkipLayerNormalization": 1}


def test_the_argument_of_onnxruntime_wins(tmp_path: Path) -> None:
    chosen = optimized(onnxruntime.SessionOptions(), tmp_path, disabled_optimizers=["GeluFusion"])
    assert chosen == {"SkipLayerNormalization": 1}
