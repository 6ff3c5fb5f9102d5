"""`mxfp8-graph verify | run | doctor`: output and exit codes; help, and what a shell completes."""

from __future__ import annotations

import json
from pathlib import Path

import models as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save
from typer.testing import CliRunner

import mxfp8_graph
from mxfp8_graph import cli, doctor, rewriting
from mxfp8_graph.policy.presets import PRESETS
from mxfp8_ops import cpu, native

pytestmark = pytest.mark.usefixtures("own_folder")


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
    answer = "Passed: 4 kernels agree with their nodes, and the relative L2 of y is 0.0641, limit 0.3"
    assert lines[-1] == f"{answer}; of E4M3 at most 0.15 is typical."
    assert run("verify", *pair).stdout == result.stdout
    assert run("verify", *pair, "--seed", "1").stdout != result.stdout


def test_verify_above_the_limit_fails(pair: tuple[str, str]) -> None:
    result = run("verify", *pair, "--max-rel-l2", "0.001", "--report", "v.json")
    assert result.exit_code == 1
    assert json.loads(Path("v.json").read_text())["passed"] is False
    assert result.stdout.splitlines()[-1] == "Failed checks: 1 of outputs, 0 of kernels; do not use m.mxfp8.onnx."
    assert "is above the limit 0.001" in result.stdout


def test_verify_of_a_model_with_integer_outputs_alone_fails() -> None:
    """A classifier that returns labels alone: no number says that the rewrite is right."""
    model = b.chain_model()
    model.graph.node.append(b.node("Cast", "y", "label", to=onnx.TensorProto.INT64))
    model.graph.output[0].CopyFrom(b.value("label", np.int64, [None, 64]))
    source = save(model)
    rewriting.rewrite(source)
    result = run("verify", source, "m.mxfp8.onnx")
    assert result.exit_code == 1
    last = result.stdout.splitlines()[-1]
    assert last.startswith("Not judged: 0 of 1 outputs have a limit and a value; set --max-rel-l2 to judge integers, ")


def test_verify_on_several_samples(pair: tuple[str, str]) -> None:
    Path("data").mkdir()
    for name, value in (("a", 1), ("b", -3)):
        np.savez(f"data/{name}.npz", x=np.full((1, 64), value, np.float32))
    lines = run("verify", *pair, "--inputs", "data").stdout.splitlines()
    assert f"{Path('data/')}" in next(line for line in lines if line.startswith("y "))
    assert "inputs   2 samples, from data; the first: x float32 [1, 64]" in lines


def test_run(pair: tuple[str, str]) -> None:
    result = run("run", pair[1], "--repeat", "3", "--dim", "batch=4")
    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[2].split()) == (0, ["y", "float32", "4", "x", "64"])
    assert f"kernels  {cpu.isa()}" in lines
    assert lines[-1].startswith("A run takes ")
    assert lines[-1].endswith(" ms, 3 runs after a warm-up).")
    np.savez("data.npz", x=np.ones((5, 64), np.float32))
    assert "inputs   x float32 [5, 64]" in run("run", pair[1], "--inputs", "data.npz").stdout


def test_doctor() -> None:
    result = run("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    names = [check.name for check in doctor.diagnose()]
    assert [line.split("  ")[0] for line in result.stdout.splitlines() if line[0] != " "] == names


def test_doctor_fails_where_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.Check(name="session", state="failed", detail="no [library]", advice="pip install [it]")
    monkeypatch.setattr(doctor, "diagnose", lambda: [check])
    result = run("doctor")
    assert (result.exit_code, " ".join(result.stdout.split()), result.stderr) == (
        2,
        "session failed no [library] -> pip install [it]",
        "error: the CPU path does not work here; expected no failed check; follow the advice above\n",
    )


def test_version_and_help() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mxfp8-graph {mxfp8_graph.__version__}\n")
    assert "Rewrites exported models to MXFP8" in run().output
    lines = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "80"}).output.splitlines()
    assert [line for line in lines[9:] if line.endswith("...") or len(line) > 80] == [], "it fits 80 columns"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rewrite", "Missing argument 'MODEL'"),
        ("rewrit m.onnx", "No such command 'rewrit'"),
        ("rewrite m.onnx --dry", "No such option"),
        ("rewrite m.onnx --for gpu", "Invalid value for '--for': 'gpu' is not one of 'cpu'."),
        ("verify a b --dim batch", "'batch'; expected NAME=SIZE, as in batch=4"),
        ("verify a b --max-rel-l2 -1", "Invalid value for '--max-rel-l2'"),
        ("run m.onnx --repeat 0", "Invalid value for '--repeat'"),
        ("run m.onnx --seed -1", "Invalid value for '--seed'"),
    ],
)
def test_wrong_usage_is_an_error(arguments: str, message: str) -> None:
    assert message in refused(*arguments.split())


def completions(typed: str, shell: str) -> str:
    """Returns the words with which a shell completes `typed`."""
    words = typed.split(" ")
    environment = {
        "_MXFP8_GRAPH_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    return CliRunner().invoke(cli.app, [], env=environment, prog_name="mxfp8-graph").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("rew", ["rewrite"]),
        ("rewrite --dry", ["--dry-run"]),
        ("rewrite m.onnx --recipe mxfp8-", ["mxfp8-bf16", "mxfp8-weight-only"]),
        ("rewrite m.onnx --external-data a", ["auto", "always"]),
        *((f"{name} m.onnx --recipe ", [*PRESETS]) for name in ("rewrite", "analyze", "tune", "from-hf")),
    ],
)
def test_a_shell_completes_commands_options_and_presets(shell: str, typed: str, expected: list[str]) -> None:
    offered = completions(f"mxfp8-graph {typed}", shell)
    assert [word for word in expected if word not in offered] == []


@pytest.mark.parametrize("typed", ["mxfp8-graph rewrite mod", "mxfp8-graph rewrite m.onnx --recipe ./my"])
def test_a_shell_completes_paths_itself(typed: str) -> None:
    assert completions(typed, "bash").split() == []  # `complete -o default` then offers files
    assert completions(typed, "zsh").strip() == "_files"
