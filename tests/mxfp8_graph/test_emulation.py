"""Emulated models: both operands of a matmul are rounded, as the real rewrite and the definition of a format do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import models as b
import numpy as np
import onnx
import pytest
from grids import looped
from onnx import numpy_helper

import mxfp8_graph
from mxfp8_graph.policy.plan import NothingEligibleError
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.compare.emulation import Emulated, Emulator
from mxfp8_graph.tools.compare.number_formats import PEERS
from mxfp8_ops.errors import ContractError

DEFAULT = load_recipe("mxfp8")
X = np.random.default_rng(0).standard_normal((2, 5, 64), np.float32)


def emulated(model: Any, name: str, recipe: Recipe = DEFAULT) -> Emulated:
    return Emulated(Emulator(model, recipe), PEERS[name])


def branching() -> onnx.ModelProto:
    """y = -(x @ w0 if yes else x @ w1), each weight in its branch."""
    branches = {}
    for number, branch in enumerate(("then", "else")):
        tensor = numpy_helper.from_array(b.weight(64, 96, seed=number), f"w{number}")
        result = onnx.helper.make_empty_tensor_value_info(f"h{number}")
        nodes = b.steps(f"MatMul x w{number}>h{number}")
        branches[f"{branch}_branch"] = onnx.helper.make_graph(nodes, branch, [], [result], [tensor])
    inputs = {"x": (np.float32, ["m", 64]), "yes": (np.bool_, [])}
    nodes = [b.node("If", "yes", "h", **branches), b.node("Neg", "h", "y")]
    return b.model(nodes, inputs, {"y": (np.float32, ["m", 96])})


def test_a_matmul_is_that_of_rounded_operands() -> None:
    model = b.matmul_model(bias=True)
    names = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = emulated(model, "int8-token").run({"x": X})["y"]

    def rounded(values: np.ndarray) -> np.ndarray:
        scale = np.abs(values).max(-1, keepdims=True) / np.float32(127)
        return np.asarray(np.clip(np.rint(values / scale), -127, 127) * scale)

    expected = np.maximum(rounded(X) @ rounded(names["w"].T).T + names["b"], 0)
    assert np.abs(found - expected).max() < 1e-5


@looped(
    "model, feeds",
    [
        (b.attention_model(), {"x": X}),
        (b.matmul_model(left=True), {"x": np.ones((1, 64, 8), np.float32)}),
        (b.gemm_model(transB=1, alpha=0.5), {"x": X[0]}),
        (b.matmul_model(dtype=np.float16, bias=True), {"x": X.astype(np.float16)}),
        (branching(), {"x": X[0], "yes": np.array(True)}),
        (branching(), {"x": X[0], "yes": np.array(False)}),
    ],
)
def test_blocks_of_32_are_the_real_rewrite(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    real, _ = mxfp8_graph.rewrite(model, Recipe(fuse=False))
    expected = Session(real, kernels=True).run(feeds)["y"]
    found = emulated(model, "mxfp8-block32").run(feeds)["y"]
    assert found.dtype == expected.dtype
    # The same operands; sums differ in order, and may round an element of a later layer to the next: an 8th of one.
    assert difference(expected, found).relative_l2 < 2e-3


def test_weights_are_counted_once_and_read_from_external_data(tmp_path: Path) -> None:
    model = b.chain_model()
    emulator = Emulator(model, DEFAULT)
    assert (emulated(model, "mxfp8-block32").byte_size, emulator.sites) == (2 * 64 * 128 * 33 // 32, 2)
    assert emulator.other_bytes == model.ByteSize() - 2 * 64 * 128 * 4
    external = b.save(model, tmp_path / "m.onnx", external=True)
    first, second = (emulated(each, "mxfp4").run({"x": X[0]})["y"] for each in (model, external))
    np.testing.assert_array_equal(first, second)


def test_delayed_scaling_uses_the_largest_amax_before() -> None:
    model = b.matmul_model()
    samples = [X * np.float32(factor) for factor in (1, 4, 2, 8)]
    found = emulated(model, "float8-delayed")
    (weight,) = found._weights.values()

    def with_amax(x: np.ndarray, amax: float) -> np.ndarray:
        scale = np.float32(448) / np.float32(amax) if amax else np.float32(1)
        cast = np.clip(x * scale, -448, 448)
        return np.maximum(cast.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * (1 / scale) @ weight, 0)

    largest = [float(np.abs(x).max()) for x in samples]
    histories = [0.0, largest[0], largest[1], largest[1]]
    for x, amax in zip(samples, histories, strict=True):
        assert np.abs(found.run({"x": x})["y"] - with_amax(x, amax)).max() < 1e-4


def test_what_cannot_be_emulated_is_an_error() -> None:
    with pytest.raises(NothingEligibleError, match="no matmul with a stored weight is eligible"):
        Emulator(b.chain_model((64, 8)), DEFAULT)
    with pytest.raises(ContractError, match="a matmul in a subgraph, which has no history of amax"):
        emulated(branching(), "float8-delayed")
    nodes = [b.node("Gather", "w i", "picked"), b.node("MatMul", "x picked", "h", "experts"), b.node("Neg", "h", "y")]
    inputs = {"x": (np.float32, [3, 5, 64]), "i": (np.int64, [3])}
    model = b.model(nodes, inputs, {"y": (np.float32, [3, 5, 96])}, {"w": b.weight(4, 64, 96)})
    with pytest.raises(ContractError, match="MXFP8GroupedWeightGemm, whose weights are picked while the model runs"):
        emulated(model, "mxfp4")
