"""Names that nothing else has, and names as they are shown: they come from files that anyone may have made."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_LONGEST: Final = 4000
"""Characters of a text that is shown."""


def unique_name(wanted: str, taken: Container[str], separator: str = "_") -> str:
    """Returns `wanted`, or `wanted` with a number from 2 on that makes it a name not in `taken`.

    It is the first such number where those before it are all taken. A name that all nodes of a large model have is
    looked for in steps that double, not in steps of one.
    """
    if wanted not in taken:
        return wanted
    below, free = 1, 2
    while f"{wanted}{separator}{free}" in taken:
        below, free = free, 2 * free
    while free - below > 1:
        middle = (below + free) // 2
        if f"{wanted}{separator}{middle}" in taken:
            below = middle
        else:
            free = middle
    return f"{wanted}{separator}{free}"


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


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error says, or the name of its class if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
