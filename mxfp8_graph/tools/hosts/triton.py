"""A model of Triton Inference Server's ONNX Runtime backend: config.pbtxt, 1/model.onnx and the native library.

Fields: https://github.com/triton-inference-server/common, protobuf/model_config.proto; the backend registers what
`model_operations` names with OrtApi.RegisterCustomOpsLibrary.
"""

from __future__ import annotations

import json
from typing import Final

import onnx

from mxfp8_graph.tools.hosts.layout import MODEL, Layout, Request
from mxfp8_ops.errors import ContractError

MAX_BATCH: Final = 32
"""Largest batch that the server forms of requests, if the model has a batch dimension; config.pbtxt can change it."""

_TYPES: Final[dict[int, str]] = {
    onnx.TensorProto.BOOL: "TYPE_BOOL",
    onnx.TensorProto.UINT8: "TYPE_UINT8",
    onnx.TensorProto.UINT16: "TYPE_UINT16",
    onnx.TensorProto.UINT32: "TYPE_UINT32",
    onnx.TensorProto.UINT64: "TYPE_UINT64",
    onnx.TensorProto.INT8: "TYPE_INT8",
    onnx.TensorProto.INT16: "TYPE_INT16",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.DOUBLE: "TYPE_FP64",
    onnx.TensorProto.STRING: "TYPE_STRING",
}


def layout(request: Request) -> Layout:
    """Returns a model's folder in a model repository, where it is version 1.

    Raises:
        ContractError: an input or output has no shape, or a dtype that Triton does not have.
    """
    graph = request.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs, outputs = [value for value in graph.input if value.name not in weights], list(graph.output)
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


def _share_a_batch(values: list[onnx.ValueInfoProto]) -> bool:
    """Whether the first dimension of all is one free dimension, named for what it is: batch, batch_size.

    Another name may be that of a sequence, whose values a server must not take from several requests.
    """
    firsts = [v.type.tensor_type.shape.dim[0].dim_param if v.type.tensor_type.shape.dim else "" for v in values]
    return len(set(firsts)) == 1 and "batch" in firsts[0].lower()


def _port(value: onnx.ValueInfoProto, batched: bool, request: Request) -> str:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TYPES or not tensor.HasField("shape"):
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        what = f"{value.name!r} has the dtype {kind}" if tensor.HasField("shape") else f"{value.name!r} has no shape"
        advice = "export the model with another, or with shapes"
        raise ContractError(request.name, what, expected="a shape, and a dtype that Triton has", advice=advice)
    sizes = [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else -1 for d in tensor.shape.dim[batched:]]
    # Triton has no tensors without dimensions, so a scalar is one value that is reshaped.
    dims = f"dims: [ {', '.join(map(str, sizes))} ]" if sizes else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"name: {json.dumps(value.name)} data_type: {_TYPES[tensor.elem_type]} {dims}"
