"""compare, analyze and tune: the effect of recipes and of single matmuls on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxfp8_graph.cli.arguments import (
    AllowNonfinite,
    Dims,
    Json,
    ModelPath,
    Objective,
    Overwrite,
    Reports,
    SamplesPath,
    Seed,
    Settings,
    Verbose,
    recipe_option,
    shapes,
)
from mxfp8_graph.cli.guard import FAILED, refuse
from mxfp8_graph.cli.results import check_reports, tell
from mxfp8_graph.policy import presets
from mxfp8_graph.terminal import progress_bar, say


def compare(
    model: ModelPath,
    *,
    recipes: Annotated[
        str | None,
        typer.Option(
            "--recipes",
            metavar="A,B,...",
            help="Presets, recipe files and formats of other tools, separated by commas. Default: all presets and "
            "formats; an unknown name lists them.",
            show_default=False,
        ),
    ] = None,
    inputs: SamplesPath = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Error to print: relative_l2, sqnr, cosine, max_error, top1, kl, or module:function (your code). "
            "Repeatable. Default: relative_l2 and cosine.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Number of timed runs.", min=1)] = 7,
    dim: Dims = None,
    seed: Seed = 0,
    settings: Settings = None,
    report: Reports = None,
    json: Json = False,
    overwrite: Overwrite = False,
) -> None:
    """Measures each recipe on MODEL: errors at its outputs, size and latency.

    Recipes are rewritten and run. Formats of other tools (TransformerEngine's DelayedScaling, Float8CurrentScaling and
    Float8BlockScaling, NVFP4, MXFP4, MXFP6, INT8) are emulated in float32, and marked so: no model is written in them.
    Needs room for the rewritten models in the temporary folder (TMPDIR).
    """
    from mxfp8_graph.tools.compare.run import METRICS
    from mxfp8_graph.tools.compare.run import compare as run_comparison

    check_reports(report, [model], overwrite=overwrite)
    with progress_bar(steps=True) as progress:
        result = run_comparison(
            model,
            [name.strip() for name in recipes.split(",")] if recipes else (),
            settings=settings or (),
            inputs=inputs,
            metrics=metric or METRICS,
            shapes=shapes(dim),
            seed=seed,
            repeat=repeat,
            progress=progress,
        )
    tell(result, json=json, reports=report, overwrite=overwrite)


def analyze(
    model: ModelPath,
    *,
    recipe: Annotated[str, recipe_option(f"Recipe that selects the matmuls: {presets.choices()}.")] = presets.DEFAULT,
    settings: Settings = None,
    inputs: SamplesPath = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Error that ranks the matmuls: relative_l2, sqnr, cosine, max_error, top1, kl, or module:function.",
        ),
    ] = "relative_l2",
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="N", min=0, help="Exclude the N worst. Default: the fewest that cause half of the error."
        ),
    ] = None,
    report: Reports = None,
    json: Json = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
    dim: Dims = None,
    seed: Seed = 0,
    allow_nonfinite: AllowNonfinite = False,
) -> None:
    """Ranks the matmuls by error: at the outputs, with each alone in MXFP8, and with all others.

    Prints the matmuls, the worst first, and an exclude list to paste into a recipe. Takes two runs of the model per
    matmul and sample. Needs room for a copy of an ONNX MODEL in the temporary folder (TMPDIR).
    """
    from mxfp8_graph.policy.recipe import load_recipe
    from mxfp8_graph.tools.analyze.run import analyze as run_analysis

    check_reports(report, [model], overwrite=overwrite)
    with progress_bar(steps=True) as progress:
        result = run_analysis(
            model,
            load_recipe(recipe).setting(settings or ()),
            inputs=inputs,
            shapes=shapes(dim),
            seed=seed,
            metric=metric,
            keep=keep,
            allow_nonfinite=allow_nonfinite,
            progress=progress,
        )
    tell(result, every=verbose, json=json, reports=report, overwrite=overwrite)


def tune(
    model: ModelPath,
    *,
    budget: Annotated[
        list[str],
        typer.Option(
            "--budget",
            metavar="BUDGET",
            help="Limit: cosine>=0.999 for the mean over all samples, worst_cosine>=0.99 for the worst sample. "
            "Metrics: relative_l2, sqnr, cosine, max_error, top1, kl, or module:function. Repeatable, all apply.",
            show_default=False,
        ),
    ],
    objective: Annotated[
        Objective, typer.Option("--objective", help="Minimise the size of the model, or its latency on this machine.")
    ] = Objective.size,
    recipe: Annotated[str, recipe_option(f"Recipe that selects the matmuls: {presets.choices()}.")] = presets.DEFAULT,
    settings: Settings = None,
    inputs: SamplesPath = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Folder for the model, recipe.yaml, report.html and report.json. Default: MODEL.tuned.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    report: Reports = None,
    json: Json = False,
    verbose: Verbose = False,
    dim: Dims = None,
    seed: Seed = 0,
    allow_nonfinite: AllowNonfinite = False,
) -> None:
    """Searches for the smallest or fastest plan that keeps a budget.

    A plan keeps or packs each matmul, in one of several ways. Every plan that is tried is rewritten for real and run on
    all samples. Measurements are written to FOLDER.part: after a stop, the same command continues from there. If no
    plan keeps the budget, the exit code is 1 and nothing is written. Needs room for a copy of an ONNX MODEL in the
    temporary folder (TMPDIR).
    """
    from mxfp8_graph.policy.recipe import load_recipe
    from mxfp8_graph.tools.tune.result import BudgetNotMetError
    from mxfp8_graph.tools.tune.run import tune as run_search
    from mxfp8_graph.tools.tune.tuner import Interrupted

    check_reports(report, [model], overwrite=overwrite)
    try:
        with progress_bar(steps=True) as progress:
            result = run_search(
                model,
                budget,
                objective=objective.value,
                recipe=load_recipe(recipe).setting(settings or ()),
                inputs=inputs,
                output=output,
                overwrite=overwrite,
                shapes=shapes(dim),
                seed=seed,
                allow_nonfinite=allow_nonfinite,
                progress=progress,
            )
    # Exit code 1, as of a failed verification: the search worked, and its answer is no.
    except BudgetNotMetError as error:
        refuse(error)
        raise typer.Exit(FAILED) from None
    except Interrupted as stopped:
        # An interrupted search shows its best plan so far, but writes no report: it is not the result.
        if (best := stopped.best) is not None:
            tell(best, every=verbose, json=json, reports=None, overwrite=overwrite)
        say(stopped.advice())
        raise (stopped.__cause__ or stopped) from None
    tell(result, every=verbose, json=json, reports=report, overwrite=overwrite)
