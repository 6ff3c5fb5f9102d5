"""compare: a row per recipe, what it says, and what it says where there is nothing to say."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders as b
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


# --- What is found ---------------------------------------------------------------------------------------------------


def test_a_row_of_a_real_recipe_is_that_of_its_rewrite(two: Comparison) -> None:
    model, found = b.chain_model(), row(two, "mxfp8")
    rewritten, report = mxfp8_graph.rewrite(model)
    original, real = Session(model, kernels=False), Session(rewritten, kernels=True)
    errors = [difference(original.run(x)["y"], real.run(x)["y"]) for x in SAMPLES]
    assert [score.metric.name for score in found.scores] == ["relative_l2", "cosine"]
    assert found.scores[0].values == tuple(error.relative_l2 for error in errors)
    assert found.scores[1].values == tuple(error.cosine for error in errors)
    assert report.weight_error is not None
    assert found.weight_sqnr == sqnr(report.weight_error.mean)
    assert (found.emulated, found.sites, found.byte_size) == (False, 2, rewritten.ByteSize())
    assert found.seconds is not None


def test_a_row_of_a_peer_is_emulated_and_has_no_latency(two: Comparison) -> None:
    model, found = b.chain_model(), row(two, "mxfp4")
    assert (found.emulated, found.seconds, found.sites) == (True, None, 2)
    assert found.byte_size == model.ByteSize() - 2 * 64 * 128 * 4 + 2 * 64 * 128 * 17 // 32
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


def test_the_emulated_block_of_32_is_the_real_recipe() -> None:
    found = compare(recipes=("mxfp8", "mxfp8-block32"))
    real, emulated = (row(found, name).scores[0].mean for name in ("mxfp8", "mxfp8-block32"))
    assert emulated == pytest.approx(real, rel=2e-3)
    assert row(found, "mxfp8").weight_sqnr == pytest.approx(row(found, "mxfp8-block32").weight_sqnr)


def test_recipes_of_the_users_own() -> None:
    Path("mine.yaml").write_text("exclude: ['layers.0']\n")
    found = compare(recipes=("mine.yaml", Recipe(name="other", activations="bfloat16")))
    assert [(r.name, r.sites) for r in found.rows[1:]] == [("mine", 1), ("other", 2)]


def test_synthesised_inputs_are_marked() -> None:
    found = compare(inputs=None)
    assert found.synthesised
    assert found.inputs == "8 samples, synthesised; the first: x float32 [2, 64]"
    assert any("synthesised inputs" in note for note in found.notes)


def test_a_metric_of_the_users_own() -> None:
    Path("largest.py").write_text(
        "def of(original, rewritten):\n    return abs(original['y'] - rewritten['y']).max()\n"
    )
    (own, built_in) = row(compare(metrics=["largest:of", "max_error"]), "mxfp4").scores
    assert own.values == pytest.approx(built_in.values)


def test_a_program_in_a_file_is_compared_as_onnx() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.LayerNorm(64)).eval()
    program = torch.export.export(net, (torch.zeros(4, 64),))
    (name,) = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    path = mxfp8_graph.save(program, "net.pt2")
    found = compare(path, inputs=[{name: SAMPLES[0]["x"]}])
    assert [r.problem for r in found.rows] == ["", "", ""]
    assert "the program is compared as the ONNX model that torch.onnx makes of it" in found.notes
    assert found.model == "net.pt2"


def test_an_interrupt_leaves_nothing_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").absolute()))

    def interrupt(name: str, done: int, total: int) -> None:
        assert list(Path("temporary").iterdir())
        if name == "mxfp4":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(progress=interrupt)
    assert not list(Path("temporary").iterdir())


def test_progress_counts_samples_of_all_models_and_the_original_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(save(b.chain_model()))
    before = path.read_bytes()
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").absolute()))
    heard: list[tuple[str, int, int]] = []
    compare(path, progress=lambda *step: heard.append(step))
    assert (path.read_bytes(), list(Path("temporary").iterdir())) == (before, [])
    runs = 3 * 3 + 2  # three samples of three models, and a timed run of the two that are real
    assert [done for _, done, _ in heard] == list(range(1, runs + 1))
    assert heard[-1][2] == runs


# --- Which recipe to take --------------------------------------------------------------------------------------------


def measured(two: Comparison, *rows: tuple[str, float, float, float]) -> Comparison:
    """Returns a comparison with (name, megabytes, relative L2, milliseconds) of real recipes, and an emulated one."""
    original, real, emulated = two.rows
    metric = METRICS["relative_l2"]
    changed = [
        replace(
            real,
            name=name,
            byte_size=int(size * 1e6),
            scores=(Score(metric=metric, values=(error,)),),
            seconds=ms / 1e3,
        )
        for name, size, error, ms in rows
    ]
    rows_ = (replace(original, byte_size=int(90e6), seconds=0.009), *changed, emulated)
    return replace(two, metrics=(metric,), rows=rows_)


def test_the_page_says_which_recipe_to_take_and_why(two: Comparison) -> None:
    rows = ("mxfp8", 60, 0.08, 5), ("mxfp8-bf16", 60.1, 0.05, 5.2), ("all", 24, 0.09, 6), ("ocp", 60, 0.1, 4)
    found = measured(two, *rows)
    assert found.answer() == "Take mxfp8-bf16: 60.1 MB instead of 90, relative L2 0.05, 5.2 ms instead of 9."
    facts = [
        ("against the default", "same size, relative L2 0.05 instead of 0.08, same time"),
        ("smallest", "all: 24 MB instead of 60.1, relative L2 0.09 instead of 0.05, 6 ms instead of 5.2"),
        ("fastest", "ocp: same size, relative L2 0.1 instead of 0.05, 4 ms instead of 5.2"),
    ]
    assert [fact for fact in found.facts() if fact in facts] == facts
    assert found.answer() in found.to_html()


def test_a_recipe_that_is_slower_is_not_taken_for_its_accuracy(two: Comparison) -> None:
    found = measured(two, ("mxfp8", 60, 0.08, 5), ("mxfp8-weight-only", 60, 0.05, 9))
    assert found.answer() == "Take mxfp8: 60 MB instead of 90, relative L2 0.08, 5 ms instead of 9."
    assert "mxfp8-weight-only: same size, relative L2 0.05 instead of 0.08, 9 ms instead of 5" in str(found)


# --- Rows that have a problem ----------------------------------------------------------------------------------------


def test_a_recipe_that_leaves_nothing_eligible_says_so_in_its_row() -> None:
    Path("nothing.yaml").write_text("min_dim: 4096\n")
    found = compare(recipes=("nothing.yaml", "mxfp8"))
    assert "none of its 2 matmuls is eligible" in row(found, "nothing").problem
    assert row(found, "mxfp8").scores
    assert json.loads(found.to_json())["recipes"][1]["problem"] == row(found, "nothing").problem


def test_outputs_that_are_not_finite_are_told() -> None:
    """The largest float32 is rounded up to 2^128, which is infinite, where the original's products are finite."""
    x = np.zeros((1, 2, 64), np.float32)
    x[0, 0, 0] = np.finfo(np.float32).max
    found = compare(b.matmul_model(), ("mxfp8-block32", "mxfp8-weight-only"), inputs={"x": x})
    (bad, _), (good, _) = (r.scores for r in found.rows[1:])
    assert (np.isnan(bad.mean), np.isfinite(good.mean)) == (True, True)
    assert found.to_html().count("NaN or Inf") == 2  # one per metric
    assert json.loads(found.to_json())["recipes"][1]["scores"][0]["mean"] is None


def test_a_sample_without_a_finite_output_leaves_no_mean() -> None:
    """It must not count as perfect: nothing was compared."""
    found = compare(inputs=[SAMPLES[0], {"x": np.full((4, 64), np.nan, np.float32)}])
    for score in row(found, "mxfp8").scores:
        assert (np.isnan(score.mean), score.worst_sample) == (True, 1)
    header, cells = found.table()
    assert cells[1][2:4] == ("NaN or Inf", "NaN or Inf"), header


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
        ({"recipes": ["mxfp8", "mxfp8"]}, RecipeError, "'mxfp8' is named twice"),
        ({"inputs": {"z": np.ones(3)}}, ShapeError, "given inputs: no array for input 'x'"),
        ({"repeat": 0}, ContractError, "compare: repeat is 0; expected 1 or more; correct it"),
        ({"model": b.chain_model((64, 8))}, NothingEligibleError, "none of its 1 matmul"),
    ],
)
def test_what_cannot_be_compared_is_an_error(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(**settings)


def test_a_rewritten_model_is_an_error() -> None:
    model, _ = mxfp8_graph.rewrite(b.chain_model())
    with pytest.raises(ContractError, match="is rewritten already; expected the original model"):
        compare(model)


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_what_it_is_asked_for() -> None:
    np.savez("data.npz", **SAMPLES[0])
    done = run(
        "compare", save(b.chain_model()), "--recipes", "mxfp8,nvfp4", "--inputs", "data.npz", "--metric", "sqnr",
        "--repeat", "1", "--report", "page.html", "--report", "data.json",
    )  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    shown = [line.split()[:2] for line in lines if line.split()[1:2] in (["real"], ["emulated"])]
    assert shown == [["mxfp8", "real"], ["original", "real"], ["nvfp4", "emulated"]]  # the one to take first
    assert lines[-1].startswith("Take mxfp8: ")
    assert any(line.split() == ["inputs", "x", "float32", "[4,", "64],", "from", "data.npz"] for line in lines)
    page = Path("page.html").read_text(encoding="utf-8")
    assert "emulated" in page
    assert "<dd>mxfp8-graph compare m.onnx --recipes mxfp8,nvfp4 --inputs data.npz" in page
    assert "http" not in page.replace("http-equiv", "")
    data = json.loads(Path("data.json").read_text(encoding="utf-8"))
    assert [r["recipe"] for r in data["recipes"]] == ["original", "mxfp8", "nvfp4"]


def test_the_command_prints_json() -> None:
    done = run("compare", save(b.chain_model()), "--recipes", "mxfp4", "--repeat", "1", "--json")
    data = json.loads(done.stdout)
    peer = data["recipes"][1]
    assert (data["synthesised"], peer["emulated"], peer["latency_seconds"]) == (True, True, None)


@looped(
    "options, message",
    [
        (["--metric", "mse"], "error: metric: 'mse'; expected one of relative_l2, "),
        (["--inputs", "none.jsonl"], "error: none.jsonl: No such file or directory"),
        (["--report", "m.pdf"], "error: m.pdf: report with suffix '.pdf'; expected .json or .html"),
    ],
)
def test_the_command_refuses(options: list[str], message: str) -> None:
    assert refused("compare", save(b.chain_model()), *options).startswith(message)


def test_the_command_on_a_model_with_nothing_eligible() -> None:
    assert "none of its" in refused("compare", save(b.chain_model((64, 8))), "--recipes", "mxfp8", code=3)
