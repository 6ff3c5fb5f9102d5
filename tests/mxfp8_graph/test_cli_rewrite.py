"""`mxfp8-graph rewrite`: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import builders as b
import numpy as np
import onnx
import pytest
from commands import poison, refused, run, save

from mxfp8_graph.policy import presets

pytestmark = pytest.mark.usefixtures("own_folder")


def words(text: str) -> list[str]:
    """Returns the lines without their columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_rewrite_writes_next_to_the_model_and_ends_with_the_answer() -> None:
    result = run("rewrite", save(b.language_model(), "lm.onnx"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert {node.op_type for node in onnx.load("lm.mxfp8.onnx").graph.node} >= {"MXFP8Quantize", "MXFP8Gemm"}
    before, after = (f"{Path(name).stat().st_size / 1e3:.1f} kB" for name in ("lm.onnx", "lm.mxfp8.onnx"))
    lines = words(result.stdout)
    assert lines[-1] == (
        f"Rewrote 2 of 3 matmuls and 0 of 2 embeddings to MXFP8 with recipe mxfp8: {before} to {after}; check it with "
        "`mxfp8-graph verify lm.onnx lm.mxfp8.onnx`."
    )
    assert "rewritten 2 linear, by recipe 'mxfp8'" in lines
    assert "weight error relative L2 mean 0.0265 (31.5 dB), worst 0.0265 (31.5 dB) at ffn.up" in lines


def test_output_and_recipe() -> None:
    source = save(b.chain_model())
    assert run("rewrite", source, "-o", "out.onnx", "--recipe", "mxfp8-weight-only").exit_code == 0
    assert {node.op_type for node in onnx.load("out.onnx").graph.node} == {"MXFP8FusedWeightGemm"}


def test_no_fuse() -> None:
    source = save(b.chain_model())
    assert run("rewrite", source, "-o", "out.onnx", "--no-fuse").exit_code == 0
    assert {node.op_type for node in onnx.load("out.onnx").graph.node} == {"MXFP8Quantize", "MXFP8Gemm", "Relu"}


def test_fused_nodes_are_counted() -> None:
    result = run("rewrite", save(b.chain_model()), "--report", "r.json")
    assert "fused         2 gemm + relu" in result.stdout
    assert json.loads(Path("r.json").read_text())["rewritten"] == 2
    fusions = json.loads(Path("r.json").read_text())["fusions"]
    assert fusions[0] == {"kind": "gemm + relu", "node": "layers.0.linear", "replaced": ["layers.0.relu"]}


def test_transformer_engine_s_name_of_the_recipe_is_taken_and_not_listed() -> None:
    result = run("rewrite", save(b.chain_model()), "--recipe", "MXFP8BlockScaling")
    assert "2 of 2 matmuls to MXFP8 with recipe MXFP8BlockScaling: " in result.stdout
    # Lines break after hyphens too.
    help_text = "".join(run("rewrite", "--help").output.split())
    assert presets.choices().replace(" ", "") in help_text
    assert "MXFP8BlockScaling" not in help_text


def test_exclude_adds_to_the_recipe() -> None:
    Path("mine.yaml").write_text("exclude: [layers.0]\n")
    source = save(b.chain_model((64, 128, 64, 64)))
    lines = words(run("rewrite", source, "--recipe", "mine.yaml", "--exclude", "1.linear").stdout)
    assert lines[-1].startswith("Rewrote 1 of 3 matmuls to MXFP8 with recipe mine excluding 1.linear: ")
    assert "kept 1 excluded by '1.linear'" in lines


def test_exclude_takes_several_patterns() -> None:
    result = run("rewrite", save(b.chain_model()), "--exclude", "layers.0", "--exclude", "layers.1", "--dry-run")
    assert (result.exit_code, "excluded by 'layers.1'" in result.stderr) == (3, True)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("lm_head", "recipe 'mxfp8 excluding lm_head': exclude.0: 'lm_head' matches none of the model's matmuls"),
        ("[", "Recipe: exclude.0: '[' is not a regular expression (unterminated character set at position 0)"),
    ],
)
def test_exclude_refuses(pattern: str, message: str) -> None:
    assert refused("rewrite", save(b.chain_model()), "--exclude", pattern).startswith(f"error: {message}; expected")


def test_dry_run_prints_a_line_per_site_and_writes_nothing() -> None:
    result = run("rewrite", save(b.language_model(), "lm.onnx"), "--dry-run")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert ["site", "op", "M", "x", "N", "x", "K", "decision", "before", "rule", "reason"] in rows
    for name, op, decision in (("Gather_tokens", "Gather", "kept"), ("ffn.up", "MatMul", "rewritten")):
        assert any(row[:2] == [name, op] and decision in row for row in rows), result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    assert result.stdout.endswith("; nothing is written.\n")
    assert [p.name for p in Path.cwd().iterdir()] == ["lm.onnx"]


def test_a_dry_run_after_the_rewrite_prints_the_plan_also_as_json() -> None:
    source = save(b.chain_model())
    run("rewrite", source)
    written = Path("m.mxfp8.onnx").read_bytes()
    exists = "note m.mxfp8.onnx exists already: only overwrite replaces it"
    assert exists in words(run("rewrite", source, "--dry-run").stdout)
    result = run("rewrite", source, "--dry-run", "--json")
    plan = json.loads(result.stdout or "null")
    assert (result.exit_code, plan["dry_run"], plan["bytes_after"]) == (0, True, None)
    assert [(site["name"], site["quantize"]) for site in plan["sites"]] == [
        ("layers.0.linear", True),
        ("layers.1.linear", True),
    ]
    assert Path("m.mxfp8.onnx").read_bytes() == written


def test_the_plan_shows_the_module_paths_that_rules_match() -> None:
    model = b.chain_model()
    for i, node in enumerate(n for n in model.graph.node if n.op_type == "MatMul"):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', 'encoder.{i}.up', 'linear_{i}']")
    lines = run("rewrite", save(model), "--dry-run").stdout.splitlines()
    assert any(line.split()[1:2] == ["encoder.0.up"] for line in lines), lines


def test_verbose_prints_bytes_and_errors_per_site() -> None:
    lines = run("rewrite", save(b.chain_model()), "-v").stdout.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("layers.0.line") and "MatMul" in line)
    assert [*row[row.index("rewritten") :][:8]] == [
        "rewritten",
        "32.8",
        "kB",
        "8.4",
        "kB",
        "0.0267",
        "policy",
        "linear,",
    ]


def test_a_dry_run_can_write_a_report() -> None:
    assert run("rewrite", save(b.chain_model()), "--dry-run", "--report", "r.html").exit_code == 0
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["m.onnx", "r.html"]


@pytest.mark.parametrize(
    ("choice", "files"), [("always", ["m.mxfp8.onnx", "m.mxfp8.onnx.data"]), ("never", ["m.mxfp8.onnx"])]
)
def test_external_data(choice: str, files: list[str]) -> None:
    assert run("rewrite", save(b.chain_model()), "--external-data", choice).exit_code == 0
    assert sorted(p.name for p in Path.cwd().glob("m.mxfp8*")) == files


def test_overwrite() -> None:
    source = save(b.chain_model())
    Path("m.mxfp8.onnx").write_text("old")
    assert run("rewrite", source, "--overwrite").exit_code == 0
    onnx.checker.check_model("m.mxfp8.onnx")


def test_allow_nonfinite() -> None:
    source = save(poison(b.chain_model(), np.nan))
    assert run("rewrite", source, "--allow-nonfinite").exit_code == 0


def test_a_rewritten_model_is_left_alone() -> None:
    run("rewrite", save(b.chain_model()), "-o", "out.onnx")
    content = Path("out.onnx").read_bytes()
    result = run("rewrite", "out.onnx")
    last = "out.onnx is already rewritten with recipe mxfp8; nothing is written."
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, last)
    assert (sorted(p.name for p in Path.cwd().iterdir()), Path("out.onnx").read_bytes()) == (
        ["m.onnx", "out.onnx"],
        content,
    )


@pytest.mark.parametrize("choice", ["never", "always"])
def test_a_rewritten_model_is_copied_to_another_output(choice: str) -> None:
    run("rewrite", save(b.chain_model()), "-o", "one.onnx", "--external-data", choice)
    result = run("rewrite", "one.onnx", "-o", "two.onnx")
    last = "one.onnx is already rewritten with recipe mxfp8; it is copied to two.onnx."
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, last)
    assert Path("two.onnx.data").exists() == (choice == "always")
    for file in Path.cwd().glob("one.*"):
        file.unlink()  # the copy does not need it
    assert run("run", "two.onnx", "--repeat", "1").exit_code == 0


def test_a_copy_replaces_nothing_and_a_dry_run_writes_none() -> None:
    run("rewrite", save(b.chain_model()), "-o", "one.onnx")
    assert "exists already" in refused("rewrite", "one.onnx", "-o", "m.onnx")
    assert run("rewrite", "one.onnx", "-o", "two.onnx", "--dry-run").exit_code == 0
    assert not Path("two.onnx").exists()
    assert run("rewrite", "one.onnx", "-o", "one.onnx").exit_code == 0  # it is there already
