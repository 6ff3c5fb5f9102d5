"""compare, analyze and tune: the effect of recipes and of single matmuls on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Exit, Option

from mxfp8_graph.cli import arguments as arg
from mxfp8_graph.cli.guard import FAILED, check_reports, print_result, progress_bar, refuse
from mxfp8_graph.policy import presets


def compare(
    model: arg.ModelPath,
    *,
    recipes: Annotated[
        str | None,
        Option(
            metavar="A,B,...", help="Presets, recipe files, formats of other tools. Default: all presets and formats."
        ),
    ] = None,
    inputs: arg.SamplesPath = None,
    metric: Annotated[
        list[str] | None, Option(metavar="NAME", help=f"{arg.METRICS}. Repeatable. Default: relative_l2 and cosine.")
    ] = None,
    repeat: arg.Repeat = 7,
    dim: arg.Dims = None,
    seed: arg.Seed = 0,
    settings: arg.Settings = None,
    report: arg.Reports = None,
    json: arg.Json = False,
    overwrite: arg.Overwrite = False,
) -> None:
    """Measures recipes on MODEL: error, size and latency.

    Rewrites MODEL with each recipe and runs it. Formats of other tools (TransformerEngine's DelayedScaling,
    Float8CurrentScaling and Float8BlockScaling, NVFP4, MXFP4, MXFP6, INT8) are emulated in float32, and marked as
    emulated. Needs room for the rewritten models in the temporary folder (TMPDIR).
    """
    from mxfp8_graph.tools.compare.run import METRICS
    from mxfp8_graph.tools.compare.run import compare as run_comparison

    check_reports(report, [model], overwrite=overwrite)
    with progress_bar() as progress:
        result = run_comparison(
            model, [name.strip() for name in recipes.split(",")] if recipes else (), settings=settings or (),
            inputs=inputs, metrics=metric or METRICS, shapes=arg.shapes(dim), seed=seed, repeat=repeat,
            progress=progress,
        )  # fmt: skip
    print_result(result, json=json, reports=report, overwrite=overwrite)


def analyze(
    model: arg.ModelPath,
    *,
    recipe: arg.SelectingRecipe = presets.DEFAULT,
    settings: arg.Settings = None,
    inputs: arg.SamplesPath = None,
    metric: Annotated[str, Option(metavar="NAME", help=f"Ranks the matmuls: {arg.METRICS}.")] = "relative_l2",
    keep: Annotated[
        int | None,
        Option(metavar="N", min=0, help="Exclude the N worst. Default: the fewest that cause half of the error."),
    ] = None,
    report: arg.Reports = None,
    json: arg.Json = False,
    overwrite: arg.Overwrite = False,
    verbose: arg.Verbose = False,
    dim: arg.Dims = None,
    seed: arg.Seed = 0,
    allow_nonfinite: arg.AllowNonfinite = False,
) -> None:
    """Ranks the matmuls by their error at the outputs.

    Measures MODEL twice for each matmul: with only this one in MXFP8, and with all except this one. Prints the matmuls,
    the worst first, and an exclude list to paste into a recipe. Takes two runs of the model per matmul and sample.
    Needs room for a copy of an ONNX MODEL in the temporary folder (TMPDIR).
    """
    from mxfp8_graph.policy.recipe import load_recipe
    from mxfp8_graph.tools.analyze.run import analyze as run_analysis

    check_reports(report, [model], overwrite=overwrite)
    with progress_bar() as progress:
        result = run_analysis(
            model, load_recipe(recipe).setting(settings or ()), inputs=inputs, shapes=arg.shapes(dim), seed=seed,
            metric=metric, keep=keep, allow_nonfinite=allow_nonfinite, progress=progress,
        )  # fmt: skip
    print_result(result, every=verbose, json=json, reports=report, overwrite=overwrite)


def tune(
    model: arg.ModelPath,
    *,
    budget: Annotated[
        list[str],
        Option(
            metavar="BUDGET",
            help="cosine>=0.999 for the mean over all samples, worst_cosine>=0.99 for the worst. Repeatable. "
            f"Metrics: {arg.METRICS}.",
        ),
    ],
    objective: Annotated[
        Literal["size", "latency"], Option(help="Minimise the size of the model, or its latency here.")
    ] = "size",
    recipe: arg.SelectingRecipe = presets.DEFAULT,
    settings: arg.Settings = None,
    inputs: arg.SamplesPath = None,
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="FOLDER", help="Folder for model, recipe and reports. Default: MODEL.tuned."),
    ] = None,
    overwrite: arg.Overwrite = False,
    report: arg.Reports = None,
    json: arg.Json = False,
    verbose: arg.Verbose = False,
    dim: arg.Dims = None,
    seed: arg.Seed = 0,
    allow_nonfinite: arg.AllowNonfinite = False,
) -> None:
    """Finds the smallest or fastest plan within a budget.

    A plan keeps or packs each matmul, in E4M3 or INT8, with activations in the same format, in bfloat16 or unchanged.
    The search rewrites MODEL by each plan that it tries, and runs it on all samples. If no plan meets the budget, the
    exit code is 1 and nothing is written. Needs room for a copy of an ONNX MODEL in the temporary folder (TMPDIR).
    """
    from mxfp8_graph.policy.recipe import load_recipe
    from mxfp8_graph.tools.tune.result import BudgetNotMetError
    from mxfp8_graph.tools.tune.run import tune as run_search

    check_reports(report, [model], overwrite=overwrite)
    try:
        with progress_bar() as progress:
            result = run_search(
                model, budget, objective=objective, recipe=load_recipe(recipe).setting(settings or ()), inputs=inputs,
                output=output, overwrite=overwrite, shapes=arg.shapes(dim), seed=seed,
                allow_nonfinite=allow_nonfinite, progress=progress,
            )  # fmt: skip
    # Exit code 1, as of a failed verification: the search worked, and its answer is no.
    except BudgetNotMetError as error:
        refuse(error)
        raise Exit(FAILED) from None
    print_result(result, every=verbose, json=json, reports=report, overwrite=overwrite)
