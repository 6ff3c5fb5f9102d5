"""rewrite_torch(): the torch pass, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import ExportedProgram

from mxfp8_graph.earlier_rewrite import already_rewritten
from mxfp8_graph.naming import printable
from mxfp8_graph.options import Options
from mxfp8_graph.policy.checkpoint_weights import apply_checkpoint
from mxfp8_graph.policy.plan import Decision, of_layers, plan, require_eligible, tied
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.build import Results, build_report
from mxfp8_graph.report.data import RewriteReport, SiteReport, StoredTensor, account
from mxfp8_graph.torch_pass import attention, internals, packed_training, record, torchao_weights, train, training_mode
from mxfp8_graph.torch_pass.checked_program import check_values, checked, untrained
from mxfp8_graph.torch_pass.find import Site, TorchSite, find_sites
from mxfp8_graph.torch_pass.load import load
from mxfp8_graph.torch_pass.operands import identity
from mxfp8_graph.torch_pass.ops import GROUPED_TRAIN, LINEAR_TRAIN
from mxfp8_graph.torch_pass.program import Program, flattened, storage_of
from mxfp8_graph.torch_pass.replace import Editor, replace_each
from mxfp8_graph.torch_pass.save import check_target, write
from mxfp8_ops.checks import dtype_name

WANTED: Final = "matmul in the program"
"""The kind of node that the error names if nothing is eligible."""


def rewrite_torch(
    model: Path | ExportedProgram, recipe: Recipe, options: Options
) -> tuple[Path | ExportedProgram | None, RewriteReport]:
    """Returns (the output's path, or the rewritten program without an output, or None on a dry run; the report).

    A program in memory is not modified. Errors: see `mxfp8_graph.rewrite`, and `internals.check_torch`.
    """
    # Before the work: packing a model takes minutes, and a wrong path can be refused now.
    if options.output is not None:
        inputs = [model] if isinstance(model, Path) else []
        check_target(options.output, overwrite=options.overwrite, inputs=inputs)
    if isinstance(model, Path):
        source = load(model)
    else:
        # A trained module may have values that the program lacks, see `checked_program`.
        check_values(model, options.name)
        source = flattened(model)
    size = model.stat().st_size if isinstance(model, Path) else byte_size(source)
    notes = [*filter(None, [internals.check_torch()])]
    previous = record.find(source)
    if already_rewritten(previous, recipe, options, what="program"):
        results: Results = {"already_rewritten": True, "notes": notes}
        result = model if isinstance(model, Path) else source
        if (path := options.copy_to) is not None and not options.dry_run:
            write(source, path, recipe.to_record(), overwrite=options.overwrite)
            result, results["bytes_after"] = path, path.stat().st_size
        return None if options.dry_run else result, build_report(recipe, options, size, **results)
    if not options.training:
        notes += _training_notes(source)
    # A program of layers of `te` may have both: weights that are stored in MXFP8, and others.
    trains = any(internals.op_name(node) in {LINEAR_TRAIN, GROUPED_TRAIN} for node in source.graph.nodes)
    if previous is not None and previous.packed and not trains:
        program, reports, replaced = packed_training.switched(source, recipe, options)
    else:
        program, reports, replaced = _replaced(*planned(source, recipe, options), recipe, options)
    decisions = [report.decision for report in reports]
    accounted = account(decisions, byte_size(source), stored_tensors(program.state, program.constants))
    done: Results = {"sites": reports, "account": accounted, "notes": [*notes, *replaced], "trained": trains}
    if options.dry_run:
        done["sites"] = [SiteReport(decision=decision) for decision in decisions]
        return None, build_report(recipe, options, size, **done)
    rewritten = checked(program.finish(), prepared=options.training)
    if options.output is None:
        done["bytes_after"] = byte_size(rewritten)
        return rewritten, build_report(recipe, options, size, **done)
    write(rewritten, options.output, recipe.to_record(), overwrite=options.overwrite)
    done["bytes_after"] = options.output.stat().st_size
    return options.output, build_report(recipe, options, size, **done)


def _training_notes(source: ExportedProgram) -> list[str]:
    """Returns notes on the ops that leave training mode, and on a training that changed no parameter."""
    notes = []
    if unchanged := untrained(source):
        notes.append(unchanged)
        warnings.warn(printable(unchanged), stacklevel=4)  # the caller of mxfp8_graph.rewrite
    if active := [internals.op_name(node) for node, _, value in training_mode.switches(source.graph_module) if value]:
        ops = ", ".join(f"{active.count(name)} {name}" for name in sorted(set(active)))
        now = "in the result dropout is off, and batch normalization, if any, uses its running statistics"
        notes.append(f"the program was exported in training mode; {now} ({ops})")
    return notes


def byte_size(program: ExportedProgram) -> int:
    """Returns the bytes of a program's parameters, buffers and constants, shared ones counted once."""
    return sum(tensor.byte_size for tensor in stored_tensors(program.state_dict, program.constants))


def stored_tensors(state: Mapping[str, torch.Tensor], constants: Mapping[str, Any]) -> list[StoredTensor]:
    """Returns the parameters, buffers (`state`) and constants by storage: tied weights and views share one."""
    storages: dict[int, StoredTensor] = {}
    for name, tensor in (*state.items(), *constants.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        packed: Any = tensor if torchao_weights.is_mx(tensor) else None
        if packed is None:
            # The whole storage, since a file has all of it even if a view shows a part. Without memory, the id is used.
            place, dtype, size = storage_of(tensor) or id(tensor), tensor.dtype, tensor.untyped_storage().nbytes()
        else:  # torchao's subclass has no storage of its own, so the bytes of its two inner tensors count
            place, dtype, size = id(tensor), packed.qdata.dtype, packed.qdata.nbytes + packed.scale.nbytes
        stored = storages.get(place) or StoredTensor((), tuple(tensor.shape), dtype_name(dtype), size)
        storages[place] = replace(stored, names=(*stored.names, name))
    return list(storages.values())


def planned(source: ExportedProgram, recipe: Recipe, options: Options) -> tuple[Program, list[Site], list[Decision]]:
    """Returns (the copy to edit, its sites, their decisions), attention split into matmuls where a recipe needs it."""
    program = Program(internals.inlined(source, training=options.training))
    if not options.training:
        training_mode.evaluate(program.module)
    sites, decisions = _decide(program, recipe, options)
    wanted = {s.node for s, d in zip(sites, decisions, strict=True) if d.quantize and not isinstance(s, TorchSite)}
    for node in wanted:
        attention.expand(program, node)
    return program, *(_decide(program, recipe, options) if wanted else (sites, decisions))


def _decide(program: Program, recipe: Recipe, options: Options) -> tuple[list[Site], list[Decision]]:
    sites = find_sites(program)
    decisions = plan([site.matmul for site in sites], recipe)
    decisions = of_layers(decisions, [record.is_layer(site.node) for site in sites], recipe)
    for index, (site, decision) in enumerate(zip(sites, decisions, strict=True)):
        unfit = site.unfit or (train.obstacle(site) if options.training else None)
        if decision.quantize and unfit:
            decisions[index] = replace(decision, kind="unfit", rule="structure", reason=unfit)
        elif decision.quantize and isinstance(site, TorchSite) and site.packed:
            decisions[index] = replace(decision, weight_format=site.packed)
    statics = [site.w.static if isinstance(site, TorchSite) else None for site in sites]
    decisions = tied(decisions, [static and identity(program, static) for static in statics])
    if options.training:
        train.check(recipe, decisions)
    return sites, decisions


def _replaced(
    program: Program, sites: Sequence[Site], decisions: Sequence[Decision], recipe: Recipe, options: Options
) -> tuple[Program, list[SiteReport], list[str]]:
    """Replaces every site that is rewritten; returns the program, a report of each site, and notes."""
    assigned = apply_checkpoint([site.matmul for site in sites], decisions, recipe, options.weights)
    notes = [*assigned.notes, *_notes(sites, assigned.decisions)]
    require_eligible(assigned.decisions, options.name, wanted=WANTED)
    if options.training and (left_out := train.note(assigned.decisions)):
        notes.append(left_out)
        warnings.warn(printable(left_out), stacklevel=4)  # the caller of mxfp8_graph.rewrite
    editor = Editor(program, recipe, options, assigned.weights)

    def change(site: Site, decision: Decision) -> SiteReport:
        assert isinstance(site, TorchSite), "attention is split into matmuls before"
        if options.training:
            return train.apply(program, site, decision, recipe)
        return editor.apply(site, decision)

    undo = partial(train.undo, program)
    progress = None if options.dry_run else options.progress
    # `undo`: a site that an earlier training rewrite made linear_train, and this recipe keeps, becomes a linear again.
    reports = replace_each(sites, assigned.decisions, change, keep=undo, progress=progress)
    editor.finish()
    if not options.training:
        # The ops for inference pass no gradients; rewrite(..., training=True) of the result sets them again.
        program.ask_for_gradients(False)
    return program, reports, notes


def _notes(sites: Sequence[Site], decisions: Sequence[Decision]) -> list[str]:
    """Returns notes on linears that core ATen split into expand and bmm, and on weights packed by torchao."""
    notes = []
    pairs = [(s, d) for s, d in zip(sites, decisions, strict=True) if isinstance(s, TorchSite)]
    if names := [s.matmul.module or s.matmul.name for s, _ in pairs if s.w.static and s.w.static.broadcast]:
        notes.append(
            f"core ATen input: {len(names)} linear(s) came as expand and bmm and were recognized ({', '.join(names)}); "
            "rewrite before run_decompositions() to be sure that none is missed"
        )
    if count := sum(bool(s.packed) and d.quantize for s, d in pairs):
        notes.append(f"{count} weights were packed by torchao: their bytes are kept, their rounding error is unknown")
    return notes
