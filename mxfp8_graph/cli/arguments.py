"""Arguments and options of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from typer import Argument, BadParameter, Option

from mxfp8_graph.policy import presets

METRICS: Final = "relative_l2, sqnr, cosine, max_error, top1, kl, or module:function (runs your code)"

ModelPath = Annotated[Path, Argument(metavar="MODEL", help="An ONNX model or a .pt2 program.")]
SamplesPath = Annotated[
    Path | None,
    Option(
        "--inputs",
        metavar="DATA",
        help="Samples: an .npz file, a folder of them, or a .jsonl file of texts with tokenizer.json beside MODEL. "
        "Default: synthesised.",
    ),
]
Dims = Annotated[
    list[str] | None,
    Option("--dim", metavar="NAME=SIZE", help="Size of synthesised inputs: batch=4, input_ids.1=128."),
]
Seed = Annotated[int, Option(min=0, help="Random seed for synthesised inputs.")]
Repeat = Annotated[int, Option(metavar="N", help="Number of timed runs.", min=1)]
Reports = Annotated[
    list[Path] | None,
    Option("--report", metavar="FILE", help="Write the result to a .json or .html file. Repeatable."),
]
Json = Annotated[bool, Option("--json", help="Print the result as JSON, and nothing else on stdout.")]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="FIELD=VALUE", help="A field of the recipe: embeddings=true. VALUE is YAML. Repeatable."),
]
ExternalData = Annotated[
    Literal["auto", "always", "never"],
    Option(help="Write weights to OUTPUT.data; auto: as in MODEL, and always in from-hf."),
]
AllowNonfinite = Annotated[
    bool, Option("--allow-nonfinite", help="Pack weights with NaN or Inf instead of refusing them.")
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace existing outputs and reports.")]
Verbose = Annotated[bool, Option("-v", "--verbose", help="Print every site, tensor, layer and step.")]


def recipe_option(help: str = "") -> Any:
    """Returns the option --recipe with completion of preset names; `help` is added to its help text."""
    help = f"{presets.choices()}. {help}".strip()
    return Option("--recipe", autocompletion=lambda: list(presets.PRESETS), help=help)


SelectingRecipe = Annotated[str, recipe_option()]


def shapes(dims: list[str] | None) -> dict[str, int]:
    """Returns name -> size from options --dim NAME=SIZE."""
    shapes = {}
    # The last "=" separates: names of inputs come from models and may have one.
    for dim in dims or ():
        name, _, size = dim.rpartition("=")
        if not name or not size.isdecimal():
            raise BadParameter(f"{dim!r}; expected NAME=SIZE, as in batch=4", param_hint="--dim")
        shapes[name] = int(size)
    return shapes
