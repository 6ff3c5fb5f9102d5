"""What ONNX Runtime's CPU provider lacks for a model of 16-bit floats: ONNX Runtime is asked, once per op and dtypes.

It has most ops in float16, by casts of its own, and few in bfloat16; which ones changes from release to release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import onnx
from onnx import TensorProto

from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.float32 import HALVES, element_type, holds_halves, retype_node, to_float32
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.tensor_data import byte_length, is_apart
from mxfp8_graph.onnx_model.walk import called_function, copy_fields, function_key, subgraphs

_MOST_NAMED: Final = 4
"""How many ops a message names; it counts the others."""

Types = Mapping[str, onnx.ValueInfoProto]


@dataclass(frozen=True)
class Lacking:
    """What keeps a model from being loaded; false if nothing does."""

    nodes: Mapping[tuple[str, int], int]
    """How many nodes there are of each (op, 16-bit dtype) without a kernel."""
    types: Types
    """What is known of the values of the main graph."""

    def __bool__(self) -> bool:
        return bool(self.nodes)

    @property
    def dtypes(self) -> frozenset[int]:
        """The dtypes that kernels are missing for."""
        return frozenset(dtype for _, dtype in self.nodes)

    def __str__(self) -> str:
        """Returns the ops with dtype and count, the most frequent first."""
        ranked = sorted(self.nodes.items(), key=lambda item: (-item[1], item[0]))
        said = [f"{op} of {HALVES[dtype]} ({count} node{'s' if count > 1 else ''})" for (op, dtype), count in ranked]
        more = len(said) - _MOST_NAMED
        return ", ".join(said[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def lacking(model: onnx.ModelProto, name: str) -> Lacking:
    """Returns the ops of `model` that the provider has in float32, and not in the 16-bit dtype they have there.

    Nodes whose dtypes onnx cannot infer are left out. A model without 16-bit floats costs a look at its nodes.

    Args:
        model: with or without the data of its large initializers, and with the bodies of its functions.
        name: what to call the model in messages.

    Raises:
        ContractError: onnx cannot read the model.
    """
    if not holds_halves(model):
        return Lacking({}, {})
    inferred = onnx_calls.infer_shapes(_without_data(model), name, [])
    answers: dict[tuple[object, ...], bool] = {}
    found: Counter[tuple[str, int]] = Counter()
    main: Types = {}
    for graph, types in _scopes(inferred.graph, {}):
        main = main or types
        stored = {tensor.name: tensor for tensor in graph.initializer if tensor.raw_data}
        for node in graph.node:
            names = [value for value in (*node.input, *node.output) if value]
            dtypes = tuple(element_type(types[value]) if value in types else 0 for value in names)
            half = next((dtype for dtype in dtypes if dtype in HALVES), None)
            if half is None or node.op_type == "Constant" or any(subgraphs(node)) or not all(dtypes):
                continue  # control flow takes every dtype; its subgraphs are scopes of their own
            key = (node.domain, node.op_type, dtypes)
            if key not in answers:
                answers[key] = _is_lacking(inferred, node, types, stored)
            found[node.op_type, half] += answers[key]
    return Lacking({key: count for key, count in found.items() if count}, main)


@dataclass(frozen=True)
class Widened:
    """A model that was given float32 values because of what the provider lacks."""

    lacking: Lacking
    casts: AbstractSet[str]
    """Names of the nodes that were added for it."""

    def note(self, model: onnx.ModelProto) -> str:
        """Returns what was done, with the casts that are left in `model` after all else that was done to it."""
        left = sum(node.name in self.casts for node in model.graph.node)
        dtypes = " and ".join(HALVES[dtype] for dtype in sorted(self.lacking.dtypes))
        what = f"computes in float32 instead of {dtypes}: ONNX Runtime's CPU provider lacks {self.lacking}"
        return f"{what}; {left} casts at inputs, outputs and stored matrices"


def widen(opened: OpenedModel) -> Widened | None:
    """Gives a model float32 values, in place, if the provider lacks something for it; None if it lacks nothing.

    Raises:
        ContractError: as `lacking` and `to_float32`.
    """
    found = lacking(opened.proto, opened.name)
    return Widened(found, to_float32(opened, found.dtypes, found.types)) if found else None


def _without_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of `model` without the data of large initializers, which a child process would be sent."""
    copy = onnx.ModelProto()
    copy_fields(copy, model, skip={"graph"})
    copy_fields(copy.graph, model.graph, skip={"initializer"})
    for tensor in model.graph.initializer:
        if is_apart(tensor) or byte_length(tensor) > INLINE_BYTES:
            copy.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        else:
            copy.graph.initializer.add().CopyFrom(tensor)
    return copy


def _scopes(graph: onnx.GraphProto, outer: Types) -> Iterator[tuple[onnx.GraphProto, Types]]:
    """Yields each graph, outermost first, with what is known of the values that its nodes see."""
    stored = (
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in graph.initializer
    )
    types = {**outer, **{value.name: value for value in (*stored, *graph.value_info, *graph.input, *graph.output)}}
    yield graph, types
    for node in graph.node:
        for _, inner in subgraphs(node):
            yield from _scopes(inner, types)


def _is_lacking(model: onnx.ModelProto, node: onnx.NodeProto, types: Types, stored: Mapping[str, TensorProto]) -> bool:
    """Whether the provider takes `node` in float32 and not as it is: what it has in no dtype is no matter of dtypes."""
    alone = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    functions = {function_key(function) for function in model.functions}
    if called_function(node) in functions:
        alone.functions.extend(model.functions)
    alone.graph.name = "alone"
    alone.graph.node.append(node)
    for name in dict.fromkeys(filter(None, node.input)):
        if name in stored and stored[name].data_type not in HALVES:  # some kernels want sizes and axes to be constant
            alone.graph.initializer.append(stored[name])
        else:
            alone.graph.input.append(types[name])
    alone.graph.output.extend(types[name] for name in node.output if name)
    if _loads(alone):
        return False
    retype_node(alone.graph.node[0], frozenset(HALVES))
    for value in (*alone.graph.input, *alone.graph.output):
        if element_type(value) in HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    return _loads(alone)


def _loads(model: onnx.ModelProto) -> bool:
    import onnxruntime  # where nothing is asked, nothing is imported

    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # what it raises has no common base
        return False
    return True
