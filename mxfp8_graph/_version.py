"""The version of this package, which pyproject.toml has too; and those of others."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.1.0"


def installed(distribution: str) -> str | None:
    """Returns which version of a distribution is installed, or None. Imports nothing of it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
