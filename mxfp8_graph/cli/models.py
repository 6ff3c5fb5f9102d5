"""rewrite, verify and run: what is done with one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxfp8_graph.cli.arguments import (
    AllowNonfinite,
    Dims,
    ExternalData,
    ModelPath,
    Overwrite,
    Report,
    RunsOn,
    SamplesPath,
    Seed,
    TrustPickle,
    Verbose,
    recipe_option,
    shapes,
)
from mxfp8_graph.cli.guard import FAILED
from mxfp8_graph.policy import presets
from mxfp8_graph.terminal import progress_bar, show

if TYPE_CHECKING:
    from mxfp8_graph.report.data import RewriteReport


def rewrite(
    model: ModelPath,
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Default: MODEL.mxfp8.onnx, or .pt2.", show_default=False)
    ] = None,
    recipe: Annotated[str, recipe_option(f"{presets.choices()}.")] = presets.DEFAULT,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="REGEX",
            help="Keep matmuls whose name or module path matches; beside the recipe's own. Repeatable.",
        ),
    ] = None,
    no_fuse: Annotated[
        bool,
        typer.Option("--no-fuse", help="ONNX: leave activations, normalizations and attention beside matmuls alone."),
    ] = False,
    runs_on: Annotated[
        RunsOn | None,
        typer.Option("--for", help="ONNX: use float32 where ONNX Runtime has no kernels for 16-bit dtypes there."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done to each matmul; stop.")] = False,
    report: Report = None,
    external_data: Annotated[
        ExternalData, typer.Option("--external-data", help="Weights in OUTPUT.data; auto: as the model has them.")
    ] = ExternalData.auto,
    overwrite: Overwrite = False,
    allow_nonfinite: AllowNonfinite = False,
    training: Annotated[
        bool,
        typer.Option("--training", help=".pt2: keep weights as parameters to train; of a packed one, train the rest."),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="CHECKPOINT",
            help="Take the packed bytes from an MXFP8 safetensors file, index or folder; quantize nothing.",
            show_default=False,
        ),
    ] = None,
    weight_names: Annotated[
        Path | None,
        typer.Option(
            "--weight-names",
            metavar="FILE.json",
            help="Names of the checkpoint by names of the model, where they do not match.",
            show_default=False,
        ),
    ] = None,
    verbose: Verbose = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Rewrites the matmuls of MODEL to MXFP8."""
    from mxfp8_graph import rewriting
    from mxfp8_graph.policy.recipe import load_recipe
    from mxfp8_graph.report.data import check_report_path

    if report is not None:
        check_report_path(report, models=[model, *([output] if output else [])])
    chosen = load_recipe(recipe).excluding(exclude or ())
    chosen = chosen.without_fusion() if no_fuse else chosen
    chosen = chosen.for_cpu() if runs_on else chosen
    with progress_bar() as progress:
        _, done = rewriting.rewrite(
            model,
            chosen,
            output=output,
            external_data=external_data.value,
            overwrite=overwrite,
            dry_run=dry_run,
            allow_nonfinite=allow_nonfinite,
            training=training,
            trust_pickle=trust_pickle,
            weights=weights,
            weight_names=weight_names,
            progress=progress,
        )
    show_report(done, plan=dry_run or verbose, verbose=verbose)
    if report is not None:
        done.write(report)


def show_report(done: RewriteReport, *, plan: bool, verbose: bool) -> None:
    """Prints what a rewrite did; with `plan` to which matmul, with `verbose` to which tensor."""
    from mxfp8_graph.report import text

    if plan and done.sites:
        show(text.plan(done, weights=verbose), fold=False)
        show("")
    if verbose and done.account.tensors:
        show(text.tensors(done), fold=False)
        show("")
    show(text.closing(done))


def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model.", show_default=False)],
    rewritten: Annotated[
        Path, typer.Argument(metavar="REWRITTEN", help="What rewrite made of it.", show_default=False)
    ],
    *,
    inputs: SamplesPath = None,
    max_rel_l2: Annotated[
        float | None,
        typer.Option(
            "--max-rel-l2", metavar="X", min=0, help="Limit of each output's relative L2 error. Default: none."
        ),
    ] = None,
    dim: Dims = None,
    seed: Seed = 0,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report, .json.")] = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Compares a rewritten model with its original.

    Prints the error of each output, and how far our kernels are from the function bodies in the file. Exit code 1 if a
    NaN or Inf is in only one of them, if a kernel disagrees with its function body, or if an error is above
    --max-rel-l2.
    """
    from mxfp8_graph.checking import text
    from mxfp8_graph.checking.verify import verify as run_verify
    from mxfp8_graph.report.data import check_report_path

    if report is not None:
        check_report_path(report, (".json",), models=[original, rewritten])
    found = run_verify(
        original,
        rewritten,
        inputs=inputs,
        shapes=shapes(dim),
        seed=seed,
        max_rel_l2=max_rel_l2,
        trust_pickle=trust_pickle,
    )
    show(text.verification(found))
    if report is not None:
        found.write(report)
    if not found.passed:
        raise typer.Exit(FAILED)


def run(
    model: ModelPath,
    *,
    inputs: SamplesPath = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs that are timed.", min=1)] = 10,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also say which kernel each node ran, and how long.")
    ] = False,
    dim: Dims = None,
    seed: Seed = 0,
    trust_pickle: TrustPickle = False,
) -> None:
    """Runs a model with our kernels and times it; of several samples, the first."""
    from mxfp8_graph.checking import text
    from mxfp8_graph.checking.runner import run_model

    found = run_model(
        model,
        inputs=inputs,
        shapes=shapes(dim),
        seed=seed,
        repeat=repeat,
        profile=profile,
        trust_pickle=trust_pickle,
    )
    show(text.run(found))
