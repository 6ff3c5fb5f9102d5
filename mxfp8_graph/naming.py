"""Unique names, and names as printable text: names come from files that may be untrusted."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_LONGEST: Final = 4000
"""Characters of a printed text."""


def unique_name(wanted: str, taken: Container[str], separator: str = "_") -> str:
    """Returns `wanted`, or `wanted` with a number from 2 on that makes it a name not in `taken`.

    It is the first free number if all numbers before it are taken. A name that all nodes of a large model have is
    looked for in steps that double, not in steps of one.
    """
    if wanted not in taken:
        return wanted
    below, free = 1, 2
    # Doubling, then halving: a thousand nodes of one name would take half a million steps one by one.
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
    """Returns `unique_name(...)`, and adds it to `taken`."""
    name = unique_name(wanted, taken, separator)
    taken.add(name)
    return name


def printable(text: str) -> str:
    """Returns `text` for people: characters that move a cursor, reorder a line or are not visible are escaped.

    A text of more than 4000 characters is cut in the middle. Do not use it for data that programs read.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}... ({len(text) - _LONGEST} more characters) ...{text[-_LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
