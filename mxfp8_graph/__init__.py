"""Rewrites exported models to MXFP8. Importing this loads no torch, no ONNX Runtime and no native code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mxfp8_graph._version import __version__ as __version__

if TYPE_CHECKING:
    from mxfp8_graph import distributed as distributed
    from mxfp8_graph import te as te
    from mxfp8_graph.eager import pack as pack
    from mxfp8_graph.eager import quantize_ as quantize_
    from mxfp8_graph.exporting import to_onnx as to_onnx
    from mxfp8_graph.models import load as load
    from mxfp8_graph.models import save as save
    from mxfp8_graph.packed import PackedWeight as PackedWeight
    from mxfp8_graph.packed import export_safetensors as export_safetensors
    from mxfp8_graph.packed import import_safetensors as import_safetensors
    from mxfp8_graph.packed import unpack as unpack
    from mxfp8_graph.policy.plan import NothingEligibleError as NothingEligibleError
    from mxfp8_graph.policy.recipe import MXFP8BlockScaling as MXFP8BlockScaling
    from mxfp8_graph.policy.recipe import Recipe as Recipe
    from mxfp8_graph.policy.recipe import Rule as Rule
    from mxfp8_graph.policy.recipe import load_recipe as load_recipe
    from mxfp8_graph.report.data import RewriteReport as RewriteReport
    from mxfp8_graph.rewriting import rewrite as rewrite
    from mxfp8_graph.running.verify import verify as verify
    from mxfp8_graph.tools.analyze.run import analyze as analyze
    from mxfp8_graph.tools.checkpoint import export_checkpoint as export_checkpoint
    from mxfp8_graph.tools.compare.run import compare as compare
    from mxfp8_graph.tools.dialects.convert import convert as convert
    from mxfp8_graph.tools.from_hf import from_hf as from_hf
    from mxfp8_graph.tools.tune.run import tune as tune

# The names a second time: the block above is for type checkers, this table for the import on first use.
_MODULES = {
    "rewriting": "rewrite",
    "eager": "quantize_ pack",
    "models": "load save",
    "exporting": "to_onnx",
    "packed": "PackedWeight export_safetensors import_safetensors unpack",
    "policy.plan": "NothingEligibleError",
    "policy.recipe": "MXFP8BlockScaling Recipe Rule load_recipe",
    "report.data": "RewriteReport",
    "running.verify": "verify",
    "tools.analyze.run": "analyze",
    "tools.checkpoint": "export_checkpoint",
    "tools.compare.run": "compare",
    "tools.dialects.convert": "convert",
    "tools.from_hf": "from_hf",
    "tools.tune.run": "tune",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use, so that `import mxfp8_graph` stays light."""
    if name in {"distributed", "te"}:  # modules of names of their own; they import torch
        return importlib.import_module(f"mxfp8_graph.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'mxfp8_graph' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"mxfp8_graph.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
