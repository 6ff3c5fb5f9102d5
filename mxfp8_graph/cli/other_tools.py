"""from-hf, convert and export-checkpoint: commands on the files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option, echo

from mxfp8_graph.cli import arguments as arg
from mxfp8_graph.cli.guard import check_reports, print_result, progress_bar
from mxfp8_graph.naming import printable
from mxfp8_graph.tools.dialects.rows import DIALECTS, WRITTEN

# The rows load no onnx, so the help can name them.
_DIALECTS = [f"{name} ({DIALECTS[name].help})" for name in WRITTEN]


def from_hf(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Hugging Face folder: config.json, *.safetensors.")],
    *,
    output: Annotated[
        Path | None, Option("-o", "--output", help="Default: FOLDER/model.mxfp8.onnx or .mxint8.onnx.")
    ] = None,
    recipe: Annotated[
        str | None, arg.recipe_option("Default: mxfp8, or mxfp8-weight-only if the checkpoint quantizes weights only.")
    ] = None,
    settings: arg.Settings = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], Option(help="Dtype of all values that are not MXFP8.")
    ] = "float32",
    opset: Annotated[int, Option(metavar="N", help="ONNX opset version, 21 or later.")] = 21,
    report: arg.Reports = None,
    json: arg.Json = False,
    external_data: arg.ExternalData = "auto",
    overwrite: arg.Overwrite = False,
    allow_nonfinite: arg.AllowNonfinite = False,
    verbose: arg.Verbose = False,
) -> None:
    """Makes an ONNX model from a Hugging Face folder.

    The folder has weights in MXFP8. Copies the bytes of all tensors, and runs no code from the folder.
    """
    from mxfp8_graph.tools.from_hf import from_hf as from_folder

    check_reports(report, [output], overwrite=overwrite)
    with progress_bar() as progress:
        _, result = from_folder(
            folder, output, recipe=recipe, settings=settings or (), dtype=dtype, opset=opset,
            external_data=external_data, overwrite=overwrite, allow_nonfinite=allow_nonfinite, progress=progress,
        )  # fmt: skip
    print_result(result, every=verbose, json=json, reports=report, overwrite=overwrite)


def convert(
    model: Annotated[Path, Argument(metavar="MODEL", help="An ONNX model in MXFP8.")],
    *,
    to: Annotated[
        str, Option(metavar="DIALECT", autocompletion=lambda: list(WRITTEN), help=f"One of: {', '.join(_DIALECTS)}.")
    ],
    output: Annotated[Path | None, Option("-o", "--output", help="Default: MODEL.DIALECT.onnx.")] = None,
    allow: Annotated[
        list[str] | None,
        Option(
            metavar="LOSS",
            help="Accept a loss in the dialect: activations (no longer quantized), rounding (their scales are rounded "
            "differently). Repeatable.",
        ),
    ] = None,
    accuracy_level: Annotated[
        Literal[0, 4], Option(help="nbits: at 4 ONNX Runtime rounds activations to int8, at 0 it computes in float32.")
    ] = 4,
    external_data: arg.ExternalData = "auto",
    overwrite: arg.Overwrite = False,
    report: arg.Reports = None,
    json: arg.Json = False,
) -> None:
    """Converts an MXFP8 model from one dialect to another.

    Elements and scales stay the same bytes. Reads the nodes of rewrite, TensorRT (modelopt, TransformerEngine),
    standard Q/DQ, ONNX Runtime's CUDA op and Quark. Prints the quantized values it reads and the losses in the other
    dialect.
    """
    from mxfp8_graph.tools.dialects.convert import convert as run_conversion

    check_reports(report, [model, output], overwrite=overwrite)
    _, result = run_conversion(
        model, to, output=output, allow=allow or (), accuracy_level=accuracy_level, external_data=external_data,
        overwrite=overwrite,
    )  # fmt: skip
    print_result(result, json=json, reports=report, overwrite=overwrite)


def export_checkpoint(
    model: arg.ModelPath,
    *,
    output: Annotated[Path, Option("-o", "--output", metavar="FOLDER", help="A new folder.")],
    config: Annotated[Path, Option(metavar="FOLDER", help="Hugging Face folder of the original.")],
    convention: Annotated[
        Literal["compressed-tensors", "scale-inv"],
        Option(help="The first for vLLM, the second for SGLang and transformers."),
    ] = "compressed-tensors",
) -> None:
    """Writes a Hugging Face folder with weights of MODEL.

    vLLM, SGLang and transformers load the packed weights.
    """
    from mxfp8_graph.tools.checkpoint import export_checkpoint as write_checkpoint

    folder, notes = write_checkpoint(model, output, config=config, convention=convention)
    # Only the folder goes to stdout, for scripts.
    for note in notes:
        echo(printable(f"note: {note}"), err=True)
    echo(printable(str(folder)))
