"""The command line: what each command prints, every exit code, and every kind of bad input with its message."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner, Result

import mxfp8_graph
from mxfp8_graph import api, cli, doctor
from mxfp8_ops import cpu


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def refused(*arguments: str, code: int = 2) -> str:
    """Returns the message of a command that must fail with `code`, print nothing else and leave no file behind."""
    before = sorted(Path.cwd().rglob("*"))
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert sorted(Path.cwd().rglob("*")) == before
    return result.stderr.rstrip("\n")


def process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mxfp8_graph", *arguments], capture_output=True, text=True, check=False, **settings
    )


def save(model: onnx.ModelProto, name: str = "m.onnx", **settings: Any) -> str:
    return str(b.save(model, Path(name), **settings))


def poison(model: onnx.ModelProto, value: float) -> onnx.ModelProto:
    """Returns the model with one value of its first weight replaced."""
    tensor = model.graph.initializer[0]
    array = numpy_helper.to_array(tensor).copy()
    array[3, 5] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


# --- rewrite -----------------------------------------------------------------------------------------------------


def test_rewrite_writes_next_to_the_model() -> None:
    result = run("rewrite", save(b.language_model(), "lm.onnx"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert {node.op_type for node in onnx.load("lm.mxfp8.onnx").graph.node} >= {"MXFP8Quantize", "MXFP8Gemm"}


def test_the_closing_table() -> None:
    source = save(b.language_model(), "lm.onnx")
    lines = run("rewrite", source).stdout.splitlines()
    before, after = Path("lm.onnx").stat().st_size, Path("lm.mxfp8.onnx").stat().st_size
    assert lines[0] == "2 of 3 matmuls rewritten to MXFP8 with recipe mxfp8"
    assert " rewritten   2       linear, by recipe 'mxfp8'" in lines
    assert (
        " kept        1       output projection: its result is a graph output; "
        "set output_projections: true to quantize it" in lines
    )
    assert f"size          {before / 1e3:.1f} kB -> {after / 1e3:.1f} kB ({before / after:.2f}x smaller)" in lines
    assert "weight error  relative L2 mean 0.0265 (31.5 dB), worst 0.0265 (31.5 dB) at ffn.up" in lines
    assert lines[-1] == "result        lm.mxfp8.onnx"


def test_output_and_recipe() -> None:
    source = save(b.chain_model())
    assert run("rewrite", source, "-o", "out.onnx", "--recipe", "mxfp8-weight-only").exit_code == 0
    assert {node.op_type for node in onnx.load("out.onnx").graph.node} == {"MXFP8WeightGemm", "Relu"}


def test_a_recipe_file() -> None:
    Path("mine.yaml").write_text("exclude: [layers.0]\n")
    result = run("rewrite", save(b.chain_model()), "--recipe", "mine.yaml")
    assert result.stdout.splitlines()[0] == "1 of 2 matmuls rewritten to MXFP8 with recipe mine"


def test_exclude_adds_to_the_recipe() -> None:
    Path("mine.yaml").write_text("exclude: [layers.0]\n")
    source = save(b.chain_model((64, 128, 64, 64)))
    lines = run("rewrite", source, "--recipe", "mine.yaml", "--exclude", "1.linear").stdout.splitlines()
    assert lines[0] == "1 of 3 matmuls rewritten to MXFP8 with recipe mine excluding 1.linear"
    assert " kept        1       excluded by '1.linear'" in lines


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
    assert (result.exit_code, result.stdout.splitlines()[:4]) == (
        0,
        [
            "site      op      M x N x K                              decision   rule    reason",
            f"ffn.up    MatMul  {sizes} 128 x 64  rewritten  policy  linear, by recipe 'mxfp8'",
            f"ffn.down  MatMul  {sizes} 64 x 128  rewritten  policy  linear, by recipe 'mxfp8'",
            f"lm_head   MatMul  {sizes} 100 x 64  kept       policy  output projection: its result is a graph output; "
            "set output_projections: true to quantize it",
        ],
    )
    assert result.stdout.splitlines()[-1] == "result  nothing written (dry run)"
    assert [p.name for p in Path.cwd().iterdir()] == ["lm.onnx"]


def test_the_plan_shows_the_module_paths_that_rules_match() -> None:
    model = b.chain_model()
    for i, node in enumerate(n for n in model.graph.node if n.op_type == "MatMul"):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', 'encoder.{i}.up', 'linear_{i}']")
    lines = run("rewrite", save(model), "--dry-run").stdout.splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["site", "module", "op"],
        ["layers.0.linear", "encoder.0.up", "MatMul"],
        ["layers.1.linear", "encoder.1.up", "MatMul"],
    ]


def test_verbose_prints_bytes_and_errors_per_site() -> None:
    result = run("rewrite", save(b.chain_model()), "-v")
    assert result.stdout.splitlines()[1] == (
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


# --- rewrite: bad input ------------------------------------------------------------------------------------------


def a_directory(path: Path) -> None:
    path.mkdir()


def truncated(path: Path) -> None:
    save(b.chain_model(), str(path))
    os.truncate(path, 3000)


def of_a_later_opset(path: Path) -> None:
    model = b.chain_model()
    model.opset_import[0].version = 99
    save(model, str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory; expected a readable ONNX file; check the path"),
        (a_directory, "a directory; expected an ONNX file; name the .onnx file inside it"),
        (lambda path: path.touch(), "the file is empty; expected an ONNX model; export it again"),
        (
            lambda path: path.write_text("hello"),
            "not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; "
            "check that the file is one and was copied whole",
        ),
        (
            truncated,
            "not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; "
            "check that the file is one and was copied whole",
        ),
        (
            lambda path: path.write_bytes(b"\x12\x04test"),
            "not an ONNX model (no IR version or no graph); expected an ONNX model; export it again",
        ),
        (
            of_a_later_opset,
            f"opset 99; expected 1 to {onnx.defs.onnx_opset_version()}, which onnx {onnx.__version__} knows; "
            "upgrade onnx",
        ),
    ],
    ids=["missing", "directory", "empty", "not ONNX", "truncated", "another protobuf", "unknown opset"],
)
def test_a_model_that_cannot_be_read(make: Callable[[Path], object], message: str) -> None:
    make(Path("m.onnx"))
    assert refused("rewrite", "m.onnx") == f"error: m.onnx: {message}"


def test_external_data_that_is_missing() -> None:
    source = save(b.chain_model(), external=True)
    Path("m.onnx.data").unlink()
    message = refused("rewrite", source)
    assert message.startswith("error: m.onnx: tensor 'layers.0.weight': cannot read external file ")
    assert message.endswith("No such file or directory; expected the file next to the model; copy it there")


def test_external_data_that_is_short() -> None:
    source = save(b.chain_model(), external=True)
    os.truncate("m.onnx.data", 100)
    message = refused("rewrite", source)
    assert message.startswith("error: m.onnx: tensor 'layers.0.weight': needs bytes 0 to 32768 of ")
    assert message.endswith("which has 100; expected the whole file; copy the external data again")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite(value: float) -> None:
    source = save(poison(b.chain_model(), value))
    assert refused("rewrite", source) == (
        f"error: weight 'layers.0.weight': {value} at index [3, 5]; expected finite values; repair the checkpoint, "
        "or pass --allow-nonfinite to let its block become NaN"
    )


def test_another_recipe_on_a_rewritten_model() -> None:
    run("rewrite", save(b.chain_model()), "-o", "out.onnx", "--recipe", "all")
    assert refused("rewrite", "out.onnx", "--recipe", "ocp") == (
        "error: out.onnx: Recipe mismatch for 'x_mxfp8_quantize': packed with 'all', asked for 'ocp'; expected the "
        "original model, since packed weights cannot be packed again; rewrite that one"
    )


@pytest.mark.parametrize("flags", [[], ["--overwrite"]], ids=str)
def test_the_input_is_never_overwritten(flags: list[str]) -> None:
    source = save(b.chain_model())
    assert refused("rewrite", source, "-o", "m.onnx", *flags) == (
        "error: m.onnx: is the input or its external data; expected another file; pass another --output"
    )


def test_an_output_that_exists() -> None:
    source = save(b.chain_model())
    Path("m.mxfp8.onnx").write_text("old")
    assert refused("rewrite", source) == (
        "error: m.mxfp8.onnx: exists already; expected a new file; pass --overwrite or another --output"
    )
    assert Path("m.mxfp8.onnx").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that even root cannot write to")
def test_a_read_only_folder() -> None:
    message = refused("rewrite", save(b.chain_model()), "-o", "/sys/out.onnx")
    assert message in {
        f"error: /sys/out.onnx: cannot be written: {reason}; expected a writable folder with enough space; "
        "free some space or pass another --output"
        for reason in ("Permission denied", "Read-only file system", "Operation not permitted")
    }


def test_an_output_folder_that_does_not_exist() -> None:
    assert refused("rewrite", save(b.chain_model()), "-o", "none/out.onnx") == (
        "error: none/out.onnx: cannot be written: No such file or directory; expected a writable folder with enough "
        "space; free some space or pass another --output"
    )


def test_an_unknown_recipe() -> None:
    assert refused("rewrite", save(b.chain_model()), "--recipe", "mxfp4") == (
        "error: recipe: 'mxfp4'; expected one of mxfp8, mxfp8-weight-only, ocp, all, or a .yaml or .toml file; "
        "correct the name"
    )


def test_a_bad_regular_expression_with_brackets() -> None:
    Path("r.yaml").write_text("exclude: ['[']\n")
    assert refused("rewrite", save(b.chain_model()), "--recipe", "r.yaml") == (
        "error: r.yaml:1: exclude.0: '[' is not a regular expression (unterminated character set at position 0); "
        "expected one; correct it"
    )


def test_a_rule_that_matches_nothing() -> None:
    Path("r.yaml").write_text("exclude: [lm_head]\n")
    assert refused("rewrite", save(b.chain_model()), "--recipe", "r.yaml") == (
        "error: recipe 'r': exclude.0: 'lm_head' matches none of the model's matmuls; expected at least one; "
        "correct or remove it. Matmuls: layers.0.linear, layers.1.linear"
    )


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_that_is_a_folder(output: str) -> None:
    assert refused("rewrite", save(b.chain_model()), "-o", output) == (
        f"error: {output}: a directory; expected a file name; pass --output DIRECTORY/MODEL.onnx"
    )


def test_a_report_that_cannot_be_written_stops_before_the_work() -> None:
    assert refused("rewrite", save(b.chain_model()), "--report", "none/r.json") == (
        "error: none/r.json: no folder none; expected a file in an existing folder; correct the report's path"
    )


# --- rewrite: nothing eligible -----------------------------------------------------------------------------------


def test_a_model_without_matmuls() -> None:
    spec = {"x": (np.float32, [2])}, {"y": (np.float32, [2])}
    source = save(b.model([b.node("Relu", "x", "y")], *spec))
    assert refused("rewrite", source, code=3) == (
        "error: m.onnx: no MatMul or Gemm in the model; expected at least one; nothing to rewrite"
    )


@pytest.mark.parametrize("flags", [[], ["--dry-run"]], ids=str)
def test_when_all_sites_are_skipped_the_reasons_are_listed(flags: list[str]) -> None:
    source = save(b.chain_model((64, 100), head=True))
    assert refused("rewrite", source, *flags, code=3).splitlines() == [
        "error: m.onnx: none of its 1 matmul is eligible; expected at least one; see the reasons and adapt the recipe",
        "site             op      M x N x K         rule    reason",
        "layers.0.linear  MatMul  batch x 100 x 64  policy  output projection: its result is a graph output; "
        "set output_projections: true to quantize it",
    ]


def test_a_matmul_over_nothing() -> None:
    message = refused("rewrite", save(b.matmul_model(k=0)), code=3)
    assert message.splitlines()[-1].split("  ")[-1] == ("the weight is empty (shape [0, 96]); expected N and K above 0")


# --- verify ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> tuple[str, str]:
    """Returns a model and its rewrite."""
    source = save(b.chain_model())
    api.rewrite(source)
    return source, "m.mxfp8.onnx"


def test_verify(pair: tuple[str, str]) -> None:
    result = run("verify", *pair)
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert " ".join(lines[1].split()) == (
        "output dtype shape rel. L2 max error cosine kernel vs body: rel. L2 max error"
    )
    assert lines[3].split()[:5] == ["y", "float32", "2", "x", "64"]
    assert "inputs   x float32 [2, 64]" in lines
    assert f"kernels  {cpu.isa()}" in lines
    assert "nodes    2 MXFP8Quantize: kernel against function body, the same bytes" in lines
    assert lines[-1] == "verdict  passed"


def test_verify_past_the_limit(pair: tuple[str, str]) -> None:
    result = run("verify", *pair, "--max-rel-l2", "0.001")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "verdict  FAILED"
    assert "is above the limit 0.001" in result.stdout.splitlines()[-2]


def test_verify_below_the_limit(pair: tuple[str, str]) -> None:
    assert run("verify", *pair, "--max-rel-l2", "0.5").exit_code == 0


def test_verify_on_given_inputs(pair: tuple[str, str]) -> None:
    np.savez("data.npz", x=np.ones((5, 64), np.float32))
    assert "inputs   x float32 [5, 64]" in run("verify", *pair, "--inputs", "data.npz").stdout


def test_verify_with_given_sizes(pair: tuple[str, str]) -> None:
    assert "inputs   x float32 [7, 64]" in run("verify", *pair, "--dim", "batch=7").stdout


def test_verify_an_empty_batch(pair: tuple[str, str]) -> None:
    assert run("verify", *pair, "--dim", "batch=0").exit_code == 0


def test_the_seed_changes_the_inputs(pair: tuple[str, str]) -> None:
    first, same, other = (run("verify", *pair, "--seed", seed).stdout for seed in ("0", "0", "1"))
    assert (first == same, first == other) == (True, False)


def test_verify_writes_a_report_also_when_it_fails(pair: tuple[str, str]) -> None:
    assert run("verify", *pair, "--max-rel-l2", "0", "--report", "v.json").exit_code == 1
    assert json.loads(Path("v.json").read_text())["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--inputs", "none.npz"],
            "error: none.npz: No such file or directory; expected a readable .npz file; check the path",
        ),
        (
            ["--dim", "bath=2"],
            "error: m.onnx: no dimension 'bath'; expected one of batch (or INPUT.AXIS); correct the name",
        ),
        (["--report", "v.html"], "error: v.html: report with suffix '.html'; expected .json; rename it"),
    ],
    ids=["inputs", "dim", "report"],
)
def test_verify_refuses(pair: tuple[str, str], arguments: list[str], message: str) -> None:
    assert refused("verify", *pair, *arguments) == message


# --- run, doctor, library-path, --version ------------------------------------------------------------------------


def test_run(pair: tuple[str, str]) -> None:
    result = run("run", pair[1], "--repeat", "3", "--dim", "batch=4")
    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[3].split()) == (0, ["y", "float32", "4", "x", "64"])
    assert f"kernels  {cpu.isa()}" in lines
    assert lines[-1].startswith("latency  median ")
    assert lines[-1].endswith(" ms, 3 runs after a warm-up)")


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


def test_doctor_with_an_instruction_set_this_machine_lacks() -> None:
    result = process("doctor", env={**os.environ, "MXFP8_ISA": "avx9000"})
    assert result.returncode == 2
    kernels = next(line for line in result.stdout.splitlines() if line.startswith("kernels"))
    assert " ".join(kernels.split()) == (
        f"kernels failed MXFP8_ISA: 'avx9000'; expected one of {', '.join(cpu.available_isas())}"
    )


def test_library_path() -> None:
    result = run("library-path")
    assert (result.exit_code, result.stdout) == (0, f"{cpu.library_path()}\n")


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mxfp8-graph {mxfp8_graph.__version__}\n")


# --- Usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewrite"], "Missing argument 'MODEL'"),
        (["rewrit", "m.onnx"], "No such command 'rewrit'"),
        (["rewrite", "m.onnx", "--dry"], "No such option: --dry"),
        (["rewrite", "m.onnx", "--external-data", "maybe"], "'maybe' is not one of 'auto', 'always', 'never'"),
        (["verify", "m.onnx"], "Missing argument 'REWRITTEN'"),
        (["verify", "a", "b", "--max-rel-l2", "-1"], "Invalid value for '--max-rel-l2'"),
        (["verify", "a", "b", "--dim", "batch"], "'batch'; expected NAME=SIZE, as in batch=4"),
        (["run", "m.onnx", "--repeat", "0"], "Invalid value for '--repeat'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_no_arguments_print_the_help() -> None:
    assert "Rewrites exported models to MXFP8" in run().output


# --- What goes wrong inside --------------------------------------------------------------------------------------


def test_a_defect_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "rewrite", lambda *args, **kwargs: {}["[oops]"])
    assert refused("rewrite", "m.onnx", code=70).splitlines()[:2] == [
        "internal error: KeyError: '[oops]'",
        "This is a defect of mxfp8-graph, not of your model. Please report it, with the output of "
        "`mxfp8-graph --debug ...` and `mxfp8-graph doctor`.",
    ]


def test_debug_prints_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "rewrite", lambda *args, **kwargs: {}["oops"])
    assert "Traceback (most recent call last)" in refused("--debug", "rewrite", "m.onnx", code=70)


def test_without_debug_there_is_no_traceback() -> None:
    assert "Traceback" not in refused("rewrite", "m.onnx")


def test_an_error_of_the_system_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", "out.onnx")

    monkeypatch.setattr(api, "rewrite", full)
    assert refused("rewrite", "m.onnx") == "error: out.onnx: No space left on device"


def test_control_characters_in_names_are_escaped() -> None:
    assert refused("rewrite", "a\x1b[31m.onnx").startswith("error: a\\x1b[31m.onnx: No such file")


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_leaves_no_half_file(name: str, code: int) -> None:
    source = save(b.chain_model())
    script = (
        "import contextlib, os, signal, sys\n"
        "from mxfp8_graph import cli\n"
        "@contextlib.contextmanager\n"
        "def progress():\n"
        f"    yield lambda name, done, total: os.kill(os.getpid(), signal.{name})\n"
        "cli.progress_bar = progress\n"
        f"sys.argv[1:] = ['rewrite', {source!r}, '--external-data', 'always']\n"
        "cli.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (
        code,
        "",
        "interrupted\n" if name == "SIGINT" else "terminated\n",
    )
    assert [p.name for p in Path.cwd().iterdir()] == ["m.onnx"]


# --- As a process ------------------------------------------------------------------------------------------------


def test_as_a_module() -> None:
    result = process("rewrite", save(b.chain_model()))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "result        m.mxfp8.onnx"


def test_the_exit_code_of_the_process() -> None:
    result = process("rewrite", "none.onnx")
    assert (result.returncode, result.stdout) == (2, "")


def test_pipes_get_no_colour_and_whole_lines() -> None:
    model = b.chain_model()
    model.graph.node[0].name = "a_name_that_is_longer_than_a_terminal_is_wide/" * 4
    save(model)
    result = process("rewrite", "m.onnx", "--dry-run", env={**os.environ, "COLUMNS": "40", "TERM": "xterm-256color"})
    assert "\x1b" not in result.stdout
    assert model.graph.node[0].name in result.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    save(b.chain_model())
    command = [sys.executable, "-m", "mxfp8_graph", "rewrite", "m.onnx", "--dry-run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""


def on_a_terminal(*arguments: str, columns: int, **environment: str) -> str:
    """Returns what the command prints on a terminal, stdout and stderr together."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "COLUMNS", "CI"}}
    command = [sys.executable, "-m", "mxfp8_graph", *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm-256color", **environment}):
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 4096):
                output += chunk
        except OSError:  # Linux says EIO where others say end of file
            pass
    os.close(ours)
    return output.decode()


@pytest.mark.skipif(os.name == "nt", reason="pty is POSIX's")
def test_a_terminal_shows_progress_in_bytes() -> None:
    save(b.chain_model())
    output = on_a_terminal("rewrite", "m.onnx", columns=120)
    assert "65.5/65.5 kB" in output
    assert "layers.1.linear" in output


@pytest.mark.skipif(os.name == "nt", reason="pty is POSIX's")
def test_no_color() -> None:
    save(b.chain_model())
    assert "\x1b[32m" in on_a_terminal("rewrite", "m.onnx", "--dry-run", columns=120)
    assert "\x1b[32m" not in on_a_terminal("rewrite", "m.onnx", "--dry-run", columns=120, NO_COLOR="1")


@pytest.mark.skipif(os.name == "nt", reason="pty is POSIX's")
def test_a_narrow_terminal_cuts_no_names() -> None:
    model = b.chain_model()
    model.graph.node[2].name = "a_long_name_of_the_layer_with_the_worst_error/MatMul"
    save(model)
    output = on_a_terminal("rewrite", "m.onnx", columns=30)
    closing = output[output.index("2 of 2 matmuls") :]
    assert model.graph.node[2].name in "".join(closing.split())
