"""Sites and decisions: the rule that rewrites a matmul, or the reason why the matmul stays.

Knows neither ONNX nor torch: both front ends describe each matmul as a `MatMulSite` and apply its `Decision`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from mxfp8_graph.policy.recipe import Recipe, Rule, load_recipe
from mxfp8_ops.errors import Mxfp8Error, RecipeError
from mxfp8_ops.formats import ELEMENT_FORMATS, VALUE_DTYPES

Role = Literal[
    "linear",
    "output_projection",
    "router",
    "attention_scores",
    "attention_values",
    "product",
    "embedding",
    "convolution",
]
Kind = Literal[
    "quantized",
    # Kept by the recipe:
    "excluded",
    "rule",
    "not_included",
    "role",  # the default policy for the role; see ROLE_SETTINGS
    "tiny",  # below min_dim or min_channels
    "no_weight",  # weight-only, and the site has no weight
    # Kept because of the model or its use:
    "unsupported",  # MatMulSite.blocker: no recipe can change it
    "unfit",  # the recipe asks for it, but training or the use of the matmul does not allow it
    "tied",  # an embedding whose table stays for another site
    "fused",  # a product inside an attention node
    "packed",  # the model has packed weights already, so nothing is left to decide
    "checkpoint",  # the checkpoint does not have its weight in MXFP8
]
"""Why a site is quantized or kept."""
Dim = int | str | None


@dataclass(frozen=True, kw_only=True)
class MatMulSite:
    """One matmul as a front end describes it: Y [..., M, N] = X [..., M, K] @ weight [..., N, K] transposed.

    A convolution is the matmul of M pixels, N output channels and K = taps x input channels of a group.
    """

    name: str
    """The node's name; unique within the model."""
    op: str
    """The op type, as the graph library spells it: MatMul, Gemm."""
    module: str = ""
    """Dotted path of the framework module the node came from, if the exporter recorded it; patterns match it too."""
    subgraph: str = ""
    """Path of the subgraph the node is in; "" is the main graph."""
    role: Role = "linear"
    """The first three have a static weight, the others none. An output_projection ends in a graph output; a TopK or
    ArgMax chooses by a router's result. An embedding is no matmul: ids pick rows of its table."""
    m: Dim = None
    """Number of rows of X; for an embedding, number of ids."""
    n: Dim = None
    k: Dim = None
    dtype: str | None = None
    """float32, float16, bfloat16 or another dtype; None if it is unknown."""
    weight: str | None = None
    """Name of the static operand's initializer."""
    weight_shape: tuple[int, ...] = ()
    """Shape of the static operand as [..., N, K]; of a convolution, as [O, k..., C / group]."""
    weight_factor: float = 1.0
    """Factor of the static operand, applied before it is packed (Gemm's alpha). NaN: a factor for each channel."""
    weight_bytes: int = 0
    """Bytes of the static operand as the matmul sees it."""
    shared_with: int = 0
    """Number of other sites that use the same weight."""
    has_bias: bool = False
    blocker: str | None = None
    """The reason why no recipe can rewrite this site, or None."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether one site is rewritten, and how."""

    site: MatMulSite
    kind: Kind
    reason: str
    """`kind` in words, with the deciding rule or advice. It is for people: no code reads it."""
    rule: str = "policy"
    """The rule that decided: "policy", "structure", "include", "exclude", "rules.<index>", "layers" for `of_layers`, or
    "checkpoint" where a checkpoint overrules the policy."""
    activations: str = "e4m3"
    """One of `recipe.Activations`."""
    weight_format: str = "e4m3"
    scale_rounding: str = "ceil"

    @property
    def quantize(self) -> bool:
        """Whether the site is rewritten."""
        return self.kind == "quantized"

    @property
    def activation_format(self) -> str | None:
        """Element format that activations are quantized to, or None."""
        return self.activations if self.activations in ELEMENT_FORMATS else None

    @property
    def activation_dtype(self) -> str | None:
        """Value dtype that activations are rounded to, or None."""
        return self.activations if self.activations in VALUE_DTYPES else None

    @property
    def weight_only(self) -> bool:
        """Whether the weight alone is quantized to an element format."""
        return self.activation_format is None


ROLE_SETTINGS: Final[Mapping[Role, str]] = {
    "output_projection": "output_projections",
    "router": "routers",
    "embedding": "embeddings",
    "attention_scores": "attention_scores",
    "attention_values": "attention_values",
    "convolution": "convolutions",
}
"""Role -> the recipe's field that makes its sites eligible. They are off by default: no later layer averages out an
error in the logits, in the choice of an expert, in a row of a table, or next to a softmax. Convolutions are on where
the weights are INT8: E4M3 costs small networks their accuracy."""

_ROLE_REASONS: Final[Mapping[Role, str]] = {
    "output_projection": "output projection: its result is a graph output",
    "router": "router: a TopK or ArgMax chooses by its result",
    "embedding": "embedding: ids pick its rows",
    "attention_scores": "attention scores (Q @ K^T), no static operand",
    "attention_values": "attention values (softmax @ V), no static operand",
    "convolution": "convolution: E4M3 costs small networks their accuracy, INT8 does not",
}


class NothingEligibleError(Mxfp8Error):
    """No site of the model is rewritten; `decisions` has the reason for each site."""

    def __init__(self, where: object, what: str, advice: str, decisions: Sequence[Decision]) -> None:
        super().__init__(where, what, expected="at least one", advice=advice)
        self.decisions = tuple(decisions)


def require_eligible(
    decisions: Sequence[Decision], where: str, *, wanted: str, held: Callable[[], str] = lambda: ""
) -> None:
    """Raises NothingEligibleError if no site is rewritten.

    Args:
        decisions: those on all sites.
        where: the name of the model.
        wanted: the ops that count.
        held: returns what holds the bytes of the model, in words.
    """
    if any(decision.quantize for decision in decisions):
        return
    if not decisions:
        advice = "; ".join(filter(None, ["nothing to rewrite", held()]))
        raise NothingEligibleError(where, f"no {wanted}", advice, decisions)
    sites = counted([decision.site for decision in decisions])
    advice = "see the reasons and adapt the recipe"
    # The bytes of a network are in its convolutions, which the MXFP8 presets keep.
    kept = [each.site for each in decisions if each.site.role == "convolution" and each.kind == "role"]
    if kept:
        shares = f"{len(kept)} of the convolutions hold {sum(site.weight_bytes for site in kept) / 1e6:.1f} MB"
        advice = f"{shares}: take --recipe mxint8, or set convolutions: true"
    raise NothingEligibleError(where, f"none of its {sites} is eligible", advice, decisions)


NOUNS: Final = ("matmul", "convolution", "embedding")
"""The kinds of sites in words."""


def counted(sites: Sequence[MatMulSite]) -> str:
    """Returns the numbers of sites in words: "1 matmul and 26 convolutions"."""
    kinds = Counter(map(noun_of, sites))
    return " and ".join(f"{kinds[noun]} {noun}{'s' if kinds[noun] > 1 else ''}" for noun in NOUNS if kinds[noun])


def noun_of(site: MatMulSite) -> str:
    """Returns which of `NOUNS` a site is."""
    return site.role if site.role in NOUNS else NOUNS[0]


def plan(sites: Sequence[MatMulSite], recipe: Recipe) -> list[Decision]:
    """Returns one decision per site, in order. The same sites and recipe give the same plan.

    Order of precedence: what cannot be rewritten; `exclude`; the first matching rule; `include`; the default policy
    for the site's role; `min_dim`.

    Raises:
        RecipeError: a rule or a pattern decides nothing, or the recipe is malformed.
    """
    recipe = load_recipe(recipe)  # checks it
    decisions = [_decide(site, recipe) for site in sites]
    _refuse_unused(sites, recipe)
    return decisions


def _decide(site: MatMulSite, recipe: Recipe) -> Decision:
    def keep(kind: Kind, rule: str, reason: str) -> Decision:
        return Decision(site=site, kind=kind, rule=rule, reason=reason)

    # What cannot be rewritten comes first: no recipe can change it, and its reason is the one that helps a user.
    if site.blocker:
        return keep("unsupported", "structure", site.blocker)
    # `exclude` overrides rules: --exclude on the command line has to work with every recipe file.
    if pattern := _first(recipe.exclude, site):
        return keep("excluded", "exclude", f"excluded by {pattern!r}")
    for index, rule in enumerate(recipe.rules):
        if _matches(rule, site):
            if not rule.quantize:
                return keep("rule", f"rules.{index}", f"kept by rules.{index}: {rule}")
            return _quantize(site, recipe, f"rules.{index}", f"rules.{index}: {rule}", rule)
    # After the rules, so that a rule can add single sites to an include list.
    if recipe.include and not _first(recipe.include, site):
        return keep("not_included", "include", "not among the included names")
    if kept := _kept_by_policy(site, recipe):
        kind, reason = kept
        return keep(kind, "policy", reason)
    return _quantize(site, recipe, "policy", f"{site.role.replace('_', ' ')}, by recipe {recipe.name!r}")


def of_layers(decisions: Sequence[Decision], is_layer: Sequence[bool], recipe: Recipe) -> list[Decision]:
    """Returns decisions that rewrite the layers of `te` in a program, and nothing else: their author chose them.

    A recipe with rules, include, exclude or a setting for a role chooses itself. Without layers nothing changes.
    """
    chooses = recipe.rules or recipe.include or recipe.exclude
    if chooses or any(getattr(recipe, setting) for setting in ROLE_SETTINGS.values()) or not any(is_layer):
        return list(decisions)
    result = []
    for decision, chosen in zip(decisions, is_layer, strict=True):
        if chosen and decision.kind != "unsupported":
            decision = _quantize(decision.site, recipe, "layers", "a layer of te")  # noqa: PLW2901
        elif decision.quantize:
            reason = "beside layers of te; to quantize it make it one, or name it in rules of the recipe"
            decision = Decision(site=decision.site, kind="not_included", rule="layers", reason=reason)  # noqa: PLW2901
        result.append(decision)
    return result


def _kept_by_policy(site: MatMulSite, recipe: Recipe) -> tuple[Kind, str] | None:
    """Returns (kind, reason) if the default policy keeps `site` in high precision, or None."""
    # The role before the size of a matmul: a role's setting is a decision, `min_dim` only a matter of gain.
    if site.role == "product":
        return "role", "both operands are computed at run time; add a rule with quantize: true to quantize it"
    if site.role == "convolution":
        # Each tap has blocks of its own, and those of few channels are mostly empty.
        for what, size in (("input", site.weight_shape[-1]), ("output", site.n)):
            if isinstance(size, int) and size < recipe.min_channels:
                below = f"below min_channels = {recipe.min_channels}; lower min_channels to quantize it"
                return "tiny", f"tiny: {size} {what} channels are {below}"
    setting = ROLE_SETTINGS.get(site.role)
    if setting and not recipe.sets(setting):
        return "role", f"{_ROLE_REASONS[site.role]}; set {setting}: true to quantize it"
    # With a K below the 32 values of a block, every block is partly empty. With a small N, the products cost little
    # compared with the quantization of X. A size that is known only at run time is not below the limit.
    for letter, size in () if site.role == "convolution" else (("N", site.n), ("K", site.k)):
        if isinstance(size, int) and size < recipe.min_dim:
            return "tiny", f"tiny: {letter} = {size} is below min_dim = {recipe.min_dim}; lower min_dim to quantize it"
    return None


def _quantize(site: MatMulSite, recipe: Recipe, rule_name: str, reason: str, rule: Rule | None = None) -> Decision:
    names = ("activations", "weight_format", "scale_rounding")
    chosen = {name: getattr(recipe, name) for name in names} | (rule.settings if rule else {})
    # A convolution of a packed weight with values that are not packed is the float32 op of the framework.
    weight_only = recipe.convolutions == "weight-only" and not (rule and rule.activations)
    if site.role == "convolution" and (weight_only or chosen["activations"] in VALUE_DTYPES):
        chosen["activations"] = "unchanged"
    decision = Decision(site=site, kind="quantized", rule=rule_name, reason=reason, **chosen)
    # A product of two activations has no weight, so without quantized activations nothing would be left to quantize.
    if decision.weight_only and site.weight is None:
        what = f"activations: {decision.activations}, and this product has no static weight"
        reason = f"{what}; set activations: e4m3 for it to quantize it"
        return Decision(site=site, kind="no_weight", rule=rule_name, reason=reason)
    return decision


def _named(pattern: str, site: MatMulSite) -> bool:
    """Whether `pattern` matches a part of the site's node name or module path."""
    return bool(re.search(pattern, site.name) or re.search(pattern, site.module))


def _first(patterns: Sequence[str], site: MatMulSite) -> str | None:
    return next((p for p in patterns if _named(p, site)), None)


def _matches(rule: Rule, site: MatMulSite) -> bool:
    # A bound on an unknown size never matches: the rule could be wrong for the size at run time.
    def within(size: Dim, least: int | None, most: int | None) -> bool:
        if least is None and most is None:
            return True
        return isinstance(size, int) and (least is None or size >= least) and (most is None or size <= most)

    return (
        (rule.name is None or _named(rule.name, site))
        and (rule.op is None or rule.op == site.op)
        and (rule.subgraph is None or re.search(rule.subgraph, site.subgraph) is not None)
        and within(site.n, rule.min_n, rule.max_n)
        and within(site.k, rule.min_k, rule.max_k)
    )


def _refuse_unused(sites: Sequence[MatMulSite], recipe: Recipe) -> None:
    """Raises RecipeError if a rule, include or exclude pattern decides no site."""
    names = [site.module or site.name for site in sites]
    # A pattern that matches nothing is most often a typing error. Without an error here, the user would not notice it.
    for field in ("include", "exclude"):
        for index, pattern in enumerate(getattr(recipe, field)):
            if not any(_named(pattern, site) for site in sites):
                raise _unused(recipe, f"{field}.{index}: {pattern!r} matches none", names)
    matching = [[index for index, rule in enumerate(recipe.rules) if _matches(rule, site)] for site in sites]
    deciding = {m[0] for m, site in zip(matching, sites, strict=True) if m and not _first(recipe.exclude, site)}
    for index, rule in enumerate(recipe.rules):
        # A rule that matches but never decides needs another advice than one that matches nothing.
        if not any(index in rules for rules in matching):
            raise _unused(recipe, f"rules.{index}: {rule} matches none", names)
        if index not in deciding:
            taken = f"rules.{index}: {rule} decides none (earlier rules or exclude take all it matches)"
            raise _unused(recipe, taken, names)


def _unused(recipe: Recipe, what: str, names: Sequence[str]) -> RecipeError:
    shown = ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
    what, advice = f"{what} of the model's matmuls", f"correct or remove it. Matmuls: {shown or 'none'}"
    return RecipeError(f"recipe {recipe.name!r}", what, expected="at least one", advice=advice)


def tied(decisions: Sequence[Decision], weights: Sequence[Hashable | None]) -> list[Decision]:
    """Returns the decisions, adapted for sites that share a weight with a kept site.

    The reason of a rewritten site then names the kept one, because the weight is stored twice. An embedding is kept
    instead, unless a rule asks for it: its table stays for the other site, so a packed copy saves nothing. `weights`
    identifies the stored weight of each site, equal for sites that share it; None without one.
    """
    groups: dict[Hashable, list[Decision]] = {}
    for decision, weight in zip(decisions, weights, strict=True):
        if weight is not None:
            groups.setdefault(weight, []).append(decision)
    return [_tied(d, groups.get(weight, ())) for d, weight in zip(decisions, weights, strict=True)]


def _tied(decision: Decision, sharing: Sequence[Decision]) -> Decision:
    """Returns a decision whose reason names the first kept site with the same weight, if there is one."""
    partner = next((other for other in sharing if not other.quantize), None)
    if not decision.quantize or partner is None or all(other.site.role != "embedding" for other in sharing):
        return decision
    setting = ROLE_SETTINGS.get(partner.site.role) if partner.kind == "role" else None
    advice = f"set {setting}: true to share one" if setting else "see why"
    other = partner.site
    shared = f"its {_what(decision.site)} is also the {_what(other)} of {other.module or other.name!r}, which is kept"
    packed = any(each.quantize and each.site.role != "embedding" for each in sharing)
    if decision.site.role == "embedding" and decision.rule == "policy" and not packed:
        reason = f"embedding: {shared}: packed alone it would make the file larger; {advice}"
        return replace(decision, kind="tied", reason=reason)
    stored = "both copies are stored, and the file is larger than with neither quantized"
    return replace(decision, reason=f"{decision.reason}; {shared}: {stored}; {advice}")


def _what(site: MatMulSite) -> str:
    return "table" if site.role == "embedding" else "weight"
