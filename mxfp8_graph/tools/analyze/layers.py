"""Layers: sites whose names begin alike, up to a number. "encoder.layer.3.attention.query" is in "encoder.layer.3"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from mxfp8_graph.policy.plan import MatMulSite

_NUMBERED: Final = (re.compile(r"^(.*?(?:^|[./])\d+)(?=[./])"), re.compile(r"^(.*?\d+)(?=[./])"))
"""A name up to its first part that is a number; or else that ends in one. Something must follow."""

OTHERS: Final = "(others)"
"""The layer of sites whose name has no number."""


def layer_of(site: MatMulSite) -> str:
    """Returns the layer that a site's module path, or else its name, puts it in."""
    found = filter(None, (pattern.match(site.module or site.name) for pattern in _NUMBERED))
    return next((match[1] for match in found), OTHERS)


def by_layer(sites: Sequence[MatMulSite]) -> dict[str, list[int]]:
    """Returns the indices of the sites in each layer, both in the order of `sites`."""
    layers: dict[str, list[int]] = {}
    for index, site in enumerate(sites):
        layers.setdefault(layer_of(site), []).append(index)
    return layers
