"""What every command that reports has: --json, --report, --overwrite, and --set for recipes."""

from __future__ import annotations

import json
from pathlib import Path

import models as b
import pytest
from commands import refused, run, save

from mxfp8_graph import rewriting

COMMANDS = {
    "rewrite m.onnx -o out.onnx": "rewritten",
    "rewrite m.onnx -o out.onnx -v": "rewritten",
    "verify m.onnx m.mxfp8.onnx": "passed",
    "run m.onnx --repeat 1": "median_seconds",
    "compare m.onnx --recipes mxfp8 --repeat 1": "recipes",
    "analyze m.onnx": "sites",
    "tune m.onnx --budget cosine>=0.5": "budgets_met",
    "convert m.mxfp8.onnx --to standard": "losses",
}
"""Command -> a key of its results."""


@pytest.fixture(autouse=True)
def _models(own_folder: object) -> None:
    rewriting.rewrite(save(b.chain_model()))


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_all_of_stdout_and_the_report(command: str) -> None:
    result = run(*command.split(), "--json", "--report", "r.json", "--report", "r.html")
    assert (result.exit_code, result.stderr) == (0, "")
    assert COMMANDS[command] in json.loads(result.stdout)
    assert Path("r.json").read_text() == result.stdout
    assert Path("r.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_that_exists_is_an_error_before_the_work(command: str) -> None:
    Path("keep.html").write_text("keep")
    message = refused(*command.split(), "--report", "keep.html")
    assert message == "error: keep.html: exists already; expected a new file; pass --overwrite or another path"
    assert Path("keep.html").read_text() == "keep"


def test_a_report_that_exists_is_replaced_with_overwrite() -> None:
    Path("r.json").write_text("old")
    assert run("verify", "m.onnx", "m.mxfp8.onnx", "--report", "r.json", "--overwrite").exit_code == 0
    assert json.loads(Path("r.json").read_text())["passed"] is True


def test_doctor_prints_json() -> None:
    checks = json.loads(run("doctor", "--json").stdout)["checks"]
    assert (checks[0]["name"], checks[0]["state"]) == ("python", "ok")


@pytest.mark.parametrize("command", ["rewrite m.onnx -o o.onnx", "analyze m.onnx", "tune m.onnx --budget cosine>=0.5"])
def test_set_changes_fields_of_the_recipe(command: str) -> None:
    result = run(*command.split(), "--set", "output_projections=true", "--set", "min_dim=8", "--json")
    recipe = json.loads(result.stdout)["recipe"]
    assert (recipe["output_projections"], recipe["min_dim"]) == (True, 8)
    if command.startswith("rewrite"):
        assert recipe["name"] == "mxfp8 with output_projections=true, min_dim=8"


def test_compare_sets_the_field_in_every_recipe_of_ours() -> None:
    result = run("compare", "m.onnx", "--recipes", "mxfp8,ocp", "--set", "min_dim=1000", "--repeat", "1")
    assert result.exit_code == 3, result.output
    assert "below min_dim = 1000" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embedings=true", "--set: embedings: unknown key; expected one of name, "),
        ("embeddings=maybe", "--set: embeddings: 'maybe'; expected a valid boolean; correct it"),
        ("embeddings", "--set: 'embeddings'; expected FIELD=VALUE, as in embeddings=true; add the value"),
        ("exclude=[a", "--set: while parsing"),
    ],
    ids=["field", "value", "no value", "YAML"],
)
def test_a_wrong_setting_is_an_error(text: str, message: str) -> None:
    assert refused("rewrite", "m.onnx", "-o", "o.onnx", "--set", text).startswith(f"error: {message}")
