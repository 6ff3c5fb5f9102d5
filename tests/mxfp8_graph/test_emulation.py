"""Emulated models against an independent fake quantization: torch modules whose linears round their operands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders as b
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

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

DEFAULT = load_recipe("mxfp8")
X = np.random.default_rng(0).standard_normal((2, 5, 64), np.float32)


def emulated(model: Any, name: str, recipe: Recipe = DEFAULT) -> Emulated:
    return Emulated(Emulator(model, recipe), PEERS[name])


# --- An independent fake quantization --------------------------------------------------------------------------------


def mx(element: Any, block: int, mode: str) -> Callable[[Any], Any]:
    """Returns torchao's rounding, in the words of a function."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    def rounded(x: Any) -> Any:
        flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
        scale_mode = getattr(ScaleCalculationMode, mode)
        return MXTensor.to_mx(flat, element, block, scale_mode).dequantize(torch.float32).reshape(x.shape)

    return rounded


def nvfp4(x: Any) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
    whole = per_tensor_amax_to_scale(flat.abs().max())
    return NVFP4Tensor.to_nvfp4(flat, per_tensor_scale=whole).dequantize(torch.float32).reshape(x.shape)


def per_tensor(x: Any) -> Any:
    scale = torch.tensor(448.0) / x.abs().max()  # 448 / amax would multiply by a rounded reciprocal
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / scale)


def roundings() -> dict[str, Callable[[Any], Any]]:
    from torchao.prototype.mx_formats import mx_tensor

    return {
        "mxfp8-block32": mx(torch.float8_e4m3fn, 32, "RCEIL"),
        "mxfp8-block64": mx(torch.float8_e4m3fn, 64, "RCEIL"),
        "mxfp6-e2m3": mx(mx_tensor.DTYPE_FP6_E2M3, 32, "FLOOR"),
        "mxfp4": mx(torch.float4_e2m1fn_x2, 32, "FLOOR"),
        "nvfp4": nvfp4,
        "float8-current": per_tensor,
    }


class Block(torch.nn.Module):
    """Two linears in a residual block, and a normalization, so that none is an output projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x: Any) -> Any:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


def round_linears(module: Any, rounded: Callable[[Any], Any]) -> None:
    """Makes the linears of `module` multiply what `rounded` makes of inputs and weights."""
    for linear in module.modules():
        if isinstance(linear, torch.nn.Linear):
            with torch.no_grad():
                linear.weight.copy_(rounded(linear.weight))
            linear.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))


def test_errors_are_those_of_a_fake_quantization_in_torch() -> None:
    x = torch.from_numpy(X)
    program = torch.export.export(Block().eval(), (x,))
    found = mxfp8_graph.compare(program, [*roundings()], inputs={"x": X}, metrics=["relative_l2", "cosine"])
    assert "the program is compared as the ONNX model that torch.onnx makes of it" in found.notes
    for (name, rounding), row in zip(roundings().items(), found.rows[1:], strict=True):
        original, rounded = Block().eval(), Block().eval()
        round_linears(rounded, rounding)
        with torch.no_grad():
            expected = difference(original(x).numpy(), rounded(x).numpy())
        error, cosine = (score.mean for score in row.scores)
        assert row.name == name
        assert error == pytest.approx(expected.relative_l2, abs=1e-6), name
        assert cosine == pytest.approx(expected.cosine, abs=1e-6), name


# --- What is laid out ------------------------------------------------------------------------------------------------


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
        return np.maximum(torch.from_numpy(cast).to(torch.float8_e4m3fn).float().numpy() * (1 / scale) @ weight, 0)

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
