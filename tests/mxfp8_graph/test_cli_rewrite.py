"""`mxfp8-graph rewrite`: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import models as b
import onnx
import pytest
from commands import refused, run, save

from mxfp8_graph.policy import presets

pytestmark = pytest.mark.usefixtures("own_folder")


def words(text: str) -> list[str]:
    """Returns the lines without their columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def ops(path: str) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def files() -> list[str]:
    return sorted(path.name for path in Path.cwd().iterdir())


def test_rewrite_writes_next_to_the_model_and_ends_with_the_answer() -> None:
    result = run("rewrite", save(b.language_model(), "lm.onnx"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert ops("lm.mxfp8.onnx") >= {"MXFP8Quantize", "MXFP8Gemm"}
    before, after = (f"{Path(name).stat().st_size / 1e3:.1f} kB" for name in ("lm.onnx", "lm.mxfp8.onnx"))
    lines = words(result.stdout)
    assert lines[-1] == (
        f"Rewrote 2 of 3 matmuls and 0 of 2 embeddings to MXFP8 with recipe mxfp8: {before} to {after}; check it with "
        "`mxfp8-graph verify lm.onnx lm.mxfp8.onnx`."
    )
    assert "rewritten 2 linear, by recipe 'mxfp8'" in lines
    assert "weight error relative L2 mean 0.0265 (31.5 dB), worst 0.0265 (31.5 dB) at ffn.up" in lines


@pytest.mark.parametrize(
    ("option", "written", "expected"),
    [
        ("--recipe mxfp8-weight-only", ["m.mxfp8.onnx"], {"MXFP8FusedWeightGemm"}),
        ("--recipe mxint8", ["m.mxint8.onnx"], {"MXFP8Quantize", "MXFP8FusedGemm"}),
        ("--no-fuse", ["m.mxfp8.onnx"], {"MXFP8Quantize", "MXFP8Gemm", "Relu"}),
        ("--external-data always", ["m.mxfp8.onnx", "m.mxfp8.onnx.data"], {"MXFP8Quantize", "MXFP8FusedGemm"}),
    ],
)
def test_an_option_changes_nodes_or_files(option: str, written: list[str], expected: set[str]) -> None:
    assert run("rewrite", save(b.chain_model()), *option.split()).exit_code == 0
    assert files() == [*written, "m.onnx"]
    assert ops(written[0]) == expected


def test_fused_nodes_are_counted() -> None:
    assert "fused         2 gemm + relu" in run("rewrite", save(b.chain_model()), "--report", "r.json").stdout
    report = json.loads(Path("r.json").read_text())
    assert report["rewritten"] == 2
    fusion = {"kind": "gemm + relu", "node": "layers.0.linear", "replaced": ["layers.0.relu"]}
    assert report["fusions"][0] == fusion


def test_transformer_engine_s_name_of_the_recipe_is_accepted_and_not_in_the_help() -> None:
    result = run("rewrite", save(b.chain_model()), "--recipe", "MXFP8BlockScaling")
    assert "2 of 2 matmuls to MXFP8 with recipe MXFP8BlockScaling: " in result.stdout
    help_text = "".join(run("rewrite", "--help").output.split())  # lines break after hyphens too
    assert presets.choices().replace(" ", "") in help_text
    assert "MXFP8BlockScaling" not in help_text


def test_exclude_adds_patterns_to_the_recipe() -> None:
    Path("mine.yaml").write_text("exclude: [layers.0]\n")
    source = save(b.chain_model((64, 128, 64, 64)))
    lines = words(run("rewrite", source, "--recipe", "mine.yaml", "--exclude", "1.linear").stdout)
    assert lines[-1].startswith("Rewrote 1 of 3 matmuls to MXFP8 with recipe mine excluding 1.linear: ")
    assert "kept 1 excluded by '1.linear'" in lines
    options = [f"--exclude=layers.{i}" for i in range(3)]
    assert "excluded by 'layers.2'" in refused("rewrite", source, *options, "--dry-run", code=3)


def test_a_dry_run_prints_a_line_per_site_and_writes_a_report_alone() -> None:
    result = run("rewrite", save(b.language_model(), "lm.onnx"), "--dry-run", "--report", "r.html")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert ["site", "op", "M", "x", "N", "x", "K", "decision", "before", "rule", "reason"] in rows
    for name, op, decision in (("Gather_tokens", "Gather", "kept"), ("ffn.up", "MatMul", "rewritten")):
        assert any(row[:2] == [name, op] and decision in row for row in rows), result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100
    assert result.stdout.endswith("; nothing is written.\n")
    assert files() == ["lm.onnx", "r.html"]


def test_a_dry_run_after_the_rewrite_prints_the_plan_also_as_json() -> None:
    source = save(b.chain_model())
    run("rewrite", source)
    written = Path("m.mxfp8.onnx").read_bytes()
    exists = "note m.mxfp8.onnx exists already: only overwrite replaces it"
    assert exists in words(run("rewrite", source, "--dry-run").stdout)
    result = run("rewrite", source, "--dry-run", "--json")
    plan = json.loads(result.stdout)
    assert (result.exit_code, plan["dry_run"], plan["bytes_after"]) == (0, True, None)
    sites = [(site["name"], site["quantize"]) for site in plan["sites"]]
    assert sites == [("layers.0.linear", True), ("layers.1.linear", True)]
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
    assert " ".join(row).partition("rewritten ")[2].startswith("32.8 kB 8.4 kB 0.0267 policy linear,")


def test_overwrite() -> None:
    source = save(b.chain_model())
    Path("m.mxfp8.onnx").write_text("old")
    assert run("rewrite", source, "--overwrite").exit_code == 0
    onnx.checker.check_model("m.mxfp8.onnx")


def test_a_rewritten_model_stays_as_it_is() -> None:
    run("rewrite", save(b.chain_model()), "-o", "out.onnx")
    content = Path("out.onnx").read_bytes()
    for output in ([], ["-o", "out.onnx"], ["-o", "two.onnx", "--dry-run"]):
        result = run("rewrite", "out.onnx", *output)
        assert (result.exit_code, files(), Path("out.onnx").read_bytes()) == (0, ["m.onnx", "out.onnx"], content)
        assert result.stdout.splitlines()[-1].startswith("out.onnx is already rewritten with recipe mxfp8; ")
    assert "exists already" in refused("rewrite", "out.onnx", "-o", "m.onnx")


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
