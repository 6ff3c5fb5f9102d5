"""TransformerEngine's words for recipes: names, the line of a recipe, and errors that its users catch."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models as b
import pytest

import mxfp8_graph
from mxfp8_graph import MXFP8BlockScaling, Recipe, Rule, load_recipe
from mxfp8_ops.errors import Mxfp8Error, RecipeError

OTHERS = {
    "DelayedScaling": "FP8 with one scale per tensor, from the magnitudes of earlier steps",
    "Float8CurrentScaling": "FP8 with one scale per tensor, from its own magnitude",
    "Float8BlockScaling": "FP8 with a float32 scale per 128 values, or per 128 x 128 of a weight",
    "NVFP4BlockScaling": "FP4 with an E4M3 scale per 16 values and one per tensor",
}


class Format(enum.Enum):
    """As in transformer_engine.common.recipe."""

    E2M1 = (6, 6)
    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


def complaint(build: Callable[[], Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        build()
    return str(caught.value)


def test_its_name_is_the_default_recipe() -> None:
    named = load_recipe("MXFP8BlockScaling")
    assert named.name == "MXFP8BlockScaling"
    assert named.differences(load_recipe("mxfp8")) == {}
    assert MXFP8BlockScaling() == named


def test_the_function_takes_the_arguments_of_the_class_in_its_order_and_our_fields() -> None:
    by_name = MXFP8BlockScaling(fp8_format="HYBRID", fp8_dpa=True, fp8_mha=False, margin=0, backward_override=None)
    assert by_name == MXFP8BlockScaling(0, "HYBRID", True, False, None)
    assert (by_name.fp8_format, by_name.attention_scores, by_name.attention_values) == ("HYBRID", True, True)
    recipe = MXFP8BlockScaling(scale_rounding="floor", exclude=["head"], name="mine")
    assert recipe == Recipe(name="mine", scale_rounding="floor", exclude=("head",))


@pytest.mark.parametrize("make", [MXFP8BlockScaling, Recipe])
@pytest.mark.parametrize("fp8_format", [Format.E4M3, Format.HYBRID])
def test_its_formats_are_accepted(make: Callable[..., Recipe], fp8_format: Format) -> None:
    assert make(fp8_format=fp8_format).fp8_format == fp8_format.name


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"fp8_format": Format.E2M1}, "fp8_format: 'E2M1'; expected 'E4M3' or 'HYBRID'"),
        ({"margin": 1}, "margin: 1; expected 0"),
        ({"backward_override": "dequantized"}, "backward_override: 'dequantized'; expected None"),
        ({"fp8_dpa": True, "attention_scores": False}, "fp8_dpa is true and attention_scores is false"),
        ({"fp8_fromat": "HYBRID"}, "fp8_fromat: unknown key; "),
    ],
)
def test_other_arguments_are_errors(fields: dict[str, Any], expected: str) -> None:
    assert complaint(lambda: MXFP8BlockScaling(**fields)).startswith(f"MXFP8BlockScaling: {expected}")


def test_a_file_may_have_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe_type: MXFP8BlockScaling\nfp8_format: HYBRID\nmargin: 0\nfp8_dpa: true\nfp8_mha: false\n")
    assert load_recipe(path) == MXFP8BlockScaling(0, "HYBRID", True, name="mine")


@pytest.mark.parametrize("name", OTHERS)
def test_the_error_of_another_recipe_of_its_names_the_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"margin: 0\nrecipe_type: {name}\n")
    for recipe, where, expected in (
        (name, "recipe", "one of mxfp8, "),
        (path, f"{path}: recipe_type", "MXFP8BlockScaling; "),
    ):
        message = complaint(lambda recipe=recipe: load_recipe(recipe))
        assert message.startswith(f"{where}: {name} is {OTHERS[name]}, not MXFP8; expected {expected}")
        assert message.endswith("`mxfp8-graph compare` emulates it and shows the error it makes on your model")


@pytest.mark.parametrize("kind", ["MXFP4BlockScaling", 3, ["MXFP8BlockScaling"]])
def test_an_unknown_recipe_type_is_an_error(kind: Any) -> None:
    message = complaint(lambda: Recipe(recipe_type=kind))
    assert message == f"Recipe: recipe_type: {kind!r}; expected MXFP8BlockScaling; correct or remove it"


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (MXFP8BlockScaling(), "E4M3"),
        (MXFP8BlockScaling(fp8_format="HYBRID"), "HYBRID"),
        (load_recipe("ocp"), "E4M3, scale_rounding=floor"),
        (
            Recipe(exclude=("^a\n",), rules=(Rule(name="up", quantize=False),), fuse=False),
            "E4M3, exclude=['^a\\n'], rules=[name='up' -> keep], fuse=False",
        ),
        (MXFP8BlockScaling(fp8_dpa=True), "E4M3, fp8_dpa=True, attention_scores=True, attention_values=True"),
    ],
)
def test_a_recipe_as_text_is_its_line_and_then_the_fields_with_other_values(recipe: Recipe, text: str) -> None:
    assert str(recipe) == f"recipe_type=MXFP8BlockScaling, margin=0, format={text}"


def test_repr_has_every_field() -> None:
    recipe = Recipe(name="mine", exclude=("head",))
    assert eval(repr(recipe)) == recipe
    assert all(f"{name}=" in repr(recipe) for name in Recipe.model_fields)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, Mxfp8Error])
def test_a_recipe_error_is_an_exception_that_users_of_either_library_catch(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="margin: 1; expected 0"):
        Recipe(margin=1)


@pytest.mark.parametrize("of", [Recipe(margin=0), Rule(name="up")], ids=["recipe", "rule"])
def test_fields_never_change(of: Recipe | Rule) -> None:
    with pytest.raises(ValueError, match="Instance is frozen"):
        of.name = "other"


def test_a_recipe_is_copied_by_its_fields_by_copy_and_by_pickle() -> None:
    recipe = load_recipe("all")
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == copy.copy(recipe) == recipe
    recipe = Recipe(fp8_dpa=True, rules=(Rule(name="up", activations="e5m2"),))
    assert Recipe(**{**recipe.model_dump(exclude_unset=True), "fp8_dpa": False}) == Recipe(rules=recipe.rules)


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ("ocp", "mxfp8", "packed with scale_rounding floor, asked for ceil"),
        (
            Recipe(min_dim=0),
            Recipe(rules=(Rule(name="0", activations="e5m2"),)),
            "packed with min_dim 0, rules [], asked for min_dim 32, rules [name='0' -> quantize, activations=e5m2]",
        ),
        ("mxfp8", Recipe(exclude=("x" * 5000,)), "packed with exclude [], asked for ['xxx"),
    ],
    ids=["presets", "two fields", "a long value"],
)
def test_rewriting_with_another_recipe_is_an_error_that_names_the_fields(
    first: Any, second: Any, difference: str
) -> None:
    packed, _ = mxfp8_graph.rewrite(b.chain_model(), first)
    message = complaint(lambda: mxfp8_graph.rewrite(packed, second))
    assert message.startswith(f"model: Recipe mismatch for 'x_mxfp8_quantize': {difference}")
    assert len(message) < 500


def test_a_recipe_of_another_name_is_the_same_recipe() -> None:
    packed, _ = mxfp8_graph.rewrite(b.chain_model())
    again, report = mxfp8_graph.rewrite(packed, "MXFP8BlockScaling")
    assert again is packed
    assert report.already_rewritten
