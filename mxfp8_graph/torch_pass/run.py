"""rewrite_torch(): the way through the torch pass, step by step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.export import ExportedProgram

from mxfp8_graph.policy.plan import Decision, NothingEligibleError, plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport, SiteReport
from mxfp8_graph.torch_pass import attention, matmul_forms, torchao_weights, training
from mxfp8_graph.torch_pass.find import AttentionSite, Site, TorchSite, find_sites
from mxfp8_graph.torch_pass.replace import Editor
from mxfp8_graph.torch_program import internals, record
from mxfp8_graph.torch_program.files import check_target, load, save
from mxfp8_graph.torch_program.program import Program
from mxfp8_graph.torch_program.values import storage_of
from mxfp8_ops import torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError, RecipeError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to rewrite, besides the recipe. See `mxfp8_graph.rewrite`."""

    name: str = "program"
    """What to call the program in messages and in the report."""
    training: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    progress: Progress | None = None


def rewrite_torch(
    source: ExportedProgram, recipe: Recipe, options: Options
) -> tuple[ExportedProgram | None, RewriteReport]:
    """Returns (the rewritten program, or None on a dry run; report). `source` is not modified.

    Raises:
        ContractError: a weight cannot be packed.
        RecipeError: a rule decides nothing, or the program was rewritten with another recipe.
        NothingEligibleError: no matmul of the program is rewritten.
        BackendError: this torch is not one the pass knows.
    """
    start = time.perf_counter()
    notes = [note for note in (internals.check_torch(),) if note]

    def report(
        sites: Sequence[SiteReport], output: ExportedProgram | None = None, *, already: bool = False
    ) -> RewriteReport:
        return RewriteReport(
            source=options.name,
            output=None,
            recipe=recipe.model_dump(mode="json"),
            sites=tuple(sites),
            bytes_before=byte_size(source),
            bytes_after=byte_size(output) if output else None,
            seconds=time.perf_counter() - start,
            notes=tuple(notes),
            dry_run=options.dry_run,
            already_rewritten=already,
        )

    if _already_rewritten(source, recipe, options):
        return source, report([], already=True)
    program, sites, decisions = _planned(source, recipe, options)
    notes += _lowered(sites)
    taken = [s for s, d in zip(sites, decisions, strict=True) if d.quantize and isinstance(s, TorchSite) and s.packed]
    if taken:
        count = len(taken)
        notes.append(f"{count} weights were packed by torchao: their bytes are kept, their rounding error is unknown")
    if not any(decision.quantize for decision in decisions):
        raise NothingEligibleError(_nothing(options.name, decisions), decisions)
    if options.dry_run:
        return None, report([SiteReport(decision=d, bytes_before=d.site.weight_bytes) for d in decisions])
    reports = _apply(program, sites, decisions, recipe, options)
    if not options.training:
        program.freeze()
    result = program.finish()
    return result, report(reports, result)


def byte_size(program: ExportedProgram) -> int:
    """Returns the bytes of a program's parameters, buffers and constants, shared ones counted once."""
    sizes: dict[object, int] = {}
    for tensor in (*program.state_dict.values(), *program.constants.values()):
        if torchao_weights.is_mx(tensor):
            sizes[id(tensor)] = tensor.qdata.nbytes + tensor.scale.nbytes
        elif isinstance(tensor, torch.Tensor):
            sizes[storage_of(tensor) or id(tensor)] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def rewrite_torch_file(
    model: ExportedProgram | str | Path,
    recipe: Recipe,
    options: Options,
    output: Path | None,
    *,
    overwrite: bool,
) -> tuple[Path | ExportedProgram | None, RewriteReport]:
    """Returns (the .pt2 file written, or None on a dry run; report).

    Args:
        model: a program, or the .pt2 file it is in.
        recipe: what to rewrite, and how.
        options: how to rewrite, besides the recipe.
        output: default MODEL.mxfp8.pt2 next to MODEL.pt2.
        overwrite: whether an existing output may be replaced. The input never is.

    Raises:
        ContractError: the model cannot be read or packed, or the output not written; also see `rewrite_torch`.
    """
    in_memory = isinstance(model, ExportedProgram)
    if output is None:
        output = Path(str(model)).with_suffix(".mxfp8.pt2")
    if not in_memory and output.resolve() == Path(str(model)).resolve():
        raise ContractError(output, "is the input", expected="another file", advice="pass another output")
    check_target(output, overwrite=overwrite)
    program = model if isinstance(model, ExportedProgram) else load(model)
    if not in_memory:
        options = replace(options, name=str(model))
    result, report = rewrite_torch(program, recipe, options)
    if result is None or report.already_rewritten:
        return (None if result is None else program if in_memory else Path(str(model))), report
    save(result, output, overwrite=overwrite)
    before = report.bytes_before if in_memory else Path(str(model)).stat().st_size
    return output, replace(report, output=str(output), bytes_before=before, bytes_after=output.stat().st_size)


def _already_rewritten(source: ExportedProgram, recipe: Recipe, options: Options) -> bool:
    """Whether `recipe` made this program; warns if it was prepared for training with another.

    Raises:
        RecipeError: another recipe packed its weights; packed weights cannot be packed again.
    """
    made = record.find(source)
    if made is None:
        return False
    same = made.recipe == recipe.model_dump_json()
    if made.packed:
        if same and not options.training:
            return True
        asked = f"training with {recipe.name!r}" if options.training else repr(recipe.name)
        raise RecipeError(
            options.name,
            f"Recipe mismatch for {made.node!r}: packed with {made.recipe_name!r}, asked for {asked}",
            expected="the original program, since packed weights cannot be packed again",
            advice="rewrite that one",
        )
    if not same:
        warnings.warn(f"Recipe type changed from {made.recipe_name} to {recipe.name}", stacklevel=4)
    return same and options.training


def _planned(source: ExportedProgram, recipe: Recipe, options: Options) -> tuple[Program, list[Site], list[Decision]]:
    """Returns (the copy to edit, its sites, what to do with each), attention taken apart where a recipe needs it."""
    program = Program(_without_einsum(source))
    sites = find_sites(program)
    decisions = _decide(sites, recipe, options)
    wanted = {s.node for s, d in zip(sites, decisions, strict=True) if d.quantize and matmul_forms.is_attention(s.node)}
    if wanted and not options.dry_run:
        for node in wanted:
            attention.expand(program, node)
        sites = find_sites(program)
        decisions = _decide(sites, recipe, options)
    return program, sites, decisions


def _decide(sites: Sequence[Site], recipe: Recipe, options: Options) -> list[Decision]:
    decisions = plan([site.matmul for site in sites], recipe)
    for index, (site, decision) in enumerate(zip(sites, decisions, strict=True)):
        unfit = site.unfit or (training.obstacle(site) if options.training else None)
        if decision.quantize and unfit:
            decisions[index] = training.kept(decision, unfit)
        elif decision.quantize and isinstance(site, TorchSite) and site.packed:
            decisions[index] = replace(decision, weight_format=site.packed)
    if options.training:
        training.check(recipe, decisions)
    return decisions


def _without_einsum(source: ExportedProgram) -> ExportedProgram:
    """Returns `source` with each einsum as the bmm it computes: among them are matmuls with a static operand."""
    modules = (m for m in source.graph_module.modules() if isinstance(m, torch.fx.GraphModule))
    if any(internals.op_name(node) == "einsum" for module in modules for node in module.graph.nodes):
        return internals.expose_einsum(source)
    return source


def _apply(
    program: Program, sites: Sequence[Site], decisions: Sequence[Decision], recipe: Recipe, options: Options
) -> list[SiteReport]:
    made = record.Made("", recipe.model_dump_json(), packed=not options.training)
    editor = Editor(program, made, allow_nonfinite=options.allow_nonfinite)
    total = sum(d.site.weight_bytes for d in decisions if d.quantize)
    done = 0
    reports: list[SiteReport] = []
    for site, decision in zip(sites, decisions, strict=True):
        if not decision.quantize or isinstance(site, AttentionSite):
            training.undo(program, site)
            reports.append(SiteReport(decision=decision, bytes_before=site.matmul.weight_bytes))
            continue
        if options.training:
            reports.append(training.apply(program, site, decision, recipe, made))
        else:
            reports.append(editor.apply(site, decision))
        done += site.matmul.weight_bytes
        if options.progress:
            options.progress(site.matmul.name, done, total)
    editor.finish()
    return reports


def _lowered(sites: Sequence[Site]) -> list[str]:
    """Returns a note that names the linears core ATen had turned into expand and bmm, if there are any."""
    linears = [s for s in sites if isinstance(s, TorchSite) and s.w.static and s.w.static.broadcast]
    names = [s.matmul.module or s.matmul.name for s in linears]
    if not names:
        return []
    return [
        f"core ATen input: {len(names)} linear(s) came as expand and bmm and were recognized ({', '.join(names)}); "
        "rewrite before run_decompositions() to be sure that none is missed"
    ]


def _nothing(name: str, decisions: Sequence[Decision]) -> str:
    if not decisions:
        return f"{name}: no matmul in the program; expected at least one; nothing to rewrite"
    count = f"{len(decisions)} matmul{'s' if len(decisions) > 1 else ''}"
    return f"{name}: none of its {count} is eligible; expected at least one; see the reasons and adapt the recipe"
