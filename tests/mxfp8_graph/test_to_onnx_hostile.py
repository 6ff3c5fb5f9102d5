"""to_onnx: broken programs, odd names and arguments, and places where no file can be: refused, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from full_disk import files, files_of_at_most
from onnx_exports import Linear, Packed, exported, packed, program, run

import mxfp8_graph
from mxfp8_ops import torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError

WEIGHT = "linear.weight_mxfp8"


@pytest.fixture(scope="module")
def good() -> Any:
    torch.manual_seed(0)
    return packed(Linear(), torch.randn(2, 64))


def refused(program: Any, path: Path, **options: Any) -> str:
    """Returns what `to_onnx` says; fails unless it refuses, and leaves the folder as it was."""
    before = files(path.parent) if path.parent.is_dir() else []
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.to_onnx(program, path, **options)
    assert (files(path.parent) if path.parent.is_dir() else []) == before
    return str(caught.value)


# --- Broken programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (WEIGHT, torch.zeros(96, 64), f"to_onnx: tensor {WEIGHT!r} is torch.float32 [96, 64]; expected torch.uint8"),
        (
            WEIGHT,
            torch.zeros(3, 5, dtype=torch.uint8),
            f"tensor {WEIGHT!r} is torch.uint8 [3, 5]; expected torch.uint8",
        ),
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
def test_a_tensor_that_does_not_fit(name: str, value: Any, said: str, tmp_path: Path) -> None:
    broken = packed(Linear(), torch.randn(2, 64))
    broken.state_dict[name] = value
    assert said in refused(broken, tmp_path / "a.onnx")


def test_an_output_that_is_no_tensor(tmp_path: Path) -> None:
    class Odd(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0), "text"

    said = refused(program(Odd(torch.randn(8, 32)), torch.randn(2, 32)), tmp_path / "a.onnx")
    assert "cannot export the program: Error when translating node return" in said


@pytest.mark.parametrize(("rows", "k", "n"), [(0, 32, 8), (1, 1, 1)])
def test_empty_and_tiny_shapes(rows: int, k: int, n: int, tmp_path: Path) -> None:
    class Tiny(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0)

    x = torch.randn(rows, k)
    ep = program(Tiny(torch.randn(n, k)), x, batch=False)
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    np.testing.assert_array_equal(run(path, x.numpy(), kernels=True), ep.module()(x).numpy())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, onnx.TensorProto.BFLOAT16), (torch.int8, onnx.TensorProto.INT8)],
)
def test_inputs_of_other_dtypes(dtype: Any, expected: int, tmp_path: Path) -> None:
    class Cast(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x.to(torch.float32), 0)

    ep = program(Cast(torch.randn(8, 32)), torch.ones(2, 32).to(dtype))
    model = exported(ep, tmp_path / "a.onnx")
    onnx.checker.check_model(model)
    assert model.graph.input[0].type.tensor_type.elem_type == expected


# --- Arguments ---------------------------------------------------------------------------------------------------


def test_an_opset_that_is_no_number_or_out_of_range(good: Any, tmp_path: Path) -> None:
    for opset in ("21", 21.0, None, True, 20, 99):
        assert f"to_onnx: opset {opset}; expected 21 to" in refused(good, tmp_path / "a.onnx", opset=opset)


@pytest.mark.parametrize(
    ("options", "said"),
    [
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
def test_arguments_that_do_not_fit(good: Any, options: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(good, tmp_path / "a.onnx", **options)


def test_names_may_have_escapes(good: Any, tmp_path: Path) -> None:
    model = exported(good, tmp_path / "a.onnx", input_names=["a\x1b[31m\n"], output_names=["b\u202e"])
    assert (model.graph.input[0].name, model.graph.output[0].name) == ("a\x1b[31m\n", "b\u202e")
    assert run(tmp_path / "a.onnx", np.ones((3, 64), np.float32), kernels=True).shape == (3, 96)


# --- Files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("external", "overwrite"), [("always", True), ("never", False)])
def test_a_disk_that_is_full(good: Any, external: Any, overwrite: bool, tmp_path: Path) -> None:
    if overwrite:
        (tmp_path / "a.onnx").write_text("old")
    with files_of_at_most(3000):
        said = refused(good, tmp_path / "a.onnx", external_data=external, overwrite=overwrite)
    assert "cannot be written: File too large" in said
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * overwrite


def test_the_program_is_not_replaced_by_its_result(good: Any, tmp_path: Path) -> None:
    saved = mxfp8_graph.save(good, tmp_path / "a.pt2")
    os.link(saved, tmp_path / "b.onnx")
    os.link(saved, tmp_path / "c.onnx.data")
    for path in (saved, tmp_path / "b.onnx", tmp_path / "c.onnx"):
        assert "is the program; expected another file" in refused(saved, path, overwrite=True)
