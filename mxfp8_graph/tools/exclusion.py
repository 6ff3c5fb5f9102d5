"""Patterns for a recipe that match some sites, and no other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mxfp8_graph.policy.plan import MatMulSite


def patterns(names: Sequence[str], sites: Sequence[MatMulSite]) -> tuple[str, ...]:
    """Returns one pattern per site that is named, in that order.

    It is of the module path, which an ONNX model and a program of the same module have in common, or of the name if
    another site has that path; if neither is its own, the pattern matches other sites too.
    """
    by_name = {site.name: site for site in sites}
    found = []
    for site in (by_name[name] for name in names):
        choices = [f"^{re.escape(name)}$" for name in (site.module, site.name) if name]
        others = [other for other in sites if other is not site]
        own = (
            p for p in choices if not any(re.search(p, other.name) or re.search(p, other.module) for other in others)
        )
        found.append(next(own, choices[-1]))
    return tuple(found)
