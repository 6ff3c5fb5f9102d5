"""Unique names, and names as printable text, since names may come from untrusted files."""

from __future__ import annotations

from collections.abc import Container
from itertools import count


def unique_name(wanted: str, taken: Container[str], separator: str = "_") -> str:
    """Returns `wanted`, or `wanted` with the first number from 2 on that makes it a name not in `taken`."""
    if wanted not in taken:
        return wanted
    # From 2 on: the name without a number counts as the first.
    return next(name for number in count(2) if (name := f"{wanted}{separator}{number}") not in taken)


def reserve_name(wanted: str, taken: set[str], separator: str = "_") -> str:
    """Returns `unique_name(...)`, and adds it to `taken`."""
    name = unique_name(wanted, taken, separator)
    taken.add(name)
    return name


def printable(text: str) -> str:
    """Returns `text` for people: characters that move a cursor, reorder a line or are not visible are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
