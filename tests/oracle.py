"""The expected results of a rewritten model, from `mxfp8_ops.numpy_nodes` alone, and comparisons with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import mxfp8_graph
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops import numerics, numpy_nodes, ort


@dataclass
class Runtime:
    """How `run` runs the nodes of a model, which the fixture `runtime` chooses."""

    kernels: bool = False
    has_run: bool = False
    """Whether the test called `run`."""
    rewritten: dict[tuple[bytes, str], tuple[onnx.ModelProto, RewriteReport]] | None = None
    """What the test rewrote already, by model and recipe: a second call of the test does not do it again."""


runtime = Runtime()


@dataclass(frozen=True)
class Expected:
    """The exact result on quantized operands, and how far float32 accumulation may be from it."""

    y: np.ndarray
    bound: np.ndarray

    def then(self, function: Callable[[np.ndarray], np.ndarray]) -> Expected:
        """Returns the expectation after a function that makes no difference larger: Relu, Neg, Abs, a transpose."""
        moves = function not in {relu, np.negative, np.abs}
        return Expected(function(self.y), function(self.bound) if moves else self.bound)

    def check(self, actual: np.ndarray, roundings: int = 0) -> None:
        """Fails with the worst value if `actual` is out of bounds; `roundings`: of ops after the gemm, in float32."""
        assert actual.shape == self.y.shape, f"shape {actual.shape}, expected {self.y.shape}"
        actual = actual.astype(np.float64)
        excess = np.abs(actual - self.y) - self.bound - roundings * 2.0**-23 * (np.abs(self.y) + np.abs(actual))
        if actual.size and not (excess <= 0).all():
            at = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
            raise AssertionError(
                f"at {[int(i) for i in at]}: {actual[at]}, expected {self.y[at]} within {self.bound[at]:.3g}; "
                f"{(~(excess <= 0)).sum()} of {actual.size} are out of bounds"
            )


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def expect(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    weight_only: bool = False,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    scale_rounding: str = "ceil",
    dtype: str = "float32",
) -> Expected:
    """Returns x [..., M, K] times the transpose of w [..., N, K], both quantized along K, plus bias [N].

    The first format may be "bfloat16": x is rounded to that.
    """
    if formats[0] == "bfloat16":
        x_values = x.astype(numerics.value_dtype("bfloat16")).astype(np.float64)
    else:
        x_values = x.astype(np.float64) if weight_only else quantized(x, formats[0], scale_rounding)
    w_values = quantized(w, formats[1], scale_rounding)
    y = x_values @ np.swapaxes(w_values, -1, -2)
    if bias is not None:
        bias = np.broadcast_to(bias.astype(np.float64).reshape(-1), (w.shape[-2],))
        y = y + bias
    return Expected(y, numpy_nodes.gemm_error_bound(x_values, w_values, dtype, bias))


def quantized(x: np.ndarray, element_format: str = "e4m3", scale_rounding: str = "ceil") -> np.ndarray:
    """Returns the values that `x` becomes when it is quantized along its last axis."""
    codes = numpy_nodes.quantize(x, element_format=element_format, scale_rounding=scale_rounding)
    return numpy_nodes.dequantize(*codes, element_format=element_format).astype(np.float64)


def run(model: onnx.ModelProto | str, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Runs a model in ONNX Runtime: the nodes are their function bodies, or our kernels if `runtime` says so."""
    runtime.has_run = True
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = model if isinstance(model, str) else model.SerializeToString()
    if runtime.kernels:
        ort.register(options)
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def rewrite(
    proto: onnx.ModelProto, recipe: Any = "mxfp8", *, fuse: bool = False
) -> tuple[onnx.ModelProto, RewriteReport]:
    """Rewrites a model in memory and checks that the result is well formed; nothing is fused unless a test asks."""
    recipe = load_recipe(recipe)
    recipe = recipe if fuse else recipe.without_fusion()
    key = (proto.SerializeToString(deterministic=True), recipe.model_dump_json())
    known = {} if runtime.rewritten is None else runtime.rewritten
    if key not in known:
        known[key] = mxfp8_graph.rewrite(proto, recipe)
        check_well_formed(known[key][0])
    result, report = known[key]
    return onnx.ModelProto.FromString(result.SerializeToString()), report


GEMM = {"MXFP8Quantize": 1, "MXFP8Gemm": 1}


def computes(
    proto: onnx.ModelProto,
    expected: Expected,
    nodes: Mapping[str, int] | None = None,
    recipe: Any = "mxfp8",
    roundings: int = 0,
    **feeds: np.ndarray,
) -> tuple[onnx.ModelProto, RewriteReport]:
    """Rewrites a model and fails unless it has so many nodes of each kind and its first output is as expected."""
    result, report = rewrite(proto, recipe)
    assert nodes is None or kinds(result) == nodes
    expected.check(run(result, feeds)[0], roundings)
    return result, report


def refusal(proto: onnx.ModelProto, recipe: Any = "mxfp8") -> str:
    """Returns the reason of the only site of a model in which nothing is eligible."""
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto, recipe)
    (decision,) = caught.value.decisions
    return decision.reason


def check_well_formed(model: onnx.ModelProto) -> None:
    """Fails if the model does not pass the checker and strict shape inference, or does not reopen in graphsurgeon."""
    import onnx_graphsurgeon as gs
    from onnx_graphsurgeon.logger import G_LOGGER

    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    severity, G_LOGGER.severity = G_LOGGER.severity, G_LOGGER.ERROR
    try:
        assert len(gs.import_onnx(model).nodes) == len(model.graph.node)
    finally:
        G_LOGGER.severity = severity


def kinds(model: onnx.ModelProto | onnx.GraphProto) -> dict[str, int]:
    """Returns how many nodes of each op type the main graph holds."""
    graph = model.graph if isinstance(model, onnx.ModelProto) else model
    return dict(Counter(node.op_type for node in graph.node))


def reasons(report: RewriteReport) -> dict[str, str]:
    """Returns why each site became what it is."""
    return {site.decision.site.name: site.decision.reason for site in report.sites}


def initializers(model: onnx.ModelProto) -> list[str]:
    return [tensor.name for tensor in model.graph.initializer]


def normal(*shape: int, seed: int = 9, dtype: Any = np.float32) -> np.ndarray:
    """Returns heavy-tailed activations: normal, times a power of two per value."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, shape))).astype(dtype)
