"""Programs exported from modules that torchao quantized: the same bytes in our nodes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import looped

torch = pytest.importorskip("torch")
logging.getLogger("torchao").setLevel(logging.ERROR)
mx_formats = pytest.importorskip("torchao.prototype.mx_formats")
quantization = pytest.importorskip("torchao.quantization")

from torch import nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import OUTPUTS_TOO, as_numpy, count, decision, export, kept, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.packing import unswizzled  # noqa: E402
from mxfp8_graph.torch_pass import torchao_weights  # noqa: E402
from mxfp8_ops import numpy_nodes  # noqa: E402

X = values(5, 160, seed=2).bfloat16()


def quantized(dtype: Any = torch.float8_e4m3fn, **settings: Any) -> nn.Module:
    from torchao.quantization.quantize_.common import KernelPreference

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 96), nn.ReLU(), nn.Linear(96, 200, bias=False)).bfloat16()
    emulated = {"kernel_preference": KernelPreference.EMULATED, "activation_dtype": dtype, "weight_dtype": dtype}
    quantization.quantize_(model, mx_formats.MXDynamicActivationMXWeightConfig(**emulated, **settings))
    return model


def dequantized(weight: Any) -> np.ndarray:
    return as_numpy(weight.dequantize(torch.float32))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return quantized()


@pytest.fixture(scope="module")
def program(model: nn.Module) -> ExportedProgram:
    return export(model, X)


def test_the_bytes_are_taken_over(model: Any, program: ExportedProgram) -> None:
    assert model[0].weight.is_swizzled_scales
    rewritten, report = mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    assert count(rewritten, "mxfp8.gemm") == 2
    assert [s.relative_l2 for s in report.sites] == [None, None]
    assert report.notes == ("2 weights were packed by torchao: their bytes are kept, their rounding error is unknown",)
    for index in (0, 2):
        name = f"{index}.weight_mxfp8"
        elements, scales = (rewritten.state_dict[key].numpy() for key in (name, f"{name}_scales"))
        np.testing.assert_array_equal(elements, model[index].weight.qdata.view(torch.uint8).numpy())
        np.testing.assert_array_equal(numpy_nodes.dequantize(elements, scales), dequantized(model[index].weight))
    assert not any(torchao_weights.is_mx(tensor) for tensor in rewritten.state_dict.values())
    assert all(torchao_weights.is_mx(program.state_dict[f"{index}.weight"]) for index in (0, 2))

    # torchao multiplies in bfloat16 after dequantizing, exactly as its emulation can; sums and results round.
    with torch.no_grad():
        expected, got = model(X).float(), rewritten.module()(X).float()
    # Two results rounded to bfloat16 (2^-9 each), of which the first moves E4M3 roundings of the second's input.
    assert float((got - expected).norm() / expected.norm()) < 0.01


def test_kept_weights_stay_torchaos(program: ExportedProgram, tmp_path: Path) -> None:
    rewritten, report = mxfp8_graph.rewrite(program)
    assert decision(report, "2").reason.startswith("output projection")
    assert torchao_weights.is_mx(rewritten.state_dict["2.weight"])
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / "mixed.pt2"))
    assert torch.equal(loaded.module()(X), rewritten.module()(X))


def test_files_with_torchao_weights(program: ExportedProgram, tmp_path: Path) -> None:
    torch.export.save(program, tmp_path / "model.pt2")
    expected, _ = mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    output, _ = mxfp8_graph.rewrite(tmp_path / "model.pt2", OUTPUTS_TOO)
    assert torch.equal(mxfp8_graph.load(output).module()(X), expected.module()(X))


def test_what_cannot_be_taken_over_is_kept_with_the_reason(program: ExportedProgram) -> None:
    decomposed = "torchao packed this weight, and the program was decomposed; rewrite before run_decompositions()"
    four_bits = "float4_e2m1fn_x2; expected float8_e4m3fn or float8_e5m2"
    for source, training, reason in (
        (program.run_decompositions({}), False, decomposed),
        (export(quantized(torch.float4_e2m1fn_x2), X), False, four_bits),
        (program, True, "torchao packed this weight; expected one in high precision"),
    ):
        assert all(reason in each for each in kept(source, training=training)), reason


@looped("rows, columns", [(128, 4), (96, 5), (200, 3), (1, 1), (257, 9)])
def test_unswizzling_undoes_torchaos_swizzling(rows: int, columns: int) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    scales = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns).to(torch.uint8)
    stored = to_blocked(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    np.testing.assert_array_equal(unswizzled(stored.numpy(), rows, columns), scales.numpy())
