"""What every command that reports has: --json, --report, --overwrite, and --set for recipes."""

from __future__ import annotations

import json
from pathlib import Path

import builders as b
import pytest
from commands import refused, run, save

from mxfp8_graph import rewriting

COMMANDS = {
    "rewrite": (["rewrite", "m.onnx", "-o", "out.onnx"], "rewritten"),
    "rewrite -v": (["rewrite", "m.onnx", "-o", "out.onnx", "-v"], "rewritten"),
    "verify": (["verify", "m.onnx", "m.mxfp8.onnx"], "passed"),
    "run": (["run", "m.onnx", "--repeat", "1"], "median_seconds"),
    "compare": (["compare", "m.onnx", "--recipes", "mxfp8", "--repeat", "1"], "recipes"),
    "analyze": (["analyze", "m.onnx"], "sites"),
    "tune": (["tune", "m.onnx", "--budget", "cosine>=0.5"], "budgets_met"),
    "convert": (["convert", "m.mxfp8.onnx", "--to", "standard"], "losses"),
}


@pytest.fixture(autouse=True)
def _models(own_folder: object) -> None:
    rewriting.rewrite(save(b.chain_model()))


@pytest.mark.parametrize(("arguments", "key"), COMMANDS.values(), ids=COMMANDS)
def test_json_is_all_there_is_on_stdout_and_in_the_report(arguments: list[str], key: str) -> None:
    result = run(*arguments, "--json", "--report", "r.json", "--report", "r.html")
    assert (result.exit_code, result.stderr) == (0, "")
    assert key in json.loads(result.stdout)
    assert Path("r.json").read_text() == result.stdout
    assert Path("r.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("arguments", "key"), COMMANDS.values(), ids=COMMANDS)
def test_a_report_that_exists_is_refused_before_the_work(arguments: list[str], key: str) -> None:
    Path("keep.html").write_text("keep")
    message = refused(*arguments, "--report", "keep.html")
    assert message == "error: keep.html: exists already; expected a new file; pass --overwrite or another path"
    assert Path("keep.html").read_text() == "keep"


def test_a_report_that_exists_is_replaced_with_overwrite() -> None:
    Path("r.json").write_text("old")
    assert run("verify", "m.onnx", "m.mxfp8.onnx", "--report", "r.json", "--overwrite").exit_code == 0
    assert json.loads(Path("r.json").read_text())["passed"] is True


def test_doctor_prints_json() -> None:
    checks = json.loads(run("doctor", "--json").stdout)["checks"]
    assert (checks[0]["name"], checks[0]["state"]) == ("python", "ok")


# --- --set -----------------------------------------------------------------------------------------------------------


def test_set_changes_fields_of_the_recipe() -> None:
    result = run("rewrite", "m.onnx", "-o", "o.onnx", "--set", "scale_rounding=floor", "--set", "min_dim=8", "--json")
    recipe = json.loads(result.stdout)["recipe"]
    assert (recipe["scale_rounding"], recipe["min_dim"]) == ("floor", 8)
    assert recipe["name"] == "mxfp8 with scale_rounding=floor, min_dim=8"


@pytest.mark.parametrize("command", ["analyze", "tune"])
def test_set_is_an_option_of_every_command_that_takes_a_recipe(command: str) -> None:
    budget = ["--budget", "cosine>=0.5"] if command == "tune" else []
    result = run(command, "m.onnx", *budget, "--set", "output_projections=true", "--json")
    assert json.loads(result.stdout)["recipe"]["output_projections"] is True


def test_compare_sets_the_field_in_every_recipe_of_ours() -> None:
    result = run("compare", "m.onnx", "--recipes", "mxfp8,ocp", "--set", "min_dim=1000", "--repeat", "1")
    assert result.exit_code == 3, result.output
    assert "below min_dim = 1000" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embedings=true", "--set: embedings: unknown key; expected a field of docs/recipes.md; "),
        ("embeddings=maybe", "--set: embeddings: 'maybe'; expected a valid boolean; correct it"),
        ("embeddings", "--set: 'embeddings'; expected FIELD=VALUE, as in embeddings=true; add the value"),
        ("exclude=[a", "--set: while parsing"),
        ("name=[", "--set: while parsing"),
    ],
    ids=["field", "value", "no value", "YAML", "flow"],
)
def test_set_refuses(text: str, message: str) -> None:
    assert refused("rewrite", "m.onnx", "-o", "o.onnx", "--set", text).startswith(f"error: {message}")
