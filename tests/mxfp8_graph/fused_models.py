"""Models with neighbours to fuse, and what tests ask of the rewrite with and without fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from models import IR_VERSION, node, steps, value, weight
from onnx import helper, numpy_helper
from oracle import normal, rewrite, run

from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_graph.report.data import RewriteReport

F32 = np.float32
MICROSOFT = "com.microsoft"


def graph_model(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, np.ndarray],
    *,
    outputs: Sequence[str] = ("y",),
    inputs: Mapping[str, Sequence[Any]] | None = None,
    dtype: Any = F32,
    opset: int = 21,
    rank: int = 2,
) -> onnx.ModelProto:
    """Returns a model from x [batch, 64] to outputs of the same dtype and rank."""
    graph = helper.make_graph(
        list(nodes),
        "fused",
        [value(name, dtype, shape) for name, shape in (inputs or {"x": ["batch", 64]}).items()],
        [value(name, dtype, [None] * rank) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=max(IR_VERSION, 10 + (opset > 22)))


def activated(
    *after: onnx.NodeProto, dtype: Any = F32, outputs: Sequence[str] = ("y",), rank: int = 2, **numbers: Any
) -> onnx.ModelProto:
    """Returns y = f(x @ w + b), f of nodes from h to y and of numbers."""
    weights = {"w": weight(64, 96, dtype=dtype), "b": weight(96, seed=1, dtype=dtype)}
    weights.update({name: np.asarray(number, dtype) for name, number in numbers.items()})
    nodes = [node("MatMul", "x w", "m", "linear"), node("Add", "m b", "h", "bias"), *after]
    return graph_model(nodes, weights, outputs=outputs, dtype=dtype, rank=rank)


def kinds_fused(report: RewriteReport) -> list[str]:
    return [fusion.kind for fusion in report.fusions]


def both_ways(proto: onnx.ModelProto, recipe: str = "mxfp8") -> tuple[onnx.ModelProto, onnx.ModelProto, RewriteReport]:
    """Returns the model rewritten with and without fusion, and the report of the first."""
    chosen = load_recipe(recipe).model_copy(update={"output_projections": True})
    fused, report = rewrite(proto, chosen, fuse=True)
    plain, other = rewrite(proto, chosen)
    assert not other.fusions
    return fused, plain, report


def feeds_of(proto: onnx.ModelProto, rows: int = 5) -> dict[str, np.ndarray]:
    """Returns normal values for inputs [batch, n]."""
    feeds = {}
    for index, each in enumerate(proto.graph.input):
        tensor = each.type.tensor_type
        dims = [dim.dim_value or rows for dim in tensor.shape.dim]
        feeds[each.name] = normal(*dims, seed=20 + index, dtype=helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return feeds


def check_same(proto: onnx.ModelProto, fused: onnx.ModelProto, plain: onnx.ModelProto, limit: float = 2e-6) -> None:
    """Checks that two rewrites of a model agree up to the rounding of float32, relative to the largest value."""
    feeds = feeds_of(proto)
    for one, other in zip(run(fused, feeds), run(plain, feeds), strict=True):
        assert one.dtype == other.dtype
        wanted = other.astype(np.float64)
        assert np.max(np.abs(one.astype(np.float64) - wanted)) <= limit * np.max(np.abs(wanted))


OPS = {
    "relu": [node("Relu", "h", "y")],
    "gelu": [node("Gelu", "h", "y")],
    "gelu_tanh": [node("Gelu", "h", "y", approximate="tanh")],
    "silu": steps("Sigmoid h>s; Mul h s>y"),
}


def gated(product: str = "s u", up: str = "x", dtype: Any = F32, **more: Any) -> onnx.ModelProto:
    """Returns y = silu(x @ g) * (up @ v)."""
    weights = {"g": weight(64, 96, dtype=dtype), "v": weight(64, 96, seed=1, dtype=dtype)}
    nodes = steps(f"gate:MatMul x g>h; Sigmoid h>t; Mul h t>s; up:MatMul {up} v>u; Mul {product}>y")
    return graph_model(nodes, weights, dtype=dtype, **more)
