"""analyze: what it measures is what separately rewritten models show, and what it proposes does what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders as b
import numpy as np
import onnx
import pytest
import yaml
from commands import poison, refused, run, save
from grids import looped
from onnx import numpy_helper

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.running import sessions
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.runner import open_runnable
from mxfp8_graph.tools import switches
from mxfp8_graph.tools.analyze.analysis import Analysis, layer_of
from mxfp8_graph.tools.analyze.input_statistics import OUTLIER, InputObserver
from mxfp8_graph.tools.analyze.run import analyze, patterns_of
from mxfp8_ops import cpu, numpy_nodes
from mxfp8_ops.errors import ContractError, ShapeError

pytestmark = pytest.mark.usefixtures("own_folder")
PLANTED = 2.0**20


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def planted(model: onnx.ModelProto, k: int, *, before: str, weight: str) -> onnx.ModelProto:
    """Returns a model that computes the same, exactly: channel `k` of `before` divided by 2^20, its weights times that.

    The others of that block of 32 weights are lost when the block is quantized.
    """
    arrays = {tensor.name: numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
    arrays[before][:, k] /= PLANTED
    arrays[weight][k] *= PLANTED
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return model


def chain(layers: int = 6) -> onnx.ModelProto:
    return b.chain_model((64, 96) * (layers // 2) + (64,))


@pytest.fixture(scope="module")
def analyzed() -> Analysis:
    """A chain of six layers on synthesised inputs."""
    return analyze(chain())


def test_a_sample_without_a_finite_output_is_refused() -> None:
    samples = [{"x": np.full((2, 64), value, np.float32)} for value in (1, np.nan)]
    with pytest.raises(ShapeError, match="given inputs sample 2: output 'y' has no finite value; expected outputs of"):
        analyze(b.chain_model(), inputs=samples)


# --- What is measured ------------------------------------------------------------------------------------------------


@looped("make", [b.attention_model, lambda: b.chain_model((64, 96, 64, 128))])
def test_damage_is_that_of_models_rewritten_one_site_at_a_time(make: Any) -> None:
    model = make()
    sites = [site.decision.site for site in mxfp8_graph.rewrite(model, dry_run=True)[1].rewritten]
    shape = [4 if isinstance(d, str) else d for d in open_runnable(model)[0].specs[0].dims]
    samples = [{"x": rng(seed).standard_normal(shape, np.float32)} for seed in range(2)]
    found = analyze(model, inputs=samples)

    def error(**patterns: Any) -> float:
        rewritten, _ = mxfp8_graph.rewrite(model, Recipe(**patterns, fuse=False))
        runnables = [open_runnable(m)[1] for m in (model, rewritten)]
        outputs = [[runnable.run(x)["y"] for runnable in runnables] for x in samples]
        return float(np.mean([difference(*pair).relative_l2 for pair in outputs]))

    for site in sorted(found.sites, key=lambda s: s.depth):
        pattern = (f"^{site.site.decision.site.name}$",)
        assert site.alone["relative_l2"].mean == pytest.approx(error(include=pattern), rel=1e-4)
        assert site.without["relative_l2"].mean == pytest.approx(error(exclude=pattern), rel=1e-4)
    assert found.everything["relative_l2"].mean == pytest.approx(error(), rel=1e-4)
    assert [s.site.decision.site.name for s in sorted(found.sites, key=lambda s: s.depth)] == [
        site.name for site in sites
    ]
    assert [s.alone["relative_l2"].mean for s in found.sites] == sorted(
        (s.alone["relative_l2"].mean for s in found.sites), reverse=True
    )


def test_two_runs_per_site_and_sample_and_ten_more_at_most_in_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, loads, runs = 3, [], []
    load, call, opened = sessions.Session.__init__, sessions.Session._call, switches.load
    monkeypatch.setattr(sessions.Session, "__init__", lambda *a, **k: (loads.append("session"), load(*a, **k))[1])
    monkeypatch.setattr(sessions.Session, "_call", lambda *a: (runs.append(1), call(*a))[1])
    monkeypatch.setattr(switches, "load", lambda m: (loads.append("file"), opened(m))[1])
    progress: list[tuple[int, int]] = []
    feeds = [{"x": rng(seed).standard_normal((4, 64), np.float32)} for seed in range(samples)]
    found = analyze(chain(), inputs=feeds, progress=lambda name, done, total: progress.append((done, total)))
    assert loads == ["file", "session"]
    assert len(runs) == found.runs <= samples * (2 * 6 + 10)
    assert progress[-1] == (found.runs, found.runs)


def test_what_goes_into_a_site_in_numbers() -> None:
    x = rng().standard_normal((8, 80), np.float32)
    x[3, 40] = 500.0  # 6 times the root mean square is below this; its 31 neighbours are not lost
    x[5, :32] *= np.where(np.arange(32) == 7, 1e7, 1e-3)  # 31 values are lost beside one
    site = MatMulSite(name="s", op="MatMul")
    observer = InputObserver(Decision(site=site, kind="quantized", reason=""))
    observer.add(x[:4])
    observer.add(x[4:])
    found = observer.result()
    elements, scales = numpy_nodes.quantize(x)
    rounded = numpy_nodes.dequantize(elements, scales).astype(np.float64)
    limits = np.repeat([OUTLIER * np.sqrt(np.mean(part.astype(np.float64) ** 2)) for part in (x[:4], x[4:])], 4)
    blocks = np.abs(np.pad(x, ((0, 0), (0, 16)))).reshape(8, 3, 32).max(-1)
    assert found.amax == np.abs(x).max()
    assert found.lost == pytest.approx(np.mean((rounded == 0) & (x != 0)))
    assert found.lost >= 31 / x.size
    assert found.outlier_blocks == np.mean(blocks > limits[:, None])
    relative = np.linalg.norm(rounded - x) / np.linalg.norm(x.astype(np.float64))
    assert found.sqnr_db == pytest.approx(-20 * np.log10(relative))


@looped(
    "activations, sqnr_db",
    [("unchanged", None), ("bfloat16", pytest.approx(50, abs=6)), ("e5m2", pytest.approx(26, abs=2))],
)
def test_inputs_are_rounded_as_the_recipe_says(activations: str, sqnr_db: Any) -> None:
    found = analyze(b.matmul_model(bias=True), Recipe(activations=activations))
    assert found.sites[0].input is not None
    assert found.sites[0].input.sqnr_db == sqnr_db


def test_sites_are_ranked_by_the_users_metric() -> None:
    Path("my_metric.py").write_text(
        "def kept(a, b):\n    return 1 - float(abs(a['y'] - b['y']).max())\nkept.higher_is_better = True\n"
    )
    found = analyze(chain(), metric="my_metric:kept")
    scores = [site.alone["my_metric:kept"].mean for site in found.sites]
    assert scores == sorted(scores)
    assert set(found.everything) == {"my_metric:kept", "relative_l2"}


# --- A planted layer -------------------------------------------------------------------------------------------------


@looped("layer", [1, 5])
def test_a_planted_bad_layer_is_found_first_and_excluded(layer: int) -> None:
    model = planted(chain(), 40, before=f"layers.{layer - 1}.weight", weight=f"layers.{layer}.weight")
    found = analyze(model)
    first, second = (site.alone["relative_l2"].mean for site in found.sites[:2])
    assert found.sites[0].label == f"layers.{layer}.linear"
    assert first > 3 * second
    assert found.exclusion is not None
    assert found.exclusion.patterns == (rf"^layers\.{layer}\.linear$",)
    assert found.layers[0].name == f"layers.{layer}"
    # Its weight's own error does not show it: that is why the outputs have to be looked at.
    errors = {site.label: site.site.sqnr_db for site in found.sites}
    assert errors[f"layers.{layer}.linear"] > min(errors.values()) - 1


# --- What is proposed ------------------------------------------------------------------------------------------------


def test_nothing_is_excluded_where_no_site_does_damage() -> None:
    model = chain()
    for weight in model.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(np.zeros(list(weight.dims), np.float32), weight.name))
    assert analyze(model).answer().startswith("Nothing to exclude: ")


def test_the_exclusion_gives_the_error_that_was_measured(tmp_path: Path) -> None:
    model, feeds = chain(), {"x": rng().standard_normal((4, 64), np.float32)}
    found = analyze(model, inputs=feeds)
    assert found.exclusion is not None
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("fuse: false\n" + found.exclusion.yaml)
    rewritten, report = mxfp8_graph.rewrite(model, str(recipe))
    kept = {site.decision.site.name for site in report.kept}
    assert kept == set(found.exclusion.sites)
    outputs = [open_runnable(m)[1].run(feeds)["y"] for m in (model, rewritten)]
    measured = found.exclusion.scores["relative_l2"].mean
    assert difference(*outputs).relative_l2 == pytest.approx(measured, rel=1e-4)
    assert measured < found.everything["relative_l2"].mean
    assert found.exclusion.share == pytest.approx(len(kept) / 6)


def test_the_fewest_sites_that_do_half_of_the_squared_error_are_excluded(analyzed: Analysis) -> None:
    found = analyzed
    assert found.exclusion is not None
    squares = [site.alone["relative_l2"].mean ** 2 for site in found.sites]
    count = len(found.exclusion.sites)
    assert sum(squares[count:]) <= sum(squares) / 2 < sum(squares[count - 1 :])


@looped("keep, excluded", [(0, 0), (2, 2), (6, 5), (100, 5)])
def test_as_many_are_excluded_as_asked_for_and_never_all(keep: int, excluded: int) -> None:
    found = analyze(chain(), keep=keep)
    assert (len(found.exclusion.sites) if found.exclusion else 0) == excluded


def test_the_recipes_own_exclusions_come_first() -> None:
    found = analyze(chain(), Recipe(exclude=(r"layers\.0",)), keep=1)
    assert found.exclusion is not None
    assert yaml.safe_load(found.exclusion.yaml)["exclude"][0] == r"layers\.0"
    assert [site.decision.site.name for site in found.kept] == ["layers.0.linear"]


def sites(*names: tuple[str, str]) -> list[MatMulSite]:
    return [MatMulSite(name=name, module=module, op="MatMul", n=64, k=64, weight="w") for name, module in names]


def test_patterns_match_exactly_and_prefer_module_paths() -> None:
    found = sites(("a", "h.0.fc"), ("b", "h.0.fc2"), ("c", "h.10.fc"), ("d", "same"), ("e", "same"), ("f.(x)[1]+", ""))
    patterns = patterns_of(["d", "a", "f.(x)[1]+"], found)
    assert patterns == ("^d$", r"^h\.0\.fc$", r"^f\.\(x\)\[1\]\+$")


def test_no_exclusion_is_proposed_for_a_name_that_is_the_module_of_another_site() -> None:
    model = planted(chain(4), 40, before="layers.1.weight", weight="layers.2.weight")
    first = next(node for node in model.graph.node if node.name == "layers.0.linear")
    first.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.2.linear', 'linear']")
    notes = analyze(model, keep=1).notes
    assert any("no exclusion is proposed: matmuls share names and module paths" in note for note in notes), notes


@looped(
    "name, layer",
    [
        ("enc.layer.0.q", "enc.layer.0"),
        ("enc.layer.10.q", "enc.layer.10"),
        ("/block3/fc/MatMul", "/block3"),
        ("bert2.layer.1.q", "bert2.layer.1"),
        ("head", "(others)"),
        ("linear_5", "(others)"),
    ],
)
def test_a_layer_is_a_name_up_to_a_number(name: str, layer: str) -> None:
    assert layer_of(*sites((name, ""))) == layer


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_ranking_and_the_lines_to_paste() -> None:
    model = planted(chain(), 40, before="layers.2.weight", weight="layers.3.weight")
    result = run("analyze", save(model), "--report", "a.html", "--report", "a.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    ranked = [line for line in lines if line.startswith("layers.") and ".linear" in line]
    assert ranked[0].startswith("layers.3.linear")
    assert lines[-1].startswith("Exclude the worst 1 of 6 matmuls, 16.7% of the weights, first layers.3.linear: rel")
    assert r"- ^layers\.3\.linear$" in lines
    assert "synthesised" in result.stdout
    page = Path("a.html").read_text()
    for part in ("Sites, the one that does most damage first", 'style="background: linear-gradient(', "<pre"):
        assert part in page
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(Path("a.json").read_text())
    assert data["sites"][0]["name"] == "layers.3.linear"
    assert data["synthesised"] is True


def test_sites_are_in_the_order_of_the_metric() -> None:
    found = analyze(b.chain_model((64, 96, 64, 96, 64)), metric="cosine")
    header, rows = found.site_table()
    assert [row[0] for row in rows] == [site.label for site in found.sites]
    shown = [cell[1] for row in rows if not isinstance(cell := row[header.index("alone, 1-cosine")], str)]
    assert shown == [1 - site.alone["cosine"].mean for site in found.sites] == sorted(shown, reverse=True)


def test_json_on_stdout_has_every_number() -> None:
    data = json.loads(run("analyze", save(b.attention_model()), "--json").stdout)
    assert {site["name"] for site in data["sites"]} == {"q", "k", "v", "o"}
    assert {site["name"] for site in data["kept"]} == {"scores", "values"}
    assert {"alone", "without", "input", "sqnr_db", "depth"} <= data["sites"][0].keys()
    assert data["sites"][0]["input"].keys() == {"amax", "outlier_blocks", "lost", "sqnr_db"}


def test_what_cannot_be_analyzed_is_refused() -> None:
    message = refused("analyze", save(b.chain_model((64, 16, 64))), code=3)
    assert "none of its 2 matmuls is eligible" in message
    assert "tiny: N = 16" in message
    assert refused("analyze", save(mxfp8_graph.rewrite(b.chain_model())[0])) == (
        "error: m.onnx: is rewritten already; expected the original model; name the model it was made from"
    )
    model = save(b.chain_model())
    assert "metric: 'nonsense'" in refused("analyze", model, "--metric", "nonsense")
    assert "nan.npz" in refused("analyze", model, "--inputs", "nan.npz")
    with pytest.raises(ContractError, match="keep is -1; expected 0 or more"):
        analyze(model, keep=-1)


def test_weights_that_are_not_finite_are_refused_or_ranked_first() -> None:
    model = poison(chain(), float("inf"))
    assert "layers.0.weight" in refused("analyze", save(model))
    with cpu.forced_isa("portable"):  # AVX512-BF16 multiplies before it scales, and stays finite
        found = analyze(planted_nan(chain()), allow_nonfinite=True)
    assert found.sites[0].label == "layers.2.linear"
    assert found.exclusion is not None
    assert found.exclusion.sites[0] == found.sites[0].site.decision.site.name
    json.loads(found.to_json())
    assert "nan" in found.to_html()


def planted_nan(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with a weight so large that its product overflows in neither, and rounds to infinity in one."""
    array = numpy_helper.to_array(model.graph.initializer[2]).copy()
    array[0, 0] = np.float32(3.4e38)
    array[1:32, 0] = 0
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(array, "layers.2.weight"))
    return model


def test_too_little_room_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    message = refused("analyze", save(chain()))
    assert "free; expected 0.0 GB for the model with its switches; set TMPDIR to a folder with more" in message


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_an_interrupted_analysis_leaves_nothing_behind(tmp_path: Path) -> None:
    source, temporary = save(chain()), tmp_path / "temporary"
    temporary.mkdir()
    script = (
        "import contextlib, os, signal, sys\n"
        "from mxfp8_graph import cli\n"
        "@contextlib.contextmanager\n"
        "def progress(**settings):\n"
        "    yield lambda name, *runs: os.kill(os.getpid(), signal.SIGINT) if name == 'layers.3.linear' else None\n"
        "cli.evidence.progress_bar = progress\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"sys.argv[1:] = ['analyze', {source!r}, '--report', 'a.html']\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert list(temporary.glob("mxfp8*")) == []
    assert [p.name for p in Path.cwd().iterdir() if p.is_file()] == ["m.onnx"]


def test_a_model_with_external_data_is_analyzed_as_any_other(
    analyzed: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").absolute()))
    plain, external = (
        [s.alone["relative_l2"].mean for s in found.sites]
        for found in (analyzed, analyze(save(chain(), external=True)))
    )
    assert plain == external
    assert not list(Path("temporary").iterdir())
