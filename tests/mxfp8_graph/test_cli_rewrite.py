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


def test_rewrite_writes_next_to_the_model() -> None:
    result = run("rewrite", save(b.language_model(), "lm.onnx"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert {node.op_type for node in onnx.load("lm.mxfp8.onnx").graph.node} >= {"MXFP8Quantize", "MXFP8Gemm"}


def test_the_closing_table() -> None:
    source = save(b.language_model(), "lm.onnx")
    lines = run("rewrite", source).stdout.splitlines()
    before, after = Path("lm.onnx").stat().st_size, Path("lm.mxfp8.onnx").stat().st_size
    assert lines[0] == "2 of 3 matmuls and 0 of 2 embeddings rewritten to MXFP8 with recipe mxfp8"
    assert "rewritten  2      linear, by recipe 'mxfp8'" in lines
    assert (
        "kept       1      output projection: its result is a graph output; "
        "set output_projections: true to quantize it" in lines
    )
    assert f"size          {before / 1e3:.1f} kB -> {after / 1e3:.1f} kB ({before / after:.2f}x smaller)" in lines
    assert "weight error  relative L2 mean 0.0265 (31.5 dB), worst 0.0265 (31.5 dB) at ffn.up" in lines
    assert lines[-1] == "result        lm.mxfp8.onnx"


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
    fusions = json.loads(Path("r.json").read_text())["fusions"]
    assert fusions[0] == {"kind": "gemm + relu", "node": "layers.0.linear", "replaced": ["layers.0.relu"]}


def test_transformer_engine_s_name_of_the_recipe() -> None:
    result = run("rewrite", save(b.chain_model()), "--recipe", "MXFP8BlockScaling")
    assert result.stdout.splitlines()[0] == "2 of 2 matmuls rewritten to MXFP8 with recipe MXFP8BlockScaling"
    # Lines break after hyphens too.
    help_text = "".join(run("rewrite", "--help").output.split())
    assert presets.choices().replace(" ", "") in help_text


def test_a_recipe_file() -> None:
    Path("mine.yaml").write_text("exclude: [layers.0]\n")
    result = run("rewrite", save(b.chain_model()), "--recipe", "mine.yaml")
    assert result.stdout.splitlines()[0] == "1 of 2 matmuls rewritten to MXFP8 with recipe mine"


def test_exclude_adds_to_the_recipe() -> None:
    Path("mine.yaml").write_text("exclude: [layers.0]\n")
    source = save(b.chain_model((64, 128, 64, 64)))
    lines = run("rewrite", source, "--recipe", "mine.yaml", "--exclude", "1.linear").stdout.splitlines()
    assert lines[0] == "1 of 3 matmuls rewritten to MXFP8 with recipe mine excluding 1.linear"
    assert "kept       1      excluded by '1.linear'" in lines


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
    sizes = "batch_size*sequence_length x"
    embedding = "embedding: ids pick its rows; set embeddings: true to quantize it"
    assert (result.exit_code, result.stdout.splitlines()[1:7]) == (
        0,
        [
            "site           op      M x N x K                              decision   before   rule    reason",
            f"Gather_tokens  Gather  {sizes} 100 x 64  kept       25.6 kB  policy  {embedding}",
            f"Gather_places  Gather  {sizes} 32 x 64   kept       8.2 kB   policy  {embedding}",
            f"ffn.up         MatMul  {sizes} 128 x 64  rewritten  32.8 kB  policy  linear, by recipe 'mxfp8'",
            f"ffn.down       MatMul  {sizes} 64 x 128  rewritten  32.8 kB  policy  linear, by recipe 'mxfp8'",
            f"lm_head        MatMul  {sizes} 100 x 64  kept       25.6 kB  policy  output projection: its result is a "
            "graph output; set output_projections: true to quantize it",
        ],
    )
    assert result.stdout.splitlines()[-1] == "result   nothing written (dry run)"
    assert [p.name for p in Path.cwd().iterdir()] == ["lm.onnx"]


def test_a_dry_run_after_the_rewrite_prints_the_plan_also_as_json() -> None:
    source = save(b.chain_model())
    run("rewrite", source)
    written = Path("m.mxfp8.onnx").read_bytes()
    assert run("rewrite", source, "--dry-run").exit_code == 0
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
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["site", "module", "op"],
        ["layers.0.linear", "encoder.0.up", "MatMul"],
        ["layers.1.linear", "encoder.1.up", "MatMul"],
    ]


def test_verbose_prints_bytes_and_errors_per_site() -> None:
    result = run("rewrite", save(b.chain_model()), "-v")
    assert result.stdout.splitlines()[2] == (
        "layers.0.linear  MatMul  batch x 128 x 64  rewritten  32.8 kB  8.4 kB  0.0267   31.5     policy  "
        "linear, by recipe 'mxfp8'"
    )


def test_a_report_is_written() -> None:
    result = run("rewrite", save(b.chain_model()), "--report", "r.json")
    assert result.exit_code == 0
    report = json.loads(Path("r.json").read_text())
    assert (report["rewritten"], report["output"], report["sites"][0]["name"]) == (2, "m.mxfp8.onnx", "layers.0.linear")


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
    assert (result.exit_code, [" ".join(line.split()) for line in result.stdout.splitlines()]) == (
        0,
        ["already rewritten with recipe mxfp8; nothing to do", "result nothing written; out.onnx is the result"],
    )
    assert (sorted(p.name for p in Path.cwd().iterdir()), Path("out.onnx").read_bytes()) == (
        ["m.onnx", "out.onnx"],
        content,
    )


@pytest.mark.parametrize("choice", ["never", "always"])
def test_a_rewritten_model_is_copied_to_another_output(choice: str) -> None:
    run("rewrite", save(b.chain_model()), "-o", "one.onnx", "--external-data", choice)
    result = run("rewrite", "one.onnx", "-o", "two.onnx")
    assert (result.exit_code, [" ".join(line.split()) for line in result.stdout.splitlines()]) == (
        0,
        ["already rewritten with recipe mxfp8; copied", "result two.onnx"],
    )
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
