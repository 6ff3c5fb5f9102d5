"""tune: what it writes meets the budget, is small, can be made again from its recipe, and beats chance."""

from __future__ import annotations

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import models as b
import numpy as np
import onnx
import pytest
from commands import refused, run, save
from grids import looped

import mxfp8_graph
from mxfp8_graph import Recipe, Rule
from mxfp8_graph.policy import presets
from mxfp8_graph.running.runner import open_runnable
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.metrics import Score
from mxfp8_graph.tools.trials import Bench, Latency
from mxfp8_graph.tools.tune.budget import parse
from mxfp8_graph.tools.tune.plans import TREATMENTS, Plan
from mxfp8_graph.tools.tune.result import BudgetNotMetError
from mxfp8_ops.errors import ContractError, RecipeError, ShapeError

pytestmark = pytest.mark.usefixtures("own_folder")

SIZES = (64, 96, 64, 160, 64, 96, 64)
SAMPLES = [{"x": np.random.default_rng(seed).standard_normal((8, 64), np.float32)} for seed in range(2)]


def chain() -> onnx.ModelProto:
    return b.chain_model(SIZES)


def tune(model: Any, *budgets: str, **settings: Any) -> Any:
    settings.setdefault("inputs", SAMPLES)
    return mxfp8_graph.tune(model, budgets, **settings)


def error(model: Any, rewritten: Any, samples: Any = SAMPLES) -> float:
    """Returns the mean relative L2 error at the output, by nothing that tune uses but a session."""
    original, other = Session(model, kernels=False), Session(rewritten, kernels=True)
    pairs = [(original.run(x)["y"], other.run(x)["y"]) for x in samples]
    return float(np.mean([np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in pairs]))


def error_by_hand(model: onnx.ModelProto, treatment: str, *kept: str) -> float:
    """Returns the error of a rewrite with one treatment for all matmuls but those that are kept."""
    patterns = tuple(f"^{re.escape(name)}$" for name in kept)
    return error(model, mxfp8_graph.rewrite(model, Recipe(**TREATMENTS[treatment], exclude=patterns))[0])


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times of models by the name of their treatment, which stand for measured ones."""
    found = {"original": 1.0, "e4m3": 0.5, "int8": 0.4, "bfloat16": 0.7, "weight-only": 0.9}
    monkeypatch.setattr(Bench, "seconds", lambda _, models, __: {name: Latency(found[name], 0) for name in models})
    return found


@looped(
    "text, expected",
    [
        ("cosine>=0.999", "cosine>=0.999"),
        (" relative_l2 <= 2e-2 ", "relative_l2<=0.02"),
        ("worst_top1>=.99", "worst_top1>=0.99"),
        ("cosine", "'cosine'; expected METRIC>=NUMBER or METRIC<=NUMBER"),
        ("cosine>=nan", "expected METRIC>=NUMBER"),
        ("cosine>=0.9>=0.8", "expected METRIC>=NUMBER"),
        ("cosine<=0.9", "more cosine is better; expected cosine>=NUMBER; reverse the sign"),
        ("worst_kl>=0.9", "expected worst_kl<=NUMBER"),
        ("cosin>=0.9", "'cosin'; expected one of relative_l2, sqnr, cosine"),
        ("cosine>=1.5", "which no plan can meet; expected cosine>=NUMBER with a number of at most 1; correct it"),
        ("worst_max_error<=-1e-9", "expected worst_max_error<=NUMBER with a number of at least 0"),
    ],
)
def test_a_budget_is_a_metric_a_sign_and_a_number_that_a_plan_can_meet(text: str, expected: str) -> None:
    if "expected" not in expected:
        assert str(parse(text)) == expected
        return
    with pytest.raises(ContractError, match=re.escape(expected)):
        parse(text)


def test_a_budget_that_is_met_exactly_is_met_by_the_mean_or_the_worst_sample() -> None:
    for text, value in (("cosine>=0.75", 0.75), ("relative_l2<=0.25", 0.25), ("top1>=1", 1.0)):
        budget = parse(text)
        assert budget.met(Score(metric=budget.metric, values=(value,)))
        assert not budget.met(Score(metric=budget.metric, values=(float("nan"),)))
    score = Score(metric=parse("relative_l2<=1").metric, values=(0.1, 0.3))
    assert parse("relative_l2<=0.2").met(score)
    assert not parse("worst_relative_l2<=0.2").met(score)


def test_samples_without_a_finite_output_are_refused_before_the_search() -> None:
    """They would count for nothing in a mean, whatever the plan."""
    nowhere = {"x": np.full((8, 64), np.nan, np.float32)}
    with pytest.raises(ShapeError, match=r"given inputs sample 2: output 'y' has no finite value; .*; leave it out"):
        tune(chain(), "cosine>=0.5", inputs=[SAMPLES[0], nowhere])
    with pytest.raises(ShapeError, match="given inputs: no output has a value; "):
        tune(chain(), "cosine>=0.5", inputs={"x": np.zeros((0, 64), np.float32)})


def test_the_fastest_treatment_that_meets_the_budget_is_chosen(speeds: dict[str, float]) -> None:
    budget = f"relative_l2<={error_by_hand(chain(), 'e4m3') * 1.01}"
    for objective in ("size", "latency"):
        found = tune(chain(), budget, objective=objective)
        assert (found.chosen.what, found.chosen.speed) == ("6 int8", 1 / 0.4)
        assert [step.what for step in found.steps] == ["6 e4m3", "6 int8", "6 bfloat16", "6 weight-only"]


def test_of_plans_that_are_as_fast_the_one_that_auto_takes_is_chosen_or_the_most_accurate(
    speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = f"relative_l2<={error_by_hand(chain(), 'e4m3') * 1.01}"
    monkeypatch.setattr(presets, "best", lambda isa: "mxint8")
    speeds["bfloat16"] = 0.39  # within 10 %
    assert tune(chain(), budget).chosen.preset == "mxint8"
    speeds["int8"] = 0.9
    speeds["e4m3"] = 0.39
    assert tune(chain(), budget).chosen.preset == "mxint8-bf16"


def test_a_fast_treatment_that_misses_is_mended_at_the_fewest_sites(speeds: dict[str, float]) -> None:
    bound = (2 * error_by_hand(chain(), "int8") + error_by_hand(chain(), "bfloat16")) / 3
    runs: list[int] = []
    found = tune(chain(), f"relative_l2<={bound}", progress=lambda what, done, total: runs.append(done))
    assert runs == sorted(runs)  # the ranking of the sites counts on
    assert re.fullmatch(r"[3-5] int8, [1-3] bfloat16", found.chosen.what)
    fewer = [step for step in found.steps if step.plan.treatment == "int8" and step.plan.worst]
    assert all(step.met == (len(step.plan.worst) >= len(found.chosen.plan.worst)) for step in fewer)
    assert error(chain(), mxfp8_graph.rewrite(chain(), found.recipe)[0]) <= bound
    assert speeds["int8"] == found.chosen.seconds[0]


def test_as_few_sites_as_possible_are_kept_and_better_ones_than_by_chance() -> None:
    """Layers that matter more than others: a sum of 12 products, each half as large as the one before it."""
    text = "; ".join(f"branch{i}.linear:MatMul x w{i}>p{i}; Tanh p{i}>t{i}" for i in range(12))
    nodes = b.steps(f"{text}; Sum {' '.join(f't{i}' for i in range(12))}>y")
    weights = {f"w{i}": b.weight(64, 64, seed=i) * np.float32(0.5**i) for i in range(12)}
    model = b.model(nodes, {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["m", 64])}, weights)
    worst = {f"branch{i}.linear" for i in range(3)}
    found = tune(model, f"relative_l2<={error_by_hand(model, 'weight-only', *worst) * 1.001}")
    assert (found.chosen.plan.better, set(found.chosen.plan.worst)) == ("kept", worst)
    rng = np.random.default_rng(0)
    for _ in range(2):
        chance = {f"branch{i}.linear" for i in rng.choice(12, 3, replace=False)}
        assert chance == worst or found.chosen.error < error_by_hand(model, "weight-only", *chance)


def test_matmuls_of_one_weight_are_treated_alike() -> None:
    text = "first:MatMul x w>a; Tanh a>t; second:MatMul t w>c; Tanh c>u; third:MatMul u v>d; Tanh d>y"
    shapes = {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["m", 64])}
    model = b.model(b.steps(text), *shapes, {"w": b.weight(64, 64), "v": b.weight(64, 64, seed=1)})
    with pytest.raises(BudgetNotMetError) as caught:
        tune(model, "relative_l2<=1e-5")
    assert [step.plan.worst for step in caught.value.best.steps[4:]] == [("first", "second")]


def test_weights_of_one_name_in_two_branches_are_two_weights() -> None:
    y = onnx.helper.make_empty_tensor_value_info("y")

    def branch(name: str, seed: int) -> onnx.GraphProto:
        stored = [onnx.numpy_helper.from_array(b.weight(64, 64, seed=seed), "w")]
        return onnx.helper.make_graph(b.steps(f"{name}:MatMul x w>y"), name, [], [y], stored)

    choose = b.node("If", "c", "h", "choose", then_branch=branch("yes", 0), else_branch=branch("no", 1))
    inputs = {"x": (np.float32, ["m", 64]), "c": (np.bool_, [])}
    model = b.model([choose, *b.steps("Tanh h>z")], inputs, {"z": (np.float32, ["m", 64])})
    samples = [{**sample, "c": np.array(number == 0)} for number, sample in enumerate(SAMPLES)]
    with pytest.raises(BudgetNotMetError) as caught:
        tune(model, "relative_l2<=1e-5", inputs=samples)
    assert [len(step.plan.worst) for step in caught.value.best.steps[4:]] == [1]


def test_one_rewritten_model_at_a_time_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Any]] = []
    counts = []

    def trial(bench: Bench, *arguments: Any) -> Any:
        counts.append(sum(each() is not None for each in opened))
        result = of_bench(bench, *arguments)
        opened.append(weakref.ref(result.runnable))
        return result

    of_bench = Bench.trial
    monkeypatch.setattr(Bench, "trial", trial)
    tune(chain(), "relative_l2<=0.5")
    assert counts == [0, 0, 0, 0]


def test_a_name_that_is_the_module_of_another_site_cannot_be_told_apart() -> None:
    sites = [site.decision.site for site in mxfp8_graph.rewrite(chain(), dry_run=True)[1].sites]
    first = replace(sites[0], name="a", module="layers.2.linear")
    with pytest.raises(RecipeError, match=r"no pattern tells 'a' from other matmuls"):
        Plan(treatment="int8", worst=("layers.2.linear",)).recipe(Recipe(), [first, *sites[1:]], "tuned")


def test_the_base_recipe_selects_the_matmuls() -> None:
    rules = (
        Rule(name="layers.1", weight_format="e5m2", activations="unchanged"),
        Rule(name="layers.4", quantize=False),
    )
    found = tune(chain(), "relative_l2<=0.5", recipe=Recipe(name="mine", exclude=("layers.0",), rules=rules))
    _, report = mxfp8_graph.rewrite(chain(), found.recipe, dry_run=True)
    packed = {site.decision.site.name: site.decision.weight_format for site in report.rewritten}
    assert packed.keys() == {f"layers.{i}.linear" for i in (1, 2, 3, 5)}
    assert set(packed.values()) == {TREATMENTS[found.chosen.plan.treatment]["weight_format"]}


def test_the_recipe_makes_the_same_model_which_meets_the_budget() -> None:
    source = save(chain())
    found = tune(source, "relative_l2<=0.008")
    assert {p.name for p in Path("m.tuned").iterdir()} == {"m.mxint8.onnx", "recipe.yaml", "report.html", "report.json"}
    again, report = mxfp8_graph.rewrite(source, "m.tuned/recipe.yaml", output="again.onnx")
    assert Path("again.onnx").read_bytes() == Path("m.tuned/m.mxint8.onnx").read_bytes()
    measured = error(source, str(again))
    assert found.chosen.scores["relative_l2"].mean == pytest.approx(measured, rel=1e-5)
    assert measured <= 0.008
    assert 0 < len(report.rewritten) < len(report.sites)
    assert found.chosen.byte_size == report.account.bytes_after


def test_a_program_is_tuned_and_its_recipe_makes_it_again() -> None:
    torch = pytest.importorskip("torch")
    from torch_programs import export, values

    nn = torch.nn
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64))
    path = mxfp8_graph.save(export(net, torch.zeros(8, 64)), "net.pt2")
    inputs = {"input": values(8, 64).numpy()}
    found = mxfp8_graph.tune(path, "relative_l2<=0.03", inputs=inputs)
    files = {"net.mxint8.pt2", "recipe.yaml", "report.html", "report.json"}
    assert {p.name for p in Path("net.tuned").iterdir()} == files
    again, _ = mxfp8_graph.rewrite(path, "net.tuned/recipe.yaml", output="again.pt2")
    outputs = [open_runnable(model)[1].run(inputs) for model in (path, again, "net.tuned/net.mxint8.pt2")]
    original, rewritten, written = (next(iter(each.values())) for each in outputs)
    np.testing.assert_array_equal(rewritten, written)
    measured = np.linalg.norm(rewritten - original) / np.linalg.norm(original)
    assert measured <= 0.03
    assert found.chosen.scores["relative_l2"].mean == pytest.approx(measured, rel=1e-5)


def test_a_model_in_memory_is_tuned_without_files_by_a_metric_of_the_users_own() -> None:
    Path("mine.py").write_text("def largest(a, b):\n    return abs(a['y'] - b['y']).max()\n")
    found = tune(chain(), "mine:largest<=0.5", "worst_mine:largest<=0.6")
    assert not [path for path in Path.cwd().iterdir() if path.name not in {"mine.py", "__pycache__"}]
    values = found.chosen.scores["mine:largest"].values
    assert (np.mean(values) <= 0.5, max(values) <= 0.6) == (True, True)


def test_the_command_ends_with_the_answer_and_writes_the_plans() -> None:
    save(chain())
    result = run("tune", "m.onnx", "--budget", "relative_l2<=0.05")
    assert result.exit_code == 0, result.output
    answer = result.stdout.splitlines()[-1]
    expected = (
        r"Take m.tuned/recipe.yaml \(6 \S+, as --recipe \S+\): mean relative L2 0\.0\d+ meets relative_l2<=0.05, 3\.\d"
    )
    assert re.match(expected, answer), answer
    report = json.loads(Path("m.tuned/report.json").read_text())
    assert report["chosen"] in report["steps"]
    assert report["budgets_met"]
    page = Path("m.tuned/report.html").read_text()
    assert page.count('<td class="short green">met</td>') == sum(step["met"] for step in report["steps"])


def test_a_budget_that_nothing_meets_is_exit_code_1_and_no_file() -> None:
    save(chain())
    message = refused("tune", "m.onnx", "--budget", "relative_l2<=0.00001", code=1)
    reached = r"the best that was reached is mean relative L2 0\.00\d+, with 1 \S+, 5 kept; expected relative_l2<=1e-05"
    assert re.search(rf"^error: m.onnx: {reached};", message), message
    assert not Path("m.tuned").exists()


def test_a_folder_that_exists_is_not_touched_unless_asked() -> None:
    save(chain())
    Path("m.tuned").mkdir()
    Path("m.tuned/note.txt").write_text("mine")
    message = refused("tune", "m.onnx", "--budget", "cosine>=0.9")
    assert "m.tuned: exists already; expected a new folder; pass another --output, or --overwrite" in message
    assert run("tune", "m.onnx", "--budget", "cosine>=0.9", "--overwrite").exit_code == 0
    assert Path("m.tuned/note.txt").read_text() == "mine"
    assert list(Path("m.tuned").glob("m.mx*.onnx"))


@looped("folder", [".", "..", "/", "m.onnx", "none/there"])
def test_a_result_needs_a_folder_of_its_own(folder: str) -> None:
    save(chain())
    assert "expected a" in refused("tune", "m.onnx", "--budget", "cosine>=0.9", "-o", folder)


def test_a_rewritten_model_is_refused() -> None:
    mxfp8_graph.rewrite(chain(), output="r.onnx")
    assert "expected the original model" in refused("tune", "r.onnx", "--budget", "cosine>=0.9")
    with pytest.raises(ContractError, match="expected at least one"):
        tune(chain())
