"""rewrite, verify and run: commands on one model; doctor: checks the installation."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option, echo

from mxfp8_graph.cli import arguments as arg
from mxfp8_graph.cli.guard import BAD_INPUT, FAILED, check_reports, print_result, progress_bar, say, show
from mxfp8_graph.policy import presets


def rewrite(
    model: arg.ModelPath,
    *,
    output: Annotated[
        Path | None, Option("-o", "--output", help="Default: MODEL.mxfp8.onnx, MODEL.mxint8.onnx; .pt2.")
    ] = None,
    recipe: Annotated[str, arg.recipe_option()] = presets.DEFAULT,
    settings: arg.Settings = None,
    exclude: Annotated[
        list[str] | None,
        Option(metavar="REGEX", help="Also keep matmuls whose name or module path matches. Repeatable."),
    ] = None,
    no_fuse: Annotated[bool, Option("--no-fuse", help="ONNX: fuse no activations, gates, attention.")] = False,
    runs_on: Annotated[
        Literal["cpu"] | None,
        Option("--for", help="ONNX: float32 for ops without 16-bit kernels in ONNX Runtime's CPU provider."),
    ] = None,
    bodies: Annotated[
        Literal["folded", "small", "none"],
        Option(help="Weights where our library is absent (ONNX): in float32; in 8 bits, slow; none: it does not run."),
    ] = "folded",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan for each matmul; write nothing.")] = False,
    report: arg.Reports = None,
    json: arg.Json = False,
    external_data: arg.ExternalData = "auto",
    overwrite: arg.Overwrite = False,
    allow_nonfinite: arg.AllowNonfinite = False,
    training: Annotated[
        bool,
        Option("--training", help=".pt2: keep weights as trainable parameters; packed weights stay frozen."),
    ] = False,
    weights: Annotated[
        Path | None,
        Option(metavar="CHECKPOINT", help="Take the packed bytes from MXFP8 safetensors; quantize nothing."),
    ] = None,
    weight_names: Annotated[
        Path | None, Option(metavar="FILE.json", help="JSON object: name in the model -> name in the checkpoint.")
    ] = None,
    verbose: arg.Verbose = False,
) -> None:
    """Rewrites the matmuls of MODEL to MXFP8 or MXINT8."""
    from mxfp8_graph import rewriting
    from mxfp8_graph.policy.recipe import load_recipe

    check_reports(report, [model, output], overwrite=overwrite)
    chosen = load_recipe(recipe).setting(settings or ()).excluding(exclude or ())
    chosen = chosen.without_fusion() if no_fuse else chosen
    chosen = chosen.for_cpu() if runs_on else chosen
    with progress_bar() as progress:
        _, result = rewriting.rewrite(
            model, chosen, output=output, external_data=external_data, overwrite=overwrite, bodies=bodies,
            dry_run=dry_run, allow_nonfinite=allow_nonfinite, training=training,
            weights=weights, weight_names=weight_names, progress=progress,
        )  # fmt: skip
    # A dry run is about the plan, so it prints every site.
    print_result(result, every=dry_run or verbose, json=json, reports=report, overwrite=overwrite)


def verify(
    original: Annotated[Path, Argument(metavar="ORIGINAL", help="The original model.")],
    rewritten: Annotated[Path, Argument(metavar="REWRITTEN", help="The rewritten model.")],
    *,
    inputs: arg.SamplesPath = None,
    max_rel_l2: Annotated[
        float | None,
        Option(
            metavar="X", min=0, help="Limit of each output's relative L2. Default: INT8 0.2, E4M3 0.3; integers none."
        ),
    ] = None,
    dim: arg.Dims = None,
    seed: arg.Seed = 0,
    report: arg.Reports = None,
    json: arg.Json = False,
    overwrite: arg.Overwrite = False,
) -> None:
    """Compares a rewritten model with its original.

    Prints the error of each output, and the distance of the native kernels from the function bodies in the file.
    Exit code 1 if a kernel disagrees with its function body, if an error is above --max-rel-l2, if a NaN or Inf is in
    only one of the outputs, or if no output could be judged: all are integers without --max-rel-l2, texts, sequences
    or maps, or have no finite values.
    """
    from mxfp8_graph.running.verify import verify as run_verify

    check_reports(report, [original, rewritten], overwrite=overwrite)
    result = run_verify(
        original, rewritten, inputs=inputs, shapes=arg.shapes(dim), seed=seed, max_rel_l2=max_rel_l2,
    )  # fmt: skip
    print_result(result, json=json, reports=report, overwrite=overwrite)
    # The report is printed first: a failed verification is a result and not an error.
    if not result.passed:
        raise Exit(FAILED)


def run(
    model: arg.ModelPath,
    *,
    inputs: arg.SamplesPath = None,
    repeat: arg.Repeat = 10,
    profile: Annotated[bool, Option("--profile", help="Also print the kernel and the time of each node.")] = False,
    device: Annotated[str, Option(metavar="cpu|cuda|cuda-copies", help="Where our nodes run.")] = "cpu",
    dim: arg.Dims = None,
    seed: arg.Seed = 0,
    report: arg.Reports = None,
    json: arg.Json = False,
    overwrite: arg.Overwrite = False,
) -> None:
    """Runs a model on the first sample, and times it."""
    from mxfp8_graph.running.runner import run_model

    check_reports(report, [model], overwrite=overwrite)
    result = run_model(
        model, inputs=inputs, shapes=arg.shapes(dim), seed=seed, repeat=repeat, profile=profile, device=device,
    )  # fmt: skip
    print_result(result, json=json, reports=report, overwrite=overwrite)


def doctor(json: arg.Json = False) -> None:
    """Checks the installation. Exit code 2 if models cannot run on the CPU."""
    from mxfp8_graph.doctor import diagnose, healthy, table

    checks = diagnose()
    if json:
        echo(dumps({"healthy": healthy(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        show(table(checks))
    if not healthy(checks):
        say("error: the CPU path does not work here; expected no failed check; follow the advice above")
        raise Exit(BAD_INPUT)
