"""analyze: what it measures is what separately rewritten models show, and what it proposes does what it says."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models as b
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


def change(model: onnx.ModelProto, name: str, edit: Callable[[np.ndarray], object]) -> None:
    """Changes the values of an initializer in place."""
    tensor = next(each for each in model.graph.initializer if each.name == name)
    array = numpy_helper.to_array(tensor).copy()
    edit(array)
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def planted(layer: int) -> onnx.ModelProto:
    """Returns a chain that computes the same: a channel before a layer is divided by 2^20, its weights multiplied.

    The others of that block of 32 weights are lost when the block is quantized.
    """
    model = chain()
    change(model, f"layers.{layer - 1}.weight", lambda w: w[:, 40].__itruediv__(PLANTED))
    change(model, f"layers.{layer}.weight", lambda w: w[40].__imul__(PLANTED))
    return model


def chain() -> onnx.ModelProto:
    return b.chain_model((64, 96) * 3 + (64,))


def samples(count: int, *shape: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(seed).standard_normal(shape, np.float32)} for seed in range(count)]


def test_a_sample_without_a_finite_output_is_refused() -> None:
    feeds = [{"x": np.full((2, 64), value, np.float32)} for value in (1, np.nan)]
    with pytest.raises(ShapeError, match="given inputs sample 2: output 'y' has no finite value; expected outputs of"):
        analyze(b.chain_model(), inputs=feeds)


def check_damage(found: Analysis, error: Callable[..., float]) -> None:
    """Fails unless each site does the damage of a model in which it alone is rewritten, and the most comes first."""
    for site in found.sites:
        pattern = (f"^{site.site.decision.site.name}$",)
        assert site.alone["relative_l2"].mean == pytest.approx(error(include=pattern), rel=1e-4)
        assert site.without["relative_l2"].mean == pytest.approx(error(exclude=pattern), rel=1e-4)
    assert found.everything["relative_l2"].mean == pytest.approx(error(), rel=1e-4)
    damage = [site.alone["relative_l2"].mean for site in found.sites]
    assert damage == sorted(damage, reverse=True)


@looped("model, shape", [(b.attention_model(), (4, 4, 64)), (b.chain_model((64, 96, 64, 128)), (4, 64))])
def test_damage_is_that_of_models_rewritten_one_site_at_a_time(model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    feeds = samples(2, *shape)

    def error(**patterns: Any) -> float:
        rewritten, _ = mxfp8_graph.rewrite(model, Recipe(**patterns, fuse=False))
        runnables = [open_runnable(m)[1] for m in (model, rewritten)]
        outputs = [[runnable.run(x)["y"] for runnable in runnables] for x in feeds]
        return float(np.mean([difference(*pair).relative_l2 for pair in outputs]))

    found = analyze(model, inputs=feeds)
    check_damage(found, error)
    sites = [site.decision.site for site in mxfp8_graph.rewrite(model, dry_run=True)[1].rewritten]
    assert [s.site.decision.site for s in sorted(found.sites, key=lambda s: s.depth)] == sites


def test_damage_is_that_of_programs_rewritten_one_site_at_a_time_also_in_a_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch_programs import Apply, export, values

    def residuals(m: Any, x: Any) -> Any:
        for w in (m.a, m.b, m.c):
            x = x + torch.tanh(torch.nn.functional.linear(x, w))
        return x

    weights = {name: values(64, 64, seed=i) / 8 for i, name in enumerate("abc")}
    program = export(Apply(residuals, weights), values(5, 64))
    name = open_runnable(program)[0].specs[0].name
    feeds = {name: values(5, 64, seed=9).numpy()}

    def error(**patterns: Any) -> float:
        rewritten, _ = mxfp8_graph.rewrite(program, Recipe(**patterns))
        results = [next(iter(open_runnable(each)[1].run(feeds).values())) for each in (program, rewritten)]
        return difference(*results).relative_l2

    found = analyze(program, inputs=feeds)
    check_damage(found, error)
    path = mxfp8_graph.save(program, tmp_path / "m.pt2")
    in_a_file = analyze(path, inputs=feeds)
    assert [s.alone for s in in_a_file.sites] == [s.alone for s in found.sites]
    assert in_a_file.source == str(path)


def test_two_runs_per_site_and_sample_and_ten_more_at_most_in_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load, opened = sessions.Session.__init__, switches.load
    monkeypatch.setattr(sessions.Session, "__init__", lambda *a, **k: (loads.append("session"), load(*a, **k))[1])
    monkeypatch.setattr(switches, "load", lambda m: (loads.append("file"), opened(m))[1])
    progress: list[tuple[int, int]] = []
    found = analyze(chain(), inputs=samples(3, 4, 64), progress=lambda name, *runs: progress.append(runs))
    assert loads == ["file", "session"]
    assert found.runs <= 3 * (2 * 6 + 10)
    assert progress[-1] == (found.runs, found.runs)


def test_what_goes_into_a_site_in_numbers() -> None:
    x = samples(1, 8, 80)[0]["x"]
    x[3, 40] = 500.0  # 6 times the root mean square is below this; its 31 neighbours are not lost
    x[5, :32] *= np.where(np.arange(32) == 7, 1e7, 1e-3)  # 31 values are lost beside one
    observer = InputObserver(Decision(site=MatMulSite(name="s", op="MatMul"), kind="quantized", reason=""))
    observer.add(x[:4])
    observer.add(x[4:])
    found = observer.result()
    rounded = numpy_nodes.dequantize(*numpy_nodes.quantize(x)).astype(np.float64)
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
    header, rows = analyze(chain(), metric="cosine").site_table()
    shown = [cell[1] for row in rows if not isinstance(cell := row[header.index("alone, 1-cosine")], str)]
    assert shown == sorted(shown, reverse=True)


@looped("layer", [1, 5])
def test_a_planted_bad_layer_is_found_first_and_excluded(layer: int) -> None:
    found = analyze(planted(layer))
    first, second = (site.alone["relative_l2"].mean for site in found.sites[:2])
    assert found.sites[0].label == f"layers.{layer}.linear"
    assert first > 3 * second
    assert found.exclusion is not None
    assert found.exclusion.patterns == (rf"^layers\.{layer}\.linear$",)
    assert found.layers[0].name == f"layers.{layer}"
    # Its weight's own error does not show it: that is why the outputs have to be looked at.
    errors = {site.label: site.site.sqnr_db for site in found.sites}
    assert errors[f"layers.{layer}.linear"] > min(errors.values()) - 1


def test_a_site_whose_output_becomes_infinite_is_ranked_first() -> None:
    def make_large(w: np.ndarray) -> None:
        w[:32, 0] = 0
        w[0, 0] = 3.4e38

    model = chain()
    change(model, "layers.2.weight", make_large)  # it overflows in neither model, and rounds to infinity in one
    with cpu.forced_isa("portable"):  # AVX512-BF16 multiplies before it scales, and stays finite
        found = analyze(model, allow_nonfinite=True)
    assert found.sites[0].label == "layers.2.linear"
    assert found.exclusion is not None
    assert found.exclusion.sites[0] == found.sites[0].site.decision.site.name
    json.loads(found.to_json())
    assert "nan" in found.to_html()


def test_nothing_is_excluded_where_no_site_does_damage() -> None:
    model = chain()
    for layer in range(6):
        change(model, f"layers.{layer}.weight", lambda w: w.fill(0))
    assert analyze(model).answer().startswith("Nothing to exclude: ")


def test_the_exclusion_gives_the_error_that_was_measured_with_the_fewest_sites(tmp_path: Path) -> None:
    model, (feeds,) = chain(), samples(1, 4, 64)
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
    squares = [site.alone["relative_l2"].mean ** 2 for site in found.sites]
    assert sum(squares[len(kept) :]) <= sum(squares) / 2 < sum(squares[len(kept) - 1 :])


@looped("keep, excluded", [(0, 0), (2, 2), (6, 5), (100, 5)])
def test_as_many_are_excluded_as_asked_for_and_never_all(keep: int, excluded: int) -> None:
    found = analyze(chain(), keep=keep)
    assert (len(found.exclusion.sites) if found.exclusion else 0) == excluded


def test_the_recipes_own_exclusions_come_first() -> None:
    found = analyze(chain(), Recipe(exclude=(r"layers\.0",)), keep=1)
    assert found.exclusion is not None
    assert yaml.safe_load(found.exclusion.yaml)["exclude"][0] == r"layers\.0"
    assert [site.decision.site.name for site in found.kept] == ["layers.0.linear"]


def test_no_exclusion_is_proposed_for_a_name_that_is_the_module_of_another_site() -> None:
    model = planted(2)
    first = next(node for node in model.graph.node if node.name == "layers.0.linear")
    first.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.2.linear', 'linear']")
    notes = analyze(model, keep=1).notes
    assert any("no exclusion is proposed: matmuls share names and module paths" in note for note in notes), notes


def sites(*names: tuple[str, str]) -> list[MatMulSite]:
    return [MatMulSite(name=name, module=module, op="MatMul", n=64, k=64, weight="w") for name, module in names]


def test_patterns_match_exactly_and_prefer_module_paths() -> None:
    found = sites(("a", "h.0.fc"), ("b", "h.0.fc2"), ("c", "h.10.fc"), ("d", "same"), ("e", "same"), ("f.(x)[1]+", ""))
    patterns = patterns_of(["d", "a", "f.(x)[1]+"], found)
    assert patterns == ("^d$", r"^h\.0\.fc$", r"^f\.\(x\)\[1\]\+$")


def test_a_layer_is_a_name_up_to_a_number() -> None:
    layers = {"enc.layer.10.q": "enc.layer.10", "/block3/fc/MatMul": "/block3", "bert2.layer.1.q": "bert2.layer.1"}
    for name, layer in {**layers, "head": "(others)", "linear_5": "(others)"}.items():
        assert layer_of(*sites((name, ""))) == layer


def test_the_command_prints_the_ranking_and_the_lines_to_paste() -> None:
    result = run("analyze", save(planted(3), external=True), "--report", "a.html", "--report", "a.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    ranked = [line for line in lines if line.startswith("layers.") and ".linear" in line]
    assert ranked[0].startswith("layers.3.linear")
    assert lines[-1].startswith("Exclude the worst 1 of 6 matmuls, 16.7% of the weights, first layers.3.linear: rel")
    assert r"- ^layers\.3\.linear$" in lines
    assert "synthesised" in result.stdout
    page = Path("a.html").read_text()
    for part in ("Sites, the one that does most damage first", 'style="--part: ', "<pre"):
        assert part in page
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(Path("a.json").read_text())
    assert (data["sites"][0]["name"], data["synthesised"]) == ("layers.3.linear", True)
    assert {"alone", "without", "input", "sqnr_db", "depth"} <= data["sites"][0].keys()
    assert data["sites"][0]["input"].keys() == {"amax", "outlier_blocks", "lost", "sqnr_db"}


def test_what_cannot_be_analyzed_is_refused() -> None:
    message = refused("analyze", save(b.chain_model((64, 16, 64))), code=3)
    assert "none of its 2 matmuls is eligible" in message
    assert "tiny: N = 16" in message
    assert refused("analyze", save(mxfp8_graph.rewrite(b.chain_model())[0])) == (
        "error: m.onnx: is rewritten already; expected the original model; name the model it was made from"
    )
    assert "layers.0.weight" in refused("analyze", save(poison(chain(), float("inf"))))
    model = save(b.chain_model())
    assert "metric: 'nonsense'" in refused("analyze", model, "--metric", "nonsense")
    assert "nan.npz" in refused("analyze", model, "--inputs", "nan.npz")
    with pytest.raises(ContractError, match="keep is -1; expected 0 or more"):
        analyze(model, keep=-1)


def test_too_little_room_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    message = refused("analyze", save(chain()))
    assert "free; expected 0.0 GB for the model with its switches; set TMPDIR to a folder with more" in message


def test_an_interrupted_analysis_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").absolute()))

    def interrupt(name: str, *runs: int) -> None:
        assert list(Path("temporary").iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(save(chain(), external=True), progress=interrupt)
    assert not list(Path("temporary").iterdir())
