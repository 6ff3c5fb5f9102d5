"""A model of Triton Inference Server's ONNX Runtime backend: config.pbtxt, 1/model.onnx and the native library.

Fields: https://github.com/triton-inference-server/common, protobuf/model_config.proto; the backend registers what
`model_operations` names with OrtApi.RegisterCustomOpsLibrary.
"""

from __future__ import annotations

import json
from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import dtype_of
from mxfp8_graph.tools.hosts.layout import MODEL, Layout, Request
from mxfp8_ops.errors import ContractError

MAX_BATCH: Final = 32
"""Largest batch that the server forms of requests, if the model has a batch dimension; config.pbtxt can change it."""

_TYPES: Final[dict[int, str]] = {
    ir.DataType.BOOL: "TYPE_BOOL",
    ir.DataType.UINT8: "TYPE_UINT8",
    ir.DataType.UINT16: "TYPE_UINT16",
    ir.DataType.UINT32: "TYPE_UINT32",
    ir.DataType.UINT64: "TYPE_UINT64",
    ir.DataType.INT8: "TYPE_INT8",
    ir.DataType.INT16: "TYPE_INT16",
    ir.DataType.INT32: "TYPE_INT32",
    ir.DataType.INT64: "TYPE_INT64",
    ir.DataType.FLOAT16: "TYPE_FP16",
    ir.DataType.FLOAT: "TYPE_FP32",
    ir.DataType.DOUBLE: "TYPE_FP64",
    ir.DataType.STRING: "TYPE_STRING",
}


def layout(request: Request) -> Layout:
    """Returns a model's folder in a model repository, where it is version 1.

    Raises:
        ContractError: an input or output has no shape, or a dtype that Triton does not have.
    """
    inputs = [value for value in request.graph.inputs if not value.is_initializer()]
    outputs = list(request.graph.outputs)
    batched = _share_a_batch([*inputs, *outputs])
    library = str(request.root / request.library)
    lines = [
        f"name: {json.dumps(request.folder_name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {MAX_BATCH if batched else 0}",
        *(f"input {{ {_port(value, batched, request)} }}" for value in inputs),
        *(f"output {{ {_port(value, batched, request)} }}" for value in outputs),
        *(["dynamic_batching { }"] if batched else []),
        f"model_operations {{ op_library_filename: {json.dumps(library)} }}",
    ]
    text = "\n".join(lines) + "\n"
    return Layout(f"1/{MODEL}", request.library, {"config.pbtxt": text.encode()})


def _share_a_batch(values: list[ir.Value]) -> bool:
    """Whether the first dimension of all is one free dimension, named for what it is: batch, batch_size.

    Another name may be that of a sequence, whose values a server must not take from several requests.
    """
    firsts = {value.shape[0] if value.shape else None for value in values}
    names = {dim.value or "" if isinstance(dim, ir.SymbolicDim) else "" for dim in firsts}
    return len(names) == 1 and "batch" in names.pop().lower()


def _port(value: ir.Value, batched: bool, request: Request) -> str:
    dtype = dtype_of(value)
    if dtype not in _TYPES or value.shape is None:
        kind = ir.DataType(dtype).name.lower()
        what = f"{value.name!r} has no shape" if value.shape is None else f"{value.name!r} has the dtype {kind}"
        advice = "export the model with another, or with shapes"
        raise ContractError(request.name, what, expected="a shape, and a dtype that Triton has", advice=advice)
    sizes = [dim if isinstance(dim, int) and dim >= 0 else -1 for dim in list(value.shape)[batched:]]
    # Triton has no tensors without dimensions, so a scalar is one value that is reshaped.
    dims = f"dims: [ {', '.join(map(str, sizes))} ]" if sizes else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"name: {json.dumps(value.name)} data_type: {_TYPES[dtype]} {dims}"
