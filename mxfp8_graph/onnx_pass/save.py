"""save(): writes a model, and perhaps its data beside it, and puts both in place together.

Tensors write themselves, one by one: weights are packed here, and data of other files is copied from file to file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph import files
from mxfp8_graph.onnx_pass import single_file
from mxfp8_graph.onnx_pass.graph import INLINE_BYTES, graphs_of, name_of
from mxfp8_graph.onnx_pass.load import external_files, path_of
from mxfp8_graph.onnx_pass.protos import to_proto
from mxfp8_ops.errors import ContractError, Option

INLINE_LIMIT: Final = 1_900_000_000
"""protobuf cannot hold 2^31 bytes; the rest is room for the graph."""

ALIGNMENT: Final = 4096
"""External tensors start at multiples of this: ONNX Runtime can then map them instead of copying."""


def size_of(model: ir.Model) -> int:
    """Returns the bytes of the model's initializers."""
    tensors = (value.const_value for graph in graphs_of(model.graph) for value in graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None and t.dtype != ir.DataType.STRING)


def wants_external(model: ir.Model, path: Path | None, choice: str, *, as_source: bool) -> bool:
    """Returns whether a result goes to an external file: as the source does, or near protobuf's 2 GB.

    Raises:
        ContractError: external data is asked for, and there is no path to put it next to; or it is not, and there is
            too much for one protobuf file.
    """
    if choice not in {"auto", "always", "never"}:
        what = f"external_data is {choice!r}"
        raise ContractError(name_of(model), what, expected="auto, always or never", advice="correct it")
    if path is None:
        if choice == "always":
            what, advice = "external_data 'always' without an output", ("pass ", Option("output"))
            raise ContractError(name_of(model), what, expected="a path to put it next to", advice=advice)
        return False
    is_large = size_of(model) > INLINE_LIMIT
    if choice == "never" and is_large:
        what, advice = "the model does not fit into one protobuf file (2 GB)", ("pass ", Option("external_data", "always"))
        raise ContractError(path, what, expected="external data", advice=advice)
    return choice == "always" or (choice == "auto" and (as_source or is_large))
