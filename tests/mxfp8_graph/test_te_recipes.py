"""Recipes, contexts and recipe states of `te`: the sources' recipe tests, written anew."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch_programs import relative_l2, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import te  # noqa: E402
from mxfp8_graph.te import nexus, recipe  # noqa: E402
from mxfp8_graph.te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling  # noqa: E402
from mxfp8_ops.errors import Mxfp8Error, RecipeError  # noqa: E402

X = values(32, 256, seed=1)


def step(layer: te.Linear, by: Any, x: Tensor = X) -> Tensor:
    with te.autocast(enabled=True, recipe=by):
        y: Tensor = layer(x)
    y.mean().backward()
    return y


def test_the_recipe_is_a_class_with_the_sources_fields_text_and_questions() -> None:
    assert isinstance(MXFP8BlockScaling(), recipe.MXFP8BlockScaling)
    assert isinstance(MXFP8BlockScaling(), mxfp8_graph.Recipe)
    assert repr(MXFP8BlockScaling(margin=0, fp8_format=Format.E4M3, fp8_dpa=False, fp8_mha=False)) == str(
        MXFP8BlockScaling()
    )
    assert str(MXFP8BlockScaling()) == "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3"
    assert MXFP8BlockScaling(fp8_format=Format.HYBRID).fp8_format == Format.HYBRID
    assert Format.HYBRID.value.max_bwd == 57344


QUESTIONS = "mxfp8 delayed float8_current_scaling float8_per_tensor_scaling float8_block_scaling nvfp4 custom fp8"


@pytest.mark.parametrize(
    ("by", "answers"),
    [
        (MXFP8BlockScaling(), {"mxfp8", "block_scaling"}),
        (mxfp8_graph.load_recipe("mxint8"), set()),
        (DelayedScaling(), {"delayed", "float8_per_tensor_scaling", "fp8"}),
        (Float8CurrentScaling(), {"float8_current_scaling", "float8_per_tensor_scaling", "fp8"}),
        (Float8BlockScaling(), {"float8_block_scaling", "block_scaling", "fp8"}),
    ],
)
def test_recipes_answer_questions(by: Any, answers: set[str]) -> None:
    assert {name for name in [*QUESTIONS.split(), "block_scaling"] if getattr(by, name)()} == answers


@pytest.mark.parametrize("by", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), "ocp"])
def test_weight_and_recipe_correspond(by: Any) -> None:
    with te.quantized_model_init(enabled=True, recipe=MXFP8BlockScaling()):
        linear = te.Linear(256, 32)
    assert isinstance(linear.weight, te.MXFP8Tensor)
    with te.autocast(enabled=True, recipe=by), pytest.raises(RuntimeError, match=r"^Recipe mismatch for 'weight'"):
        linear(X)


KINDS = [
    (DelayedScaling, te.Float8Quantizer),
    (Float8CurrentScaling, te.Float8CurrentScalingQuantizer),
    (Float8BlockScaling, te.Float8BlockQuantizer),
    (MXFP8BlockScaling, te.MXFP8Quantizer),
]


@pytest.mark.parametrize(("first", "quantizer"), KINDS)
@pytest.mark.parametrize(("then", "expected"), KINDS)
def test_a_recipe_may_change_while_a_layer_trains(first: Any, quantizer: Any, then: Any, expected: Any) -> None:
    layer = te.Linear(256, 32)
    for _ in range(3):
        step(layer, first())
    assert {type(each) for each in layer.quantizers["scaling_fwd"]} == {quantizer}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(layer, then())
    changed = [each for each in caught if "Recipe type changed" in str(each.message)]
    text = f"Recipe type changed from {first.__name__} to {then.__name__}. This may affect model behavior."
    assert [str(each.message) for each in changed] == ([] if first is then else [text])
    assert {each.filename for each in changed} <= {__file__}
    assert [type(each) for each in layer.quantizers["scaling_fwd"]] == [expected] * 3
    assert [type(each) for each in layer.quantizers["scaling_bwd"]] == [expected] * 2


def test_a_change_of_format_makes_new_quantizers_without_a_warning() -> None:
    layer = te.Linear(256, 32)
    step(layer, MXFP8BlockScaling())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(layer, MXFP8BlockScaling(fp8_format="HYBRID"))
    assert [each.dtype for each in layer.quantizers["scaling_bwd"]] == [te.DType.kFloat8E5M2] * 2
    assert layer.fp8_meta["scaling_fwd"].dtype is te.DType.kFloat8E4M3


def test_rewriting_by_another_format_does_not_speak_of_another_type() -> None:
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)), (X[:, :64],))
    first, _ = mxfp8_graph.rewrite(program, MXFP8BlockScaling(), training=True)
    with pytest.warns(UserWarning, match=r"^Recipe MXFP8BlockScaling changed: fp8_format from E4M3 to HYBRID"):
        mxfp8_graph.rewrite(first, MXFP8BlockScaling(fp8_format="HYBRID"), training=True)


def test_recipe_states_make_quantizers() -> None:
    state = te.RecipeState.create(MXFP8BlockScaling(fp8_format="HYBRID"), mode="backward", num_quantizers=2)
    assert type(state) is te.MXFP8BlockScalingRecipeState
    assert [each.dtype.name for each in state.make_quantizers()] == ["kFloat8E5M2"] * 2
    with pytest.raises(Mxfp8Error, match="mode: 'sideways'; expected one of forward, backward"):
        te.RecipeState.create(MXFP8BlockScaling(), mode="sideways")


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_takes_the_scale_of_earlier_calls(algorithm: str) -> None:
    by = DelayedScaling(amax_history_len=2, amax_compute_algo=algorithm, margin=1)
    (quantizer,) = te.RecipeState.create(by, mode="forward").make_quantizers()
    history, amax = [], 0.0
    for factor in (1.0, 8.0, 0.5, 0.25, 0.0, 0.0, 3.0):
        scale = 448 / amax / 2 if amax else 1.0
        assert quantizer.scale == pytest.approx(scale)
        wanted = (X * factor * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        torch.testing.assert_close(quantizer(X * factor), wanted, rtol=1e-6, atol=1e-9)
        history.append(float((X * factor).abs().max()))
        # The last scale stays where the history has zeros only.
        amax = (max(history[-2:]) if algorithm == "max" else history[-1]) or amax


def test_delayed_scaling_updates_once_for_an_autocast_and_not_in_an_evaluation() -> None:
    layer, by = te.Linear(256, 32), DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=by):
        layer(X)
        with te.autocast(recipe=by):
            layer(3 * X)
    (quantizer, *_) = layer.quantizers["scaling_fwd"]
    assert list(quantizer.amax_history) == [float((3 * X).abs().max())]
    with torch.no_grad(), te.autocast(recipe=by):
        layer(1000 * X)
    assert quantizer.scale == pytest.approx(448 / float((3 * X).abs().max()))


@pytest.mark.parametrize(("kind", "most"), [(Float8CurrentScaling, 0.15), (Float8BlockScaling, 0.05)])
def test_emulated_recipes_have_the_three_products(kind: Any, most: float) -> None:
    """Heavy-tailed values lose their small ones to one scale per tensor, and fewer to one per 128 values."""
    layer, x = te.Linear(256, 200), X.clone().requires_grad_()
    step(layer, kind(), x)
    got = x.grad, layer.weight.grad, layer.bias.grad
    other, weight, bias = (each.detach().clone().requires_grad_() for each in (X, layer.weight, layer.bias))
    F.linear(other, weight, bias).mean().backward()
    for mine, theirs in zip(got, (other.grad, weight.grad, bias.grad), strict=True):
        assert relative_l2(mine, theirs) < most
    assert relative_l2(got[0], other.grad) > 1e-3  # it is not float32


def test_contexts_nest_and_end_after_an_exception() -> None:
    outer, inner = MXFP8BlockScaling(), MXFP8BlockScaling(fp8_format="HYBRID")
    with te.autocast(recipe=outer) as context:
        with te.autocast(recipe=inner), te.autocast(enabled=False):
            assert te.current_recipe() is None
        with pytest.raises(KeyError), te.autocast(recipe=inner):
            raise KeyError
        with context:  # the same object again
            assert te.current_recipe() is outer
        assert te.current_recipe() is outer
    assert te.current_recipe() is None
    with pytest.raises(KeyError), te.quantized_model_init():
        raise KeyError

    def generator() -> Any:
        with te.autocast(recipe=inner):
            yield

    left_open = generator()
    next(left_open)
    with te.autocast(recipe=outer):
        left_open.close()
        assert te.current_recipe() is outer
    assert te.current_recipe() is None
    assert not isinstance(te.Linear(32, 32).weight, te.MXFP8Tensor)


def test_threads_have_contexts_of_their_own() -> None:
    layer, results, barrier = te.Linear(256, 64), {}, threading.Barrier(3)

    def work(name: str, by: Any) -> None:
        for _ in range(20):
            barrier.wait()
            with te.autocast(enabled=by is not None, recipe=by), torch.no_grad():
                results.setdefault(name, []).append(layer(X))

    recipes = {"float32": None, "mxfp8": MXFP8BlockScaling(), "ocp": mxfp8_graph.load_recipe("ocp")}
    threads = [threading.Thread(target=work, args=row) for row in recipes.items()]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for name, by in recipes.items():
        with te.autocast(enabled=by is not None, recipe=by), torch.no_grad():
            wanted = layer(X)
        assert all(torch.equal(y, wanted) for y in results[name]), name


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("mxint8", "autocast: mxint8 has other formats than E4M3"),
        (mxfp8_graph.Recipe(exclude=("head",)), "autocast: custom chooses among layers by name"),
        ("mxfp9", "recipe: 'mxfp9'"),
    ],
)
def test_autocast_refuses_recipes_that_a_layer_cannot_follow(by: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        te.autocast(recipe=by)
    assert str(caught.value).startswith(message)


def test_what_is_emulated_has_no_stored_form_and_no_rewrite() -> None:
    with (
        pytest.raises(RecipeError, match="DelayedScaling has no stored form"),
        te.quantized_model_init(recipe=DelayedScaling()),
    ):
        pass
    with pytest.raises(RecipeError, match=r"DelayedScaling is FP8 with one scale per tensor.*compare"):
        mxfp8_graph.load_recipe(DelayedScaling())  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="DelayedScaling: fp8_format: E5M2; expected E4M3 or HYBRID"):
        DelayedScaling(fp8_format="E5M2")


def test_availability_is_an_answer_and_a_reason() -> None:
    available, reason = te.is_mxfp8_available()
    assert available
    assert "CPU kernels" in reason
    assert te.is_mxfp8_available(return_reason=False)
    assert not te.is_nvfp4_available()


PAGE = (Path(__file__).parents[2] / "docs/from_transformer_engine.md").read_text(encoding="utf-8")


def test_the_names_of_the_page_exist() -> None:
    rows = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and " | " in line]
    names = re.findall(r"`((?:te|recipe|nexus)\.[\w.]+)`", "\n".join(rows))
    assert len(names) > 30
    for name in names:
        found: Any = {"te": te, "recipe": recipe, "nexus": nexus}[name.partition(".")[0]]
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


def test_the_tests_of_the_page_exist() -> None:
    links = re.findall(r"\.\./(tests/[\w/]+\.py)(?:#(\w+))?\)", PAGE)
    assert len(links) > 40
    for file, test in links:
        assert not test or f"def {test}(" in (Path(__file__).parents[2] / file).read_text(encoding="utf-8"), test
