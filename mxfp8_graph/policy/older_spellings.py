"""What recipes say in the words of earlier versions, in the words of this one.

    weight_only: true        -> activations: unchanged
    weight_only: false       -> activations: e4m3, or the `activation_format` beside it, which may be the recipe's
    activation_format: e5m2  -> activations: e5m2

Recipe files, Python calls and the recipes that rewritten models record have them. Only here are they known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mxfp8_ops.formats import ELEMENT_FORMATS

UNCHANGED: Final = "unchanged"
_NO_EFFECT: Final = "can have no effect; remove one or the other"


def in_rule(given: Any) -> Any:
    """Returns the fields of a rule with `activations` in place of what meant it.

    Raises:
        ValueError: they contradict each other, or a value is not one that the field had.
    """
    if not isinstance(given, Mapping):
        return given  # pydantic says what it expects
    only, chosen, fields = _split(given)
    if only and chosen:
        raise ValueError(f"weight_only is true, so activation_format {_NO_EFFECT}")
    return fields if only is None and chosen is None else {**fields, "activations": _meaning(only, chosen)}


def in_recipe(given: Any) -> Any:
    """Returns the fields of a recipe with `activations` in place of what meant it; rules are only told its format.

    Raises:
        ValueError: as `in_rule`.
    """
    if not isinstance(given, Mapping):
        return given
    for name in _NAMES:
        if name in given and given[name] is None:
            raise _wrong(name, None)
    only, chosen, fields = _split(given)
    own = chosen or fields.get("activations")
    own = own if own in tuple(ELEMENT_FORMATS) else None
    rules = given.get("rules")
    if isinstance(rules, (list, tuple)):
        fields["rules"] = [{**rule, "activation_format": own} if own and _bare(rule) else rule for rule in rules]
    if only:
        _refuse_unused(chosen, fields)
    return fields if only is None and chosen is None else {**fields, "activations": _meaning(only, chosen)}


_NAMES: Final = ("weight_only", "activation_format")


def _split(given: Mapping[str, Any]) -> tuple[bool | None, str | None, dict[str, Any]]:
    """Returns `weight_only`, `activation_format` (None where not given) and the other fields."""
    only, chosen = (given.get(name) for name in _NAMES)
    if only is not None and not isinstance(only, bool):
        raise _wrong("weight_only", only)
    if chosen is not None and chosen not in tuple(ELEMENT_FORMATS):
        raise _wrong("activation_format", chosen)
    for name in _NAMES:
        if given.get(name) is not None and given.get("activations") is not None:
            raise ValueError(f"{name} is an older spelling of activations, which is given too; remove {name}")
    return only, chosen, {key: value for key, value in given.items() if key not in _NAMES}


def _meaning(only: bool | None, chosen: str | None) -> str:
    return UNCHANGED if only else chosen or "e4m3"


def _bare(rule: Any) -> bool:
    """Whether a rule quantizes activations without saying to what format."""
    return (
        isinstance(rule, Mapping)
        and rule.get("weight_only") is False
        and rule.get("activation_format") is None
        and rule.get("activations") is None
    )


def _refuse_unused(chosen: str | None, fields: Mapping[str, Any]) -> None:
    """Raises ValueError if a recipe with `weight_only: true` has a format that no site takes."""
    rules = fields.get("rules", ())
    for index, rule in enumerate(rules if isinstance(rules, (list, tuple)) else ()):
        if isinstance(rule, Mapping) and rule.get("activation_format") and rule.get("weight_only") is None:
            what = f"activation_format is {rule['activation_format']} and the recipe's weight_only is true"
            raise ValueError(f"rules.{index}: {what}, so it {_NO_EFFECT}")
    if chosen not in {None, "e4m3"} and not any(_formats(rules)):
        raise ValueError(f"activation_format is {chosen} and weight_only is true, so it {_NO_EFFECT}")


def _formats(rules: Any) -> Iterator[bool]:
    """Yields for each rule whether it quantizes activations."""
    for rule in rules if isinstance(rules, (list, tuple)) else ():
        if isinstance(rule, Mapping):
            yield rule.get("weight_only") is False
        else:
            yield getattr(rule, "activations", None) in tuple(ELEMENT_FORMATS)


def _wrong(name: str, value: object) -> ValueError:
    expected = "true or false" if name == "weight_only" else " or ".join(map(repr, ELEMENT_FORMATS))
    return ValueError(f"{name}: {value!r}; expected {expected}; correct it")
