"""Models beside which a linear is rewritten, so that they are brought up: whatever else they compute stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from models import node, value, weight
from onnx import numpy_helper
from oracle import expect, normal

import mxfp8_graph
from mxfp8_graph.report.data import RewriteReport

WEIGHT = weight(64, 96)
X = normal(3, 64)


def with_linear(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns `model` with one more input, output and linear: beside.y = -(beside.x @ beside.w)."""
    both = onnx.ModelProto()
    both.CopyFrom(model)
    graph = both.graph
    graph.node.append(node("MatMul", "beside.x beside.w", "beside.h"))
    graph.node.append(node("Neg", "beside.h", "beside.y"))
    graph.input.append(value("beside.x", np.float32, [3, 64]))
    graph.output.append(value("beside.y", np.float32, [3, 96]))
    graph.initializer.append(numpy_helper.from_array(WEIGHT, "beside.w"))
    if both.ir_version < 4:
        graph.input.append(value("beside.w", np.float32, [64, 96]))
    return both


def upgraded(model: onnx.ModelProto) -> tuple[onnx.ModelProto, RewriteReport]:
    """Returns what `model` with a linear beside it is rewritten to, and the report; attention is not fused."""
    recipe = mxfp8_graph.Recipe(name="only the linear", include=("beside",), fuse=False)
    rewritten, report = mxfp8_graph.rewrite(with_linear(model), recipe)
    assert len(report.rewritten) == 1
    return rewritten, report


def run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """Returns the outputs of `model` in ONNX Runtime, of nodes as they are written."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def differences(names: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> dict[str, str]:
    """Returns which results differ by more than a few roundings, and how; `after` ends with that of the linear."""
    expect(X, WEIGHT.T).then(np.negative).check(after[-1])
    wrong = {name: _difference(a, b) for name, a, b in zip(names, before, after, strict=False)}
    return {name: what for name, what in wrong.items() if what}


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, (list, dict)) or a is None:  # sequences, maps, optional values
        return "" if repr(a) == repr(b) else f"{b}, not {a}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{b.dtype} {b.shape}, not {a.dtype} {a.shape}"
    if a.dtype.kind not in "fc":
        return "" if (a == b).all() else f"{(a != b).sum()} of {a.size} values"
    tolerance = 8 * np.finfo(a.dtype).eps
    near = np.isclose(a, b, rtol=tolerance, atol=tolerance * np.abs(np.nan_to_num(a)).max(initial=0), equal_nan=True)
    return "" if near.all() else f"{(~near).sum()} of {a.size} values, by {np.abs(a - b).max()}"
