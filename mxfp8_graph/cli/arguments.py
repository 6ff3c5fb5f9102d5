"""Arguments and options that several commands have."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from mxfp8_graph.policy import presets


class ExternalData(str, enum.Enum):
    """Place of packed weights: inside of the model, or in a file beside it."""

    auto = "auto"
    always = "always"
    never = "never"


class Objective(str, enum.Enum):
    """The objective of `tune`."""

    size = "size"
    latency = "latency"


ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX model or a .pt2 program.", show_default=False)
]
SamplesPath = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="DATA",
        help="Samples: an .npz file, a folder of .npz or .npy files (a sample per file), a .jsonl file (a sample per "
        "line), or module:function (runs your code, which yields mappings). Default: synthesised.",
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="NAME=SIZE", help="Size of a free dimension of synthesised inputs: batch=4, input_ids.1=128."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed for synthesised inputs.")]

Reports = Annotated[
    list[Path] | None,
    typer.Option("--report", "--html", metavar="FILE", help="Write the result to a .json or .html file. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on stdout.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the recipe, as in embeddings=true. VALUE is YAML. Repeatable.",
    ),
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Pack weights that hold NaN or Inf. Without it they are an error.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing outputs and reports.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print every site, tensor, layer and step.")]


def completed(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns a completion function for the shell: the names that begin with the typed text."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def recipe_option(help: str, **settings: Any) -> Any:
    """Returns the option --recipe, with completion of the presets."""
    return typer.Option("--recipe", autocompletion=completed(presets.PRESETS), help=help, **settings)


def shapes(dims: list[str] | None) -> dict[str, int]:
    """Returns name -> size of the options --dim NAME=SIZE."""
    shapes = {}
    for dim in dims or ():
        name, _, size = dim.rpartition("=")
        if not name or not size.isdecimal():
            raise typer.BadParameter(f"{dim!r}; expected NAME=SIZE, as in batch=4", param_hint="--dim")
        shapes[name] = int(size)
    return shapes
