"""tune(): checks what it is given, opens the model, and lets the search run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.running.inputs import Signature
from mxfp8_graph.running.runner import Model, is_program, open_runnable
from mxfp8_graph.running.samples import SampleOptions, make_samples
from mxfp8_graph.running.sessions import Runnable
from mxfp8_graph.tools.tune.budget import parse
from mxfp8_graph.tools.tune.folder import Place
from mxfp8_graph.tools.tune.result import Tuning
from mxfp8_graph.tools.tune.trials import Ticker
from mxfp8_graph.tools.tune.tuner import Tuner
from mxfp8_ops.errors import ContractError

OBJECTIVES: Final = ("size", "latency")
SYNTHESISED: Final = 8
"""Samples that are made where none are given."""


class TuneOptions(SampleOptions, total=False):
    """The options of `tune` besides the goal."""

    overwrite: bool
    """Whether files in a folder that exists may be replaced. Default: False."""
    allow_nonfinite: bool
    """Pack weights that hold NaN or Inf. Default: False."""
    progress: Progress | None
    """Called as progress(what, runs done, runs that it may take at most). Default: None."""


def tune(
    model: Model,
    budget: str | Sequence[str],
    *,
    objective: Literal["size", "latency"] = "size",
    recipe: str | Path | Recipe = presets.DEFAULT,
    output: str | Path | None = None,
    **options: Unpack[TuneOptions],
) -> Tuning:
    """Returns the smallest or fastest plan that keeps a budget, of those that the search tried, with its recipe.

    Each matmul is kept, or packed with its activations in E4M3 (INT8, if the recipe's weights are), in bfloat16 or as
    they are. Every plan that is tried is rewritten for real and run on all samples. Measurements are written down as
    they are made: after a kill, the same call goes on from them.

    Args:
        model: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`. Not modified.
        budget: "METRIC>=NUMBER" or "METRIC<=NUMBER", of the mean over all samples; "worst_METRIC...", of the worst
            sample; several must all be kept. METRIC: `tools.metrics.METRICS` or the user's module:function.
        objective: "size" makes bytes small, and of plans of one size takes the most accurate; where errors differ by
            less than 5 %, the one that is cheaper to multiply. "latency" makes the time of a run here small.
        recipe: which matmuls may be packed, and in which weight format; its activations and scale roundings are tuned.
        output: the folder to write: the model, recipe.yaml, report.html and report.json. Default: MODEL.tuned beside
            a path; nothing is written for a model in memory.
        **options: see `TuneOptions` and `running.samples.SampleOptions`.

    Raises:
        BudgetNotMetError: no plan keeps the budget; nothing is written.
        Interrupted: a KeyboardInterrupt; the best so far and all measurements are in OUTPUT.part.
        ContractError: a budget is malformed, the model cannot be read or rewritten, the output exists, another
            process searches there, or what an earlier search left there is of another model, recipe, objective, metric
            or other samples.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
        ShapeError: the samples do not fit the model.
        BackendError: the model cannot be run, or the native library is missing.
    """
    check_options("tune", options, TuneOptions)
    budgets = tuple(parse(text) for text in ([budget] if isinstance(budget, str) else budget))
    if not budgets:
        raise ContractError("budget", "none is given", expected="at least one", advice="pass cosine>=0.999")
    if objective not in OBJECTIVES:
        raise ContractError.unknown("objective", objective, OBJECTIVES)
    base = load_recipe(recipe)
    in_memory = not isinstance(model, (str, Path))
    place = None if in_memory and output is None else Place(model, output, overwrite=options.get("overwrite", False))
    search = contextlib.nullcontext() if place is None else place.search()
    with search as file, _opened(model) as (source, signature, original):
        samples = make_samples(signature, options, count=SYNTHESISED, run=original.run)
        base = base.for_cpu() if original.note else base
        with tempfile.TemporaryDirectory(prefix="mxfp8-graph-") as folder:
            tuner = Tuner(
                model=model,
                source=source,
                signature=signature,
                original=original,
                samples=samples,
                base=base,
                budgets=budgets,
                objective=objective,
                place=place,
                file=file,
                folder=Path(folder),
                allow_nonfinite=options.get("allow_nonfinite", False),
                ticker=Ticker(options.get("progress")),
            )
            return tuner.run()


@contextlib.contextmanager
def _opened(model: Model) -> Iterator[tuple[Any, Signature, Runnable]]:
    """Yields (the model as the passes take it, what it takes, the model ready to run); a program is read once."""
    source: Any = model
    if is_program(model) and isinstance(model, (str, Path)):
        from mxfp8_graph.torch_pass.load import load

        source = load(model)
    signature, original = open_runnable(source)
    if source is not model:
        signature = replace(signature, name=str(model))
    yield source, signature, original
