"""The version of this package, the same as in pyproject.toml, and versions of other packages."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.1.0"


def installed(distribution: str) -> str | None:
    """Returns the installed version of a distribution, or None. Does not import it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
