"""Reads YAML and TOML files, and reports pydantic's findings by file and key.

Knows no recipe: `recipe.py` has the fields.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pydantic
import yaml

from mxfp8_graph.naming import printable
from mxfp8_ops.errors import RecipeError, correction

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES: Final = frozenset({".yaml", ".yml", ".toml"})

OPTION: Final = "--set"
"""The place in messages about a field that the command line sets."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses two equal keys: PyYAML would take the last, and a rule would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in set(keys):
            if keys.count(name) > 1:
                raise yaml.MarkedYAMLError(problem=f"{name!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


def read(path: Path) -> dict[str, Any]:
    """Returns the fields in a file; raises RecipeError if it cannot be read, or is not a mapping in YAML or TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError.unreadable(path, error, "a readable recipe file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(path, str(error), expected="text in UTF-8", advice="check the path") from None
    data = _parse(path, text)
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        advice = "see docs on recipes"
        raise RecipeError(path, f"{kind} at the top", expected="a mapping of recipe fields", advice=advice)
    return data


def assigned(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that texts such as "embeddings=true" set, each value in YAML."""
    fields = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(OPTION, repr(text), expected="FIELD=VALUE, as in embeddings=true", advice="add the value")
        fields[name.strip()] = _parse(Path(OPTION), value)
    return fields


def _parse(path: Path, text: str) -> Any:
    is_toml = path.suffix == ".toml"
    try:
        return tomllib.loads(text) if is_toml else yaml.load(text, _Loader)
    # Both raise a ValueError for impossible dates and endless numbers, and parse nested brackets recursively.
    except (ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        expected = f"valid {'TOML' if is_toml else 'YAML'}"
        raise RecipeError(path, " ".join(str(error).split()), expected=expected, advice="correct it") from None


def explained(error: pydantic.ValidationError, where: object, fields: Mapping[str, Collection[str]]) -> RecipeError:
    """Returns an error with one line per finding of pydantic.

    Args:
        error: the error of pydantic.
        where: the file, or the class that was called.
        fields: the names of the fields by class; "" is the class of a whole file.
    """
    findings = []
    for each in error.errors():
        own = each.get("ctx", {}).get("error")
        known = fields.get("Rule" if each["loc"][:1] == ("rules",) else error.title, fields[""])
        # A class with an __init__ of its own checks in there, and its error has a place already.
        findings.append(printable(str(own) if isinstance(own, RecipeError) else f"{where}: {_finding(each, known)}"))
    return RecipeError("\n".join(findings))


def _finding(error: Any, fields: Collection[str]) -> str:
    """Returns "<key>: <value>; <pydantic's message>", or the message of a check of ours, which has all parts."""
    key = "".join(f"{part}: " for part in [".".join(map(str, error["loc"]))] if part)
    if error["type"] == "value_error":
        return f"{key}{error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        advice = correction(error["loc"][-1], fields)
        return f"{key}unknown key; expected one of {', '.join(fields)}; {advice}"
    said = error["msg"].replace("Input should be", "expected")
    if error["type"] == "tuple_type":
        said = f"expected a list of {'rules' if error['loc'][-1] == 'rules' else 'patterns'}"
    return f"{key}{reprlib.repr(error['input'])}; {said}; correct it"
