"""Recipes in the words of earlier versions: `weight_only` and `activation_format` mean `activations`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxfp8_graph.policy.recipe import Recipe, Rule, load_recipe, recorded
from mxfp8_ops.errors import RecipeError


def from_yaml(tmp_path: Path, text: str) -> Recipe:
    """Returns the recipe of a file that says `text`."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


@pytest.mark.parametrize(
    ("older", "activations"),
    [
        ({"weight_only": True}, "unchanged"),
        ({"weight_only": False}, "e4m3"),
        ({"activation_format": "e5m2"}, "e5m2"),
        ({"weight_only": False, "activation_format": "e5m2"}, "e5m2"),
    ],
)
@pytest.mark.parametrize("build", [Recipe, lambda **older: Rule(name="a", **older)], ids=["recipe", "rule"])
def test_an_older_spelling_means(build, older: dict[str, object], activations: str) -> None:
    assert build(**older).activations == activations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weight_only: true\nrules:\n- {name: a, weight_only: false}\n", ("unchanged", "e4m3")),
        ("activation_format: e5m2\nrules:\n- {name: a, weight_only: true}\n", ("e5m2", "unchanged")),
        ("activation_format: e5m2\nrules:\n- {name: a, weight_only: false}\n", ("e5m2", "e5m2")),
        ("activations: e5m2\nrules:\n- {name: a, weight_only: false}\n", ("e5m2", "e5m2")),
        (
            "weight_only: true\nactivation_format: e5m2\nrules:\n- {name: a, weight_only: false}\n",
            ("unchanged", "e5m2"),
        ),
        (
            "weight_only: true\nrules:\n- {name: a, weight_only: false, activation_format: e5m2}\n",
            ("unchanged", "e5m2"),
        ),
        ("weight_only: true\nrules:\n- {name: a, weight_format: e5m2}\n", ("unchanged", None)),
    ],
)
def test_a_rule_quantizes_activations_to_the_format_of_its_recipe(tmp_path: Path, text: str, expected: object) -> None:
    recipe = from_yaml(tmp_path, text)
    assert (recipe.activations, recipe.rules[0].activations) == expected


RECORD = {
    **{"name": "mine", "fp8_format": "E4M3", "margin": 0, "fp8_dpa": False, "fp8_mha": False},
    **{"scale_rounding": "ceil", "activation_format": "e5m2", "weight_format": "e4m3", "weight_only": True},
    **{"output_projections": False, "routers": False, "attention_scores": False, "attention_values": False},
    **{"min_dim": 32, "include": [], "exclude": []},
    "rules": [
        {
            **{"name": "up", "op": None, "subgraph": None, "min_n": None, "max_n": None, "min_k": None, "max_k": None},
            **{"quantize": True, "weight_only": False, "activation_format": None},
            **{"weight_format": None, "scale_rounding": None},
        }
    ],
}
"""A recipe as the version before `activations` recorded it."""


def test_what_an_earlier_version_recorded_is_the_recipe_it_was() -> None:
    rules = (Rule(name="up", activations="e5m2"),)
    assert recorded(json.dumps(RECORD)) == Recipe(name="mine", activations="unchanged", rules=rules, fuse=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weight_only: maybe\n", "mine.yaml:1: weight_only: 'maybe'; expected true or false; correct it"),
        ("\nweight_only:\n", "mine.yaml:2: weight_only: None; expected true or false; correct it"),
        (
            "activation_format: bfloat16\n",
            "mine.yaml:1: activation_format: 'bfloat16'; expected 'e4m3' or 'e5m2'; correct it",
        ),
        (
            "rules:\n- name: a\n  weight_only: 1\n",
            "mine.yaml:2: rules.0: weight_only: 1; expected true or false; correct it",
        ),
        (
            "weight_only: true\nactivation_format: e5m2\n",
            "mine.yaml:2: activation_format is e5m2 and weight_only is true, so it can have no effect; "
            "remove one or the other",
        ),
        (
            "rules:\n- {name: a, weight_only: true, activation_format: e5m2}\n",
            "mine.yaml:2: rules.0: weight_only is true, so activation_format can have no effect; "
            "remove one or the other",
        ),
        (
            "weight_only: true\nrules:\n- {name: a, activation_format: e5m2}\n",
            "mine.yaml:3: rules.0: activation_format is e5m2 and the recipe's weight_only is true, so it can have no "
            "effect; remove one or the other",
        ),
        (
            "activations: e5m2\nweight_only: false\n",
            "mine.yaml:2: weight_only is an older spelling of activations, which is given too; remove weight_only",
        ),
    ],
)
def test_an_older_spelling_that_is_wrong_or_contradicts_another(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        from_yaml(tmp_path, text)
    assert str(caught.value).replace(f"{tmp_path}/", "") == expected
