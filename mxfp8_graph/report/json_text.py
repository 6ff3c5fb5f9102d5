"""JSON that is easy to read, grep and diff: each row of a table on one line, everything else indented."""

from __future__ import annotations

import json
import math
from typing import Any, Final

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def json_text(data: Any) -> str:
    """Returns `data`, of JSON types only, as JSON. Text that is not printable is escaped, other text is unchanged.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    lines = _spread(data, "").split("\n")  # within a text, a line's end is escaped
    return "\n".join(line if line.isprintable() else _visible(line) for line in lines) + "\n"


def finite(value: float | None) -> float | None:
    """Returns `value`, or None if it is NaN, infinite or None, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def _spread(data: Any, indent: str) -> str:
    """Returns the JSON of `data` with a line per key, and per item of a list of objects."""
    if isinstance(data, dict) and data:
        items = [f"{_ENCODER.encode(key)}: {_spread(value, indent + '  ')}" for key, value in data.items()]
        brackets = "{}"
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        items, brackets = [_ENCODER.encode(row) for row in data], "[]"
    else:
        return _ENCODER.encode(data)
    return f"{brackets[0]}\n{indent}  " + f",\n{indent}  ".join(items) + f"\n{indent}{brackets[1]}"


def _visible(line: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
