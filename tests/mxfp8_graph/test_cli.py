"""`mxfp8-graph verify | run | doctor`: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import builders as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save
from typer.testing import CliRunner

import mxfp8_graph
from mxfp8_graph import cli, doctor, rewriting
from mxfp8_ops import cpu, native

pytestmark = pytest.mark.usefixtures("own_folder")


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[str, str]:
    """Returns a model and its rewrite."""
    source = save(b.chain_model())
    rewriting.rewrite(source)
    return source, "m.mxfp8.onnx"


def test_verify(pair: tuple[str, str]) -> None:
    result = run("verify", *pair)
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert any(line.split()[:5] == ["y", "float32", "2", "x", "64"] for line in lines)
    assert "inputs   x float32 [2, 64], synthesised" in lines
    assert f"kernels  {cpu.isa()}" in lines
    assert f"nodes    2 MXFP8Quantize ({native.isa()}): kernel and function body give the same bytes" in lines
    assert lines[-1] == "Passed: 4 kernels agree with their nodes, and the relative L2 of y is 0.0641, limit 0.5."


def test_verify_past_the_limit(pair: tuple[str, str]) -> None:
    result = run("verify", *pair, "--max-rel-l2", "0.001", "--report", "v.json")
    assert result.exit_code == 1
    assert json.loads(Path("v.json").read_text())["passed"] is False
    assert result.stdout.splitlines()[-1] == "Failed checks: 1 of outputs, 0 of kernels; do not use m.mxfp8.onnx."
    assert "is above the limit 0.001" in result.stdout


def test_verify_of_a_model_without_an_output_to_judge() -> None:
    """A classifier that returns labels alone: nothing says that the rewrite is right."""
    model = b.chain_model()
    model.graph.node.append(b.node("Cast", "y", "label", to=onnx.TensorProto.INT64))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, [None, 64]))
    source = save(model)
    rewriting.rewrite(source)
    result = run("verify", source, "m.mxfp8.onnx")
    last = result.stdout.splitlines()[-1]
    assert result.exit_code == 1
    assert last.startswith("Not judged: 0 of 1 outputs have a limit and a value; set --max-rel-l2 to judge integers, ")


def test_verify_on_several_samples(pair: tuple[str, str]) -> None:
    Path("data").mkdir()
    for name, value in (("a", 1), ("b", -3)):
        np.savez(f"data/{name}.npz", x=np.full((1, 64), value, np.float32))
    result = run("verify", *pair, "--inputs", "data")
    lines = result.stdout.splitlines()
    assert [word in result.stdout for word in ("mean", "worst", "kernel")] == [True] * 3
    assert f"{Path('data/')}" in next(line for line in lines if line.startswith("y "))
    assert "inputs   2 samples, from data; the first: x float32 [1, 64]" in lines


def test_the_seed_changes_the_inputs(pair: tuple[str, str]) -> None:
    first, same, other = (run("verify", *pair, "--seed", seed).stdout for seed in ("0", "0", "1"))
    assert (first == same, first == other) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--inputs", "none.npz"],
            "error: none.npz: No such file or directory; expected a readable .npz file; check the path",
        ),
        (
            ["--dim", "bath=2"],
            "error: m.onnx: size bath = 2; expected 0 or more, for one of batch (or INPUT.AXIS); correct or drop --dim",
        ),
        (
            ["--dim", "batch=2", "--inputs", "data.npz"],
            "error: m.onnx: sizes batch with given inputs; expected one or the other; drop --dim",
        ),
        (
            ["--dim", "batch=1125899906842624"],
            "error: m.onnx: input x float32 [batch, 64] would be (1125899906842624, 64); expected one that fits in "
            "memory; pass smaller sizes, --dim NAME=SIZE",
        ),
        (["--report", "v.txt"], "error: v.txt: report with suffix '.txt'; expected .json or .html; rename it"),
    ],
    ids=["inputs", "dim", "both", "memory", "report"],
)
def test_verify_refuses(pair: tuple[str, str], arguments: list[str], message: str) -> None:
    assert refused("verify", *pair, *arguments) == message


# --- run, doctor, --version ------------------------------------------------------------------------------------------


def test_run(pair: tuple[str, str]) -> None:
    result = run("run", pair[1], "--repeat", "3", "--dim", "batch=4")
    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[1].split()) == (0, ["y", "float32", "4", "x", "64"])
    assert f"kernels  {cpu.isa()}" in lines
    assert lines[-1].startswith("A run takes ")
    assert lines[-1].endswith(" ms, 3 runs after a warm-up).")


def test_run_on_given_inputs(pair: tuple[str, str]) -> None:
    np.savez("data.npz", x=np.ones((5, 64), np.float32))
    assert "inputs   x float32 [5, 64]" in run("run", pair[1], "--inputs", "data.npz").stdout


def test_doctor() -> None:
    result = run("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split("  ")[0] for line in result.stdout.splitlines() if line[0] != " "] == [
        check.name for check in doctor.diagnose()
    ]


def test_doctor_when_the_cpu_path_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.Check(name="session", state="failed", detail="no [library]", advice="pip install [it]")
    monkeypatch.setattr(doctor, "diagnose", lambda: [check])
    result = run("doctor")
    assert (result.exit_code, " ".join(result.stdout.split()), result.stderr) == (
        2,
        "session failed no [library] -> pip install [it]",
        "error: the CPU path does not work here; expected no failed check; follow the advice above\n",
    )


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mxfp8-graph {mxfp8_graph.__version__}\n")


def test_help_fits_80_columns() -> None:
    lines = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "80"}).output.splitlines()
    assert [line for line in lines[9:] if line.endswith("...") or len(line) > 80] == []


def test_a_wrong_choice_is_named() -> None:
    assert run("rewrite", "m.onnx", "--for", "gpu").stderr.endswith(
        "Invalid value for '--for': 'gpu' is not one of 'cpu'.\n"
    )
