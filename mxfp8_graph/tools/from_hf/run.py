"""from_hf(): a local Hugging Face folder with MXFP8 weights -> ONNX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mxfp8_graph.exporting import check_opset
from mxfp8_graph.options import Options, PackOptions, Unpack, check_options
from mxfp8_graph.packed.checkpoint import Checkpoint, listed, open_checkpoint, read_json
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.checkpoint_weights import CheckpointWeights
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops import contract, formats
from mxfp8_ops.errors import BackendError, ContractError, Option

if TYPE_CHECKING:
    import onnx_ir as ir

_ACTIVATIONS = {"num_bits": 8, "type": "float", "group_size": formats.BLOCK_SIZE, "dynamic": True}
"""The fields of compressed-tensors for activations in MXFP8; static scales, for example, give other values.

modelopt writes `dynamic` as False, although its MXFP8 has no stored scales: see `_quant_algo_to_group_config` in
modelopt/torch/export/convert_hf_config.py. `open_checkpoint` refuses a checkpoint with scales of activations.
"""


def from_hf(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    recipe: str | Path | Recipe | None = None,
    settings: Sequence[str] = (),
    dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    opset: int = contract.MIN_OPSET,
    **options: Unpack[PackOptions],
) -> tuple[Path, RewriteReport]:
    """Returns (the ONNX file, a report): the model in a Hugging Face folder with its MXFP8 weights, byte for byte.

    The model is built from config.json without values, and exported. Packed weights are copied as by
    `rewrite(weights=...)`; other tensors (norms, embeddings, output projection) are copied in their stored dtype.
    Biases of packed nodes become float32, which represents their values exactly. Nothing in the folder is executed,
    nothing is downloaded, and no weight is quantized again.

    Decoders (classes named ...ForCausalLM) take input_ids and attention_mask [batch, past + sequence], and their cache
    as past_key_values.N.key and .value [batch, heads, past, size]; they return logits and present.N.key and .value.
    Encoders take input_ids, attention_mask and perhaps token_type_ids, and return the outputs of transformers.

    Args:
        folder: a folder with config.json and model.safetensors, or model.safetensors.index.json and its shards.
        output: file to write. Default: FOLDER/model.mxfp8.onnx, or model.mxint8.onnx.
        recipe: sets activations and fusion, as in `rewrite`. Default: "mxfp8-weight-only" for a checkpoint
            with unquantized activations, else "mxfp8"; for INT8 elements "mxint8-weight-only" or "mxint8".
        settings: fields to set in the recipe: "fuse=false"; see `Recipe.setting`.
        dtype: the dtype of all other computations; tensors that are stored in another dtype are cast at run time.
        opset: version of the default operator domain, at least 21.
        **options: see `mxfp8_graph.options.PackOptions`; external data is written with "auto" too.

    Raises:
        ContractError: the folder has no MXFP8 checkpoint, or no model that transformers knows and torch can export; a
            tensor is missing, has another shape or another quantization; or the output cannot be written.
        RecipeError: the recipe is malformed, or does not fit the model.
        BackendError: torch, onnxscript or transformers is missing.
    """
    check_options("from_hf", options, PackOptions)
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise ContractError(folder, "not a folder", expected="a local Hugging Face folder", advice="check the path")
    config = read_json(
        folder / "config.json", what="not a JSON object", expected="the config of a model", advice="download it again"
    )
    if dtype not in contract.VALUE_NAMES.values():
        raise ContractError.unknown("dtype", dtype, contract.VALUE_NAMES.values())
    check_opset(opset, "from_hf")
    checkpoint = open_checkpoint(folder)
    checkpoint.require_mxfp8()
    chosen = load_recipe(_recipe_for(config, checkpoint, folder) if recipe is None else recipe).setting(settings)
    target = Path(output) if output else chosen.output_for(folder / "model", "onnx")
    files = checkpoint.files | {folder / "config.json"}
    weights = CheckpointWeights(where=str(folder), weights=checkpoint.weights, replaces_all=True, files=files)
    # Before the export, which takes minutes: the output must not replace a file of the checkpoint.
    weights.refuse_output(target)
    whole = Options(name=str(folder), output=target, weights=weights, **options)
    model, names = _model(folder, checkpoint, dtype, opset)
    from mxfp8_graph.onnx_pass.run import rewrite_model

    path, report = rewrite_model(model, chosen, whole, checkpoint.byte_size)
    assert isinstance(path, Path)  # the options have an output
    if unused := sorted(checkpoint.others.keys() - names):
        note = f"{len(unused)} tensors of the checkpoint are not used by the model: {listed(unused, 5)}"
        report = replace(report, notes=(note, *report.notes))
    return path, report


def _model(folder: Path, checkpoint: Checkpoint, dtype: str, opset: int) -> tuple[ir.Model, set[str]]:
    """Returns (the model, whose tensors are external data in the files of the checkpoint; the names that it uses)."""
    try:
        import onnxscript  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        expected, advice = "torch, onnxscript and transformers", "pip install torch onnxscript transformers"
        raise BackendError("from_hf", str(error), expected=expected, advice=advice) from error
    from mxfp8_graph.tools.from_hf import architecture, stored

    # On meta first: names and shapes are checked before a module with real buffers is built.
    blank = architecture.build(folder, dtype, "meta")
    architecture.check_callable(blank, folder)
    names = stored.names_of(blank, checkpoint)
    call = architecture.call_of(architecture.build(folder, dtype, "cpu"))
    exported = architecture.export(call, opset, str(folder))
    stored.bind_parameters(exported, checkpoint, call.input_names, names)
    return exported, set(names.values())


def _recipe_for(config: dict[str, Any], checkpoint: Checkpoint, folder: Path) -> str:
    """Returns the preset with the activations of the checkpoint.

    Raises:
        ContractError: only some layers have quantized activations, or they are quantized in another way than MXFP8.
    """
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    # With INT8 elements in all weights it is a checkpoint of MXINT8, whose activations are INT8 too.
    is_int = {weight.element_format for weight in checkpoint.weights.values()} == {formats.INT8.name}
    both, weight_only = ("mxint8", "mxint8-weight-only") if is_int else (presets.DEFAULT, "mxfp8-weight-only")
    expected = {**_ACTIVATIONS, "type": "int" if is_int else "float"}
    # auto-round's field: 16 bits means that activations are not quantized.
    if quantization.get("act_bits", 8) == 16:
        return weight_only
    quantized = [not weight.weight_only for weight in checkpoint.weights.values()]
    groups = quantization.get("config_groups")
    where = folder / "config.json"
    advice = ("choose for all with ", Option("recipe"), ", or say which in a recipe file")
    if isinstance(groups, dict) and groups:
        activations = [group.get("input_activations") for group in groups.values() if isinstance(group, dict)]
        # modelopt's False has no meaning, see `_ACTIVATIONS`.
        ours = {"dynamic": True} if quantization.get("quant_method") == "modelopt" else {}
        for each in filter(None, activations):
            if not (isinstance(each, dict) and expected.items() <= {**each, **ours}.items()):
                what = f"quantization_config has activations that are not in MXFP8: {str(each)[:200]}"
                raise ContractError(where, what, expected=str(expected), advice=advice)
        quantized = [bool(each) for each in activations]
    # A preset has one setting for all sites, and a guess would change results.
    if any(quantized) and not all(quantized):
        what = "the activations of some layers alone are quantized"
        raise ContractError(where, what, expected="the same for all", advice=advice)
    return both if any(quantized) else weight_only
