"""verify and run on exported torch programs, alone and against ONNX."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from commands import run  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.running.programs import TorchProgram  # noqa: E402
from mxfp8_graph.running.runner import run_model  # noqa: E402
from mxfp8_ops.errors import BackendError, ShapeError  # noqa: E402


class Block(torch.nn.Module):
    """Embedding, an FFN behind a residual add, a head."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 64)
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
        self.head = torch.nn.Linear(64, classes)

    def forward(self, ids: Any, scale: Any) -> Any:
        x = self.table(ids) * scale
        return {"logits": self.head(x + self.down(torch.relu(self.up(x)))), "embedded": x}


@functools.cache
def program(dtype: Any = torch.float32, classes: int = 10) -> Any:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    inputs = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, 1, dtype=dtype))
    dims = {0: batch, 1: length}
    return torch.export.export(Block(classes).to(dtype).eval(), inputs, dynamic_shapes=(dims, dims))


@functools.cache
def rewritten() -> Any:
    return mxfp8_graph.rewrite(program())[0]


def test_a_rewritten_program_is_close_to_its_original_and_its_onnx_file_agrees_with_it(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    assert TorchProgram(program()).signature.ranges == {"ids": range(50)}
    report = mxfp8_graph.verify(program(), rewritten())
    assert report.passed, report.failures
    assert 0 < report.worst_relative_l2 < 0.05
    assert report.outputs[1].rewritten.max_abs == 0, "the rewrite does not touch it"
    report = mxfp8_graph.verify(mxfp8_graph.to_onnx(rewritten(), tmp_path / "m.onnx"), rewritten())
    assert report.passed, report.failures
    assert report.worst_relative_l2 < 1e-6, report.outputs


def test_bfloat16_goes_in_and_comes_out() -> None:
    report = run_model(mxfp8_graph.rewrite(program(torch.bfloat16))[0], repeat=1)
    assert [array.dtype.name for array in report.timing.outputs.values()] == ["bfloat16", "bfloat16"]


def test_given_inputs_are_used() -> None:
    inputs = {"ids": np.full((3, 4), 7), "scale": np.zeros((3, 4, 1), np.float32)}
    outputs = list(run_model(program(), inputs=inputs, repeat=1).timing.outputs.values())
    assert outputs[0].shape == (3, 4, 10)
    assert not outputs[1].any()


def test_outputs_of_another_shape_fail() -> None:
    report = mxfp8_graph.verify(program(), program(classes=11))
    assert report.failures == ("output 'linear_2': [2, 16, 11] float32; expected [2, 16, 10] float32",)


def test_inputs_that_a_program_does_not_take_are_refused() -> None:
    other = torch.export.export(torch.nn.Linear(64, 64), (torch.zeros(2, 64),))
    with pytest.raises(ShapeError, match=r"inputs input float32 \[2, 64\]; expected those of program, ids int64 "):
        mxfp8_graph.verify(program(), other)
    inputs = {"ids": np.zeros((3, 4), np.int64), "scale": np.zeros((2, 4, 1), np.float32)}
    with pytest.raises((BackendError, ShapeError), match="scale"):
        run_model(program(), inputs=inputs, repeat=1)


def test_a_program_runs_on_the_cpu_alone() -> None:
    with pytest.raises(BackendError, match=r"device 'cuda': a program; expected an ONNX model; write it with mxfp8_gr"):
        run_model(program(), device="cuda")


def test_the_command_line_rewrites_verifies_and_runs_a_pt2_file(tmp_path: Path) -> None:
    original, result = str(tmp_path / "m.pt2"), str(tmp_path / "m.mxfp8.pt2")
    mxfp8_graph.save(program(), original)
    for command in (["rewrite", original], ["verify", original, result], ["run", result, "--repeat", "1"]):
        done = run(*command)
        assert done.exit_code == 0, (command, done.output)
    failed = run("verify", original, result, "--max-rel-l2", "1e-9")
    assert failed.exit_code == 1
