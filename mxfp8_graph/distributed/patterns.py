"""Patterns for names of modules and tensors; "*" stands for one part of a name, or for characters of it."""

from __future__ import annotations

from fnmatch import fnmatchcase


def leading(name: str, pattern: str) -> str | None:
    """Returns the first parts of a name, as many as the pattern has, or None if they do not match it."""
    parts, wanted = name.split("."), pattern.split(".")
    if len(parts) < len(wanted) or not all(map(fnmatchcase, parts, wanted)):
        return None
    return ".".join(parts[: len(wanted)])
