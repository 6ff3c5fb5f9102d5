"""Names that nothing else has."""

from __future__ import annotations

from collections.abc import Container


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
