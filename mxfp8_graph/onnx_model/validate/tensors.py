"""Stored tensors: dtypes, dims, and sizes against the data that is there."""

from __future__ import annotations

import math
from typing import Final

import onnx

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_graph.onnx_model.tensor_data import bit_width, inside, opened
from mxfp8_graph.onnx_model.validate.limits import MOST_DIMS
from mxfp8_graph.onnx_model.validate.places import Place
from mxfp8_graph.onnx_model.walk import iter_graphs, iter_tensors

MOST_BYTES: Final = 2**62
"""Sizes stay far from overflowing 64 bits."""

_Proto = onnx.TensorProto

# Looked up once: looking one of these up takes longer than reading a field.
_STRING: Final = _Proto.STRING
_EXTERNAL: Final = _Proto.EXTERNAL

DTYPES: Final = frozenset(set(_Proto.DataType.values()) - {_Proto.UNDEFINED})

_PER_ENTRY: Final = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}
"""How many values of a dtype share an entry of the field that holds them."""


def check_tensors(model: onnx.ModelProto, place: Place, folder: ModelFolder | None) -> None:
    """Raises ContractError if a tensor of the graph, of its subgraphs or of the local functions is malformed.

    External data is not read: only whether its file has the bytes that the tensor asks for.
    """
    for tensor in iter_tensors(model):
        size = _checked_size(tensor, place)
        if tensor.data_location != _EXTERNAL:
            _check_data(tensor, size, place)
        elif folder is not None:
            with opened(tensor, folder, place.model):
                pass
    for graph in iter_graphs(model.graph):
        for sparse in graph.sparse_initializer:
            _check_sparse(sparse, place)


def _checked_size(tensor: onnx.TensorProto, place: Place) -> int:
    """Returns how many values a tensor has, once its name, dtype and dims are what they may be."""
    if not isinstance(tensor.name, str):
        raise place.tensor_error(tensor.name, "its name is not UTF-8", "text")
    for entry in tensor.external_data or ():
        if not isinstance(entry.key, str) or not isinstance(entry.value, str) or "\0" in entry.value:
            raise place.tensor_error(tensor.name, f"external {entry.key!r} is {entry.value!r}", "text")
    if tensor.data_type not in DTYPES:
        raise place.tensor_error(tensor.name, f"unknown dtype {tensor.data_type}", "one of onnx.TensorProto.DataType")
    dims = list(tensor.dims)
    if len(dims) > MOST_DIMS:
        raise place.tensor_error(tensor.name, f"{len(dims)} dims", f"at most {MOST_DIMS}")
    if dims and min(dims) < 0:
        raise place.tensor_error(tensor.name, f"dims {dims}", "none below 0")
    if math.prod(dim or 1 for dim in dims) > MOST_BYTES // 16:  # NumPy leaves dims of 0 out, too
        raise place.tensor_error(tensor.name, f"dims {dims}", "a size that a file can have")
    return math.prod(dims)


def _check_data(tensor: onnx.TensorProto, size: int, place: Place) -> None:
    dtype = tensor.data_type
    if tensor.HasField("segment"):
        raise place.tensor_error(tensor.name, "is one segment of a tensor", "a whole one")
    if dtype == _STRING:
        found, expected, unit = len(tensor.string_data), size, "string"
    elif (own := inside(tensor)) or tensor.HasField("raw_data"):
        found = own[1] if own else len(tensor.raw_data)
        expected, unit = -(-size * bit_width(dtype) // 8), "byte"
    else:
        field, expected = _field(tensor)
        found, unit = len(getattr(tensor, field)), f"entry of {field}"
    if found != expected:
        name = _Proto.DataType.Name(dtype).lower()
        what = f"has {found} {_plural(unit)}"
        raise place.tensor_error(tensor.name, what, f"{expected} for {name} {list(tensor.dims)}")


def _field(tensor: onnx.TensorProto) -> tuple[str, int]:
    """Returns which field holds the values of a tensor without raw data, and how many entries it must have."""
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    count = math.prod(tensor.dims)
    if tensor.data_type in {_Proto.COMPLEX64, _Proto.COMPLEX128}:
        return field, 2 * count
    return field, -(-count // _PER_ENTRY.get(_Proto.DataType.Name(tensor.data_type), 1))


def _plural(unit: str) -> str:
    return unit.replace("entry", "entries") if "entry" in unit else f"{unit}s"


def _check_sparse(sparse: onnx.SparseTensorProto, place: Place) -> None:
    """Raises ContractError if the values, indices and dims of a sparse tensor do not fit together."""
    values, indices, rank = list(sparse.values.dims), list(sparse.indices.dims), len(sparse.dims)
    fitting = len(values) == 1 and indices in (values, [*values, rank]) and sparse.indices.data_type == _Proto.INT64
    if not fitting or min(sparse.dims, default=-1) < 0:
        what = f"sparse, of dims {list(sparse.dims)}, with values {values} at indices {indices}"
        raise place.tensor_error(sparse.values.name, what, "values [N] at int64 indices [N] or [N, rank]")
