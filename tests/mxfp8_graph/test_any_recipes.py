"""Any recipe is a RecipeError, or reads back as itself and gives a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import properties  # noqa: F401 - sets hypothesis up
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe, Rule, load_recipe
from mxfp8_ops.errors import RecipeError

PATTERNS = st.sampled_from(["ffn", "^layers", r"layers\.\d+", "up$", "", "attention/(q|k|v)$", "nothing", "(", "[a-z"])
SIZES = st.sampled_from([0, 1, 31, 32, 64, 4096, -1, 10**20])
JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(SIZES, max_size=2))
SETTINGS = {
    "activations": st.sampled_from(["e4m3", "e5m2", "bfloat16", "unchanged", "fp8"]),
    "weight_format": st.sampled_from(["e4m3", "e5m2", "fp8"]),
    "scale_rounding": st.sampled_from(["ceil", "floor", "even", "up"]),
}
RULE = {
    **SETTINGS,
    "name": PATTERNS,
    "op": st.sampled_from(["MatMul", "Gemm", "Conv"]),
    "subgraph": PATTERNS,
    "quantize": st.booleans(),
    **dict.fromkeys(("min_n", "max_n", "min_k", "max_k"), SIZES),
}
SWITCHES = ("fp8_dpa", "output_projections", "routers", "embeddings", "attention_scores", "attention_values")
FIELDS = {
    **SETTINGS,
    "name": st.text(max_size=8),
    "fp8_format": st.sampled_from(["E4M3", "HYBRID", "e4m3"]),
    "margin": st.sampled_from([0, 1]),
    "min_dim": SIZES,
    **dict.fromkeys(SWITCHES, st.booleans()),
    **dict.fromkeys(("include", "exclude"), st.lists(PATTERNS, max_size=2)),
    "rules": st.lists(st.fixed_dictionaries({}, optional=RULE), max_size=3),
}


def some_of(fields: dict[str, Any], most: int = 4) -> st.SearchStrategy[dict[str, Any]]:
    """Returns mappings of up to `most` of the fields, to values that mostly fit."""
    keys = st.lists(st.sampled_from([*fields]), max_size=most, unique=True)
    return keys.flatmap(lambda chosen: st.fixed_dictionaries({key: fields[key] for key in chosen}))


BROKEN = some_of({**FIELDS, **dict.fromkeys(("min_dimm", "rules", "include", "activations", "name"), JUNK)})
FILES = st.one_of(
    BROKEN.map(lambda fields: ("yaml", yaml.safe_dump(fields, allow_unicode=True))),
    BROKEN.map(lambda fields: ("toml", "\n".join(f"{key} = {json.dumps(value)}" for key, value in fields.items()))),
    st.text(alphabet="ab: -[]{}&*\n\t'\"#!|>01.e", max_size=60).map(lambda content: ("yaml", content)),
)
SITES = st.lists(
    st.builds(
        MatMulSite,
        name=st.sampled_from(["layers.0.ffn.up", "layers.1.ffn.down", "attention/q", "head", "a\nb", ""]),
        op=st.sampled_from(["MatMul", "Gemm"]),
        module=st.sampled_from(["", "model.layers.0.up"]),
        subgraph=st.sampled_from(["", "loop/body"]),
        role=st.sampled_from(
            ["linear", "output_projection", "router", "attention_scores", "attention_values", "product"]
        ),
        n=st.sampled_from([None, "n", 1, 32, 4096]),
        k=st.sampled_from([None, "k", 31, 32, 4096]),
        weight=st.sampled_from([None, "w"]),
        blocker=st.sampled_from([None, None, None, "no static operand"]),
    ),
    max_size=6,
)


def recipe_of(fields: dict[str, Any]) -> Recipe:
    """Returns the recipe of these fields; an example with fields that no recipe can have is left out."""
    try:
        return Recipe(**{**fields, "rules": [Rule(**rule) for rule in fields.get("rules", [])]})
    except RecipeError:
        assume(False)
        raise


@given(some_of(FIELDS))
def test_a_recipe_reads_back_as_itself(tmp_path: Path, fields: dict[str, Any]) -> None:
    recipe = recipe_of(fields)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(recipe.model_dump_json(exclude_unset=True))), encoding="utf-8")
    assert load_recipe(path) == (recipe if "name" in fields else recipe.model_copy(update={"name": "recipe"}))


@given(FILES, SITES)
def test_a_file_is_an_error_with_its_place_or_gives_a_plan(
    tmp_path: Path, file: tuple[str, str], sites: list[MatMulSite]
) -> None:
    suffix, content = file
    path = tmp_path / f"recipe.{suffix}"
    path.write_text(content, encoding="utf-8")
    message = ""
    try:
        decisions = plan(sites, load_recipe(path))
    except RecipeError as error:
        decisions, message = [], str(error)
    assert message.startswith((f"{path}", "recipe ")) or [decision.site for decision in decisions] == sites, message
    assert all(decision.reason for decision in decisions)


@given(st.data(), some_of(FIELDS), SITES)
def test_a_plan_does_not_depend_on_the_order_of_the_sites(data: Any, fields: Any, sites: list[MatMulSite]) -> None:
    recipe = recipe_of(fields)
    try:
        decisions = plan(sites, recipe)
    except RecipeError:
        assume(False)
    assert plan(sites, recipe) == decisions
    order = data.draw(st.permutations(range(len(sites))))
    assert plan([sites[i] for i in order], recipe) == [decisions[i] for i in order]
