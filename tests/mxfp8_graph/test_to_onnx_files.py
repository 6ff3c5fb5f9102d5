"""to_onnx: types of elements, names and files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx_exports import Linear, Packed, data, expected, exported, ours, packed, program, run
from oracle import Expected, check_well_formed, expect, normal

import mxfp8_graph
from mxfp8_graph.onnx_pass import save
from mxfp8_ops import numerics, numpy_nodes, torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.contract import FLOAT8E4M3FN, FLOAT8E5M2, UINT8
from mxfp8_ops.errors import ContractError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- Packed weights ----------------------------------------------------------------------------------------------


def test_elements_are_float8_and_scales_uint8_with_the_bytes_of_the_buffers(tmp_path: Path) -> None:
    ep = packed(Linear(), torch.randn(2, 64))
    stored = data(exported(ep, tmp_path / "a.onnx"))
    for name, dtype in (("linear.weight_mxfp8", FLOAT8E4M3FN), ("linear.weight_mxfp8_scales", UINT8)):
        buffer = ep.state_dict[name]
        assert stored[name] == (dtype, tuple(buffer.shape), buffer.numpy().tobytes())


def test_weights_of_equal_bytes_may_be_merged_by_the_exporter(tmp_path: Path) -> None:
    class Twice(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0) + self.gemm(x, 1)

    weight, x = torch.randn(8, 32), normal(2, 32)
    path = mxfp8_graph.to_onnx(program(Twice(weight, weight), torch.from_numpy(x)), tmp_path / "a.onnx")
    check_well_formed(onnx.load(path))
    once = expect(x, weight.numpy())
    Expected(2 * once.y, 2 * once.bound).check(run(path, x, kernels=True), roundings=1)


def test_equal_bytes_of_both_formats_become_two_tensors(tmp_path: Path) -> None:
    class Both(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0) + self.gemm(x, 1, b_format="e5m2")

    zeros = torch.zeros(8, 32)
    ep = program(Both(zeros, zeros, formats=("e4m3", "e5m2")), torch.randn(2, 32))
    model = exported(ep, tmp_path / "a.onnx")
    check_well_formed(model)
    stored = data(model)
    gemms = [node for node in ours(model) if node.op_type == "MXFP8Gemm"]
    assert {stored[node.input[2]][0] for node in gemms} == {FLOAT8E4M3FN, FLOAT8E5M2}


def test_elements_that_equal_their_scales_become_two_tensors(tmp_path: Path) -> None:
    class Zero(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0)

    path = mxfp8_graph.to_onnx(program(Zero(torch.zeros(8, 1)), torch.randn(2, 1)), tmp_path / "a.onnx")
    model = onnx.load(path)
    check_well_formed(model)
    gemm = next(node for node in ours(model) if node.op_type == "MXFP8Gemm")
    assert [data(model)[name][0] for name in gemm.input[2:4]] == [FLOAT8E4M3FN, UINT8]
    assert not run(path, np.ones((2, 1), np.float32), kernels=True).any()


@pytest.mark.parametrize(
    "use",
    [
        lambda codes, weight: torch.ops.mxfp8.dequantize(*codes),
        lambda codes, weight: torch.ops.mxfp8.dequantize(*weight),
        lambda codes, weight: (torch.ops.mxfp8.gemm(*codes, *weight), codes[0] + 1),
        lambda codes, weight: torch.ops.mxfp8.gemm(codes[0] ^ 128, codes[1], *weight),
        lambda codes, weight: torch.ops.mxfp8.gemm(*codes, weight[0] + 1, weight[1]),
        lambda codes, weight: torch.ops.mxfp8.gemm(*codes, *weight, a_format="e5m2"),
        lambda codes, weight: torch.ops.mxfp8.weight_gemm(torch.ones(3, 64), *codes),
        lambda codes, weight: torch.ops.mxfp8.gemm(codes[0].reshape(1, -1, 64), codes[1].reshape(1, -1, 2), *weight),
    ],
)
def test_ops_that_rewrite_does_not_make_so_are_refused(use: Any, tmp_path: Path) -> None:
    class Odd(Packed):
        def forward(self, x: Any) -> Any:
            return use(torch.ops.mxfp8.quantize(x), (self.w0_mxfp8, self.w0_mxfp8_scales))

    with pytest.raises(ContractError, match=r"node '\w+' is mxfp8\.\w+, not as rewrite makes it; expected products"):
        mxfp8_graph.to_onnx(program(Odd(torch.randn(8, 64)), torch.randn(2, 64)), tmp_path / "a.onnx")


# --- Names, files ------------------------------------------------------------------------------------------------


def test_dynamic_axes_stay_dynamic_and_can_be_named(tmp_path: Path) -> None:
    ep = packed(Linear(), torch.randn(2, 64))
    names = {"input_names": ["tokens"], "output_names": ["hidden"], "dynamic_shapes": ({0: "batch"},)}
    model = exported(ep, tmp_path / "a.onnx", **names)
    for value, name in ((model.graph.input[0], "tokens"), (model.graph.output[0], "hidden")):
        assert value.name == name
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    for rows in (1, 7):
        assert run(tmp_path / "a.onnx", np.ones((rows, 64), np.float32), kernels=True).shape == (rows, 96)


@pytest.mark.parametrize("by_itself", [False, True])
def test_external_data_goes_next_to_the_file(by_itself: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On request, and near the limit of protobuf."""
    module, x = Linear(256, 256), normal(3, 256)
    ep = packed(module, torch.from_numpy(x))
    if by_itself:
        monkeypatch.setattr(save, "INLINE_LIMIT", 1000)
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx", external_data="auto" if by_itself else "always")
    assert {file.name for file in tmp_path.iterdir()} == {"a.onnx", "a.onnx.data"}
    assert (tmp_path / "a.onnx.data").stat().st_size >= 256 * 256
    onnx.checker.check_model(str(path), full_check=True)
    expected(module.linear, x).check(run(path, x, kernels=True))


def test_an_existing_file_is_replaced_only_on_request_and_the_program_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_text("mine")
    ep = packed(Linear(), torch.randn(2, 64))
    before = str(ep), {name: tensor.clone() for name, tensor in ep.state_dict.items()}
    with pytest.raises(ContractError, match="exists already; expected a new file"):
        mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_text() == "mine"
    mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx", overwrite=True)
    assert ours(onnx.load(tmp_path / "a.onnx"))
    assert str(ep) == before[0]
    assert all(torch.equal(ep.state_dict[name], tensor) for name, tensor in before[1].items())


def test_a_saved_program_is_read_from_its_path(tmp_path: Path) -> None:
    saved = mxfp8_graph.save(packed(Linear(), torch.randn(2, 64)), tmp_path / "a.pt2")
    assert len(ours(exported(saved, tmp_path / "a.onnx"))) == 2


# --- Refusals ----------------------------------------------------------------------------------------------------


def test_a_program_in_training_form_is_refused(tmp_path: Path) -> None:
    class Train(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 64))

        def forward(self, x: Any) -> Any:
            return torch.ops.mxfp8.linear_train(x, self.weight)

    with pytest.raises(ContractError, match=r"node 'linear_train' is mxfp8.linear_train.*rewrite the program again"):
        mxfp8_graph.to_onnx(program(Train(), torch.randn(2, 64)), tmp_path / "a.onnx")


def test_a_program_that_was_not_rewritten_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no mxfp8 op; expected a rewritten one"):
        mxfp8_graph.to_onnx(program(Linear(), torch.randn(2, 64)), tmp_path / "a.onnx")


def test_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="to_onnx: a Linear; expected a rewritten ExportedProgram"):
        mxfp8_graph.to_onnx(Linear(), tmp_path / "a.onnx")


def test_an_op_without_an_onnx_form_is_named(tmp_path: Path) -> None:
    class Strange(Packed):
        def forward(self, x: Any) -> Any:
            return torch.special.bessel_j0(self.gemm(x, 0))

    with pytest.raises(ContractError, match=r"cannot export the program: .*bessel_j0"):
        mxfp8_graph.to_onnx(program(Strange(torch.randn(8, 32)), torch.randn(2, 32)), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_a_gather_of_constants_is_written_without_a_warning(tmp_path: Path, caplog: Any) -> None:
    class Positions(torch.nn.Module):
        """BERT's way to its token types: onnx's reference evaluator cannot gather from more than 64."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 96)
            self.register_buffer("types", torch.arange(100.0))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.linear(x)) + torch.gather(self.types[None], 1, torch.arange(96)[None])

    x = torch.randn(5, 64)
    rewritten = packed(Positions(), x)
    model = exported(rewritten, tmp_path / "m.onnx")
    assert [r.getMessage() for r in caplog.records if r.name.startswith("onnxscript")] == []
    result = run(model, x.numpy(), kernels=True)
    np.testing.assert_allclose(result, rewritten.module()(x).numpy(), rtol=1e-5, atol=1e-5)
