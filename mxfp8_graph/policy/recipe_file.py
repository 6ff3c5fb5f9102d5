"""Reads YAML and TOML files with the line of every key, and reports pydantic's findings by file, line and key.

Knows no recipe: `recipe.py` says which fields there are.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import pydantic
import yaml
from pydantic import BaseModel

from mxfp8_graph.naming import printable
from mxfp8_ops import formats
from mxfp8_ops.errors import RecipeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES: Final = frozenset({".yaml", ".yml", ".toml"})

OPTION: Final = "--set"
"""Name of the source in messages about a field that the command line sets."""

Location = tuple[int | str, ...]
"""Keys and indices down to a value, outermost first."""

Lines = Mapping[Location, int]
"""Line of every key, counted from 1."""


_LARGEST: Final = 2**20
"""Bytes of a file."""


class _Loader(yaml.SafeLoader):
    """YAML without aliases, by which a few lines describe a document as large as one likes, or without end."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"an alias, *{alias.anchor}", problem_mark=alias.start_mark)
        return super().compose_node(parent, index)


def read(path: Path) -> tuple[dict[str, Any], Lines]:
    """Returns the file's data and, for YAML, the line of every key.

    Raises:
        RecipeError: the file cannot be read, or is not a mapping in YAML or TOML; quotes the file and the line.
    """
    try:
        with path.open("rb") as file:
            # One byte more than the limit tells a file of that size from a larger one without reading it whole.
            content = file.read(_LARGEST + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        # An OSError's text repeats the path, which the message has already.
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(path, reason, expected="a readable recipe file", advice="check the path") from None
    if len(content) > _LARGEST:
        expected = f"at most {_LARGEST}"
        raise RecipeError(path, f"more than {_LARGEST} bytes", expected=expected, advice="name a recipe")
    data, lines = _parse(path, text)
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise RecipeError(
            path, f"{kind} at the top", expected="a mapping of recipe fields", advice="see docs on recipes"
        )
    return data, lines


def assigned(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that texts such as "embeddings=true" set, each value in YAML.

    Raises:
        RecipeError: a text is not FIELD=VALUE, or its value is not YAML.
    """
    fields = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise RecipeError(OPTION, repr(text), expected="FIELD=VALUE, as in embeddings=true", advice="add the value")
        fields[name.strip()] = _parse(Path(OPTION), value)[0]
    return fields


def _parse(path: Path, text: str) -> tuple[Any, Lines]:
    lines: dict[Location, int] = {}
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text), lines
        loader = _Loader(text)
        # Composed before it is constructed: a node has the mark of its line.
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _collect_lines(node, (), lines)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else path
        raise RecipeError(where, str(error.problem), expected="valid YAML", advice="fix that line") from None
    # PyYAML and tomllib parse nested brackets recursively.
    except RecursionError:
        raise RecipeError(path, "nested without end", expected="a recipe", advice="flatten it") from None
    except (ValueError, OverflowError, yaml.YAMLError) as error:  # also impossible dates and numbers without end
        message, kind = " ".join(str(error).split()), path.suffix[1:].upper() or "YAML"
        raise RecipeError(path, message, expected=f"valid {kind}", advice="fix that line") from None


def _collect_lines(node: yaml.Node | None, at: Location, lines: dict[Location, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # PyYAML's constructor rejects it as a key
            where = (*at, key.value)
            if where in lines:
                # PyYAML lets the last of two equal keys win, so one of two rules would vanish.
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
            lines[where] = key.start_mark.line + 1
            _collect_lines(value, where, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*at, index)] = value.start_mark.line + 1
            _collect_lines(value, (*at, index), lines)


_EXPECTED: Final = {
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "invalid_key": "keys that are text",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
}
"""Pydantic's error type -> what the field takes, in the words of the file."""


_MOST_FINDINGS: Final = 50
"""Errors of one file that are reported: more fill the screen, and close matches of unknown keys take time to find."""


def explained(
    error: pydantic.ValidationError, where: object, model: type[BaseModel], lines: Lines | None = None
) -> RecipeError:
    """Returns pydantic's findings as an error with one line each: "<file>:<line>: <key>: <what>; <expected>; <advice>".

    `where` is the file, or the class that was called.
    """
    findings = error.errors()
    messages = [_explain(one, where, model, lines or {}) for one in findings[:_MOST_FINDINGS]]
    if len(findings) > _MOST_FINDINGS:
        messages.append(f"{where}: and {len(findings) - _MOST_FINDINGS} more")
    return RecipeError("\n".join(messages))


def _explain(error: Any, where: object, model: type[BaseModel], lines: Lines) -> str:
    at: Location = tuple(error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if not at:  # an invariant of the whole recipe: its message starts with the key that breaks it
        key = message.split()[0].rstrip(":")
        at, text = tuple(int(part) if part.isdecimal() else part for part in key.split(".")), message
    elif at == ("block_size",):
        expected = f"{formats.BLOCK_SIZE}, which all recipes have without a key"
        advice = "remove it; `mxfp8-graph compare` emulates mxfp8-block16 and mxfp8-block64"
        text = f"block_size: {_shown(error['input'])}; expected {expected}; {advice}"
    elif error["type"] == "extra_forbidden":
        fields = _fields(model, at)
        # Cut: the time of a match grows with the product of the lengths, and a key may have a megabyte.
        close = difflib.get_close_matches(str(at[-1])[:100], fields, n=1)
        advice = f"did you mean {close[0]}?" if close else "correct or remove it"
        text = f"{_dotted(at)}: unknown key; expected one of {', '.join(fields)}; {advice}"
    elif error["type"] in _EXPECTED:
        expected = _EXPECTED[error["type"]].format(**error.get("ctx", {}))
        text = f"{_dotted(at)}: {_shown(error['input'])}; expected {expected}; correct it"
    else:
        text = f"{_dotted(at)}: {message}"
    line = next((lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in lines), None)
    return printable(f"{where}:{line}: {text}" if line else f"{where}: {text}")


def _fields(model: type[BaseModel], at: Location) -> list[str]:
    """Returns the fields of the model that the key at `at` is in: `model`, or what one of its lists is made of."""
    for key in at[:-1]:
        if isinstance(key, str):
            model = get_args(model.model_fields[key].annotation)[0]
    return list(model.model_fields)


def _dotted(at: Location) -> str:
    return ".".join(map(str, at))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."
