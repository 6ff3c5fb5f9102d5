"""compare: a row per recipe, what it says, and what it says where there is nothing to say."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import models as b
import numpy as np
import pytest
from commands import refused, run, save
from grids import looped

import mxfp8_graph
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import NothingEligibleError
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.compare import difference, sqnr
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.compare.comparison import Comparison, Row
from mxfp8_graph.tools.compare.number_formats import PEERS
from mxfp8_graph.tools.compare.run import VARIANTS, WORDS
from mxfp8_graph.tools.metrics import METRICS, Score
from mxfp8_graph.tools.trials import Latency
from mxfp8_ops.errors import ContractError, RecipeError, ShapeError

pytestmark = pytest.mark.usefixtures("own_folder")

SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((4, 64), np.float32)} for seed in range(3)]


def compare(model: Any = None, recipes: Any = ("mxfp8", "mxfp4"), **settings: Any) -> Comparison:
    return mxfp8_graph.compare(model or b.chain_model(), recipes, **{"inputs": SAMPLES, "repeat": 1, **settings})


@pytest.fixture(scope="module")
def two() -> Comparison:
    """The default recipe and a peer, on three samples."""
    return compare()


def row(found: Comparison, name: str) -> Row:
    return next(row for row in found.rows if row.name == name)


def test_a_real_recipe_has_the_numbers_of_its_rewrite_and_a_peer_is_emulated(two: Comparison) -> None:
    model, real, peer = b.chain_model(), row(two, "mxfp8"), row(two, "mxfp4")
    rewritten, report = mxfp8_graph.rewrite(model)
    sessions = Session(model, kernels=False), Session(rewritten, kernels=True)
    errors = [difference(*(session.run(x)["y"] for session in sessions)) for x in SAMPLES]
    assert [score.metric.name for score in real.scores] == ["relative_l2", "cosine"]
    assert real.scores[0].values == tuple(error.relative_l2 for error in errors)
    assert real.scores[1].values == tuple(error.cosine for error in errors)
    assert report.weight_error is not None
    assert real.weight_sqnr == sqnr(report.weight_error.mean)
    assert (real.emulated, real.sites, real.byte_size) == (False, 2, rewritten.ByteSize())
    assert real.seconds is not None
    assert (peer.emulated, peer.seconds, peer.sites) == (True, None, 2)
    assert peer.byte_size == model.ByteSize() - 2 * 64 * 128 * 4 + 2 * 64 * 128 * 17 // 32
    assert not two.synthesised


def test_every_recipe_with_a_name_has_a_row() -> None:
    found = compare(recipes=())
    ours = {*presets.PRESETS, *VARIANTS} - {"MXFP8BlockScaling"}  # mxfp8 by another name
    assert {r.name for r in found.rows} == {"original", *ours, *PEERS}
    assert not [r.problem for r in found.rows if r.problem]
    assert {r.name for r in found.rows if r.seconds} == {"original", *ours}
    assert set(WORDS) == ours


def test_formats_come_in_the_order_of_what_they_can_hold() -> None:
    """Normal weights and inputs: ceil beats floor, more mantissa bits beat fewer, finer scales beat coarser ones."""
    names = ("mxint8", "mxfp8", "ocp", "mxfp6-e3m2", "nvfp4", "mxfp4")
    found = compare(b.chain_model((512, 512, 512)), names, inputs=None)
    errors = [row(found, name).scores[0].mean for name in names]
    assert errors == sorted(errors), dict(zip(names, errors, strict=True))
    assert found.synthesised
    assert found.inputs == "8 samples, synthesised; the first: x float32 [2, 512]"
    assert any("synthesised inputs" in note for note in found.notes)


def test_the_emulated_block_of_32_is_the_real_recipe() -> None:
    found = compare(recipes=("mxfp8", "mxfp8-block32"))
    real, emulated = (row(found, name).scores[0].mean for name in ("mxfp8", "mxfp8-block32"))
    assert emulated == pytest.approx(real, rel=2e-3)
    assert row(found, "mxfp8").weight_sqnr == pytest.approx(row(found, "mxfp8-block32").weight_sqnr)


def test_recipes_and_a_metric_of_the_users_own() -> None:
    Path("largest.py").write_text(
        "def of(original, rewritten):\n    return abs(original['y'] - rewritten['y']).max()\n"
    )
    Path("mine.yaml").write_text("exclude: ['layers.0']\n")
    recipes = ("mine.yaml", Recipe(name="other", activations="bfloat16"))
    found = compare(recipes=recipes, metrics=["largest:of", "max_error"])
    assert [(r.name, r.sites) for r in found.rows[1:]] == [("mine", 1), ("other", 2)]
    for own, built_in in (r.scores for r in found.rows[1:]):
        assert own.values == pytest.approx(built_in.values)


def test_a_program_in_a_file_is_compared_as_onnx() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.LayerNorm(64)).eval()
    path = mxfp8_graph.save(torch.export.export(net, (torch.zeros(4, 64),)), "net.pt2")
    found = compare(path, inputs={"input": SAMPLES[0]["x"]})
    assert ([r.problem for r in found.rows], found.model) == (["", "", ""], "net.pt2")
    assert "the program is compared as the ONNX model that torch.onnx makes of it" in found.notes


@pytest.mark.parametrize("stop", [None, "mxfp4"], ids=["to the end", "interrupted"])
def test_progress_counts_samples_and_no_temporary_file_stays(stop: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    path, temporary = Path(save(b.chain_model())), Path("temporary").absolute()
    before = path.read_bytes()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    heard: list[tuple[int, int]] = []

    def progress(name: str, *step: int) -> None:
        heard.append(step)
        assert list(temporary.iterdir())
        if name == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
        compare(path, progress=progress)
    assert (path.read_bytes(), list(temporary.iterdir())) == (before, [])
    runs = 3 * 3 + 2  # three samples of three models, and a timed run of the two that are real
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1))
    assert (heard[-1] == (runs, runs)) == (stop is None)


def measured(two: Comparison, *rows: tuple[str, float, float, float], spread: float = 0) -> Comparison:
    """Returns a comparison with (name, megabytes, relative L2, milliseconds) of real recipes, and an emulated one."""
    original, real, emulated = two.rows
    metric = METRICS["relative_l2"]
    changed = [
        replace(
            real,
            name=name,
            byte_size=int(size * 1e6),
            scores=(Score(metric=metric, values=(error,)),),
            latency=Latency(ms / 1e3, spread),
        )
        for name, size, error, ms in rows
    ]
    rows_ = (replace(original, byte_size=int(90e6), latency=Latency(0.009, 0)), *changed, emulated)
    return replace(two, metrics=(metric,), rows=rows_)


def test_the_answer_names_the_fastest_recipe_and_the_most_accurate_of_its_size(two: Comparison) -> None:
    rows = ("mxfp8", 60, 0.08, 5), ("mxfp8-bf16", 60.1, 0.05, 6), ("all", 24, 0.09, 7), ("ocp", 60, 0.1, 4)
    found = measured(two, *rows)
    fast, accurate = "Fastest: --recipe ocp, 2.2 times the original, relative L2 0.1", "--recipe mxfp8-bf16, 1.5 times"
    assert found.answer() == f"{fast}. Most accurate at that size: {accurate}, 0.05."
    assert ("smallest", "--recipe all: 24.0 MB, 1.3 times, relative L2 0.09") in found.facts()
    assert "Most accurate at that size" in found.to_html()
    alone = measured(two, ("mxfp8", 60, 0.05, 5), ("ocp", 60, 0.08, 9))
    fast = "Fastest: --recipe mxfp8, 1.8 times the original, relative L2 0.05"
    assert alone.answer() == f"{fast}; none of its size is more accurate."


@looped(
    "ms, spread, expected",
    [
        ((5.0, 5.3, 4.9), 0.0, "mxint8"),  # times repeat within 10 %: the recipe that auto takes
        ((5.0, 7.0, 4.9), 0.0, "mxint8-bf16"),  # a tie without it: the most accurate
        ((5.0, 7.0, 4.9), 0.5, "mxint8"),  # a busy machine: all are ties
        ((3.0, 7.0, 4.9), 0.0, "mxfp8"),
    ],
)
def test_recipes_within_the_spread_of_their_times_are_ties_and_go_to_auto(
    two: Comparison, ms: tuple[float, ...], spread: float, expected: str
) -> None:
    rows = zip(("mxfp8", "mxint8", "mxint8-bf16"), (60, 60, 60), (0.08, 0.04, 0.02), ms, strict=True)
    found = replace(measured(two, *rows, spread=spread), isa="avx512_vnni")
    recommended = found.recommendation()
    assert recommended is not None
    assert recommended.name == expected


def test_a_recipe_that_leaves_nothing_eligible_says_so_in_its_row() -> None:
    Path("nothing.yaml").write_text("min_dim: 4096\n")
    found = compare(recipes=("nothing.yaml", "mxfp8"))
    assert "none of its 2 matmuls is eligible" in row(found, "nothing").problem
    assert row(found, "mxfp8").scores
    assert json.loads(found.to_json())["recipes"][1]["problem"] == row(found, "nothing").problem


def test_outputs_that_are_not_finite_have_no_mean() -> None:
    """The largest float32 is rounded up to 2^128, which is infinite, where the original's products are finite."""
    x = np.zeros((1, 2, 64), np.float32)
    x[0, 0, 0] = np.finfo(np.float32).max
    found = compare(b.matmul_model(), ("mxfp8-block32", "mxfp8-weight-only"), inputs={"x": x})
    (bad, _), (good, _) = (r.scores for r in found.rows[1:])
    assert (np.isnan(bad.mean), np.isfinite(good.mean)) == (True, True)
    assert found.to_html().count("NaN or Inf") == 2  # one per metric
    assert json.loads(found.to_json())["recipes"][1]["scores"][0]["mean"] is None
    # A sample whose output is nowhere finite must not count as perfect: nothing was compared.
    found = compare(inputs=[SAMPLES[0], {"x": np.full((4, 64), np.nan, np.float32)}])
    assert [(np.isnan(s.mean), s.worst_sample) for s in row(found, "mxfp8").scores] == [(True, 1)] * 2
    cells = next(cells for cells in found.table()[1] if cells[0] == "mxfp8")
    assert cells[3:5] == ("NaN or Inf", "NaN or Inf")


def test_the_largest_sample_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = Session._call
    monkeypatch.setattr(
        Session, "_call", lambda self, feeds: (sizes.append(feeds["x"].shape()[0]), run(self, feeds))[1]
    )
    samples = [{"x": np.ones((rows, 64), np.float32)} for rows in (1, 5, 3)]
    found = compare(recipes=("mxfp8",), inputs=samples)
    assert sizes[6:] == [5] * 4  # after those that are compared: a warm-up and a run of each model
    told = "the median of runs on the largest sample, x float32 [5, 64], one model after another in turn"
    assert ("latency", told) in found.facts()
    assert found.to_dict()["latency_inputs"] == "x float32 [5, 64]"


@looped(
    "settings, error, message",
    [
        ({"recipes": ["mxfp5"]}, RecipeError, r"recipe: 'mxfp5'; expected one of mxfp8, .*nvfp4.*a \.yaml or \.toml"),
        ({"recipes": "mxin8"}, RecipeError, r"recipe: 'mxin8'; .*; did you mean mxint8\?"),  # one name is a list of one
        ({"recipes": ["mxfp8", "mxfp8"]}, RecipeError, "'mxfp8' is named twice"),
        ({"inputs": {"z": np.ones(3)}}, ShapeError, "given inputs: no array for input 'x'"),
        ({"repeat": 0}, ContractError, "compare: repeat is 0; expected 1 or more; correct it"),
        ({"model": b.chain_model((64, 8))}, NothingEligibleError, "none of its 1 matmul"),
        ({"model": mxfp8_graph.rewrite(b.chain_model())[0]}, ContractError, "is rewritten already; expected the orig"),
    ],
)
def test_what_cannot_be_compared_is_an_error(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(**settings)


def test_the_command_prints_a_table_and_writes_what_it_is_asked_for() -> None:
    np.savez("data.npz", **SAMPLES[0])
    options = ("--recipes", "mxfp8,nvfp4", "--inputs", "data.npz", "--metric", "sqnr", "--repeat", "1")
    done = run("compare", save(b.chain_model()), *options, "--report", "page.html", "--report", "data.json")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    titles, names = {"Recipes", "Formats of other tools, emulated"}, ("mxfp8 ", "original ", "nvfp4 ")
    shown = [line.split("  ")[0] for line in lines if line in titles or line.startswith(names)]
    emulated, real = ["Formats of other tools, emulated", "nvfp4"], ["Recipes", "mxfp8", "original"]
    assert shown == [*emulated, *real]  # the one to take first
    assert lines[-1].startswith("Fastest: --recipe mxfp8, ")
    assert any(line.split() == ["inputs", "x", "float32", "[4,", "64],", "from", "data.npz"] for line in lines)
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<pre>mxfp8-graph rewrite m.onnx --recipe mxfp8</pre>" in page
    assert "<details><summary>Formats of other tools, emulated" in page
    assert "<dd>mxfp8-graph compare m.onnx --recipes mxfp8,nvfp4 --inputs data.npz" in page
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(Path("data.json").read_text(encoding="utf-8"))
    told = [(r["recipe"], r["emulated"], r["latency_seconds"] is None) for r in data["recipes"]]
    assert told == [("original", False, False), ("mxfp8", False, False), ("nvfp4", True, True)]
    message = refused("compare", "m.onnx", "--metric", "mse")
    assert message.startswith("error: metric: 'mse'; expected one of relative_l2, ")
