"""The recipe of recipe.yaml, written in Python."""

from __future__ import annotations

import sys

import mxfp8_graph
from mxfp8_graph import Recipe, Rule

recipe = Recipe(
    name="sample",
    attention_scores=True,
    rules=(Rule(name="attention/v$", quantize=False), Rule(name="ffn/", activations="unchanged")),
)
_, report = mxfp8_graph.rewrite(sys.argv[1], recipe, dry_run=True)
for site in report.sites:
    decision = site.decision
    print(f"{'mxfp8' if decision.quantize else 'kept ':5}  {decision.site.name:24} {decision.reason}")
