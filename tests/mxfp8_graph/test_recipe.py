"""Recipes: presets, files, and the error of each mistake in one."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from mxfp8_graph.policy.plan import plan
from mxfp8_graph.policy.presets import PRESETS
from mxfp8_graph.policy.recipe import Activations, ElementFormatName, Recipe, Rule, ScaleRounding, load_recipe
from mxfp8_ops import formats
from mxfp8_ops.errors import RecipeError

Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Returns a function that writes a recipe file and loads it."""
    monkeypatch.chdir(tmp_path)

    def load(content: str, path: str = "mine.yaml") -> Recipe:
        Path(path).write_text(content)
        return load_recipe(path)

    return load


def complaint(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*arguments)
    assert caught.value.__cause__ is None
    return str(caught.value)


def unpickled(**values: object) -> Recipe:
    """Returns a recipe with these values that nothing has checked."""
    recipe = Recipe()
    recipe.__dict__.update(values)
    return pickle.loads(pickle.dumps(recipe))


ON = ("output_projections", "routers", "embeddings", "attention_scores", "attention_values", "fp8_dpa")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mxfp8", {}),
        ("mxfp8-bf16", {"activations": "bfloat16"}),
        ("mxfp8-weight-only", {"activations": "unchanged"}),
        ("mxint8-bf16", {"weight_format": "int8", "activations": "bfloat16", "scale_rounding": "floor"}),
        ("ocp", {"scale_rounding": "floor"}),
        ("all", dict.fromkeys(ON, True)),
    ],
)
def test_a_preset_differs_from_the_default_in(name: str, settings: dict[str, object]) -> None:
    preset = load_recipe(name)
    assert preset.model_dump(exclude_defaults=True, exclude={"name"}) == settings
    assert preset.name == name
    assert Recipe.model_validate_json(preset.model_dump_json()) == preset


@pytest.mark.parametrize("name", PRESETS)
def test_docs_explain_each_preset(name: str) -> None:
    assert f"| `{name}` " in (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")


def test_a_preset_is_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "toy", {"min_dim": 64})
    assert load_recipe("toy") == Recipe(name="toy", min_dim=64)
    message = complaint(load_recipe, "mxfp4")
    assert message.startswith("recipe: 'mxfp4'; expected one of mxfp8, mxfp8-bf16, ")
    assert message.endswith(", all, toy, auto, or a .yaml or .toml file; did you mean mxfp8?")
    code = "import sys; from mxfp8_graph.policy.presets import PRESETS; PRESETS['toy'] = {'min_dim': 64}; "
    code += "from mxfp8_graph import cli; sys.argv[1:] = ['rewrite', '--help']; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "all, toy, auto, or a .yaml or .toml file" in " ".join(done.stdout.split())


def test_a_recipe_is_its_own_recipe() -> None:
    mine = Recipe(name="mine", rules=(Rule(name="mlp"),))
    assert load_recipe(mine) is mine


def test_a_preset_takes_further_fields() -> None:
    named = load_recipe("mxint8", embeddings=True)
    assert named == Recipe(**PRESETS["mxint8"], embeddings=True, name="mxint8 with embeddings=True")


def test_yaml_and_toml_files_have_the_fields_of_a_recipe(load: Load) -> None:
    text = "activations: unchanged\nexclude: [lm_head]\nrules:\n  - name: mlp\n    activations: e5m2\n"
    rules = (Rule(name="mlp", activations="e5m2"),)
    assert load(text) == Recipe(name="mine", activations="unchanged", exclude=("lm_head",), rules=rules)
    text = 'name = "production"\nmin_dim = 64\n[[rules]]\nop = "Gemm"\nquantize = false\n'
    expected = Recipe(name="production", min_dim=64, rules=(Rule(op="Gemm", quantize=False),))
    assert load(text, "mine.toml") == expected


def test_a_file_that_cannot_be_read_is_an_error(load: Load) -> None:
    message = complaint(load_recipe, "none.yaml")
    assert message == "none.yaml: No such file or directory; expected a readable recipe file; check the path"
    Path("mine.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    assert complaint(load_recipe, "mine.yaml").startswith("mine.yaml: 'utf-8' codec can't decode byte 0xff")


MISTAKES = {
    "min_dim: -1\n": "min_dim: -1; expected greater than or equal to 0",
    "min_dim: true\n": "min_dim: True; expected a valid integer",
    "\nmargin: 1\n": "margin: 1; expected 0",
    "fp8_mha: true\n": "fp8_mha: True; expected False",
    "fp8_format: E5M2\n": "fp8_format: 'E5M2'; expected 'E4M3' or 'HYBRID'",
    "activations: fp8\n": "activations: 'fp8'; expected 'e4m3', 'e5m2', 'int8', 'bfloat16' or 'unchanged'",
    "routers: maybe\n": "routers: 'maybe'; expected a valid boolean",
    "include: up_proj\n": "include: 'up_proj'; expected a list of patterns",
    "rules:\n- mlp\n": "rules.0: 'mlp'; expected a valid dictionary or instance of Rule",
    "1: 2\n": "1: 1; Keys should be strings",
    "": "nothing at the top; expected a mapping of recipe fields",
    "- a\n": "a list at the top; expected a mapping of recipe fields",
    "include:\n  - a\n  - '['\n": "include.1: '[' is not a regular expression (unterminated character set",
    "rules:\n  - quantize: false\n": "rules.0: a rule without a key matches every site; give at least one of name, op",
    "rules:\n  - name: mlp\n    quantise: false\n": "rules.0.quantise: unknown key; expected one of name, op, ",
    "include: [a]\nexclude: [b, a]\n": "include and exclude both have 'a'",
    "rules:\n- {name: a}\n- {name: a, quantize: false}\n": "rules.1 (name='a' -> keep) has the same keys as rules.0",
    "fp8_dpa: true\nattention_values: false\n": "fp8_dpa is true and attention_values is false",
    "rules:\n- {name: a, min_n: 5, max_n: 3}\n": "rules.0: min_n 5 is above max_n 3",
    "rules:\n- {name: a, quantize: false, weight_format: e5m2}\n": "rules.0: quantize is false, so weight_format",
    "a: [\n": "while parsing a flow node expected the node content, but found '<stream end>'",
    "min_dim: 1\nmin_dim: 2\n": "'min_dim' is given twice",
    "name: 2020-13-45\n": "month must be in 1..12; expected valid YAML; correct it",
    "[" * 10_000: "maximum recursion depth exceeded",
}


@pytest.mark.parametrize("content", MISTAKES, ids=lambda content: content.strip()[:40] or "nothing")
def test_a_mistake_in_yaml_is_an_error_with_its_place(load: Load, content: str) -> None:
    assert complaint(load, content).startswith(f"mine.yaml: {MISTAKES[content]}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("min_dim =\n", "Invalid value (at line 1, column 10); expected valid TOML"),
        ('[[rules]]\nname = "a"\nkeep = true\n', "rules.0.keep: unknown key; expected one of name, op, "),
    ],
    ids=["text", "field"],
)
def test_a_mistake_in_toml_is_an_error_with_its_place(load: Load, content: str, expected: str) -> None:
    assert complaint(load, content, "mine.toml").startswith(f"mine.toml: {expected}")


def test_all_mistakes_are_in_one_error(load: Load) -> None:
    assert complaint(load, "min_dim: -1\nmargin: 1\n").splitlines() == [
        "mine.yaml: margin: 1; expected 0; correct it",
        "mine.yaml: min_dim: -1; expected greater than or equal to 0; correct it",
    ]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Recipe(min_dim="3"), "Recipe: min_dim: '3'; expected a valid integer; correct it"),
        (lambda: Recipe(include=("a",), exclude=("a",)), "Recipe: include and exclude both have 'a'; remove one"),
        (lambda: Recipe(rules=({"min_n": -1},)), "Recipe: rules.0.min_n: -1; expected greater than or equal to 0"),
        (lambda: Rule(name="a", quantise=False), "Rule: quantise: unknown key; expected one of name, op, "),
        (lambda: Rule(name="("), "Rule: name: '(' is not a regular expression (missing ), unterminated subpattern"),
        (lambda: Recipe(rules=({},)), "Recipe: rules.0: a rule without a key matches every site"),
        (lambda: load_recipe(Recipe().model_copy(update={"activations": "fp16"})), "Recipe: activations: 'fp16'; "),
        (lambda: load_recipe(Recipe().model_copy(update={"embedding": True})), "Recipe: embedding: unknown key; "),
        (lambda: load_recipe(Recipe.model_construct(min_dim=-1)), "Recipe: min_dim: -1; expected greater than or"),
        (lambda: load_recipe(unpickled(min_dim=-1)), "Recipe: min_dim: -1; expected greater than or equal to 0"),
        (lambda: plan([], unpickled(margin=1)), "Recipe: margin: 1; expected 0; correct it"),
        (
            lambda: load_recipe("mxint8", embedding=True),
            "load_recipe: embedding: unknown key; expected one of name, fp8",
        ),
        (lambda: load_recipe({"min_dim": 3}), "recipe: a dict; expected a preset's name, a file, or a Recipe"),
    ],
)
def test_a_mistake_in_python_is_an_error_with_its_place(build: Callable[[], Any], expected: str) -> None:
    assert complaint(build).startswith(expected)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule(name="mlp"), "name='mlp' -> quantize"),
        (Rule(op="Gemm", max_k=64, quantize=False), "op='Gemm', max_k=64 -> keep"),
        (Rule(name="up", weight_format="e5m2"), "name='up' -> quantize, weight_format=e5m2"),
    ],
)
def test_a_rule_reads_as_its_keys_and_its_effect(rule: Rule, text: str) -> None:
    assert str(rule) == text


def test_the_literal_texts_are_the_formats_and_roundings_that_exist() -> None:
    assert get_args(ElementFormatName) == (*formats.ELEMENT_FORMATS,)
    assert get_args(Activations) == (*formats.ELEMENT_FORMATS, formats.BFLOAT16.name, "unchanged")
    assert get_args(ScaleRounding) == formats.SCALE_ROUNDINGS
