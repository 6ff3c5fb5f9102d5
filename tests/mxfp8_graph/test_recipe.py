"""Recipes: presets, files, and what each mistake in one says."""

import subprocess
import sys
from pathlib import Path

import pytest

from mxfp8_graph.policy.presets import PRESETS
from mxfp8_graph.policy.recipe import Recipe, Rule, load_recipe
from mxfp8_ops.errors import RecipeError

UNKNOWN_KEY = "unknown key; expected a field of docs/recipes.md; correct or remove it"


@pytest.fixture
def recipe(tmp_path: Path):
    """Returns a function that writes a recipe file and loads it."""

    def load(text: str, suffix: str = "yaml") -> Recipe:
        path = tmp_path / f"mine.{suffix}"
        path.write_text(text)
        return load_recipe(path)

    return load


@pytest.fixture
def complaint(recipe, tmp_path: Path):
    """Returns a function that loads a bad recipe and returns the message, the folder left out."""

    def message(text: str, suffix: str = "yaml") -> str:
        with pytest.raises(RecipeError) as caught:
            recipe(text, suffix)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message


# --- Presets -----------------------------------------------------------------------------------------------------


def test_the_default_preset_is_the_default_recipe() -> None:
    assert load_recipe("mxfp8") == Recipe(name="mxfp8")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mxfp8-bf16", {"activations": "bfloat16"}),
        ("mxfp8-weight-only", {"activations": "unchanged"}),
        ("mxint8-bf16", {"weight_format": "int8", "activations": "bfloat16", "scale_rounding": "floor"}),
        ("ocp", {"scale_rounding": "floor"}),
        (
            "all",
            {"output_projections": True, "routers": True, "embeddings": True}
            | {"attention_scores": True, "attention_values": True, "fp8_dpa": True},
        ),
    ],
)
def test_a_preset_differs_from_the_default_in(name: str, settings: dict[str, object]) -> None:
    assert load_recipe(name).model_dump(exclude_defaults=True, exclude={"name"}) == settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_recorded_recipe_reads_back_as_itself(name: str) -> None:
    preset = load_recipe(name)
    assert Recipe.model_validate_json(preset.model_dump_json()) == preset


def test_a_preset_is_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "toy", {"min_dim": 64})
    assert load_recipe("toy") == Recipe(name="toy", min_dim=64)
    with pytest.raises(RecipeError, match=r"expected one of mxfp8, .*, all, toy, auto, or a \.yaml or \.toml file"):
        load_recipe("mxfp4")
    code = "import sys; from mxfp8_graph.policy.presets import PRESETS; PRESETS['toy'] = {'min_dim': 64}; "
    code += "from mxfp8_graph import cli; sys.argv[1:] = ['rewrite', '--help']; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    help_text = " ".join(done.stdout.split())
    assert "all, toy, auto, or a .yaml or .toml file" in help_text


@pytest.mark.parametrize("name", PRESETS)
def test_the_readme_explains_each_preset(name: str) -> None:
    assert f"| `{name}` " in (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")


def test_a_recipe_is_its_own_recipe() -> None:
    mine = Recipe(name="mine")
    assert load_recipe(mine) is mine


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("mxfp4")
    assert str(caught.value) == (
        "recipe: 'mxfp4'; expected one of mxfp8, mxfp8-bf16, mxfp8-weight-only, ocp, mxint8, "
        "mxint8-bf16, mxint8-weight-only, all, auto, or a .yaml or .toml file; correct the name"
    )


# --- Files -------------------------------------------------------------------------------------------------------


def test_yaml(recipe) -> None:
    loaded = recipe("activations: unchanged\nexclude: [lm_head]\nrules:\n  - name: mlp\n    activations: e5m2\n")
    assert loaded == Recipe(
        name="mine", activations="unchanged", exclude=("lm_head",), rules=(Rule(name="mlp", activations="e5m2"),)
    )


def test_toml(recipe) -> None:
    loaded = recipe('min_dim = 64\n[[rules]]\nop = "Gemm"\nquantize = false\n', "toml")
    assert loaded == Recipe(name="mine", min_dim=64, rules=(Rule(op="Gemm", quantize=False),))


def test_a_file_may_name_its_recipe(recipe) -> None:
    assert recipe("name: production\n").name == "production"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "none.yaml")
    assert str(caught.value) == (
        f"{tmp_path}/none.yaml: No such file or directory; expected a readable recipe file; check the path"
    )


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(RecipeError, match=r"mine\.yaml: 'utf-8' codec can't decode byte 0xff"):
        load_recipe(tmp_path / "mine.yaml")


# --- Mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("min_dim: -1\n", "mine.yaml: min_dim: -1; expected greater than or equal to 0; correct it"),
        ("min_dim: true\n", "mine.yaml: min_dim: True; expected a valid integer; correct it"),
        ("\nmargin: 1\n", "mine.yaml: margin: 1; expected 0; correct it"),
        ("fp8_mha: true\n", "mine.yaml: fp8_mha: True; expected False; correct it"),
        ("fp8_format: E5M2\n", "mine.yaml: fp8_format: 'E5M2'; expected 'E4M3' or 'HYBRID'; correct it"),
        ("scale_rounding: up\n", "mine.yaml: scale_rounding: 'up'; expected 'ceil', 'floor' or 'even'; correct it"),
        (
            "activations: fp8\n",
            "mine.yaml: activations: 'fp8'; expected 'e4m3', 'e5m2', 'int8', 'bfloat16' or 'unchanged'; correct it",
        ),
        ("routers: maybe\n", "mine.yaml: routers: 'maybe'; expected a valid boolean; correct it"),
        ("include: up_proj\n", "mine.yaml: include: 'up_proj'; expected a valid tuple; correct it"),
        ("rules:\n- mlp\n", "mine.yaml: rules.0: 'mlp'; expected a valid dictionary or instance of Rule; correct it"),
        ("name: [a]\n", "mine.yaml: name: ['a']; expected a valid string; correct it"),
        ("1: 2\n", "mine.yaml: 1: 1; Keys should be strings; correct it"),
        ("", "mine.yaml: nothing at the top; expected a mapping of recipe fields; see docs on recipes"),
        ("- a\n", "mine.yaml: a list at the top; expected a mapping of recipe fields; see docs on recipes"),
        (
            "include:\n  - a\n  - '['\n",
            "mine.yaml: include.1: '[' is not a regular expression (unterminated character set at position 0); "
            "expected one; correct it",
        ),
        (
            "rules:\n  - quantize: false\n",
            "mine.yaml: rules.0: a rule without a key matches every site; give at least one of "
            "name, op, subgraph, min_n, max_n, min_k, max_k",
        ),
        (
            "rules:\n  - name: mlp\n    quantise: false\n",
            f"mine.yaml: rules.0.quantise: {UNKNOWN_KEY}",
        ),
    ],
)
def test_a_field_that_is_wrong(complaint, text: str, expected: str) -> None:
    assert complaint(text) == expected


def test_every_mistake_is_reported_at_once(complaint) -> None:
    assert complaint("min_dim: -1\nmargin: 1\n").splitlines() == [
        "mine.yaml: margin: 1; expected 0; correct it",
        "mine.yaml: min_dim: -1; expected greater than or equal to 0; correct it",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "include: [a]\nexclude: [b, a]\n",
            "mine.yaml: include and exclude both have 'a'; remove one",
        ),
        (
            "rules:\n- {name: a}\n- {name: a, quantize: false}\n",
            "mine.yaml: rules.1 (name='a' -> keep) has the same keys as rules.0, which comes first and always wins; "
            "merge them",
        ),
        (
            "fp8_dpa: true\nattention_values: false\n",
            "mine.yaml: fp8_dpa is true and attention_values is false; fp8_dpa means both attention products",
        ),
        (
            "rules:\n- {name: a, min_n: 5, max_n: 3}\n",
            "mine.yaml: rules.0: min_n 5 is above max_n 3, so the rule can match nothing",
        ),
        (
            "rules:\n- {name: a, quantize: false, weight_format: e5m2}\n",
            "mine.yaml: rules.0: quantize is false, so weight_format can have no effect; remove one or the other",
        ),
    ],
)
def test_a_recipe_that_contradicts_itself(complaint, text: str, expected: str) -> None:
    assert complaint(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [\n", "mine.yaml: while parsing a flow node expected the node content, but found '<stream end>'"),
        ("min_dim: 1\nmin_dim: 2\n", "mine.yaml: 'min_dim' is given twice"),
        ("name: 2020-13-45\n", "mine.yaml: month must be in 1..12"),
        ("[" * 10_000, "mine.yaml: maximum recursion depth exceeded"),
    ],
    ids=["end", "twice", "date", "depth"],
)
def test_a_file_that_is_not_yaml(complaint, text: str, expected: str) -> None:
    message = complaint(text)
    assert message.startswith(expected)
    assert message.endswith("; expected valid YAML; correct it")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("min_dim =\n", "mine.toml: Invalid value (at line 1, column 10); expected valid TOML; correct it"),
        ("min_dim = -1\n", "mine.toml: min_dim: -1; expected greater than or equal to 0; correct it"),
        (
            '[[rules]]\nname = "a"\nkeep = true\n',
            f"mine.toml: rules.0.keep: {UNKNOWN_KEY}",
        ),
    ],
)
def test_mistakes_in_toml(complaint, text: str, expected: str) -> None:
    assert complaint(text, "toml") == expected


# --- Built in Python ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Recipe(min_dim="3"), "Recipe: min_dim: '3'; expected a valid integer; correct it"),
        (
            lambda: Recipe(scale_rounding="up"),
            "Recipe: scale_rounding: 'up'; expected 'ceil', 'floor' or 'even'; correct it",
        ),
        (lambda: Recipe(include=("a",), exclude=("a",)), "Recipe: include and exclude both have 'a'; remove one"),
        (
            lambda: Recipe(rules=({"min_n": -1},)),
            "Recipe: rules.0.min_n: -1; expected greater than or equal to 0; correct it",
        ),
        (
            lambda: Rule(name="a", quantise=False),
            f"Rule: quantise: {UNKNOWN_KEY}",
        ),
        (
            lambda: Rule(name="("),
            "Rule: name: '(' is not a regular expression (missing ), unterminated subpattern at position 0); "
            "expected one; correct it",
        ),
        (
            lambda: load_recipe({"min_dim": 3}),
            "recipe: a dict; expected a preset's name, a file, or a Recipe; pass Recipe(**fields)",
        ),
    ],
)
def test_what_is_built_wrongly_says_field_value_and_what_is_expected(build, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build()
    assert str(caught.value) == expected
    assert caught.value.__cause__ is None


# --- Rules as text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule(name="mlp"), "name='mlp' -> quantize"),
        (Rule(op="Gemm", max_k=64, quantize=False), "op='Gemm', max_k=64 -> keep"),
        (Rule(name="up", weight_format="e5m2"), "name='up' -> quantize, weight_format=e5m2"),
    ],
)
def test_a_rule_reads_as_its_keys_and_what_it_does(rule: Rule, text: str) -> None:
    assert str(rule) == text
