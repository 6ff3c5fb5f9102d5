"""The nodes of `contract.py` as ONNX model-local functions made of standard ops.

A model with these functions runs in any ONNX Runtime without our library: the runtime inlines their bodies. If our
library is registered, its kernels run instead. Gemms accumulate in float32 and stay within `gemm_error_bound`; other
nodes give the bytes of the reference. `Op.body` writes the body of a node, for the nodes of one model.

ONNX Runtime decodes weights that are initializers once, when a session opens. They then take the memory and the time of
float32; a table of MXFP8Embedding takes those of float16. A `Style` can prevent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from mxfp8_ops import contract
from mxfp8_ops.case import ABSENT, Case, Input, merged
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import STYLE, Body, Style
from mxfp8_ops.node import BOOL, DOMAIN


def functions(
    model: ModelProto, style: Style = STYLE, known: Mapping[str, Input] = MappingProxyType({})
) -> list[FunctionProto]:
    """Returns the functions that the nodes of domain `mxfp8` in `model` need, also nodes in subgraphs.

    Attach them with `model.functions.extend(...)`, and import the domain `contract.DOMAIN` at `contract.VERSION`. They
    are valid for this model alone: for the formats, attributes and shapes of its nodes, and for its opset. ONNX Runtime
    resolves an inlined body at the opset of the model and ignores the opset that the function imports.

    Args:
        model: a model with its default domain at `contract.MIN_OPSET` or above.
        style: the choices of the writer.
        known: dtypes and shapes of values by name, beyond those in the model. More facts make shorter bodies.

    Raises:
        ContractError: the opset is too low, the contract has no such node, or an attribute has an illegal value.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < contract.MIN_OPSET:
        raise ContractError(
            "functions",
            f"opset {opset}",
            expected=f"at least {contract.MIN_OPSET}",
            advice="convert the model up with onnx.version_converter",
        )
    nodes = [*_cases(model.graph, known)]
    outer = [*merged(case for _, case in nodes).values()]
    try:
        written = [_body(case, opset, style) for case in outer]
        # The nodes in a body share their functions with the nodes of the graph, so the cases of those cover both.
        bodies = [body for body in written if body.called]
        plain = [body.case for body in written if not body.called] + [case for body in bodies for case in body.called]
        bodies += [_body(case, opset, style) for case in merged(plain).values()]
    except ContractError:
        # A merged case does not tell which node is wrong: the bodies of single nodes do.
        for node, case in nodes:
            try:
                _body(case, opset, style)
            except ContractError as error:
                raise error.inside(f"node {node.name!r} ({node.op_type})") from None
        raise
    order = [*contract.OPS]
    return [_function(body) for body in sorted(bodies, key=lambda body: order.index(body.op.name))]


def _body(case: Case, opset: int, style: Style) -> Body:
    body = Body(case, opset, style)
    case.op.body(body)
    return body


def _function(body: Body) -> FunctionProto:
    op, imports = body.op, [helper.make_opsetid("", body.opset)]
    if body.called:
        imports.append(helper.make_opsetid(DOMAIN, contract.VERSION))
    return helper.make_function(
        DOMAIN,
        op.name,
        [port.name for port in op.inputs],
        [port.name for port in op.outputs],
        body.nodes,
        imports,
        attribute_protos=[helper.make_attribute(key, default) for key, default in op.attributes.items()],
    )


# --- The facts that a model has about its nodes


def case_of(node: NodeProto, known: Mapping[str, Input], *, whole: bool = False) -> Case:
    """Returns the case of one node, from the known facts about values by name.

    `whole` tells that a reader of the elements has full blocks, so the node's blocks are full too.

    Raises:
        ContractError: the contract has no such node.
    """
    if node.op_type not in contract.OPS:
        where, expected = f"node {node.name!r}", f"one of {', '.join(contract.OPS)}"
        raise ContractError(where, f"{node.op_type} of domain {DOMAIN!r}", expected=expected, advice="correct it")
    op = contract.OPS[node.op_type]
    settings = {name: (value,) for name, value in settings_of(node).items() if name in op.attributes}
    names = dict(zip((port.name for port in op.inputs), node.input, strict=False))
    inputs = {}
    for port in op.inputs:
        value = known.get(names[port.name], Input()) if names.get(port.name) else ABSENT
        inputs[port.name] = replace(value, present=False) if port.has_stand_in and value.neutral else value
    return Case(op, settings, inputs, whole or (op.quantizes and settings["axis"] == (-1,) and inputs["X"].whole))


def settings_of(node: NodeProto) -> dict[str, Any]:
    """Returns all attributes of a node of `contract.OPS`, typed as in `KINDS`, with defaults for missing ones."""
    written = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    text = {name: value.decode(errors="replace") for name, value in written.items() if isinstance(value, bytes)}
    lists = {name: tuple(value) for name, value in written.items() if isinstance(value, list)}
    return {**contract.OPS[node.op_type].attributes, **written, **text, **lists}


def _cases(graph: GraphProto, outer: Mapping[str, Input]) -> Iterable[tuple[NodeProto, Case]]:
    """Yields each node of domain `mxfp8` in a graph and its subgraphs, with its case."""
    own = _values(graph)
    known = {**outer, **{name: value for name, value in own.items() if value.shape is not None or name not in outer}}
    # The graph may have no shapes. But K of a gemm's weight is also K of its activation, so full blocks in the weight
    # mean full blocks in the activation.
    read_whole = set()
    for node in graph.node:
        op = contract.OPS.get(node.op_type) if node.domain == DOMAIN else None
        if op is not None and op.is_gemm and known.get(node.input[op.at("B") or 0], Input()).whole:
            read_whole.add(node.input[0])
    for node in graph.node:
        if node.domain == DOMAIN:
            case = case_of(node, known, whole=node.output[0] in read_whole)
            yield node, case
            if known.get(node.output[0], Input()).dtype == 0:
                known[node.output[0]] = _result(case)
        for attribute in node.attribute:
            for inner in (attribute.g,) if attribute.type == AttributeProto.GRAPH else attribute.graphs:
                yield from _cases(inner, known)


def _result(case: Case) -> Input:
    """Returns the facts about the first output of a node that follow from the node alone."""
    like, first = case.op.outputs[0].like, case.inputs[case.op.inputs[0].name]
    dtype = case.inputs[like].dtype if like else case.attributes["output_dtype"][0]
    shape = first.shape
    if case.op.is_gemm and shape:
        b = case.inputs["B"].shape
        shape = (*shape[:-1], b[-2] if b else None) if b is not None and len(b) == 2 else None
    return replace(Input.from_shape(dtype, shape if case.op.quantizes or case.op.is_gemm else None), whole=case.whole)


def _values(graph: GraphProto) -> dict[str, Input]:
    """Returns the facts in a graph about its values, by name."""
    values = {info.name: _typed(info) for info in (*graph.input, *graph.value_info, *graph.output)}
    fed = {info.name for info in graph.input}  # a caller may replace an initializer that is also an input
    for tensor in graph.initializer:
        if tensor.name not in fed:
            values[tensor.name] = _constant(tensor)
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            values[node.output[0]] = _constant(node.attribute[0].t)
    return values


def _typed(info: ValueInfoProto) -> Input:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return Input(kind.elem_type)
    return Input.from_shape(kind.elem_type, (d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim))


def _constant(tensor: TensorProto) -> Input:
    # Neutral constants (`Port.has_stand_in`): no values, [0], or [True].
    neutral = 0 in tensor.dims
    if list(tensor.dims) == [1] and tensor.data_location != TensorProto.EXTERNAL:
        neutral = bool(np.all(numpy_helper.to_array(tensor) == (tensor.data_type == BOOL)))
    return Input.from_shape(tensor.data_type, tensor.dims, constant=True, neutral=neutral)
