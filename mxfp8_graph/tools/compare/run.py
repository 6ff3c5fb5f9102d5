"""compare(): the error, size and speed of a model under each recipe, on the user's own data.

Our recipes are rewritten, and run with our kernels. Formats of other projects are emulated (`emulation.py`) at the same
matmuls. An exported program is compared as the ONNX model that torch exports from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.onnx_pass.load import bytes_of, load
from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.running.compare import sqnr
from mxfp8_graph.running.inputs import describe
from mxfp8_graph.running.runner import Model, is_program
from mxfp8_graph.running.samples import SampleOptions
from mxfp8_graph.running.sessions import Runnable
from mxfp8_graph.tools.compare.comparison import Comparison, Row
from mxfp8_graph.tools.compare.emulation import Emulated, Emulator
from mxfp8_graph.tools.compare.number_formats import PEERS, Peer
from mxfp8_graph.tools.metrics import metric_called
from mxfp8_graph.tools.trials import Bench, open_bench
from mxfp8_ops import cpu, system
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError, correction

VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mxfp8-even": {"scale_rounding": "even"},
    "mxfp8-e5m2": {"weight_format": "e5m2", "activations": "e5m2"},
}
"""Settings of `mxfp8` that are no presets: the fields that differ from the defaults."""

WORDS: Final[Mapping[str, str]] = {
    "mxfp8": "E4M3, ceil scales (TransformerEngine's MXFP8BlockScaling), blocks of 32",
    "mxfp8-bf16": "E4M3 weights, ceil scales; activations in bfloat16",
    "mxfp8-weight-only": "E4M3 weights, ceil scales; activations as they are",
    "mxint8": "INT8, floor scales (MXINT8 of the OCP specification)",
    "mxint8-bf16": "INT8 weights, floor scales; activations in bfloat16",
    "mxint8-weight-only": "INT8 weights, floor scales; activations as they are",
    "ocp": "E4M3, floor scales (the OCP specification's)",
    "all": "E4M3, ceil scales; also output projections, routers, embeddings and attention products",
    "mxfp8-even": "E4M3, even scales: mxfp8 with scale_rounding=even",
    "mxfp8-e5m2": "E5M2, ceil scales: mxfp8 with weight_format=e5m2 and activations=e5m2",
}
METRICS: Final = ("relative_l2", "cosine")
"""The default metrics."""
ORIGINAL: Final = "original"


@blame_models_if_checker_complains("model")
def compare(
    model: Model,
    recipes: str | Path | Recipe | Sequence[str | Path | Recipe] = (),
    *,
    settings: Sequence[str] = (),
    metrics: Sequence[str] = METRICS,
    repeat: int = 7,
    progress: Progress | None = None,
    **inputs: Unpack[SampleOptions],
) -> Comparison:
    """Returns the errors of outputs and weights, the size and the latency of a model under each recipe.

    A recipe that does not fit the model has a row with the reason. Rewritten models are in the temporary folder while
    this runs, and the outputs of all samples in memory.

    Args:
        model: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        recipes: presets, `VARIANTS` and `number_formats.PEERS` by name, files, `Recipe`s, one or several; all with a
            name if empty.
        settings: fields to set in every recipe of ours: "embeddings=true"; see `Recipe.setting`.
        metrics: `metrics.METRICS` by name, or "module:function".
        repeat: number of timed runs of each real model, at least 1.
        progress: called as progress(recipe, runs done, runs in all).
        **inputs: see `running.samples.SampleOptions`.

    Raises:
        ContractError: the model cannot be read, exported or is rewritten already; an unknown metric, or no run.
        RecipeError: a recipe is unknown or malformed.
        ShapeError: the samples do not fit.
        BackendError: ONNX Runtime cannot run the model, or the native library is missing.
        NothingEligibleError: no recipe rewrites anything.
    """
    check_options("compare", inputs, SampleOptions)
    if repeat < 1:
        raise ContractError("compare", f"repeat is {repeat}", expected="1 or more", advice="correct it")
    chosen = [metric_called(name) for name in metrics]
    several = [recipes] if isinstance(recipes, (str, Path, Recipe)) else recipes
    candidates = _candidates(several, settings)
    notes = [f"recipes of ours with {', '.join(settings)}"] if settings else []
    with contextlib.ExitStack() as stack:
        source = model
        if is_program(model):
            from mxfp8_graph.onnx_export.to_onnx import plain_to_onnx  # imports torch

            folder = stack.enter_context(system.temporary_folder())
            source = plain_to_onnx(model, folder / "model.onnx")
            notes.append("the program is compared as the ONNX model that torch.onnx makes of it")
        bench = stack.enter_context(open_bench(source, inputs, chosen, progress=progress))
        if source is not model:
            bench.name = str(model) if isinstance(model, (str, Path)) else "program"
        real = sum(isinstance(candidate, Recipe) for candidate in candidates.values())
        bench.total = len(bench.samples) * (len(candidates) + 1) + repeat * (real + 1)
        rows = _rows(bench, candidates, repeat)
    if bench.samples.synthesised:
        notes.append("synthesised inputs: errors on your own data may differ; pass --inputs")
    return Comparison(
        model=bench.name,
        inputs=str(bench.samples),
        timed=describe(bench.samples.largest),
        synthesised=bench.samples.synthesised,
        sample_names=bench.samples.names,
        metrics=tuple(chosen),
        isa=cpu.isa(),
        rows=tuple(rows),
        notes=(*notes, *filter(None, [bench.original.note])),
    )


def choices() -> str:
    """Returns the names of recipes that a user may pass, as a text."""
    return f"{', '.join((*presets.PRESETS, *VARIANTS, *PEERS))}, or a .yaml or .toml file"


def _candidates(recipes: Sequence[str | Path | Recipe], settings: Sequence[str]) -> dict[str, Recipe | Peer]:
    """Returns the recipes to try by name."""
    chosen: dict[str, Recipe | Peer] = {}
    for recipe in recipes or (*presets.PRESETS, *VARIANTS, *PEERS):
        candidate = _candidate(recipe)
        name = candidate.name  # `setting` adds the settings to the name of a recipe
        if name in chosen:
            what = f"{name!r} is named twice"
            raise RecipeError("compare", what, expected="a different name for each recipe", advice="name each once")
        chosen[name] = candidate.setting(settings) if isinstance(candidate, Recipe) else candidate
    return chosen


def _candidate(recipe: str | Path | Recipe) -> Recipe | Peer:
    if isinstance(recipe, str) and recipe in PEERS:
        return PEERS[recipe]
    if isinstance(recipe, str) and recipe in VARIANTS:
        return Recipe(name=recipe, **VARIANTS[recipe])
    if isinstance(recipe, str) and recipe not in get_args(presets.Preset) and not Path(recipe).suffix:
        meant = correction(recipe, (*presets.PRESETS, *VARIANTS, *PEERS))
        raise RecipeError("recipe", repr(recipe), expected=f"one of {choices()}", advice=meant)
    return load_recipe(recipe)


def _rows(bench: Bench, candidates: Mapping[str, Recipe | Peer], repeat: int) -> list[Row]:
    """Returns the row of the original, and one per recipe; raises the first recipe's error if none has a result."""
    size = bytes_of(load(bench.model))
    rows = [Row(name=ORIGINAL, what="the model as it is", emulated=False, byte_size=size)]
    runnables: dict[str, Runnable] = {ORIGINAL: bench.original}
    errors: list[Mxfp8Error] = []
    emulator: list[Emulator] = []
    for name, candidate in candidates.items():
        what = candidate.what if isinstance(candidate, Peer) else WORDS.get(name, "")
        row, before = Row(name=name, what=what, emulated=isinstance(candidate, Peer)), bench.runs
        try:
            if isinstance(candidate, Peer):
                # Made once, at the first format that needs it: it prepares the whole model.
                emulator = emulator or [Emulator(bench.model, load_recipe(presets.DEFAULT, convolutions=True))]
                row = _emulated(bench, row, emulator[0], candidate)
            else:
                row = _real(bench, row, candidate, runnables)
        except Mxfp8Error as error:
            errors.append(error)
            row = replace(row, problem=str(error))
            bench.runs = before + len(bench.samples)  # the progress includes the runs that the error skipped
        rows.append(row)
    if len(errors) == len(candidates):
        raise errors[0]
    # At the end, since all models take turns.
    latencies = bench.seconds(runnables, repeat)
    return [replace(row, latency=latencies.get(row.name)) for row in rows]


def _real(bench: Bench, row: Row, recipe: Recipe, runnables: dict[str, Runnable]) -> Row:
    trial = bench.trial(recipe, row.name)
    runnables[row.name] = trial.runnable
    report = trial.report
    return replace(
        row,
        recipe=trial.recipe.to_yaml(),
        scores=tuple(trial.scores.values()),
        sites=len(report.rewritten),
        weight_sqnr=None if report.weight_error is None else sqnr(report.weight_error.mean),
        byte_size=report.bytes_after,
    )


def _emulated(bench: Bench, row: Row, emulator: Emulator, peer: Peer) -> Row:
    emulated = Emulated(emulator, peer)
    return replace(
        row,
        scores=tuple(bench.scores(emulated.run, row.name).values()),
        sites=emulator.sites,
        weight_sqnr=sqnr(emulated.relative_l2),
        byte_size=emulator.other_bytes + emulated.byte_size,
    )
