"""Planning: the reason of each decision, the order of precedence, and rules that decide nothing."""

from typing import Any

import pytest

from mxfp8_graph.policy.plan import Decision, MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe, Rule, load_recipe
from mxfp8_ops.errors import RecipeError


def site(name: str = "mlp.up", **fields: Any) -> MatMulSite:
    """Returns a linear with a 64 x 128 weight, but for `fields`."""
    defaults: dict[str, Any] = {"op": "MatMul", "m": "batch", "n": 64, "k": 128, "dtype": "float32", "weight": "w"}
    return MatMulSite(name=name, **{**defaults, **fields})


def product(role: Any) -> MatMulSite:
    return site("product", role=role, weight=None, n="seq")


def decide(one: MatMulSite, recipe: Recipe | str = "mxfp8") -> Decision:
    (decision,) = plan([one], load_recipe(recipe))
    return decision


KEPT: dict[str, tuple[MatMulSite, dict[str, Any]]] = {
    "output projection: its result is a graph output; set output_projections: true": (
        site(role="output_projection"),
        {"output_projections": True},
    ),
    "router: a TopK or ArgMax chooses by its result; set routers: true": (site(role="router"), {"routers": True}),
    "embedding: ids pick its rows; set embeddings: true": (site(role="embedding"), {"embeddings": True}),
    "attention scores (Q @ K^T), no static operand; set attention_scores: true": (
        product("attention_scores"),
        {"attention_scores": True},
    ),
    "attention values (softmax @ V), no static operand; set attention_values: true": (
        product("attention_values"),
        {"fp8_dpa": True},
    ),
    "both operands are computed at run time; add a rule with quantize: true": (
        product("product"),
        {"rules": (Rule(name="product"),)},
    ),
    "tiny: N = 31 is below min_dim = 32; lower min_dim": (site(n=31), {"min_dim": 31}),
    "tiny: K = 3 is below min_dim = 32; lower min_dim": (site(k=3), {"min_dim": 3}),
}
"""Reason -> a site that the policy keeps for it, and the setting with which it is rewritten."""


@pytest.mark.parametrize("reason", KEPT)
def test_the_policy_keeps_a_site_until_a_recipe_has_the_setting_that_the_reason_names(reason: str) -> None:
    one, setting = KEPT[reason]
    decision = decide(one)
    kind = "tiny" if reason.startswith("tiny") else "role"
    assert (decision.kind, decision.rule, decision.reason) == (kind, "policy", f"{reason} to quantize it")
    assert decide(one, Recipe(**setting)).quantize


def test_a_linear_is_rewritten_with_the_settings_of_the_recipe() -> None:
    decision = decide(site())
    assert (decision.quantize, decision.rule, decision.reason) == (True, "policy", "linear, by recipe 'mxfp8'")
    assert decide(site(n="seq", k=None)).quantize, "an unknown size is not tiny"
    settings = {"scale_rounding": "even", "weight_format": "e5m2", "activations": "e5m2"}
    decision = decide(site(), Recipe(**settings))
    assert [decision.scale_rounding, decision.weight_format, decision.activation_format] == [*settings.values()]
    assert not decision.weight_only


def test_weight_only_needs_a_static_weight() -> None:
    decision = decide(product("attention_scores"), Recipe(activations="unchanged", attention_scores=True))
    assert not decision.quantize
    assert decision.reason.startswith("activations: unchanged, and this product has no static weight; set activations")


@pytest.mark.parametrize(
    "keys",
    [
        {"name": r"^mlp\."},
        {"name": "layers.3"},  # looked for in the module path too
        {"op": "MatMul"},
        {"subgraph": "^then"},
        {"min_n": 64, "max_n": 64},
        {"min_k": 128, "max_k": 128},
    ],
    ids=str,
)
def test_a_rule_matches_by(keys: dict[str, Any]) -> None:
    one = site(subgraph="then_branch", module="model.layers.3.mlp")
    others = [site("attn", op="Gemm", n=32, k=256), site("attn", op="Gemm", n="seq", k=None)]
    decisions = plan([one, *others], Recipe(rules=(Rule(**keys, quantize=False),)))
    assert [(d.quantize, d.rule) for d in decisions] == [(False, "rules.0"), (True, "policy"), (True, "policy")]


def test_all_keys_of_a_rule_must_match() -> None:
    rule = Rule(name="mlp", min_n=100, quantize=False)
    decisions = plan([site(), site("mlp.down", n=128)], Recipe(rules=(rule,)))
    assert [d.quantize for d in decisions] == [True, False]


def test_the_first_matching_rule_wins_and_is_the_reason() -> None:
    rules = (Rule(name="up", weight_format="e5m2"), Rule(name="mlp", quantize=False))
    up, down = plan([site("mlp.up"), site("mlp.down")], Recipe(rules=rules))
    assert (up.rule, up.quantize, up.weight_format) == ("rules.0", True, "e5m2")
    assert (down.rule, down.quantize, down.reason) == ("rules.1", False, "kept by rules.1: name='mlp' -> keep")


def test_settings_that_a_rule_leaves_out_are_those_of_the_recipe() -> None:
    decision = decide(site(), Recipe(scale_rounding="floor", rules=(Rule(name="mlp", activations="unchanged"),)))
    assert (decision.weight_only, decision.scale_rounding) == (True, "floor")


def test_structure_comes_before_exclude_then_the_first_rule_then_include_then_the_policy() -> None:
    recipe = Recipe(include=("[abcef]",), exclude=("b",), rules=(Rule(name="a|b|c", quantize=False),))
    sites = [site("a", blocker="dtype int8"), site("b"), site("c"), site("d"), site("e", role="output_projection")]
    decisions = plan([*sites, site("f")], recipe)
    assert [(d.site.name, d.quantize, d.rule, d.kind) for d in decisions] == [
        ("a", False, "structure", "unsupported"),
        ("b", False, "exclude", "excluded"),
        ("c", False, "rules.0", "rule"),
        ("d", False, "include", "not_included"),
        ("e", False, "policy", "role"),
        ("f", True, "policy", "quantized"),
    ]
    assert [d.reason for d in decisions[:4:2]] == ["dtype int8", "kept by rules.0: name='a|b|c' -> keep"]
    assert [d.reason for d in decisions[1:4:2]] == ["excluded by 'b'", "not among the included names"]


@pytest.mark.parametrize("role", ["output_projection", "product", "embedding"])
def test_a_rule_overrides_the_policy(role: Any) -> None:
    assert decide(site(role=role, n=8), Recipe(rules=(Rule(name="mlp"),))).quantize


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"include": ("mpl",)}, "include.0: 'mpl' matches none"),
        ({"exclude": ("mlp", "x")}, "exclude.1: 'x' matches none"),
        ({"rules": (Rule(op="Matmul"),)}, "rules.0: op='Matmul' -> quantize matches none"),
        ({"rules": (Rule(name="mlp"), Rule(name="up"))}, "rules.1: name='up' -> quantize decides none (earlier rules"),
        ({"exclude": ("mlp",), "rules": (Rule(name="up"),)}, "rules.0: name='up' -> quantize decides none (earlier"),
    ],
    ids=["include", "exclude", "rule", "shadowed", "excluded"],
)
def test_a_rule_that_decides_nothing_is_an_error(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan([site(f"mlp.up.{i}") for i in range(7)], Recipe(**fields))
    message = str(caught.value)
    assert message.startswith(f"recipe 'custom': {what}")
    assert message.endswith("Matmuls: mlp.up.0, mlp.up.1, mlp.up.2, mlp.up.3, mlp.up.4, ... (7 in all)")


def test_decisions_are_in_the_order_of_the_sites_and_do_not_depend_on_it() -> None:
    recipe = Recipe(rules=(Rule(name="a", activations="unchanged"),))
    sites = [site("c"), site("a"), site("b", role="output_projection")]
    decisions = plan(sites, recipe)
    assert [decision.site for decision in decisions] == sites
    assert plan(sites[::-1], recipe) == decisions[::-1]
    assert plan([], Recipe()) == []
