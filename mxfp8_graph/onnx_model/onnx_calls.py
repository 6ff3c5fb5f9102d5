"""Calls of onnx's own passes. They are C++, which may abort, run away or raise anything: here it is one clear error.

Each call runs in a child process, within limits; see `child.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import onnx
from onnx import inliner, shape_inference, version_converter

from mxfp8_graph.onnx_model import child
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs, iter_nodes, node_label, stored_in, subgraphs
from mxfp8_ops.errors import ContractError

MOST_SECONDS: Final = 10
"""Processor time for a small model."""

BYTES_PER_SECOND: Final = 1_000_000
"""A model of this size, without its weights, may take a second more."""

_MOST_SIZES: Final = 64
"""Longer constants are no shapes, axes or perms."""


def infer_shapes(model: onnx.ModelProto, name: str, notes: list[str]) -> onnx.ModelProto:
    """Returns a copy of `model` with every shape that onnx can infer; where it finds a contradiction, with a note.

    Args:
        model: without the data of its weights.
        name: what to call the model in messages.
        notes: the notes of the report, to which one is added.

    Raises:
        ContractError: onnx cannot read the model at all, or an op cannot take what it is given.
    """
    result = _call(lambda: _inferred_inside(model), model)
    if isinstance(result, onnx.ModelProto):
        return result
    _raise_impossible(result, name)
    if result.kind != shape_inference.InferenceError.__name__:
        what = f"onnx's shape inference {_said(result)}"
        raise ContractError(name, what, expected="a model that onnx understands", advice="export the model again")
    notes.append(f"shapes could not be inferred: {result.message.splitlines()[0]}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def inline(model: onnx.ModelProto, functions: Sequence[tuple[str, str]], name: str) -> onnx.ModelProto:
    """Returns `model` with calls of these local functions, each (domain, name), replaced by their bodies.

    Raises:
        ContractError: onnx cannot do that.
    """
    return _inlined(lambda: inliner.inline_selected_functions(model, list(functions)), model, name)


def inline_standard(model: onnx.ModelProto, ops: Sequence[tuple[str, str]], name: str) -> onnx.ModelProto:
    """Returns `model` with these ops, each (domain, name), replaced by the functions that the standard says they are.

    Raises:
        ContractError: onnx cannot do that, as versions before 1.19.
    """
    options = {"inline_schema_functions": True}
    return _inlined(lambda: inliner.inline_selected_functions(model, list(ops), **options), model, name)


def _inlined(call: Callable[[], onnx.ModelProto], model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    result = _call(call, model)
    if isinstance(result, onnx.ModelProto):
        return result
    what = f"onnx's inliner of local functions {_said(result)}"
    raise ContractError(name, what, expected="a model that onnx understands", advice="export the model again")


def convert(model: onnx.ModelProto, opset: int, name: str) -> onnx.ModelProto:
    """Returns `model` at another version of the default domain, with the shapes that onnx can infer.

    Raises:
        ContractError: onnx cannot convert it, or an op cannot take what it is given, which might no longer show.
    """
    result = _call(lambda: version_converter.convert_version(_inferred(model), opset), model)
    if isinstance(result, onnx.ModelProto):
        return result
    _raise_impossible(result, name)
    before = next(entry.version for entry in model.opset_import if entry.domain in STANDARD)
    node = child.call(lambda: _refused(model, opset).encode(), _seconds(model))
    where = f"{name}: {node.decode()}" if node and isinstance(node, bytes) else name
    what = f"opset {before}, and onnx's converter cannot bring it to {opset}: {_said(result, refusal='')}"
    expected = f"opset {opset} or above"
    raise ContractError(where, what, expected=expected, advice="export the model again with one")


def _refused(model: onnx.ModelProto, opset: int) -> str:
    """Returns what to call the first node that cannot be converted alone either; "" if each can."""
    known = _inferred(model)
    for graph in iter_graphs(known.graph):
        types = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
        for node in graph.node:
            if node.domain not in STANDARD or any(subgraphs(node)):
                continue
            values = [types.get(name, onnx.ValueInfoProto(name=name)) for name in (*node.input, *node.output)]
            alone = onnx.ModelProto(ir_version=known.ir_version, opset_import=known.opset_import)
            alone.graph.node.append(node)
            alone.graph.input.extend(value for value in values[: len(node.input)] if value.name)
            alone.graph.output.extend(value for value in values[len(node.input) :] if value.name)
            try:
                version_converter.convert_version(alone, opset)
            except Exception:  # whatever C++ raises
                return f"node {node_label(node)!r} ({node.op_type})"
    return ""


_IMPOSSIBLE: Final = re.compile(
    r"\(op_type:(?P<op>[^,)]*)(?:, node name: (?P<node>.*?))?\): "
    r"(?:\[ShapeInferenceError\] (?!Inferred shape and existing))?(?P<what>[^\[].*)"
)
"""An op that cannot take the shapes or dtypes it is given. ONNX Runtime does not load such a model, but loads one whose
declared shapes are wrong; and our nodes, which it knows by their bodies only, would hide it."""


def _inferred_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """Does what `_inferred` does, and sees sizes that a subgraph reads of constants outside it, as onnx does not."""
    if not any(any(subgraphs(node)) for node in model.graph.node):
        return _inferred(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _lend(copy.graph, {})
    result = _inferred(copy)
    for graph, before in zip(iter_graphs(result.graph), iter_graphs(model.graph), strict=True):
        del graph.initializer[len(before.initializer) :]
    return result


def _lend(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Gives each subgraph the lists of sizes that are constants outside it and that its nodes read."""
    given = {value.name for value in graph.input}
    own = {name: tensor for name, tensor in stored_in(graph).items() if name not in given and _is_sizes(tensor)}
    hidden = given | {name for node in graph.node for name in node.output} | {t.name for t in graph.initializer}
    read = {name for node in graph.node for name in node.input} - hidden
    visible = {name: tensor for name, tensor in outer.items() if name not in hidden} | own
    for name in sorted(read & outer.keys()):
        lent = graph.initializer.add()
        lent.CopyFrom(outer[name])
        lent.name = name  # that of a Constant node has none
    for node in graph.node:
        for _, inner in subgraphs(node):
            _lend(inner, visible)


def _is_sizes(tensor: onnx.TensorProto) -> bool:
    """Whether a constant may be a list of sizes, whose values are at hand."""
    few = tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) < 2 and math.prod(tensor.dims) <= _MOST_SIZES
    return few and bool(tensor.raw_data or tensor.int64_data)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of `model` with shapes.

    Raises:
        InferenceError: an op cannot take what it is given, whatever shapes the model declares for what is between ops.
    """
    try:
        return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError:
        pass
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for graph in iter_graphs(bare.graph):
        del graph.value_info[:]
        for output in graph.output:
            output.ClearField("type")
        for value in graph.input:
            for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
                if dim.dim_value < 0:  # what some exporters write for a size they do not know
                    dim.ClearField("dim_value")
    for check_type in (False, True):  # a type that does not fit ends the search for shapes
        try:
            shape_inference.infer_shapes(bare, check_type=check_type, strict_mode=True)
        except shape_inference.InferenceError as error:
            if _impossible(str(error)):
                raise
    _check_scans(model.graph, shape_inference.infer_shapes(bare).graph)
    return shape_inference.infer_shapes(model, data_prop=True)


def _check_scans(declared: onnx.GraphProto, inferred: onnx.GraphProto) -> None:
    """Raises InferenceError if the body of a Scan declares another rank for an output than it computes (`inferred`).

    ONNX Runtime then forgets the output's shape, and refuses to run a Scan without it, unless an optimization happens
    to find the shape again: with our nodes in the body, none does.
    """
    for node, known in zip(iter_nodes(declared.node), iter_nodes(inferred.node), strict=True):
        if node.op_type != "Scan" or node.domain not in STANDARD:
            continue
        for (_, body), (_, computed) in zip(subgraphs(node), subgraphs(known), strict=True):
            for output, actual in zip(body.output, computed.output, strict=True):
                types = output.type.tensor_type, actual.type.tensor_type
                ranks = [len(each.shape.dim) if each.HasField("shape") else None for each in types]
                if None not in ranks and ranks[0] != ranks[1]:
                    what = f"its body declares rank {ranks[0]} for output {output.name!r}, which has rank {ranks[1]}"
                    raise shape_inference.InferenceError(f"(op_type:Scan, node name: {node_label(node)}): {what}")


def _impossible(message: str) -> re.Match[str] | None:
    """Returns what is impossible in a model, as onnx says; of dtypes that ops do not know, only those of matmuls."""
    for found in _IMPOSSIBLE.finditer(message):
        if "has unsupported type" in found["what"] and not re.search("op_type:(MatMul|Gemm)", found[0]):
            continue
        if "(op_type:" in found["what"] and onnx.defs.has(found["op"]):
            continue  # in the function that the standard says this op is, with whose attributes onnx gets lost
        return found
    return None


def _raise_impossible(failure: child.Failure, name: str) -> None:
    """Raises ContractError if a call failed because an op cannot take what it is given."""
    found = _impossible(failure.message)
    if failure.kind == shape_inference.InferenceError.__name__ and found is not None:
        where = f"{name}: node {found['node'] or ''!r} ({found['op']})"
        expected = "inputs and attributes that fit together"
        raise ContractError(where, found["what"], expected=expected, advice="export the model again")


def _call(function: Callable[[], onnx.ModelProto], model: onnx.ModelProto) -> onnx.ModelProto | child.Failure:
    content = child.call(lambda: function().SerializeToString(), _seconds(model))
    return content if isinstance(content, child.Failure) else onnx.ModelProto.FromString(content)


def _seconds(model: onnx.ModelProto) -> int:
    """Returns how much processor time a call may take."""
    return MOST_SECONDS + model.ByteSize() // BYTES_PER_SECOND


def _said(failure: child.Failure, refusal: str = "refuses it: ") -> str:
    if not failure.kind:
        return failure.message
    lines = failure.message.strip().splitlines() or [failure.kind]
    return refusal + lines[-1].split("failed: ")[-1]
