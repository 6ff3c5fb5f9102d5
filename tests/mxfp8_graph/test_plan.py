"""Planning: every reason, the order of precedence, and the rules that decide nothing."""

from typing import Any

import pytest

from mxfp8_graph.policy.plan import Decision, MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe, Rule, load_recipe
from mxfp8_ops.errors import RecipeError


def site(name: str = "mlp.up", **fields: Any) -> MatMulSite:
    """Returns a linear with a 64 x 128 weight, unless told otherwise."""
    defaults: dict[str, Any] = {"op": "MatMul", "m": "batch", "n": 64, "k": 128, "dtype": "float32", "weight": "w"}
    return MatMulSite(name=name, **{**defaults, **fields})


def product(name: str, role: Any) -> MatMulSite:
    return site(name, role=role, weight=None, n="seq")


def decide(one: MatMulSite, recipe: Recipe | str = "mxfp8") -> Decision:
    (decision,) = plan([one], load_recipe(recipe))
    return decision


# --- The default policy ------------------------------------------------------------------------------------------


def test_a_linear_is_rewritten() -> None:
    decision = decide(site())
    assert (decision.quantize, decision.rule, decision.reason) == (True, "policy", "linear, by recipe 'mxfp8'")


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (
            site(role="output_projection"),
            "output projection: its result is a graph output; set output_projections: true to quantize it",
        ),
        (
            site(role="router"),
            "router: a TopK or ArgMax chooses by its result; set routers: true to quantize it",
        ),
        (
            product("qk", "attention_scores"),
            "attention scores (Q @ K^T), no static operand; set attention_scores: true to quantize it",
        ),
        (
            product("pv", "attention_values"),
            "attention values (softmax @ V), no static operand; set attention_values: true to quantize it",
        ),
        (
            product("mix", "product"),
            "both operands are computed at run time; add a rule with quantize: true to quantize it",
        ),
        (site(n=31), "tiny: N = 31 is below min_dim = 32; lower min_dim to quantize it"),
        (site(k=3), "tiny: K = 3 is below min_dim = 32; lower min_dim to quantize it"),
    ],
    ids=["output_projection", "router", "attention_scores", "attention_values", "product", "tiny N", "tiny K"],
)
def test_the_policy_keeps(kept: MatMulSite, reason: str) -> None:
    decision = decide(kept)
    kind = "tiny" if reason.startswith("tiny") else "role"
    assert (decision.kind, decision.rule, decision.reason) == (kind, "policy", reason)


def test_a_size_nobody_knows_is_not_tiny() -> None:
    assert decide(site(n="seq", k=None)).quantize


@pytest.mark.parametrize(
    ("one", "recipe"),
    [
        (site(role="output_projection"), Recipe(output_projections=True)),
        (site(role="router"), Recipe(routers=True)),
        (product("qk", "attention_scores"), Recipe(attention_scores=True)),
        (product("pv", "attention_values"), Recipe(attention_values=True)),
        (product("qk", "attention_scores"), Recipe(fp8_dpa=True)),
        (product("pv", "attention_values"), Recipe(fp8_dpa=True)),
        (site(n=31), Recipe(min_dim=31)),
    ],
    ids=["output_projections", "routers", "scores", "values", "fp8_dpa scores", "fp8_dpa values", "min_dim"],
)
def test_the_setting_that_the_reason_names_rewrites_it(one: MatMulSite, recipe: Recipe) -> None:
    assert decide(one, recipe).quantize


def test_weight_only_needs_a_static_weight() -> None:
    decision = decide(product("qk", "attention_scores"), Recipe(activations="unchanged", attention_scores=True))
    assert (decision.quantize, decision.reason) == (
        False,
        "activations: unchanged, and this product has no static weight; set activations: e4m3 for it to quantize it",
    )


def test_a_decision_carries_the_settings_of_the_recipe() -> None:
    decision = decide(site(), Recipe(scale_rounding="even", weight_format="e5m2", activations="e5m2"))
    assert (decision.scale_rounding, decision.weight_format, decision.activation_format, decision.weight_only) == (
        "even",
        "e5m2",
        "e5m2",
        False,
    )


# --- Rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Rule(name=r"^mlp\.", quantize=False),
        Rule(name="layers.3", quantize=False),
        Rule(op="MatMul", quantize=False),
        Rule(subgraph="^then", quantize=False),
        Rule(min_n=64, max_n=64, quantize=False),
        Rule(min_k=128, max_k=128, quantize=False),
    ],
    ids=str,
)
def test_a_rule_matches_by(rule: Rule) -> None:
    one = site(subgraph="then_branch", module="model.layers.3.mlp")
    other = site("attn", op="Gemm", n=32, k=256)
    decisions = plan([one, other], Recipe(rules=(rule,)))
    assert [(d.quantize, d.rule) for d in decisions] == [(False, "rules.0"), (True, "policy")]


def test_all_keys_of_a_rule_must_match() -> None:
    rule = Rule(name="mlp", min_n=100, quantize=False)
    decisions = plan([site(), site("mlp.down", n=128)], Recipe(rules=(rule,)))
    assert [d.quantize for d in decisions] == [True, False]


def test_a_size_nobody_knows_matches_no_size_rule() -> None:
    decisions = plan([site(n="seq"), site("b")], Recipe(rules=(Rule(min_n=1, quantize=False),)))
    assert [d.quantize for d in decisions] == [True, False]


def test_the_first_matching_rule_wins() -> None:
    rules = (Rule(name="up", weight_format="e5m2"), Rule(name="mlp", quantize=False))
    decisions = plan([site("mlp.up"), site("mlp.down")], Recipe(rules=rules))
    assert [(d.rule, d.quantize, d.weight_format) for d in decisions] == [
        ("rules.0", True, "e5m2"),
        ("rules.1", False, "e4m3"),
    ]


def test_the_reason_quotes_the_rule() -> None:
    assert decide(site(), Recipe(rules=(Rule(name="mlp", quantize=False),))).reason == (
        "kept by rules.0: name='mlp' -> keep"
    )


@pytest.mark.parametrize("role", ["output_projection", "product"])
def test_a_rule_overrides_the_policy(role: Any) -> None:
    assert decide(site(role=role, n=8), Recipe(rules=(Rule(name="mlp"),))).quantize


def test_settings_a_rule_does_not_give_are_those_of_the_recipe() -> None:
    decision = decide(site(), Recipe(scale_rounding="floor", rules=(Rule(name="mlp", activations="unchanged"),)))
    assert (decision.weight_only, decision.scale_rounding) == (True, "floor")


# --- Include and exclude -----------------------------------------------------------------------------------------


def test_only_included_names_are_eligible() -> None:
    decisions = plan([site("mlp.up"), site("attn.q")], Recipe(include=("mlp",)))
    assert [(d.quantize, d.rule, d.reason) for d in decisions] == [
        (True, "policy", "linear, by recipe 'custom'"),
        (False, "include", "not among the included names"),
    ]


def test_what_is_included_is_still_up_to_the_policy() -> None:
    assert not decide(site(role="output_projection"), Recipe(include=("mlp",))).quantize


def test_an_excluded_name_is_kept() -> None:
    decision = decide(site(), Recipe(exclude=("up$",)))
    assert (decision.quantize, decision.rule, decision.reason) == (False, "exclude", "excluded by 'up$'")


def test_names_are_also_looked_for_in_the_module_path() -> None:
    decision = decide(site("node_linear_7", module="model.layers.0.mlp.up_proj"), Recipe(exclude=("up_proj",)))
    assert decision.rule == "exclude"


# --- Precedence --------------------------------------------------------------------------------------------------


def test_precedence() -> None:
    """structure > exclude > first rule > include > policy."""
    recipe = Recipe(include=("[abce]",), exclude=("b",), rules=(Rule(name="a|b|c", quantize=False),))
    sites = [site("a", blocker="dtype int8"), site("b"), site("c"), site("d"), site("e", role="output_projection")]
    decisions = plan(sites, recipe)
    assert [d.rule for d in decisions] == ["structure", "exclude", "rules.0", "include", "policy"]
    assert [d.kind for d in decisions] == ["unsupported", "excluded", "rule", "not_included", "role"]


def test_a_blocked_site_says_why() -> None:
    decision = decide(site(blocker="the weight is empty"), Recipe(rules=(Rule(name="mlp"),)))
    assert (decision.quantize, decision.reason) == (False, "the weight is empty")


def test_the_same_sites_and_recipe_give_the_same_plan() -> None:
    sites = [site("mlp.up"), site("head", role="output_projection"), product("qk", "attention_scores")]
    recipe = Recipe(rules=(Rule(name="up", activations="unchanged"),))
    assert plan(sites, recipe) == plan(sites, recipe)


def test_decisions_come_in_the_order_of_the_sites() -> None:
    names = ["c", "a", "b"]
    assert [d.site.name for d in plan([site(n) for n in names], Recipe())] == names


def test_no_sites_no_decisions() -> None:
    assert plan([], Recipe()) == []


# --- What decides nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        (Recipe(include=("mpl",)), "include.0: 'mpl' matches none"),
        (Recipe(exclude=("mlp", "x")), "exclude.1: 'x' matches none"),
        (Recipe(rules=(Rule(op="Matmul"),)), "rules.0: op='Matmul' -> quantize matches none"),
        (
            Recipe(rules=(Rule(name="mlp"), Rule(name="up"))),
            "rules.1: name='up' -> quantize decides none (earlier rules or exclude take all it matches)",
        ),
        (
            Recipe(exclude=("mlp",), rules=(Rule(name="up"),)),
            "rules.0: name='up' -> quantize decides none (earlier rules or exclude take all it matches)",
        ),
    ],
    ids=["include", "exclude", "rule", "shadowed", "excluded"],
)
def test_what_decides_nothing_is_an_error(recipe: Recipe, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan([site("mlp.up"), site("mlp.up.2")], recipe)
    assert str(caught.value) == (
        f"recipe 'custom': {what} of the model's matmuls; expected at least one; correct or remove it. "
        "Matmuls: mlp.up, mlp.up.2"
    )


def test_a_long_list_of_matmuls_is_cut() -> None:
    with pytest.raises(RecipeError, match=r"Matmuls: l0, l1, l2, l3, l4, \.\.\. \(7 in all\)$"):
        plan([site(f"l{i}") for i in range(7)], Recipe(exclude=("x",)))


# --- Embeddings --------------------------------------------------------------------------------------------------


def test_an_embedding_is_kept_unless_the_recipe_asks_for_it() -> None:
    reason = "embedding: ids pick its rows; set embeddings: true to quantize it"
    assert decide(site(role="embedding")).reason == reason
    assert decide(site(role="embedding"), Recipe(embeddings=True)).quantize
    assert decide(site(role="embedding"), Recipe(rules=(Rule(name="up"),))).quantize
    assert decide(site(role="embedding", n=2), Recipe(embeddings=True)).reason.startswith("tiny: N = 2")
