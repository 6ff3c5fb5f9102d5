"""unpack(): the packed weights of a model by name, for every kind of model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.packed.weight import Contents, PackedWeight
from mxfp8_ops.errors import ContractError


def unpack(model: Any, *, trust_pickle: bool = False) -> Mapping[str, PackedWeight]:
    """Returns the packed weights of a model, by the names they had before.

    Only the structure is read. Each weight reads its elements and scales from the file on access,
    so a model larger than memory can be gone through weight by weight. The files have to stay where they are meanwhile.

    Args:
        model: the path of an ONNX file or a .pt2 file, an `onnx.ModelProto`, an `onnx_graphsurgeon.Graph`, or a
            `torch.export.ExportedProgram`. Weights in TensorRT's own MXFP8 nodes (domain `trt`) are found too. A
            model that was not rewritten has none.
        trust_pickle: let a .pt2 file run code that it brings; see `mxfp8_graph.load`.

    Raises:
        ContractError: the model is none of these, or cannot be read.
    """
    return MappingProxyType(contents(model, trust_pickle=trust_pickle).weights)


def contents(model: Any, *, trust_pickle: bool = False) -> Contents:
    """Returns everything a model stores; see `unpack`."""
    kind = kind_of(model)
    if kind is Kind.UNKNOWN:
        expected = "a path, an onnx.ModelProto, an onnx_graphsurgeon.Graph or an ExportedProgram"
        raise ContractError("unpack", f"a {type(model).__name__}", expected=expected, advice="load the model first")
    if kind.is_program:
        from mxfp8_graph.torch_program import load  # says what to install where torch is missing

        # isort: split
        from mxfp8_graph.packed import from_torch

        if not kind.is_file:
            return from_torch.contents(model, "program")
        program = load(model, trust_pickle=trust_pickle)
        return replace(from_torch.contents(program, str(model)), files=frozenset({Path(model)}))
    from mxfp8_graph.onnx_model import graphsurgeon
    from mxfp8_graph.onnx_model.open import open_model
    from mxfp8_graph.packed import from_onnx

    return from_onnx.contents(open_model(graphsurgeon.to_proto(model) if kind is Kind.GRAPHSURGEON else model))
