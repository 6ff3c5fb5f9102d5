"""tune: what it writes keeps the budget, is small, can be made again from its recipe, and beats chance."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save
from grids import looped
from onnx import numpy_helper

import mxfp8_graph
from mxfp8_graph import Recipe, Rule
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.metrics import Score
from mxfp8_graph.tools.tune.budget import parse
from mxfp8_graph.tools.tune.plans import KEPT, Unit, Way, after, path, size_cost
from mxfp8_graph.tools.tune.result import BudgetNotMetError
from mxfp8_graph.tools.tune.trials import Trials
from mxfp8_ops.errors import ContractError, ShapeError

pytestmark = pytest.mark.usefixtures("own_folder")

SIZES = (64, 96, 64, 160, 64, 96, 64)
SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((8, 64), np.float32)} for seed in range(2)]


def chain() -> onnx.ModelProto:
    return b.chain_model(SIZES)


def tune(model: Any, *budgets: str, **settings: Any) -> Any:
    settings.setdefault("inputs", SAMPLES)
    return mxfp8_graph.tune(model, budgets, **settings)


def errors(model: Any, rewritten: Any, samples: Any = SAMPLES) -> list[float]:
    """Returns relative L2 errors at the output, by nothing that tune uses but a session."""
    original, other = Session(model, kernels=False), Session(rewritten, kernels=True)
    return [float(np.linalg.norm(other.run(x)["y"] - (y := original.run(x)["y"])) / np.linalg.norm(y)) for x in samples]


def ways(found: Any) -> dict[str, str]:
    return {unit.label: str(way) for unit, way in zip(found.units, found.chosen.plan, strict=True)}


# --- Budgets ---------------------------------------------------------------------------------------------------------


@looped(
    "text, written",
    [
        ("cosine>=0.999", "cosine>=0.999"),
        (" relative_l2 <= 2e-2 ", "relative_l2<=0.02"),
        ("worst_top1>=.99", "worst_top1>=0.99"),
        ("sqnr>=30", "sqnr>=30"),
    ],
)
def test_a_budget_is_a_metric_a_sign_and_a_number(text: str, written: str) -> None:
    assert str(parse(text)) == written


@looped(
    "text, message",
    [
        ("cosine", "'cosine'; expected METRIC>=NUMBER or METRIC<=NUMBER"),
        ("cosine>=nan", "expected METRIC>=NUMBER"),
        ("cosine>=0.9>=0.8", "expected METRIC>=NUMBER"),
        ("cosine<=0.9", "more cosine is better; expected cosine>=NUMBER; reverse the sign"),
        ("worst_kl>=0.9", "expected worst_kl<=NUMBER"),
        ("cosin>=0.9", "'cosin'; expected one of relative_l2, sqnr, cosine"),
        (
            "cosine>=1.5",
            "which no plan can keep; expected cosine>=NUMBER with a number of at most 1; correct",
        ),
        ("worst_max_error<=-1e-9", "expected worst_max_error<=NUMBER with a number of at least 0"),
    ],
)
def test_what_is_no_budget_is_an_error(text: str, message: str) -> None:
    save(chain())
    assert message in refused("tune", "m.onnx", "--budget", text)


def test_the_mean_may_keep_a_budget_that_the_worst_sample_does_not() -> None:
    easy, hard = np.zeros((8, 64), np.float32), SAMPLES[0]["x"]
    easy[:, 0] = 1  # a power of two: E4M3 has it exactly
    found = tune(chain(), "relative_l2<=1", inputs=[{"x": easy}, {"x": hard}]).chosen.trial.scores["relative_l2"]
    assert found.mean < found.worst
    between = (found.mean + found.worst) / 2
    assert parse(f"relative_l2<={between}").met(found)
    assert not parse(f"worst_relative_l2<={between}").met(found)


@looped("text, value", [("cosine>=0.75", 0.75), ("relative_l2<=0.25", 0.25), ("top1>=1", 1.0)])
def test_a_budget_that_is_met_exactly_is_kept(text: str, value: float) -> None:
    budget = parse(text)
    assert budget.met(Score(metric=budget.metric, values=(value,)))


def test_samples_without_a_finite_output_are_refused_before_the_search() -> None:
    """They would count for nothing in a mean, whatever the plan."""
    nowhere = {"x": np.full((8, 64), np.nan, np.float32)}
    with pytest.raises(ShapeError, match=r"given inputs sample 2: output 'y' has no finite value; .*; leave it out"):
        tune(chain(), "cosine>=0.5", inputs=[SAMPLES[0], nowhere])
    with pytest.raises(ShapeError, match="given inputs: no output has a value; "):
        tune(chain(), "cosine>=0.5", inputs={"x": np.zeros((0, 64), np.float32)})


# --- The path --------------------------------------------------------------------------------------------------------


@looped("seed", range(5))
def test_no_plan_on_the_path_is_beaten_in_both_damage_and_cost(seed: int) -> None:
    """Against all plans there are, under the model of errors that the path is made for."""
    rng = np.random.default_rng(seed)
    some = [Way("e4m3"), Way("bfloat16"), Way("unchanged")]
    units = [
        Unit(sites=(str(i),), label=str(i), bytes_before=4 * n, bytes_after=n, damages=dict(zip(some, d, strict=True)))
        for i, (n, d) in enumerate(zip(rng.integers(1, 50, 4).tolist(), rng.random((4, 3)).tolist(), strict=True))
    ]

    def both(plan: Any) -> tuple[float, float]:
        pairs = list(zip(units, plan, strict=True))
        return sum(u.damage(w) for u, w in pairs), sum(size_cost(u, w) for u, w in pairs)

    moves = path(units, size_cost)
    everything = [both(plan) for plan in itertools.product([KEPT, *some], repeat=len(units))]
    for count in range(len(moves) + 1):
        damage, cost = both(after(len(units), moves[:count]))
        better = [other for other in everything if other[0] < damage - 1e-12 and other[1] < cost - 1e-9]
        assert not better, (count, (damage, cost), better)
    assert both(after(len(units), moves))[1] == min(cost for _, cost in everything)


# --- What it finds and writes ----------------------------------------------------------------------------------------


def test_the_recipe_makes_the_same_model_which_keeps_the_budget() -> None:
    source = save(chain())
    found = tune(source, "relative_l2<=0.05")
    assert {p.name for p in Path("m.tuned").iterdir()} == {"m.mxfp8.onnx", "recipe.yaml", "report.html", "report.json"}
    assert not Path("m.tuned.part").exists()
    again, report = mxfp8_graph.rewrite(source, "m.tuned/recipe.yaml", output="again.onnx")
    assert Path("again.onnx").read_bytes() == Path("m.tuned/m.mxfp8.onnx").read_bytes()
    measured = errors(source, str(again))
    assert found.chosen.trial.scores["relative_l2"].values == pytest.approx(measured, rel=1e-5)
    assert np.mean(measured) <= 0.05
    assert 0 < len(report.rewritten) < len(report.sites)
    assert found.chosen.trial.byte_size == report.account.bytes_after


@looped("bound", [0.5, None])
def test_of_plans_of_one_size_the_most_accurate_is_chosen(bound: float | None) -> None:
    """All are of one size where all weights are packed. Weight-only is as accurate as bfloat16, and tried later."""
    model = chain()
    low, high = (np.mean(errors(model, mxfp8_graph.rewrite(model, name)[0])) for name in ("mxfp8-bf16", "mxfp8"))
    found = tune(model, f"relative_l2<={bound or (low + high) / 2}")
    assert set(ways(found).values()) == {"bfloat16"}
    assert [step.what for step in found.steps] == ["everything e4m3", "everything bfloat16", "everything weight-only"]
    assert found.chosen.trial.scores["relative_l2"].mean == pytest.approx(low)
    equal = 2 if bound is None else 3
    assert (
        "chosen",
        f"the most accurate, within 5 %, of {equal} plans of one size that keep the budget",
    ) in found.facts()


def test_it_beats_random_exclusion_of_as_many_bytes() -> None:
    """Layers that matter more than others: the residual branches have factors."""
    (model, sites), kept = branches(), 3
    bound = np.mean(errors(model, tuned_by_hand(model, sites[:kept])))
    found = tune(model, f"relative_l2<={bound * 1.001}")
    chosen = found.chosen.trial.scores["relative_l2"].mean
    excluded = sum(unit.bytes_before for unit, way in zip(found.units, found.chosen.plan, strict=True) if way == KEPT)
    assert excluded <= kept * 64 * 64 * 4
    rng = np.random.default_rng(0)
    for _ in range(4):
        chance = rng.choice(len(sites), kept, replace=False)
        if set(chance) == set(range(kept)):
            continue
        assert chosen < np.mean(errors(model, tuned_by_hand(model, [sites[i] for i in chance])))


def branches() -> tuple[onnx.ModelProto, list[str]]:
    """Returns a sum of 12 products, each half as large as the one before it, and the names of their nodes."""
    nodes, weights = [], {}
    for i in range(12):
        weights[f"w{i}"] = b.weight(64, 64, seed=i) * np.float32(0.5**i)
        nodes += [b.node("MatMul", f"x w{i}", f"p{i}", f"branch{i}.linear"), b.node("Tanh", f"p{i}", f"t{i}")]
    nodes.append(b.node("Sum", " ".join(f"t{i}" for i in range(12)), "y"))
    shapes = {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["m", 64])}
    return b.model(nodes, *shapes, weights), [f"branch{i}.linear" for i in range(12)]


def tuned_by_hand(model: onnx.ModelProto, kept: Any) -> onnx.ModelProto:
    patterns = tuple(f"^{re.escape(name)}$" for name in kept)
    return mxfp8_graph.rewrite(model, Recipe(activations="unchanged", exclude=patterns))[0]


def test_other_scale_roundings_are_chosen_where_they_win() -> None:
    """Weights at the lower end of what E4M3 holds beside one that nothing reads: rounding scales up costs a bit."""
    model = b.chain_model((64, 64))
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy() * np.float32(2.0**-13)
    weight[::32] = 1.8  # floor: 1.75 * 2^0, and the others are twice as fine
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, model.graph.initializer[0].name))
    x = SAMPLES[0]["x"].copy()
    x[:, ::32] = 0
    x = np.sign(x)  # exact in every format
    found = tune(model, "relative_l2<=0.2", inputs=[{"x": x}], recipe=Recipe(output_projections=True))
    alone = found.units[0].damages
    assert alone[Way("e4m3", "floor")] < 0.5 * alone[Way("e4m3", "ceil")]
    assert found.recipe.scale_rounding == "floor"


def test_weights_of_int8_are_tuned_with_activations_of_int8() -> None:
    found = tune(chain(), "worst_relative_l2<=0.05", recipe="mxint8")
    tried = {str(way) for step in found.steps for way in step.plan}
    assert tried == {"int8", "bfloat16", "weight-only"}
    assert found.chosen.recipe.weight_format == "int8"


def test_matmuls_of_one_weight_are_kept_or_packed_together() -> None:
    nodes = [b.node("MatMul", "x w", "a", "first"), b.node("Tanh", "a", "t"), b.node("MatMul", "t w", "c", "second")]
    nodes += [b.node("Tanh", "c", "u"), b.node("MatMul", "u v", "d", "third"), b.node("Tanh", "d", "y")]
    shapes = {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["m", 64])}
    model = b.model(nodes, *shapes, {"w": b.weight(64, 64), "v": b.weight(64, 64, seed=1)})
    found = tune(model, "relative_l2<=0.045")
    assert [unit.sites for unit in found.units] == [("first", "second"), ("third",)]
    assert [unit.bytes_before for unit in found.units] == [64 * 64 * 4] * 2


def test_the_base_recipe_says_what_is_tuned() -> None:
    base = Recipe(
        name="mine",
        exclude=("layers.0",),
        rules=(
            Rule(name="layers.1", weight_format="e5m2", activations="unchanged"),
            Rule(name="layers.[23]", activations="bfloat16"),
            Rule(name="layers.4", quantize=False),
        ),
    )
    source = save(chain())
    found = tune(source, "relative_l2<=0.06", recipe=base)
    assert set(ways(found)) == {"layers.1.linear", "layers.2.linear", "layers.3.linear", "layers.5.linear"}
    _, report = mxfp8_graph.rewrite(source, "m.tuned/recipe.yaml", dry_run=True)
    done = {s.decision.site.name: s.decision for s in report.sites}
    assert not done["layers.0.linear"].quantize
    assert not done["layers.4.linear"].quantize
    assert all(done[name].quantize == (way != "kept") for name, way in ways(found).items())
    assert all(d.weight_format == ("e5m2" if "1" in n else "e4m3") for n, d in done.items() if d.quantize)


def test_the_fastest_plan_is_that_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given here: wide matmuls gain most in E4M3, the others are slower than they were."""

    def timed(self: Any, model: Any) -> tuple[float, float]:
        nodes = [n for n in onnx.load(model).graph.node if n.domain == "mxfp8" and "Gemm" in n.op_type]
        shapes = {t.name: t.dims for t in onnx.load(model).graph.initializer}
        wide = sum(160 in shapes[name] for n in nodes for name in n.input if name in shapes and len(shapes[name]) == 2)
        return 1.0 - 0.1 * wide + 0.1 * (len(nodes) - wide / 2), 1.0

    monkeypatch.setattr(Trials, "_timed", timed)
    found = tune(chain(), "relative_l2<=0.5", objective="latency")
    assert {name for name, way in ways(found).items() if way != "kept"} == {"layers.2.linear", "layers.3.linear"}
    assert found.latency is not None


def test_a_model_in_memory_is_tuned_without_files_by_a_metric_of_the_users_own() -> None:
    Path("mine.py").write_text("def largest(a, b):\n    return abs(a['y'] - b['y']).max()\n")
    found = tune(chain(), "mine:largest<=0.5", "worst_mine:largest<=0.6")
    assert not [path for path in Path.cwd().iterdir() if path.name not in {"mine.py", "__pycache__"}]
    values = found.chosen.trial.scores["mine:largest"].values
    assert np.mean(values) <= 0.5
    assert max(values) <= 0.6


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_the_path_of_the_search() -> None:
    save(chain())
    result = run("tune", "m.onnx", "--budget", "relative_l2<=0.05")
    assert result.exit_code == 0, result.output
    assert "budget relative_l2<=0.05 kept" in result.stdout
    report = json.loads(Path("m.tuned/report.json").read_text())
    (chosen,) = [step for step in report["steps"] if step["chosen"]]
    assert chosen["met"]
    smaller = [step for step in report["steps"] if step["bytes"] < chosen["bytes"]]
    assert smaller
    assert not any(step["met"] for step in smaller)
    page = Path("m.tuned/report.html").read_text()
    steps = page.split("<h2>Steps</h2>")[1].split("</table>")[0]
    assert steps.count("<tr>") == 1 + len(report["steps"])  # the header, and a row per step
    assert steps.count('<td class="short green">chosen</td>') == 1
    count = len(report["steps"])
    assert re.search(rf"<dd>{count} plans rewritten and run on 8 samples; \d keep the budget</dd>", page)
    assert "exclude:" in page


def test_a_budget_that_nothing_keeps_is_exit_code_1_and_no_file() -> None:
    save(chain())
    message = refused("tune", "m.onnx", "--budget", "relative_l2<=0.0001", code=1)
    assert re.search(
        r"^error: m.onnx: the best that was reached is mean relative L2 0\.0\d+, with 5 kept, 1 \S+; expected "
        r"relative_l2<=0.0001;",
        message,
    )
    with pytest.raises(BudgetNotMetError) as caught:
        tune(b.chain_model((64, 96, 64, 64)), "relative_l2<=0.0001")
    tried = [step.trial.scores["relative_l2"].mean for step in caught.value.best.steps]
    assert caught.value.best.chosen.trial.scores["relative_l2"].mean == min(tried)


def test_a_folder_that_exists_is_not_touched_unless_asked() -> None:
    save(chain())
    Path("m.tuned").mkdir()
    Path("m.tuned/note.txt").write_text("mine")
    assert "m.tuned: exists; expected nothing there; pass --overwrite" in refused(
        "tune", "m.onnx", "--budget", "cosine>=0.9"
    )
    assert run("tune", "m.onnx", "--budget", "cosine>=0.9", "--overwrite").exit_code == 0
    assert Path("m.tuned/note.txt").read_text() == "mine"
    assert Path("m.tuned/m.mxfp8.onnx").exists()
    assert not Path("m.tuned.part").exists()


@looped("folder", [".", "..", "/"])
def test_a_result_needs_a_folder_of_its_own(folder: str) -> None:
    save(chain())
    assert "not the name of a folder" in refused("tune", "m.onnx", "--budget", "cosine>=0.9", "-o", folder)


def test_a_rewritten_model_is_refused() -> None:
    mxfp8_graph.rewrite(chain(), output="r.onnx")
    assert "expected the original model" in refused("tune", "r.onnx", "--budget", "cosine>=0.9")
    with pytest.raises(ContractError, match="expected at least one"):
        tune(chain())
