"""Which release of a package is installed: for tests of what older ones cannot do."""

from __future__ import annotations

from importlib import metadata


def release(package: str) -> tuple[int, ...]:
    """Returns the first two numbers of an installed package's version, as (1, 24)."""
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])
