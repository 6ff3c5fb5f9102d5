"""rewrite(): the one call, whatever the model is. Chooses the front end; the front ends know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mxfp8_graph.recipe import Recipe, load_recipe
from mxfp8_graph.report import RewriteReport
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
    progress: Progress | None = None,
) -> tuple[Any, RewriteReport]:
    """Returns (the rewritten model, a report of every decision).

    Args:
        model: the path of an ONNX file, an `onnx.ModelProto`, or an `onnx_graphsurgeon.Graph`. It is not modified.
        recipe: a preset ("mxfp8", "mxfp8-weight-only", "ocp", "all"), a .yaml or .toml file, or a `Recipe`.
        output: file to write. Default: MODEL.mxfp8.onnx next to a path, nothing for a model in memory.
        external_data: whether tensors go to OUTPUT.data: "always", "never", or "auto" (as the source has them, and
            near protobuf's 2 GB).
        overwrite: whether an existing output may be replaced. The input never is.
        dry_run: plan and report, write nothing; the first result is then None.
        allow_nonfinite: pack weights that hold NaN or Inf (their blocks become NaN) instead of refusing them.
        progress: called after each weight.

    Returns:
        For a path, the path written; otherwise the same kind of model as `model`. A model that the same recipe has
        already rewritten comes back as it is, with `report.already_rewritten` set and nothing written.

    Raises:
        ContractError: the model cannot be read, converted or packed, or the output cannot be written.
        RecipeError: the recipe is malformed, does not fit the model, or is not the one that rewrote it before.
        NothingEligibleError: no matmul of the model is rewritten; carries the reasons.
    """
    import onnx

    from mxfp8_graph.onnx_pass import Options, rewrite_onnx

    chosen = load_recipe(recipe)
    as_graph = type(model).__module__.startswith("onnx_graphsurgeon.")
    if isinstance(model, (str, Path)):
        source: Path | onnx.ModelProto = Path(model)
        output = output or Path(model).with_suffix(".mxfp8.onnx")
    elif isinstance(model, onnx.ModelProto):
        source = model
    elif as_graph:
        import onnx_graphsurgeon as gs

        source = gs.export_onnx(model)
    else:
        raise ContractError(
            f"rewrite: model is a {type(model).__name__}; expected a path, an onnx.ModelProto or an "
            "onnx_graphsurgeon.Graph; load the model first"
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
        import onnx_graphsurgeon as gs

        rewritten = model if report.already_rewritten else gs.import_onnx(rewritten)
    return rewritten, report
