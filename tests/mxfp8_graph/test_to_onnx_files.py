"""to_onnx: stored tensors, names, arguments and files, and programs that it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from full_disk import files
from onnx_exports import Linear, Packed, data, expected, exported, ours, packed, program, run
from oracle import Expected, check_well_formed, expect, normal

import mxfp8_graph
from mxfp8_graph.onnx_pass import save
from mxfp8_ops import torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.contract import FLOAT, FLOAT8E4M3FN, FLOAT8E5M2, FLOAT16, UINT8
from mxfp8_ops.errors import ContractError

WEIGHT = "linear.weight_mxfp8"


@pytest.fixture(scope="module")
def good() -> Any:
    torch.manual_seed(0)
    return packed(Linear(), torch.randn(2, 64))


class Uses(Packed):
    """Returns function(self, x)."""

    def __init__(self, function: Any, *weights: Any, **options: Any) -> None:
        super().__init__(*weights, **options)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def refused(program: Any, path: Path, **options: Any) -> str:
    """Returns what `to_onnx` says; fails unless it refuses, and leaves the folder as it was."""
    before = files(path.parent)
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.to_onnx(program, path, **options)
    assert files(path.parent) == before
    return str(caught.value)


# --- Packed weights ----------------------------------------------------------------------------------------------


def test_weights_of_equal_bytes_may_be_merged_by_the_exporter(tmp_path: Path) -> None:
    weight, x = torch.randn(8, 32), normal(2, 32)
    twice = Uses(lambda m, x: m.gemm(x, 0) + m.gemm(x, 1), weight, weight)
    path = mxfp8_graph.to_onnx(program(twice, torch.from_numpy(x)), tmp_path / "a.onnx")
    check_well_formed(onnx.load(path))
    once = expect(x, weight.numpy())
    Expected(2 * once.y, 2 * once.bound).check(run(path, x, kernels=True), roundings=1)


def test_equal_bytes_of_both_formats_become_two_tensors(tmp_path: Path) -> None:
    zeros = torch.zeros(8, 32)
    both = Uses(lambda m, x: m.gemm(x, 0) + m.gemm(x, 1, b_format="e5m2"), zeros, zeros, formats=("e4m3", "e5m2"))
    model = exported(program(both, torch.randn(2, 32)), tmp_path / "a.onnx")
    check_well_formed(model)
    gemms = [node for node in ours(model) if node.op_type == "MXFP8Gemm"]
    assert {data(model)[node.input[2]][0] for node in gemms} == {FLOAT8E4M3FN, FLOAT8E5M2}


def test_elements_that_equal_their_scales_become_two_tensors(tmp_path: Path) -> None:
    zero = Uses(lambda m, x: m.gemm(x, 0), torch.zeros(8, 1))
    path = mxfp8_graph.to_onnx(program(zero, torch.randn(2, 1)), tmp_path / "a.onnx")
    model = onnx.load(path)
    check_well_formed(model)
    (gemm,) = (node for node in ours(model) if node.op_type == "MXFP8Gemm")
    assert [data(model)[name][0] for name in gemm.input[2:4]] == [FLOAT8E4M3FN, UINT8]
    assert not run(path, np.ones((2, 1), np.float32), kernels=True).any()


@pytest.mark.parametrize(("rows", "k", "n"), [(0, 32, 8), (1, 1, 1)])
def test_empty_and_tiny_shapes(rows: int, k: int, n: int, tmp_path: Path) -> None:
    x = torch.randn(rows, k)
    ep = program(Uses(lambda m, x: m.gemm(x, 0), torch.randn(n, k)), x, batch=False)
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    np.testing.assert_array_equal(run(path, x.numpy(), kernels=True), ep.module()(x).numpy())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, onnx.TensorProto.BFLOAT16), (torch.int8, onnx.TensorProto.INT8)],
)
def test_inputs_of_other_dtypes(dtype: Any, expected: int, tmp_path: Path) -> None:
    cast = Uses(lambda m, x: m.gemm(x.to(torch.float32), 0), torch.randn(8, 32))
    model = exported(program(cast, torch.ones(2, 32).to(dtype)), tmp_path / "a.onnx")
    assert model.graph.input[0].type.tensor_type.elem_type == expected


def test_a_dtype_left_open_is_the_ops_default(tmp_path: Path) -> None:
    def both(m: Any, x: Any) -> Any:
        weight = m.w0_mxfp8, m.w0_mxfp8_scales
        gemm = torch.ops.mxfp8.gemm(*torch.ops.mxfp8.quantize(x), *weight, dtype=None)
        return gemm, torch.ops.mxfp8.weight_gemm(x, *weight)

    ep = program(Uses(both, torch.randn(8, 32)), torch.randn(2, 32, dtype=torch.float16))
    outputs = exported(ep, tmp_path / "a.onnx").graph.output
    assert [output.type.tensor_type.elem_type for output in outputs] == [FLOAT, FLOAT16]


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


# --- Programs that it refuses ------------------------------------------------------------------------------------


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
    odd = Uses(lambda m, x: use(torch.ops.mxfp8.quantize(x), (m.w0_mxfp8, m.w0_mxfp8_scales)), torch.randn(8, 64))
    with pytest.raises(ContractError, match=r"node '\w+' is mxfp8\.\w+, not as rewrite makes it; expected products"):
        mxfp8_graph.to_onnx(program(odd, torch.randn(2, 64)), tmp_path / "a.onnx")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(
            lambda: program(Linear(), torch.randn(2, 64)), "no mxfp8 op; expected a rewritten one", id="not rewritten"
        ),
        pytest.param(Linear, "to_onnx: a Linear; expected a rewritten ExportedProgram", id="a module"),
        pytest.param(
            lambda: program(Uses(lambda m, x: (m.gemm(x, 0), "text"), torch.randn(8, 32)), torch.randn(2, 32)),
            "cannot export the program: Error when translating node return",
            id="an output that is no tensor",
        ),
        pytest.param(
            lambda: program(
                Uses(lambda m, x: torch.special.bessel_j0(m.gemm(x, 0)), torch.randn(8, 32)), torch.randn(2, 32)
            ),
            "bessel_j0",
            id="an op without an ONNX form",
        ),
    ],
)
def test_a_program_that_has_no_onnx_form_is_refused(source: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(source(), tmp_path / "a.onnx")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (WEIGHT, torch.zeros(96, 64), f"to_onnx: tensor {WEIGHT!r} is torch.float32 [96, 64]; expected torch.uint8"),
        (WEIGHT, torch.zeros(96, 64, dtype=torch.uint8, device="meta"), f"to_onnx: tensor {WEIGHT!r} is on meta"),
        (f"{WEIGHT}_scales", torch.zeros(96, 3, dtype=torch.uint8), "_scales' is torch.uint8 [96, 3]; expected"),
        (WEIGHT, None, f"to_onnx: no tensor {WEIGHT!r}; expected all tensors that its graph uses"),
        (
            "linear.bias",
            torch.zeros(96, dtype=torch.complex64),
            "to_onnx: tensor 'linear.bias' is torch.complex64 [96]; expected torch.float32 [96], as its graph says",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(name: str, value: Any, said: str, tmp_path: Path) -> None:
    broken = packed(Linear(), torch.randn(2, 64))
    broken.state_dict[name] = value
    assert said in refused(broken, tmp_path / "a.onnx")


# --- Arguments and files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"opset": opset}, f"to_onnx: opset {opset}; expected 21 to") for opset in ("21", 21.0, True, 20, 99)),
        ({"input_names": "ab"}, "input_names is 'ab'; expected a list of names, each once"),
        ({"input_names": 3}, "input_names is 3"),
        ({"input_names": [""]}, "input_names is ['']"),
        ({"input_names": [3]}, "input_names is [3]"),
        ({"output_names": ["a", "a"]}, "output_names is ['a', 'a']"),
        ({"input_names": ["a"], "output_names": ["a"]}, "'a' is the name of another value"),
        ({"input_names": ["linear.weight"]}, "'linear.weight' is the name of another value"),
        ({"output_names": ["linear.bias"]}, "'linear.bias' is the name of another value"),
        ({"dynamic_shapes": ({9: "batch"},)}, "cannot export the program: "),
        ({"external_data": "sometimes"}, "external_data is 'sometimes'; expected auto, always or never"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(good: Any, options: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(good, tmp_path / "a.onnx", **options)


def test_dynamic_axes_stay_dynamic_and_can_be_named(good: Any, tmp_path: Path) -> None:
    names = {"input_names": ["tokens"], "output_names": ["hidden"], "dynamic_shapes": ({0: "batch"},)}
    model = exported(good, tmp_path / "a.onnx", **names)
    for value, name in ((model.graph.input[0], "tokens"), (model.graph.output[0], "hidden")):
        assert value.name == name
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    for rows in (1, 7):
        assert run(tmp_path / "a.onnx", np.ones((rows, 64), np.float32), kernels=True).shape == (rows, 96)


@pytest.mark.parametrize("by_itself", [False, True], ids=["on request", "near the limit of protobuf"])
def test_external_data_goes_next_to_the_file(by_itself: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Linear(256, 256), normal(3, 256)
    if by_itself:
        monkeypatch.setattr(save, "INLINE_LIMIT", 1000)
    external = "auto" if by_itself else "always"
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x)), tmp_path / "a.onnx", external_data=external)
    assert {file.name for file in tmp_path.iterdir()} == {"a.onnx", "a.onnx.data"}
    assert (tmp_path / "a.onnx.data").stat().st_size >= 256 * 256
    onnx.checker.check_model(str(path), full_check=True)
    expected(module.linear, x).check(run(path, x, kernels=True))


def test_an_existing_file_is_replaced_only_on_request_and_the_program_is_not_changed(good: Any, tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_text("mine")
    before = str(good), {name: tensor.clone() for name, tensor in good.state_dict.items()}
    assert "exists already; expected a new file" in refused(good, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_text() == "mine"
    assert ours(exported(good, tmp_path / "a.onnx", overwrite=True))
    assert str(good) == before[0]
    assert all(torch.equal(good.state_dict[name], tensor) for name, tensor in before[1].items())


def test_a_saved_program_is_read_from_its_path_and_is_not_replaced_by_its_result(good: Any, tmp_path: Path) -> None:
    saved = mxfp8_graph.save(good, tmp_path / "a.pt2")
    assert len(ours(exported(saved, tmp_path / "a.onnx"))) == 2
    os.link(saved, tmp_path / "b.onnx")
    os.link(saved, tmp_path / "c.onnx.data")
    for path in (saved, tmp_path / "b.onnx", tmp_path / "c.onnx"):
        assert "is the program; expected another file" in refused(saved, path, overwrite=True)
