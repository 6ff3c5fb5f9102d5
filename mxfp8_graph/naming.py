"""Names that nothing else has, and names as they are shown: they come from files that anyone may have made."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_LONGEST: Final = 4000
"""Characters of a text that is shown."""


def unique_name(wanted: str, taken: Container[str], separator: str = "_") -> str:
    """Returns `wanted`, or `wanted` with the first number from 2 on that makes it a name not in `taken`."""
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}{separator}{count}"
    return name


def take_name(wanted: str, taken: set[str], separator: str = "_") -> str:
    """Returns `unique_name`, which is in `taken` from now on."""
    name = unique_name(wanted, taken, separator)
    taken.add(name)
    return name


def printable(text: str) -> str:
    """Returns `text` as it may be shown: whatever moves a cursor, reorders a line or is not visible is escaped.

    What nobody would read to the end is cut in the middle. For data that programs read, `text` stays as it is.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}... ({len(text) - _LONGEST} more characters) ...{text[-_LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
