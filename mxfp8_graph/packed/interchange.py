"""Returns packed weights of models by name, and converts them to and from safetensors checkpoints, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mxfp8_graph import provenance
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.naming import reserve_name, unique_name
from mxfp8_graph.packed import safetensors
from mxfp8_graph.packed.checkpoint import open_checkpoint
from mxfp8_graph.packed.compressed_tensors import (
    COMPRESSED_TENSORS,
    CONFIG_KEY,
    CONVENTIONS,
    SCALE_INV,
    config_of,
    entries_of,
)
from mxfp8_graph.packed.contents import Contents, PackedWeight, Tensor
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError


def unpack(model: Any) -> Mapping[str, PackedWeight]:
    """Returns the packed weights of a model, by the names they had before.

    Only the structure is read. Each weight reads its elements and scales from the file on access, so you can read a
    model larger than memory weight by weight. Keep the files in place until then.

    Args:
        model: the path of an ONNX file or a .pt2 file, an `onnx.ModelProto`, an `onnx_graphsurgeon.Graph`, or a
            `torch.export.ExportedProgram`. Weights in TensorRT's own MXFP8 nodes (domain `trt`) are included. A model
            that was not rewritten has none.

    Raises:
        ContractError: the model is none of these, or cannot be read.
    """
    return MappingProxyType(contents(model).weights)


def contents(model: Any) -> Contents:
    """Returns the packed weights and the other parameters of a model; see `unpack`."""
    kind = kind_of(model)
    if kind is Kind.UNKNOWN:
        expected = "a path, an onnx.ModelProto, an onnx_graphsurgeon.Graph or an ExportedProgram"
        raise ContractError("unpack", f"a {type(model).__name__}", expected=expected, advice="load the model first")
    # Imports are here and not on top: importing torch takes seconds, and ONNX models do not need it.
    if kind.is_program:
        from mxfp8_graph.torch_pass.load import load  # first, since its error names the packages to install

        # isort: split
        from mxfp8_graph.packed import from_torch

        if not kind.is_file:
            return from_torch.contents(model, "program")
        return replace(from_torch.contents(load(model), str(model)), files=frozenset({Path(model)}))
    from mxfp8_graph.onnx_pass import graphsurgeon
    from mxfp8_graph.packed import from_onnx

    return from_onnx.contents(graphsurgeon.to_proto(model) if kind is Kind.GRAPHSURGEON else model)


def export_safetensors(
    model: Any,
    path: str | Path,
    *,
    convention: str = COMPRESSED_TENSORS,
    weights_only: bool = False,
    overwrite: bool = False,
) -> Path:
    """Writes the weights of a rewritten model to a safetensors checkpoint, and returns `path`.

    A weight is named after the module that uses it ("model.layers.0.up.weight") if the model records the module, else
    as in the model. The file's metadata has the "quantization_config" that belongs in the checkpoint's config.json. One
    tensor is in memory at a time.

    Args:
        model: a model of any type that `unpack` takes.
        path: file to write.
        convention: "compressed-tensors" (scales are X.weight_scale) or "scale-inv" (X.weight_scale_inv).
        weights_only: leave out the parameters that are not packed (biases, embeddings, norms).
        overwrite: whether an existing file may be replaced.

    Raises:
        ContractError: the model has no packed weights or cannot be read, the convention does not support their element
            format, or the file cannot be written.
    """
    path = Path(path)
    if convention not in CONVENTIONS:
        raise ContractError.unknown("convention", convention, CONVENTIONS)
    source = contents(model)
    if not source.weights:
        what = "no packed weights"
        raise ContractError(source.where, what, expected="a rewritten model", advice="call mxfp8_graph.rewrite first")
    ints = [w.name for w in source.weights.values() if w.element_format == formats.INT8.name]
    if convention == SCALE_INV and ints:
        what, expected = f"weight {ints[0]!r} has int8 elements", "float8 elements, as this convention has"
        advice = f"export it with convention={COMPRESSED_TENSORS!r}"
        raise ContractError(source.where, what, expected=expected, advice=advice)
    weights: dict[str, PackedWeight] = {}
    for weight in source.weights.values():
        # Two weights of one module would have the same name X.weight.
        weights[unique_name(weight.parameter, weights)] = weight
    taken = set(weights)
    tensors: dict[str, PackedWeight | Tensor] = {**weights}
    ignored = []
    for tensor in source.others:
        # A tied embedding that is stored under the name of the output projection gets the name of the module that looks
        # it up.
        tied = tensor.name in taken and tensor.module is not None
        name = reserve_name(f"{tensor.module}.weight" if tied else tensor.name, taken)
        # Readers need the names of the modules whose matrices stay in high precision.
        if len(tensor.shape) > 1 and name.endswith(".weight"):
            ignored.append(name.removesuffix(".weight"))
        if not weights_only:
            tensors[name] = tensor
    metadata = file_metadata(config_of(weights, convention, ignored), source)
    safetensors.write(path, entries_of(tensors, convention), metadata, overwrite=overwrite, inputs=source.files)
    return path


def file_metadata(config: Mapping[str, Any], source: Contents) -> dict[str, str]:
    """Returns the metadata of a checkpoint's file: the config, and the record of the model's rewrite."""
    # transformers requires the first entry.
    return {"format": "pt", CONFIG_KEY: json.dumps(config), **provenance.entries(source.recipe)}


def import_safetensors(path: str | Path) -> Mapping[str, PackedWeight]:
    """Returns the MXFP8 weights of a safetensors checkpoint by name; a weight reads its data on access.

    Reads compressed-tensors (modelopt and auto-round write the same), weight_scale_inv, torchao's and ComfyUI's
    tensors, with scales of dtype U8 or F8_E8M0. Tensors that are not MXFP8 are left out.

    Args:
        path: a .safetensors file, the .safetensors.index.json of a sharded checkpoint, or a Hugging Face folder.

    Raises:
        ContractError: a file cannot be read, there is no MXFP8 weight in it, or a tensor beside an MXFP8 weight
            describes an unknown quantization.
    """
    return MappingProxyType(dict(open_checkpoint(path).weights))
