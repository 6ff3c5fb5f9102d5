"""The version of this package; pyproject.toml says the same."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
