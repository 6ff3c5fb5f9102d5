"""What torchao has packed, in every dialect and back: same bytes, same outputs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from grids import looped
from test_convert import DIALECTS, LOSSES, relative

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.sessions import Session
from mxfp8_ops import numpy_nodes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
logging.getLogger("torchao").setLevel(logging.ERROR)

from onnx_exports import program  # noqa: E402
from torch import nn  # noqa: E402

RECIPE = Recipe(name="outputs too", output_projections=True)


def there_and_back(model: Any, to: str) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, int]]:
    there, report = mxfp8_graph.convert(model, to, allow=LOSSES.get(to, ()))
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    return there, back, dict(report.losses)


def run(model: onnx.ModelProto | Path, x: np.ndarray, *, kernels: bool = True) -> np.ndarray:
    session = Session(model, kernels=kernels)
    name = (onnx.load(model, load_external_data=False) if isinstance(model, Path) else model).graph.input[0].name
    return next(iter(session.run({name: x}).values())).astype(np.float32)


class Between(nn.Module):
    """Two linears in bfloat16, as torchao wants them, between float32 values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(160, 96, dtype=torch.bfloat16)
        self.down = nn.Linear(96, 224, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.up(x.bfloat16()).float())
        return self.down(h.bfloat16()).float()


@pytest.fixture(scope="module")
def torchao() -> Any:
    """Returns a module whose weights torchao has packed, and which quantizes activations."""
    mx_formats = pytest.importorskip("torchao.prototype.mx_formats")
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    torch.manual_seed(0)
    module = Between().eval()
    quantize_(module, mx_formats.MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED))
    return module


X = torch.randn(5, 160, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def torchao_in_onnx(torchao: Any, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    exported, _ = mxfp8_graph.rewrite(program(torchao, X, batch=False), RECIPE)
    return onnx.load(mxfp8_graph.to_onnx(exported, tmp_path_factory.mktemp("torchao") / "m.onnx"))


@looped("to", DIALECTS)
def test_torchaos_weights_in_every_dialect(torchao: Any, torchao_in_onnx: onnx.ModelProto, to: str) -> None:
    there, back, losses = there_and_back(torchao_in_onnx, to)
    weights = mxfp8_graph.unpack(back)
    for name in ("up", "down"):
        theirs = getattr(torchao, name).weight
        np.testing.assert_array_equal(weights[f"{name}.weight"].elements, theirs.qdata.view(torch.uint8).numpy())
        values = theirs.dequantize(torch.float32).numpy()
        ours = weights[f"{name}.weight"]
        np.testing.assert_array_equal(numpy_nodes.dequantize(ours.elements, ours.scales), values)
    with torch.no_grad():
        expected = torchao(X).numpy()
    # Two results rounded to bfloat16 (2^-9 each), of which the first moves E4M3 roundings of the second's input; and
    # without quantized activations, what their rounding (2^-4 at most, relative to a value) changes.
    limit = 0.05 if losses else 0.01
    assert relative(run(back, X.numpy()), expected) < limit
    if to in {"qdq", "standard"}:
        assert relative(run(there, X.numpy(), kernels=False), expected) < limit
