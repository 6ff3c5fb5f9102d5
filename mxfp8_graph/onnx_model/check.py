"""Is this model what ONNX says a model is? Asked once, where a model is opened, before anything works on it.

What ONNX Runtime runs passes, also where onnx.checker is stricter. Names, order, and nodes against their schemas are
onnx's to check, see `check_nodes.py`. What it does not see and what would hurt later is checked here: texts that are
none, depth, the sizes of tensors, what local functions expand to. Nothing is repaired.
"""

from __future__ import annotations

import math
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import onnx

from mxfp8_graph.file_reading import ModelFolder
from mxfp8_graph.onnx_model.check_nodes import Copy, Functions, Place, check_copies, check_text
from mxfp8_graph.onnx_model.tensor_data import bit_width, inside, opened
from mxfp8_graph.onnx_model.walk import (
    FunctionKey,
    called_function,
    function_key,
    iter_graphs,
    iter_nodes,
    iter_tensors,
    subgraphs,
)
from mxfp8_ops.errors import ContractError

MOST_LEVELS: Final = 33
"""Graphs inside graphs; protobuf reads no more from a file (100 messages inside each other, 3 for each graph)."""

MOST_TYPE_LEVELS: Final = 16
"""Sequences of sequences of ..."""

MOST_DIMS: Final = 32
"""Dimensions of a stored tensor: NumPy before 2.0 has no more."""

MOST_BYTES: Final = 2**62
"""Sizes stay far from overflowing 64 bits."""

MOST_CALLS_DEEP: Final = 100
"""Functions that call functions: onnx and ONNX Runtime call themselves for each."""

MOST_NODES: Final = 100_000
MOST_GROWTH: Final = 300
"""A model may expand to the first, or to the second times the nodes it has: ours expand to some 100 each."""

_Proto = onnx.TensorProto

# Looked up once: looking one of these up takes longer than reading a field.
_STRING: Final = _Proto.STRING
_EXTERNAL: Final = _Proto.EXTERNAL

_VALUE_DTYPES: Final = frozenset(_Proto.DataType.values())
"""The undefined one among them: exporters use it for what they do not know."""

DTYPES: Final = _VALUE_DTYPES - {_Proto.UNDEFINED}

_PER_ENTRY: Final = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}
"""How many values of a dtype share an entry of the field that holds them."""


def validate(model: onnx.ModelProto, name: str, folder: ModelFolder | None) -> None:
    """Raises ContractError if `model` is damaged; see the top of this module for what that is.

    Args:
        model: as it was read, or given by a caller; it is not modified.
        name: what to call the model in messages: its path, or "model".
        folder: where external data is looked up; None for a model that came without a path.
    """
    place = Place(name)
    _check_header(model, place)
    _check_nesting(model, place)
    _check_tensors(model, place, folder)
    validate_structure(model, name)


def validate_structure(model: onnx.ModelProto, name: str) -> None:
    """Raises ContractError if names, nodes or local functions of `model` are damaged; tensors may lack their data."""
    place = Place(name)
    functions = _functions(model, place)
    copies = {name: Copy(model.opset_import, functions, place).of_graph(model.graph)}
    for function in _reached(model, functions, place):
        inner = place.within(f"function {function.name!r}")
        copy = Copy(function.opset_import, functions, inner, in_function=True)
        copies[f"{name}: {inner.inside[0]}"] = copy.of_function(function)
    check_copies(copies, name)


def check_result(model: onnx.ModelProto, name: str) -> None:
    """Raises RuntimeError if the graph that we made of a valid one has damaged names or nodes: a defect of ours.

    Args:
        model: before it is written; tensors may lack their data. Its local functions are ours, or as they were.
        name: what to call the original in messages.
    """
    try:
        place = Place(name)
        copy = Copy(model.opset_import, {function_key(each): each for each in model.functions}, place)
        check_copies({name: copy.of_graph(model.graph)}, name)
    except ContractError as error:
        raise RuntimeError(f"{error.problem}, in the result, which is not written") from error


# --- Header, types, depth ----------------------------------------------------------------------------------------


def _check_header(model: onnx.ModelProto, place: Place) -> None:
    """Raises ContractError if the model has no graph or output, or a version that onnx does not know."""
    if not model.ir_version or not model.HasField("graph"):
        raise place.error("not an ONNX model (no IR version or no graph)", "an ONNX model", "export it again")
    if not model.graph.output:
        raise place.error("the graph has no outputs", "at least one")
    newest = int(onnx.IR_VERSION)
    if not 1 <= model.ir_version <= newest:
        expected = f"1 to {newest}, which onnx {onnx.__version__} knows"
        raise place.error(f"IR version {model.ir_version}", expected, "upgrade onnx")
    for message in (model, model.graph):
        check_text((value for field, value in message.ListFields() if field.type == field.TYPE_STRING), place)
    check_text((text for entry in model.metadata_props for text in (entry.key, entry.value)), place)


def _check_nesting(model: onnx.ModelProto, place: Place) -> None:
    """Raises ContractError if graphs or types are nested too deep. Calls itself for nothing."""
    stack = [(model.graph.node, 1), *((function.node, 1) for function in model.functions)]
    graphs = [model.graph]
    while stack:
        nodes, level = stack.pop()
        if level > MOST_LEVELS:
            what = f"subgraphs inside subgraphs, more than {MOST_LEVELS} levels"
            raise place.error(what, "fewer", "flatten the model")
        for node in nodes:
            if node.attribute:
                inner = [graph for _, graph in subgraphs(node)]
                graphs += inner
                stack += [(graph.node, level + 1) for graph in inner]
    for graph in graphs:
        for infos in (graph.input, graph.output, graph.value_info):
            for info in infos:
                _check_type(info, place)


def _check_type(info: onnx.ValueInfoProto, place: Place) -> None:
    kind, level = info.type, 0
    while (which := kind.WhichOneof("value")) in {"sequence_type", "optional_type", "map_type"}:
        level += 1
        if level > MOST_TYPE_LEVELS:
            raise place.error(f"value {info.name!r}: types inside types, more than {MOST_TYPE_LEVELS} levels", "fewer")
        inner = getattr(kind, which)
        kind = inner.value_type if which == "map_type" else inner.elem_type
    if which in {"tensor_type", "sparse_tensor_type"}:
        tensor = getattr(kind, which)
        if tensor.elem_type not in _VALUE_DTYPES:
            what = f"value {info.name!r} has unknown dtype {tensor.elem_type}"
            raise place.error(what, "one of onnx.TensorProto.DataType")
        check_text((dim.dim_param for dim in tensor.shape.dim), place)


# --- Tensors -----------------------------------------------------------------------------------------------------


def _check_tensors(model: onnx.ModelProto, place: Place, folder: ModelFolder | None) -> None:
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
            values, indices, rank = list(sparse.values.dims), list(sparse.indices.dims), len(sparse.dims)
            fitting = len(values) == 1 and indices in (values, [*values, rank])
            if not fitting or sparse.indices.data_type != _Proto.INT64 or min(sparse.dims, default=-1) < 0:
                what = f"sparse, of dims {list(sparse.dims)}, with values {values} at indices {indices}"
                raise place.tensor_error(sparse.values.name, what, "values [N] at int64 indices [N] or [N, rank]")


def _checked_size(tensor: onnx.TensorProto, place: Place) -> int:
    """Returns how many values a tensor has, once its name, dtype and dims are what they may be."""
    check_text([tensor.name], place)
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
    dtype, name = tensor.data_type, _Proto.DataType.Name(tensor.data_type)
    if tensor.HasField("segment"):
        raise place.tensor_error(tensor.name, "is one segment of a tensor", "a whole one")
    if dtype == _STRING:
        stored, expected, unit = len(tensor.string_data), size, "strings"
    elif (own := inside(tensor)) or tensor.HasField("raw_data"):
        stored = own[1] if own else len(tensor.raw_data)
        expected, unit = -(-size * bit_width(dtype) // 8), "bytes"
    else:
        field = onnx.helper.tensor_dtype_to_field(dtype)
        stored, unit = len(getattr(tensor, field)), f"entries of {field}"
        expected = 2 * size if name.startswith("COMPLEX") else -(-size // _PER_ENTRY.get(name, 1))
    if stored != expected:
        expected_text = f"{expected} for {name.lower()} {list(tensor.dims)}"
        raise place.tensor_error(tensor.name, f"has {stored} {unit}", expected_text)


# --- Local functions ---------------------------------------------------------------------------------------------


def _functions(model: onnx.ModelProto, place: Place) -> Functions:
    """Returns the local functions by key."""
    functions: dict[FunctionKey, onnx.FunctionProto] = {}
    for function in model.functions:
        check_text((*function_key(function), *function.input, *function.output), place)
        if functions.setdefault(function_key(function), function) is not function:
            raise place.error(f"local function {function.name!r} is defined twice", "each once")
    return functions


def _reached(model: onnx.ModelProto, functions: Functions, place: Place) -> list[onnx.FunctionProto]:
    """Returns the local functions that the graph calls, directly or not.

    Raises:
        ContractError: one calls itself, or together they expand to too many nodes.
    """
    if not functions:
        return []
    callers: dict[FunctionKey | None, list[onnx.NodeProto]] = {None: list(iter_nodes(model.graph.node))}
    callers |= {key: list(iter_nodes(function.node)) for key, function in functions.items()}
    calls = {key: [k for k in map(called_function, nodes) if k in functions] for key, nodes in callers.items()}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        path = " -> ".join(name for _, name, _ in reversed(error.args[1]))
        raise place.error(f"local functions call themselves: {path}", "no recursion") from None
    sizes, depths = dict[Any, int](), dict[Any, int]()
    for caller in order:  # callees before callers
        sizes[caller] = len(callers[caller]) + sum(sizes[key] for key in calls[caller])
        depths[caller] = 1 + max((depths[key] for key in calls[caller]), default=0)
    most = max(MOST_NODES, MOST_GROWTH * sum(map(len, callers.values())))
    if max(sizes.values()) > most:
        raise place.error("local functions expand to too many nodes", f"at most {most}")
    if max(depths.values()) > MOST_CALLS_DEEP + 1:
        deepest = f"local functions call each other {max(depths.values()) - 1} deep"
        raise place.error(deepest, f"at most {MOST_CALLS_DEEP}")
    reached: set[Any] = {None}
    for caller in reversed(order):
        if caller in reached:
            reached.update(calls[caller])
    return [functions[key] for key in order if key in reached and key is not None]
