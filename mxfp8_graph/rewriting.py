"""rewrite(): checks the arguments and calls the front end for the kind of the model.

The front ends do not import each other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from mxfp8_graph.files import is_any_of
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.options import Options, RewriteCall, RewriteOptions, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.checkpoint_weights import CheckpointWeights
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops.errors import ContractError, Option

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs
    from torch.export import ExportedProgram
    from torch.nn import Module

    from mxfp8_graph.torch_pass.export import RewrittenModule

AnyRecipe = presets.Preset | Path | Recipe


@overload
def rewrite(
    model: str | Path, recipe: AnyRecipe = ..., **options: Unpack[RewriteCall]
) -> tuple[Path, RewriteReport]: ...
@overload
def rewrite(
    model: onnx.ModelProto, recipe: AnyRecipe = ..., **options: Unpack[RewriteCall]
) -> tuple[onnx.ModelProto, RewriteReport]: ...
@overload
def rewrite(
    model: ExportedProgram, recipe: AnyRecipe = ..., **options: Unpack[RewriteCall]
) -> tuple[ExportedProgram, RewriteReport]: ...
@overload
def rewrite(
    model: Module,
    recipe: AnyRecipe = ...,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    dynamic_shapes: Any = ...,
    **options: Unpack[RewriteCall],
) -> tuple[RewrittenModule, RewriteReport]: ...
@overload
def rewrite(
    model: gs.Graph, recipe: AnyRecipe = ..., **options: Unpack[RewriteCall]
) -> tuple[gs.Graph, RewriteReport]: ...
def rewrite(
    model: Any,
    recipe: AnyRecipe = presets.DEFAULT,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Unpack[RewriteCall],
) -> tuple[Any, RewriteReport]:
    """Returns (the rewritten model or the path of its file, a report with the decision on every matmul).

    Args:
        model: the path of an ONNX or .pt2 file, an `onnx.ModelProto`, an `onnx_graphsurgeon.Graph`, or a
            `torch.export.ExportedProgram`; or a `torch.nn.Module`, which is exported. It is not modified.
        recipe: the name of a preset (`mxfp8_graph.policy.presets` has them all), the path of a .yaml or .toml file, or
            a `Recipe`. The path may be a str, too, but type checkers know only the presets.
        example_inputs: arguments to export a module with: a sequence, or a mapping by name.
        dynamic_shapes: dynamic shapes of these arguments, as `torch.export.export` takes them. By default axis 0 of
            each tensor, the batch, is dynamic where the module allows it; a note of the report says where it does not.
        output: file to write. Default: MODEL.mxfp8.onnx (or .pt2) next to a path, MODEL.mxint8.onnx for INT8 weights;
            nothing for a model in memory.
        training: keep the weights as parameters and train them in MXFP8; programs and modules only. A program shares
            these parameters with its source: a conversion (`half()`) of one converts the other. In a packed program,
            gradients pass through the packed weights, which stay frozen, and everything else is trained. After the
            training, rewrite the program again without this option: it packs the weights, or returns the packed
            program.
        weights: an MXFP8 checkpoint (.safetensors, .safetensors.index.json or a folder, see `import_safetensors`) of
            the same model. Its weights [N, K] replace the model's, byte for byte. They are matched by the name of the
            weight, or else of its module; one prefix may be added to all names, or removed. Only the checkpoint's
            MXFP8 weights are packed, whatever the recipe's default policy. Weights that the recipe excludes, or that
            the checkpoint has in high precision, keep the model's values.
        weight_names: name of a weight, node or module in the model -> name of the weight in the checkpoint, where
            the names do not match: a mapping, or a JSON file with one.
        external_data: whether tensors of an ONNX file go to OUTPUT.data: "always", "never" or "auto" (default).
        bodies: how an ONNX file computes its nodes without our library: "folded" (default), "small" or "none".
        overwrite: whether an existing output may be replaced. Default: False.
        dry_run: plan and report, but write nothing. Default: False.
        allow_nonfinite: pack weights with NaN or Inf instead of refusing them. Default: False.
        progress: called as progress(site_name, bytes_done, bytes_total) after each weight.
        **options: the keywords above from `training` on, and `output`; `mxfp8_graph.options.RewriteOptions` says more.

    Returns:
        The model is the path of the output for a path. For a module it is a module that is called as the original and
        shares nothing with it; its attribute `program` is the exported program, for `save` and `to_onnx`. Otherwise it
        is of the same kind as `model`; None on a dry run. A model that the same recipe has already
        rewritten is returned unchanged, with `report.already_rewritten` set, and copied to `output` if there is one. A
        graphsurgeon graph has the record of the rewrite in its attribute `metadata_props`, which `gs.export_onnx` does
        not write:
        `onnx.helper.set_model_props(proto, graph.metadata_props)` does.

    Raises:
        ContractError: the model cannot be read, converted or packed, or the output cannot be written; or a weight of
            the checkpoint fits no matmul of the model, or is quantized in another way. All are listed.
        RecipeError: the recipe is malformed, does not fit the model, or another recipe rewrote the model before.
        NothingEligibleError: no matmul of the model is rewritten; it has the reasons.
    """
    check_options("rewrite", options, RewriteCall)
    output, training = options.pop("output", None), options.pop("training", False)
    weights, weight_names = options.pop("weights", None), options.pop("weight_names", None)
    if options.get("dry_run"):
        options["overwrite"] = True  # it writes nothing, so an output that exists is no error
    chosen = load_recipe(recipe)
    source, (model, kind, notes) = model, _exported(model, example_inputs, dynamic_shapes)
    # ONNX models have no gradients; only an exported program can be trained.
    if training and not kind.is_program:
        what = "an ONNX model, which cannot be trained"
        where = model if kind.is_file else "rewrite"
        advice = ("export the model with torch.export, or leave out ", Option("training"))
        raise ContractError(where, what, expected="an exported program (.pt2)", advice=advice)
    if kind.is_program:
        _refuse_onnx_options(options, model if kind.is_file else "rewrite")
    if training and weights is not None:
        what, advice = "weights of a checkpoint for training", ("leave out ", Option("weights"))
        raise ContractError("rewrite", what, expected="weights in high precision", advice=advice)
    name = "program" if kind.is_program else "model"
    copy_to = Path(output) if output else None
    if kind.is_file:
        # The model is at its output already, so there is nothing to copy.
        copy_to = None if copy_to is None or is_any_of(copy_to, [Path(model)]) else copy_to
        model = Path(model)
        name = str(model)
        output = output or chosen.output_for(model, "pt2" if kind.is_program else "onnx")
    whole = Options(
        name=name,
        output=Path(output) if output else None,
        copy_to=copy_to,
        training=training,
        weights=_load_weights(weights, weight_names),
        **cast("RewriteOptions", options),
    )
    # The checkpoint is read while the output is written.
    if whole.weights is not None and whole.output is not None:
        whole.weights.refuse_output(whole.output)
    if kind.is_program:
        # Imported on use: a rewrite of an ONNX model needs no torch, and the reverse.
        from mxfp8_graph.torch_pass import rewrite_torch

        program, report = rewrite_torch(model, chosen, whole)
        report = replace(report, notes=(*report.notes, *notes))
        if kind_of(source) is not Kind.UNKNOWN or program is None or isinstance(program, Path):
            return program, report  # else a module came in
        from mxfp8_graph.torch_pass.export import as_module

        return as_module(program), report
    from mxfp8_graph.onnx_pass import graphsurgeon
    from mxfp8_graph.onnx_pass.run import rewrite_onnx

    if kind is not Kind.GRAPHSURGEON:
        return rewrite_onnx(model, chosen, whole)
    rewritten, report = rewrite_onnx(graphsurgeon.to_proto(model), chosen, whole)
    if rewritten is None or isinstance(rewritten, Path):
        return rewritten, report
    return model if report.already_rewritten else graphsurgeon.to_graph(rewritten), report


def _exported(
    model: Any, inputs: Sequence[Any] | Mapping[str, Any] | None, dynamic_shapes: Any
) -> tuple[Any, Kind, list[str]]:
    """Returns (the model, its kind, notes); a module is exported to a program first."""
    kind = kind_of(model)
    # By sys.modules, without an import of torch: a module exists only if torch was imported.
    is_module = isinstance(model, getattr(sys.modules.get("torch.nn"), "Module", ()))
    if is_module and inputs is not None:
        from mxfp8_graph.torch_pass.export import exported  # imports torch

        program, notes = exported(model, inputs, dynamic_shapes)
        return program, Kind.PROGRAM, notes
    if kind is Kind.UNKNOWN:
        what = f"model is a {type(model).__name__}"
        expected = "a path, an onnx.ModelProto, an onnx_graphsurgeon.Graph, an ExportedProgram or a torch.nn.Module"
        advice = "pass example_inputs=(x,) too" if is_module else "load the model first"
        raise ContractError("rewrite", what, expected=expected, advice=advice)
    if inputs is not None or dynamic_shapes is not None:
        what, advice = "example inputs or dynamic shapes of a model that is exported already", "leave them out"
        raise ContractError("rewrite", what, expected="a torch.nn.Module with them", advice=advice)
    return model, kind, []


def _refuse_onnx_options(options: RewriteOptions, where: Any) -> None:
    """Raises ContractError if an option that only ONNX files have differs from its default."""
    for name in ("external_data", "bodies"):
        default = getattr(Options, name)
        if (value := options.get(name, default)) != default:
            advice = ("leave out ", Option(name), ", or pass it to to_onnx after the rewrite")
            what = f"{name} is {value!r}, an option of ONNX files"
            raise ContractError(where, what, expected="an ONNX model", advice=advice)


def _load_weights(weights: str | Path | None, names: str | Path | Mapping[str, str] | None) -> CheckpointWeights | None:
    """Returns the weights of a checkpoint, or None without a checkpoint."""
    if weights is not None:
        from mxfp8_graph.packed.checkpoint import weights_for_model

        return weights_for_model(weights, names)
    if names is not None:
        what, advice = "names of weights without a checkpoint", ("pass ", Option("weights"), " too")
        raise ContractError("rewrite", what, expected="a checkpoint", advice=advice)
    return None
