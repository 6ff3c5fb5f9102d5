"""diagnose_file(): what a file is, by its nodes and what it records, and what tools have done to it since."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.doctor import Check
from mxfp8_graph.models import kind_of
from mxfp8_graph.onnx_model import cpu_provider
from mxfp8_graph.onnx_model.dialect_ops import foreign
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.walk import function_key, iter_nodes
from mxfp8_graph.program_files import load
from mxfp8_ops import contract
from mxfp8_ops.errors import Mxfp8Error

_NAME: Final = "model"


def diagnose_file(path: str | Path) -> Check:
    """Returns the check of one file. Never raises: a file that cannot be read is a check that says so."""
    try:
        if kind_of(path).is_program:
            return _program(path)
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
    return _loadable(model, (by and f"{path}: {by}") or f"{path}: no MXFP8 in it", "")


def _ours(path: str | Path, model: onnx.ModelProto, used: set[str], by: str) -> Check:
    there = {name for domain, name, _ in map(function_key, model.functions) if domain == contract.DOMAIN}
    detail = "; ".join(filter(None, (f"{path}: {', '.join(sorted(used))}", by)))
    if lost := sorted(used - there):
        detail += f"; without the function bodies of {', '.join(lost)}, so it runs with our library only"
        advice = f"a tool has dropped them; put them back: mxfp8-graph convert {path} --to mxfp8"
        return Check(name=_NAME, state="broken", detail=detail, advice=advice)
    return _loadable(model, f"{detail}; with function bodies", ": runs everywhere in ONNX Runtime")


def _loadable(model: onnx.ModelProto, detail: str, otherwise: str) -> Check:
    """Returns the check of a whole file: whether a CPU runs it; `otherwise` is what there is to say then."""
    notes = [note.partition("; ") for note in cpu_provider.note(model)]
    said = "".join(f"; {what}" for what, _, _ in notes) or otherwise
    return Check(name=_NAME, state="ok", detail=f"{detail}{said}", advice="".join(advice for _, _, advice in notes))


def _program(path: str | Path) -> Check:
    """Returns the check of a .pt2 file, which is loaded."""
    program = load(path)  # says what to install, if torch is not here
    from mxfp8_graph.torch_program import record

    made = record.find(program)
    if made is None:
        return Check(name=_NAME, state="ok", detail=f"{path}: a program that loads; no MXFP8 in it")
    weights = "packed weights" if made.packed else "weights to train in MXFP8"
    detail = f"{path}: a program that loads, with {weights}, by recipe {provenance.recipe_name(made.recipe)}"
    return Check(name=_NAME, state="ok", detail=detail)
