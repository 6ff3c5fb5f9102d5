"""Whether ONNX Runtime's CPU provider has kernels for a model of 16-bit floats: it is asked, since releases differ.

It runs most ops in float16, by casts of its own, and few in bfloat16.
"""

from __future__ import annotations

import re
from typing import Any, Final

import onnx
import onnx_ir as ir

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_model.float32 import CAST, DTYPES, HALVES, to_float32
from mxfp8_graph.onnx_model.graph import to_proto
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.tensor_data import byte_length, is_apart
from mxfp8_graph.onnx_model.walk import STANDARD, copy_fields, iter_graphs, iter_nodes, iter_tensors
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

ADVICE: Final = "rewrite the original with --for cpu (runs_on: cpu) for a model that does"

_MESSAGES: Final = (
    r"implementation for (?P<op>\w+)\(\d+\) node with name '(?P<node>.*)'",
    r"Type 'tensor\(b?float16\)' of input parameter .* of operator \((?P<op>\w+)\) in node \((?P<node>.*)\) is",
)
"""What it says of an op without a kernel for a dtype, and of one that has no such dtype in the standard."""

_LACKS: Final = "ONNX Runtime's CPU provider has no kernel for"


def missing_kernel(model: onnx.ModelProto) -> str:
    """Returns the first node of a model of 16-bit floats that the provider has no kernel for, in words; "" if none.

    Args:
        model: with or without the data of its large initializers, and with the bodies of its functions.
    """
    return missing_in(_refusal(model)) if _holds_halves(model) else ""


def _holds_halves(model: onnx.ModelProto) -> bool:
    """Whether a model takes, gives, stores or makes 16-bit floats; the bodies of our nodes round as the kernels do."""
    bodies = (node for function in model.functions if function.domain != contract.DOMAIN for node in function.node)
    ends = (value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output))
    stored = (tensor.data_type for tensor in iter_tensors(model))
    made = (a.i for node in iter_nodes((*model.graph.node, *bodies)) for a in node.attribute if a.name in DTYPES)
    return any(dtype in HALVES for dtypes in (ends, stored, made) for dtype in dtypes)


def _refusal(model: onnx.ModelProto) -> str:
    """Returns why ONNX Runtime does not load a model, in its words; "" if it does.

    Our nodes have their kernels: ONNX Runtime takes a minute to inline the bodies of a large model, which it runs in
    any dtype.
    """
    import onnxruntime  # takes a while, and most models need none of this

    from mxfp8_ops import ort

    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1  # nothing runs, so no threads are needed
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        ort.register(options)
        onnxruntime.InferenceSession(_without_weights(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # they have no common class
        return str(error)
    return ""


def missing_in(message: str) -> str:
    """Returns which node has no kernel for its dtype, in words, if ONNX Runtime's message says that, or ""."""
    found = next(filter(None, (re.search(pattern, message) for pattern in _MESSAGES)), None)
    return f"{found['op']} in 16 bits (node {found['node']!r})" if found else ""


def widen(opened: OpenedModel, model: ir.Model) -> str:
    """Gives a model float32 values, in place, if the provider lacks a kernel for it; returns what to say of that.

    Args:
        opened: the model, to which nothing was done since it became `model`.
        model: its graph, with the dtypes that onnx infers; edited.

    Raises:
        ContractError: as `to_float32`, or ONNX Runtime refuses that, too.
    """
    if not (lacking := missing_kernel(opened.proto)):
        return ""
    to_float32(model, opened.name)
    if still := _refusal(to_proto(opened, model)):
        what = f"ONNX Runtime refuses it in float32 too: {first_line(Exception(still))}"
        advice = "leave out runs_on (--for cpu)"
        raise ContractError(opened.name, what, expected="a model that it runs then", advice=advice)
    return f"computes in float32 instead of 16 bits, since {_LACKS} {lacking}"


def note(model: onnx.ModelProto, widened: str = "") -> list[str]:
    """Returns what there is to know of a rewritten model with 16-bit floats; `widened`: what `widen` said of it."""
    if lacking := "" if widened else missing_kernel(model):
        return [f"does not load on a CPU: {_LACKS} {lacking}; {ADVICE}"]
    casts = sum(node.name.startswith(CAST) for node in model.graph.node)
    return [f"{widened}; {casts} casts at inputs, outputs, lookups and stored tensors"] if widened else []


def _without_weights(model: onnx.ModelProto) -> bytes:
    """Returns a model whose large tensors are inputs: its data is not needed to find kernels.

    Subgraphs read inputs of the main graph by name.
    """
    copy = onnx.ModelProto()
    copy_fields(copy, model, skip={"graph"})
    copy_fields(copy.graph, model.graph, skip={"initializer"})
    inputs = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        small = byte_length(tensor) <= INLINE_BYTES and not is_apart(tensor)
        if small and any(descriptor.name.endswith("_data") for descriptor, _ in tensor.ListFields()):
            copy.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            _add_input(copy, tensor.name, tensor)
    for graph in iter_graphs(copy.graph):
        outputs = {value.name for value in graph.output}
        for index, tensor in reversed([*enumerate(graph.initializer)]):
            if is_apart(tensor) and tensor.name not in outputs:
                _add_input(copy, tensor.name, tensor)
                del graph.initializer[index]
        for index, node in reversed([*enumerate(graph.node)]):
            value = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
            constant = node.op_type == "Constant" and node.domain in STANDARD and node.output[0] not in outputs
            if constant and value is not None and is_apart(value):
                _add_input(copy, node.output[0], value)
                del graph.node[index]
    return bytes(copy.SerializeToString())


def _add_input(model: onnx.ModelProto, name: str, tensor: onnx.TensorProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
