"""A recipe says which matmuls become MXFP8, and how. Data only: `plan.py` applies it.

Field names follow TransformerEngine's `MXFP8BlockScaling` where they mean the same. The default policy follows
NVIDIA's "Recipes for Pre-training LLMs with MXFP8": it quantizes the linears inside every block, and keeps the output
projection and the attention products. It also keeps routers, as ModelOpt does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pydantic
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mxfp8_graph.policy import presets, recipe_file
from mxfp8_graph.policy.kind import Kind
from mxfp8_ops import formats
from mxfp8_ops.errors import RecipeError, correction


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    # Python parses patterns recursively: some thousand brackets exhaust the stack.
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error}); expected one; correct it") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_checked_pattern)]
"""A regular expression, matched anywhere in the name (`re.search`)."""

NonNegative = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Flag = pydantic.StrictBool
"""true or false; not 1, "yes" or "on"."""
Activations = Literal["e4m3", "e5m2", "int8", "bfloat16", "unchanged"]
"""How activations are treated: quantized to an element format, rounded to bfloat16, or unchanged."""
# Texts, since type checkers read no others; a test compares them with the sets that `formats` defines.
ElementFormatName = Literal["e4m3", "e5m2", "int8"]
ScaleRounding = Literal["ceil", "floor", "even"]


_MXFP8: Final = "MXFP8BlockScaling"

_OTHERS: Final[Mapping[str, str]] = {
    "DelayedScaling": "FP8 with one scale per tensor, from the magnitudes of earlier steps",
    "Float8CurrentScaling": "FP8 with one scale per tensor, from its own magnitude",
    "Float8BlockScaling": "FP8 with a float32 scale per 128 values, or per 128 x 128 of a weight",
    "NVFP4BlockScaling": "FP4 with an E4M3 scale per 16 values and one per tensor",
}
"""TransformerEngine's other recipes -> their formats and scales."""


def _refusal(name: object) -> tuple[str, str] | None:
    """Returns (description, advice) for the name of another recipe of TransformerEngine, or None."""
    if not isinstance(name, str) or name not in _OTHERS:
        return None
    advice = "`mxfp8-graph compare` emulates it and shows the error it makes on your model"
    return f"{name} is {_OTHERS[name]}, not MXFP8", advice


def _without_type(fields: Any) -> Any:
    """Returns the fields of a recipe without `recipe_type`; ValueError if that names another recipe."""
    if not isinstance(fields, Mapping) or "recipe_type" not in fields:
        return fields
    # Accepted and dropped: configurations that were written for TransformerEngine name the type of the recipe.
    kind = fields["recipe_type"]
    if kind != _MXFP8:
        what, advice = _refusal(kind) or (repr(kind)[:200], "correct or remove it")
        raise ValueError(f"recipe_type: {what}; expected {_MXFP8}; {advice}")
    return {key: value for key, value in fields.items() if key != "recipe_type"}


def _format_name(value: Any) -> Any:
    """Returns the name of a `Format` of TransformerEngine, or of another object with a name; else the value itself."""
    # By attribute, so that TransformerEngine need not be installed.
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else value


@contextlib.contextmanager
def _explained(where: object) -> Iterator[None]:
    """Turns pydantic's error into a RecipeError that names `where`."""
    try:
        yield
    except pydantic.ValidationError as error:
        # `from None`: pydantic's own message says the same in its words, and quotes a page of its documentation.
        fields = {"": Recipe.model_fields, "Rule": Rule.model_fields}
        raise recipe_file.explained(error, where, fields) from None


class _Model(BaseModel):
    """Base of recipes and rules: they are immutable, and a wrong argument raises RecipeError.

    pydantic's ways around the constructor raise its own error, or check nothing. `load_recipe` checks what it takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")

    def __init__(self, **fields: Any) -> None:
        with _explained(type(self).__name__):
            super().__init__(**fields)

    # pydantic then checks the rules of a recipe with it, so that an error has the whole path: rules.0.min_n.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class Rule(_Model):
    """One row of a recipe: keys that match sites, and settings for these sites.

    An absent key matches every site, and all present keys must match. The first matching rule decides. A rule with
    `quantize: true` overrides the default policy: output projections, routers, embeddings, attention products,
    `min_dim`.
    """

    name: Pattern | None = None
    """Matches the node's name, or the module path that the exporter recorded (model.layers.0.mlp.up_proj)."""
    op: str | None = None
    """Matches the op type exactly: MatMul, Gemm, ..."""
    subgraph: Pattern | None = None
    """Matches the path of the node's subgraph ("" is the main graph)."""
    min_n: NonNegative | None = None
    max_n: NonNegative | None = None
    min_k: NonNegative | None = None
    max_k: NonNegative | None = None

    quantize: Flag = True
    """False keeps the site in high precision."""
    activations: Activations | None = None
    weight_format: ElementFormatName | None = None
    scale_rounding: ScaleRounding | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that are present."""
        return self.model_dump(include=_RULE_KEYS, exclude_none=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from the recipe's."""
        return self.model_dump(exclude={*_RULE_KEYS, "quantize"}, exclude_none=True)

    @model_validator(mode="after")
    def _check(self) -> Rule:
        # A rule without keys decides every site, so no later rule and no policy would have an effect.
        if not self.keys:
            raise ValueError(f"a rule without a key matches every site; give at least one of {', '.join(_RULE_ORDER)}")
        if not self.quantize and self.settings:
            settings = ", ".join(self.settings)
            raise ValueError(f"quantize is false, so {settings} can have no effect; remove one or the other")
        for low, high in (("min_n", "max_n"), ("min_k", "max_k")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low} {least} is above {high} {most}, so the rule can match nothing")
        return self

    def __str__(self) -> str:
        """Returns the rule as its keys and settings, for reports."""
        keys = ", ".join(f"{k}={v!r}" for k, v in self.keys.items())
        settings = ", ".join(["quantize" if self.quantize else "keep", *(f"{k}={v}" for k, v in self.settings.items())])
        return f"{keys} -> {settings}"


_RULE_ORDER: Final = ("name", "op", "subgraph", "min_n", "max_n", "min_k", "max_k")
_RULE_KEYS: Final = set(_RULE_ORDER)


class Recipe(_Model, Kind):  # noqa: PLW1641 - pydantic hashes the fields
    """Which matmuls become MXFP8, and how. A wrong field raises RecipeError with field, value and expectation.

    Invariants, checked at construction: no pattern is both included and excluded; no two rules have the same keys;
    `fp8_dpa` does not contradict `attention_scores` or `attention_values`.
    """

    name: str = "custom"
    """Shown in reports and recorded in the rewritten file."""
    # The next four fields have TransformerEngine's names and defaults, so that its code runs with a recipe of ours.
    fp8_format: Annotated[Literal["E4M3", "HYBRID"], BeforeValidator(_format_name)] = "E4M3"
    """TE: E4M3 everywhere, or HYBRID: E5M2 for gradients. The two differ in training only. Takes TE's `Format`."""
    margin: Literal[0] = 0
    """TE's field; MXFP8 block scaling has no margin."""
    fp8_dpa: Flag = False
    """TE: dot-product attention in MXFP8. The same as `attention_scores` and `attention_values` together."""
    fp8_mha: Literal[False] = False
    """TE: FP8 tensors across the attention boundary; TE does not offer it with MXFP8 either."""
    scale_rounding: ScaleRounding = "ceil"
    """How amax becomes a scale: see `mxfp8_ops.formats.SCALE_ROUNDINGS`."""
    activations: Activations = "e4m3"
    """How activations are treated: see `Activations`."""
    weight_format: ElementFormatName = "e4m3"
    output_projections: Flag = False
    """Also matmuls whose result is the model's output (an LM head, a classifier)."""
    routers: Flag = False
    """Also matmuls by whose result a TopK or ArgMax chooses: the gate of a mixture of experts."""
    embeddings: Flag = False
    """Also the tables that ids pick rows from; `activations` has no effect on them."""
    attention_scores: Flag = False
    """Also Q @ transpose(K)."""
    attention_values: Flag = False
    """Also softmax(...) @ V."""
    convolutions: Flag | Literal["weight-only"] | None = None
    """Also convolutions, or their weights alone; None: where weight_format is int8."""
    min_dim: NonNegative = 32
    """Matmuls with N or K below this stay as they are: less than one block of work."""
    min_channels: NonNegative = 16
    """Convolutions with fewer input or output channels in a group stay as they are."""
    include: tuple[Pattern, ...] = ()
    """If not empty, only sites whose name or module path matches one of these are eligible (rules come first)."""
    exclude: tuple[Pattern, ...] = ()
    """Sites whose name or module path matches one of these stay in high precision, whatever the rules say."""
    rules: tuple[Rule, ...] = ()
    """First match wins."""
    fuse: Flag = True
    """Merge the activation, gate or attention beside a rewritten matmul of an ONNX model into its node. In exported
    programs torch.compile does this."""
    runs_on: Literal["cpu"] | None = None
    """Where an ONNX model has to load, whatever its dtypes. "cpu": ops that ONNX Runtime's CPU provider lacks in
    bfloat16 or float16 compute in float32. Exported programs run in their dtypes."""

    def __eq__(self, other: object) -> bool:
        # By fields, whatever the class: `MXFP8BlockScaling()` is the recipe of a file that names no other field.
        return isinstance(other, Recipe) and self.__dict__ == other.__dict__

    def excluding(self, patterns: Sequence[str]) -> Recipe:
        """Returns the recipe with more patterns in `exclude` and in its name.

        Raises:
            RecipeError: a pattern is not a regular expression, or is in `include` too.
        """
        if not patterns:
            return self
        excluded = (*self.exclude, *patterns)
        return self._changed(f"excluding {', '.join(patterns)}", {"exclude": excluded}, type(self).__name__)

    def setting(self, assignments: Sequence[str]) -> Recipe:
        """Returns the recipe with fields set by texts such as "embeddings=true", which its name lists.

        Args:
            assignments: FIELD=VALUE, the value in YAML.

        Raises:
            RecipeError: a text is not FIELD=VALUE, or the recipe has no such field, or the field cannot have the value.
        """
        if not assignments:
            return self
        return self._changed(f"with {', '.join(assignments)}", recipe_file.assigned(assignments), recipe_file.OPTION)

    def _changed(self, change: str, fields: Mapping[str, Any], where: str) -> Recipe:
        # Without unset fields: "fp8_dpa=false" then takes back the attention fields that fp8_dpa implied.
        return _validated({**self.model_dump(exclude_unset=True), "name": f"{self.name} {change}", **fields}, where)

    def without_fusion(self) -> Recipe:
        """Returns the recipe with `fuse` false."""
        return self.model_copy(update={"fuse": False})

    def for_cpu(self) -> Recipe:
        """Returns the recipe with `runs_on` "cpu"."""
        return self.model_copy(update={"runs_on": "cpu"})

    def mxfp8(self) -> bool:
        """Returns whether activations and weights are MXFP8 in E4M3."""
        return self.activations == self.weight_format == formats.E4M3.name

    @property
    def backward_override(self) -> None:
        """TE: None, gradients are computed by products in MXFP8."""
        return

    def sets(self, setting: str) -> bool:
        """Whether a field of `plan.ROLE_SETTINGS` makes the sites of its role eligible."""
        value = getattr(self, setting)
        return self.weight_format == "int8" if value is None else bool(value)

    def to_record(self) -> str:
        """Returns the recipe as JSON for `recorded`."""
        # Without a default that versions before convolutions do not know: they read the record, too.
        later = {"min_channels"} if self.min_channels == type(self).model_fields["min_channels"].default else None
        return self.model_dump_json(exclude_none=True, exclude=later)

    def output_for(self, model: Path, suffix: str) -> Path:
        """Returns the default path of the rewritten model, named after the format of its weights: model.mxint8.onnx."""
        return model.with_name(f"{model.stem}.{'mxint8' if self.weight_format == 'int8' else 'mxfp8'}.{suffix}")

    def to_yaml(self) -> str:
        """Returns the text of a recipe file with this recipe."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(fields, sort_keys=False, width=10_000, allow_unicode=True)

    def __str__(self) -> str:
        """Returns TransformerEngine's text of a recipe, then the other fields that differ from their defaults."""
        said = {"name", "margin", "fp8_format"}
        defaults = {name: field.default for name, field in Recipe.model_fields.items() if name not in said}
        others = [f"{name}={_text(ours)}" for name, ours in self if name in defaults and ours != defaults[name]]
        kind = f"recipe_type={_MXFP8}"
        return ", ".join((kind, f"margin={self.margin}", f"format={self.fp8_format}", *others))

    def differences(self, other: Recipe) -> dict[str, tuple[str, str]]:
        """Returns the fields in which another recipe differs, each with both values as text.

        Fields that do not change packed weights are left out.
        """
        # Name, fusion and target do not change the packed bytes: weights need not be packed again for them.
        pairs = ((name, ours, getattr(other, name)) for name, ours in self if name not in {"name", "fuse", "runs_on"})
        return {name: (_text(ours)[:200], _text(theirs)[:200]) for name, ours, theirs in pairs if ours != theirs}

    _typed = model_validator(mode="before")(_without_type)

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if both := sorted(set(self.include) & set(self.exclude)):
            raise ValueError(f"include and exclude both have {both[0]!r}; remove one")
        seen: dict[str, int] = {}
        for index, rule in enumerate(self.rules):
            first = seen.setdefault(repr(rule.keys), index)
            if first != index:
                raise ValueError(
                    f"rules.{index} ({rule}) has the same keys as rules.{first}, which comes first and always wins; "
                    "merge them"
                )
        if self.fp8_dpa:
            for field in ("attention_scores", "attention_values"):
                if field in self.model_fields_set and not getattr(self, field):
                    raise ValueError(f"fp8_dpa is true and {field} is false; fp8_dpa means both attention products")
                object.__setattr__(self, field, True)  # spelled out, so that a recorded recipe reads back as itself
        return self


class MXFP8BlockScaling(Recipe):
    """The recipe of TransformerEngine's class of this name, with its arguments and its text."""

    name: str = _MXFP8

    def __init__(  # noqa: PLR0917 - TransformerEngine's order
        self,
        margin: int = 0,
        fp8_format: Any = "E4M3",
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: None = None,
        enable_2d_quantization: bool = False,
        **ours: Any,
    ) -> None:
        """Makes the recipe.

        Args:
            margin: 0, as MXFP8 has none.
            fp8_format: "E4M3" or "HYBRID", or TransformerEngine's `Format` of that name.
            fp8_dpa: as in `Recipe`.
            fp8_mha: False, as in `Recipe`.
            backward_override: None: gradients are computed by products in MXFP8.
            enable_2d_quantization: False: each scale is for 32 values of one row.
            ours: further fields of `Recipe`.

        Raises:
            RecipeError: another value, or an unknown field.
        """
        for name, value, expected in (
            ("backward_override", backward_override, "None, gradients in MXFP8"),
            ("enable_2d_quantization", enable_2d_quantization or None, "False, blocks of 32 values of one row"),
        ):
            if value is not None:
                raise RecipeError(_MXFP8, f"{name}: {value!r}", expected=expected, advice="leave it out")
        fields = {"margin": margin, "fp8_format": fp8_format, "fp8_dpa": fp8_dpa, "fp8_mha": fp8_mha}
        super().__init__(**{**fields, **ours})

    __repr__ = Recipe.__str__


def _validated(fields: dict[str, Any], where: object) -> Recipe:
    """Returns the recipe with these fields; an error names `where` instead of the class."""
    with _explained(where):
        return Recipe.model_validate(fields)


def _text(value: object) -> str:
    """Returns the value of a field in one line."""
    if not isinstance(value, tuple):
        return str(value)
    return f"[{', '.join(str(each) if isinstance(each, Rule) else repr(each) for each in value)}]"


def recorded(text: str | None) -> Recipe | None:
    """Returns the recipe that a rewritten model records as JSON; None if this version cannot read it."""
    try:
        return Recipe.model_validate_json(text or "")
    except ValueError:
        return None


def load_recipe(recipe: str | Path | Recipe, **fields: Any) -> Recipe:
    """Returns the recipe of an argument, with further fields: `load_recipe("mxint8", embeddings=True)`.

    Args:
        recipe: a `Recipe`, the name of a preset, or a .yaml, .yml or .toml file. "auto" is the preset that measured
            best on a processor like this one: see `presets.MEASURED`.
        **fields: fields of `Recipe`, which replace those of `recipe`; the name lists them.

    Raises:
        RecipeError: no such preset or file; the file is malformed, which names the file and the key; or a field does
            not exist or cannot have the value.
    """
    loaded = _loaded(recipe)
    change = f"with {', '.join(f'{key}={value}' for key, value in fields.items())}"
    return loaded._changed(change, fields, "load_recipe") if fields else loaded


def _loaded(recipe: str | Path | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        # Again, because pickle, and whoever writes to its __dict__, do not check.
        with _explained(type(recipe).__name__):
            checked = recipe.model_validate(recipe)
        return recipe if checked.__dict__ == recipe.__dict__ else checked
    if not isinstance(recipe, (str, Path)):
        if refused := _refusal(type(recipe).__name__):  # TransformerEngine's own classes, or those of `te`
            what, advice = refused
            raise RecipeError("recipe", what, expected=f"one of {presets.choices()}, or a Recipe", advice=advice)
        expected = "a preset's name, a file, or a Recipe"
        raise RecipeError("recipe", f"a {type(recipe).__name__}", expected=expected, advice="pass Recipe(**fields)")
    name, path = str(recipe), Path(recipe)
    if name == presets.AUTO:
        from mxfp8_ops import cpu  # loads the native library, which other recipes do without

        name, isa = presets.best(cpu.isa()), cpu.isa()
        if name == "mxint8" and isa in presets.SLOW_CONVOLUTIONS:
            return Recipe(name=name, **presets.PRESETS[name], convolutions="weight-only")
    if name == _MXFP8:  # TransformerEngine's name of the default
        return MXFP8BlockScaling()
    if name in presets.PRESETS:
        return Recipe(name=name, **presets.PRESETS[name])
    if refused := _refusal(name):
        what, advice = refused
        raise RecipeError("recipe", what, expected=f"one of {presets.choices()}", advice=advice)
    meant = correction(name, (*presets.PRESETS, presets.AUTO))
    # Without a known suffix the text is more likely a mistyped preset than a file.
    if path.suffix not in recipe_file.SUFFIXES:
        raise RecipeError("recipe", repr(name), expected=f"one of {presets.choices()}", advice=meant)
    return _validated({"name": path.stem, **recipe_file.read(path)}, path)
