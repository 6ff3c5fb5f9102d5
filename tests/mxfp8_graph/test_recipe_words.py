"""TransformerEngine's words for recipes: names, the one line, and errors of the kind its users catch."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders as b
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


# --- MXFP8BlockScaling -----------------------------------------------------------------------------------------------


def test_the_name_is_the_default_recipe() -> None:
    named = load_recipe("MXFP8BlockScaling")
    assert named.name == "MXFP8BlockScaling"
    assert named.differences(load_recipe("mxfp8")) == {}
    assert MXFP8BlockScaling() == named


def test_a_model_is_rewritten_by_that_name_and_by_the_function() -> None:
    by_default, by_name, by_call = (
        mxfp8_graph.rewrite(b.chain_model(), recipe)[0].graph.SerializeToString(deterministic=True)
        for recipe in ("mxfp8", "MXFP8BlockScaling", MXFP8BlockScaling())
    )
    assert by_default == by_name == by_call


def test_the_function_takes_the_arguments_of_the_class_in_its_order() -> None:
    by_name = MXFP8BlockScaling(fp8_format="HYBRID", fp8_dpa=True, fp8_mha=False, margin=0, backward_override=None)
    assert by_name == MXFP8BlockScaling(0, "HYBRID", True, False, None)
    assert (by_name.fp8_format, by_name.attention_scores, by_name.attention_values) == ("HYBRID", True, True)


def test_the_function_takes_our_fields_too() -> None:
    recipe = MXFP8BlockScaling(scale_rounding="floor", exclude=["head"], name="mine")
    assert recipe == Recipe(name="mine", scale_rounding="floor", exclude=("head",))


@pytest.mark.parametrize("make", [MXFP8BlockScaling, Recipe])
@pytest.mark.parametrize("fp8_format", [Format.E4M3, Format.HYBRID])
def test_its_formats_are_accepted(make: Callable[..., Recipe], fp8_format: Format) -> None:
    assert make(fp8_format=fp8_format).fp8_format == fp8_format.name


@pytest.mark.parametrize("fp8_format", [Format.E5M2, Format.E2M1])
def test_formats_that_it_refuses_too(fp8_format: Format) -> None:
    assert complaint(lambda: MXFP8BlockScaling(fp8_format=fp8_format)) == (
        f"MXFP8BlockScaling: fp8_format: {fp8_format.name!r}; expected 'E4M3' or 'HYBRID'; correct it"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"margin": 1}, "margin: 1; expected 0; correct it"),
        ({"fp8_mha": True}, "fp8_mha: True; expected False; correct it"),
        (
            {"backward_override": "dequantized"},
            "backward_override: 'dequantized'; expected None, gradients in MXFP8; leave it out",
        ),
        (
            {"fp8_dpa": True, "attention_scores": False},
            "fp8_dpa is true and attention_scores is false; fp8_dpa means both attention products",
        ),
    ],
)
def test_what_mxfp8_has_not(fields: dict[str, Any], expected: str) -> None:
    assert complaint(lambda: MXFP8BlockScaling(**fields)) == f"MXFP8BlockScaling: {expected}"


def test_a_misspelt_argument_is_found() -> None:
    message = complaint(lambda: MXFP8BlockScaling(fp8_fromat="HYBRID"))
    assert message.startswith("MXFP8BlockScaling: fp8_fromat: unknown key; ")


def test_fields_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe_type: MXFP8BlockScaling\nfp8_format: HYBRID\nmargin: 0\nfp8_dpa: true\nfp8_mha: false\n")
    assert load_recipe(path) == MXFP8BlockScaling(0, "HYBRID", True, name="mine")


# --- Its other recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_another_recipe_is_answered_with_what_it_is(name: str) -> None:
    assert complaint(lambda: load_recipe(name)) == (
        f"recipe: {name} is {OTHERS[name]}, not MXFP8; expected one of mxfp8, mxfp8-bf16, "
        "mxfp8-weight-only, ocp, mxint8, mxint8-bf16, mxint8-weight-only, all, auto, or a .yaml or .toml file; "
        "`mxfp8-graph compare` emulates it and shows the error it makes on your model"
    )


@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_in_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"margin: 0\nrecipe_type: {name}\n")
    assert complaint(lambda: load_recipe(path)) == (
        f"{path}: recipe_type: {name} is {OTHERS[name]}, not MXFP8; expected MXFP8BlockScaling; "
        "`mxfp8-graph compare` emulates it and shows the error it makes on your model"
    )


@pytest.mark.parametrize("kind", ["MXFP4BlockScaling", 3, ["MXFP8BlockScaling"]])
def test_a_recipe_type_that_nobody_has(kind: Any) -> None:
    assert complaint(lambda: Recipe(recipe_type=kind)) == (
        f"Recipe: recipe_type: {kind!r}; expected MXFP8BlockScaling; correct or remove it"
    )


# --- One line --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (MXFP8BlockScaling(), ""),
        (load_recipe("mxfp8"), ""),
        (load_recipe("ocp"), ", scale_rounding=floor"),
        (
            Recipe(exclude=("^a\n",), rules=(Rule(name="up", quantize=False),), fuse=False),
            ", exclude=['^a\\n'], rules=[name='up' -> keep], fuse=False",
        ),
        (MXFP8BlockScaling(fp8_dpa=True), ", fp8_dpa=True, attention_scores=True, attention_values=True"),
    ],
)
def test_a_recipe_as_text_is_its_line_and_what_is_not_as_by_default(recipe: Recipe, text: str) -> None:
    assert str(recipe) == f"recipe_type=MXFP8BlockScaling, margin=0, format=E4M3{text}"


def test_the_line_names_the_format() -> None:
    assert str(MXFP8BlockScaling(fp8_format="HYBRID")) == "recipe_type=MXFP8BlockScaling, margin=0, format=HYBRID"


def test_repr_has_every_field() -> None:
    recipe = Recipe(name="mine", exclude=("head",))
    assert eval(repr(recipe)) == recipe
    assert all(f"{name}=" in repr(recipe) for name in Recipe.model_fields)


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, Mxfp8Error])
def test_a_recipe_error_is_what_either_side_catches(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="margin: 1; expected 0"):
        Recipe(margin=1)


@pytest.mark.parametrize("of", [Recipe(margin=0), Rule(name="up")], ids=["recipe", "rule"])
def test_fields_never_change(of: Recipe | Rule) -> None:
    with pytest.raises(ValueError, match="Instance is frozen"):
        of.name = "other"


def test_another_is_made_of_the_fields() -> None:
    recipe = Recipe(fp8_dpa=True, rules=(Rule(name="up", activations="e5m2"),))
    assert Recipe(**{**recipe.model_dump(exclude_unset=True), "fp8_dpa": False}) == Recipe(rules=recipe.rules)


def test_a_recipe_is_pickled_and_copied_though_it_never_changes() -> None:
    recipe = load_recipe("all")
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == copy.copy(recipe) == recipe


# --- A recipe after another ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (Recipe(), Recipe(fp8_format="HYBRID"), "packed with fp8_format E4M3, asked for HYBRID"),
        ("ocp", "mxfp8", "packed with scale_rounding floor, asked for ceil"),
        (
            Recipe(min_dim=0),
            Recipe(rules=(Rule(name="0", activations="e5m2"),)),
            "packed with min_dim 0, rules [], asked for min_dim 32, rules [name='0' -> quantize, activations=e5m2]",
        ),
    ],
    ids=["one field", "presets", "two fields"],
)
def test_a_mismatch_names_the_fields_that_differ(first: Any, second: Any, told: str) -> None:
    packed, _ = mxfp8_graph.rewrite(b.chain_model(), first)
    assert complaint(lambda: mxfp8_graph.rewrite(packed, second)) == (
        f"model: Recipe mismatch for 'x_mxfp8_quantize': {told}; expected the original model, since packed weights "
        "cannot be packed again; rewrite that one"
    )


def test_a_long_difference_is_cut() -> None:
    packed, _ = mxfp8_graph.rewrite(b.chain_model())
    message = complaint(lambda: mxfp8_graph.rewrite(packed, Recipe(exclude=("x" * 5000,))))
    assert "packed with exclude [], asked for ['xxx" in message
    assert len(message) < 500


def test_another_name_is_no_mismatch() -> None:
    packed, _ = mxfp8_graph.rewrite(b.chain_model())
    again, report = mxfp8_graph.rewrite(packed, "MXFP8BlockScaling")
    assert again is packed
    assert report.already_rewritten
