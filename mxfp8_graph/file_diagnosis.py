"""diagnose_file(): what an ONNX file is, by its nodes and its metadata, and what tools have done to it since."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.doctor import Check
from mxfp8_graph.onnx_model.dialect_ops import foreign
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.walk import function_key, iter_nodes
from mxfp8_ops import contract
from mxfp8_ops.errors import Mxfp8Error

_NAME: Final = "model"


def diagnose_file(path: str | Path) -> Check:
    """Returns the check of one file. Never raises: a file that cannot be read is a check that says so."""
    try:
        model = open_model(Path(path)).proto
    except Mxfp8Error as error:
        return Check(name=_NAME, state="broken", detail=error.problem, advice=error.advice)
    recorded = {entry.key: entry.value for entry in model.metadata_props}
    written = recorded.get(provenance.DIALECT_KEY, "mxfp8" if provenance.CONTRACT_KEY in recorded else None)
    by = f"written by mxfp8-graph {recorded.get(provenance.VERSION_KEY, '')} as {written}" if written else ""
    if by and provenance.LOST_KEY in recorded:
        by += f"; lost in conversion: {recorded[provenance.LOST_KEY]}"
    used = {node.op_type for node in iter_nodes(model.graph.node) if node.domain == contract.DOMAIN}
    if used:
        return _ours(path, model, used, by)
    if written == "mxfp8":
        detail = f"{path}: {by}, and has no node of domain {contract.DOMAIN!r} any more: a tool has inlined them"
        advice = "our kernels do not run it, and weights may be float32 again: take the file from before that tool"
        return Check(name=_NAME, state="broken", detail=detail, advice=advice)
    if found := foreign(model):
        advice = f"for our kernels: mxfp8-graph convert {path} --to mxfp8"
        what = f"MXFP8 as {found[0]}" if written in {None, found[0]} else f"MXFP8 in standard ops (as {found[0]})"
        return Check(name=_NAME, state="ok", detail="; ".join(filter(None, (f"{path}: {what}", by))), advice=advice)
    return Check(name=_NAME, state="ok", detail=(by and f"{path}: {by}") or f"{path}: no MXFP8 in it")


def _ours(path: str | Path, model: onnx.ModelProto, used: set[str], by: str) -> Check:
    there = {name for domain, name, _ in map(function_key, model.functions) if domain == contract.DOMAIN}
    detail = "; ".join(filter(None, (f"{path}: {', '.join(sorted(used))}", by)))
    if lost := sorted(used - there):
        detail += f"; without the function bodies of {', '.join(lost)}, so it runs with our library only"
        advice = f"a tool has dropped them; put them back: mxfp8-graph convert {path} --to mxfp8"
        return Check(name=_NAME, state="broken", detail=detail, advice=advice)
    return Check(name=_NAME, state="ok", detail=f"{detail}; with function bodies: runs everywhere in ONNX Runtime")
