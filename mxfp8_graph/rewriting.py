"""rewrite(): the one call, whatever the model is. Chooses the front end; the front ends know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops.errors import ContractError

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


def rewrite(
    model: Any,
    recipe: str | Path | Recipe = "mxfp8",
    *,
    output: str | Path | None = None,
    external_data: Literal["auto", "always", "never"] = "auto",
    overwrite: bool = False,
    dry_run: bool = False,
    allow_nonfinite: bool = False,
    training: bool = False,
    progress: Progress | None = None,
) -> tuple[Any, RewriteReport]:
    """Returns (the rewritten model, a report of every decision).

    Args:
        model: the path of an ONNX or .pt2 file, an `onnx.ModelProto`, an `onnx_graphsurgeon.Graph`, or a
            `torch.export.ExportedProgram`. It is not modified.
        recipe: a preset ("mxfp8", "mxfp8-weight-only", "ocp", "all"), a .yaml or .toml file, or a `Recipe`.
        output: file to write. Default: MODEL.mxfp8.onnx (or .pt2) next to a path, nothing for a model in memory.
        external_data: whether tensors go to OUTPUT.data: "always", "never", or "auto" (as the source has them, and
            near protobuf's 2 GB).
        overwrite: whether an existing output may be replaced. The input never is.
        dry_run: plan and report, check that the output could be written, write nothing; the first result is then None.
        allow_nonfinite: pack weights that hold NaN or Inf (their blocks become NaN) instead of refusing them.
        training: keep the weights as parameters and train them in MXFP8; exported programs only. Rewrite the trained
            program again, without it, to pack them.
        progress: called after each weight.

    Returns:
        For a path, the path written; otherwise the same kind of model as `model`. A model that the same recipe has
        already rewritten comes back as it is, with `report.already_rewritten` set and nothing written. A graphsurgeon
        graph has the record of how it was made in its attribute `metadata_props`, which `gs.export_onnx` does not
        write: `onnx.helper.set_model_props(proto, graph.metadata_props)` does.

    Raises:
        ContractError: the model cannot be read, converted or packed, or the output cannot be written.
        RecipeError: the recipe is malformed, does not fit the model, or is not the one that rewrote it before.
        NothingEligibleError: no matmul of the model is rewritten; carries the reasons.
    """
    chosen = load_recipe(recipe)
    if _is_program(model):
        return _rewrite_program(model, chosen, output, overwrite, dry_run, allow_nonfinite, training, progress)
    if training:
        raise ContractError(
            "rewrite", "training=True for an ONNX model", expected="an exported program", advice="export with torch"
        )

    import onnx

    from mxfp8_graph.onnx_model import graphsurgeon as surgeon
    from mxfp8_graph.onnx_pass import Options, rewrite_onnx

    as_graph = type(model).__module__.startswith("onnx_graphsurgeon.")
    if isinstance(model, (str, Path)):
        source: Path | onnx.ModelProto = Path(model)
        output = output or Path(model).with_suffix(".mxfp8.onnx")
    elif isinstance(model, onnx.ModelProto):
        source = model
    elif as_graph:
        source = surgeon.to_proto(model)
    else:
        raise ContractError(
            "rewrite",
            f"model is a {type(model).__name__}",
            expected="a path, an onnx.ModelProto or an onnx_graphsurgeon.Graph",
            advice="load the model first",
        )
    options = Options(
        output=Path(output) if output else None,
        external_data=external_data,
        overwrite=overwrite,
        dry_run=dry_run,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
    )
    rewritten, report = rewrite_onnx(source, chosen, options)
    if as_graph and isinstance(rewritten, onnx.ModelProto):
        rewritten = model if report.already_rewritten else surgeon.to_graph(rewritten)
    return rewritten, report


def _is_program(model: Any) -> bool:
    """Whether `model` is a torch ExportedProgram or a .pt2 file; asks without importing torch."""
    if isinstance(model, (str, Path)):
        return Path(model).suffix == ".pt2"
    return any(c.__name__ == "ExportedProgram" and c.__module__.startswith("torch.") for c in type(model).__mro__)


def _rewrite_program(  # noqa: PLR0917 - rewrite's own options
    model: Any,
    recipe: Recipe,
    output: str | Path | None,
    overwrite: bool,
    dry_run: bool,
    allow_nonfinite: bool,
    training: bool,
    progress: Progress | None,
) -> tuple[Any, RewriteReport]:
    """Returns what `rewrite` does, for an exported program in memory or in a .pt2 file."""
    from mxfp8_graph.torch_pass import Options, rewrite_torch, rewrite_torch_file

    options = Options(training=training, dry_run=dry_run, allow_nonfinite=allow_nonfinite, progress=progress)
    if output is None and not isinstance(model, (str, Path)):
        return rewrite_torch(model, recipe, options)
    return rewrite_torch_file(model, recipe, options, Path(output) if output else None, overwrite=overwrite)
