"""Our gemms and fused nodes, taken apart into MXFP8Quantize, MXFP8Dequantize and standard ops.

    MXFP8FusedGemm, MXFP8GatedGemm, MXFP8Attention ... -> the nodes of their bodies
    MXFP8Gemm(A, B)        -> MatMul(MXFP8Dequantize(A), Transpose(MXFP8Dequantize(B)))
    MXFP8WeightGemm(X, B)  -> MatMul(X, Transpose(MXFP8Dequantize(B))), X rounded to bfloat16 where the node does that
    MXFP8Embedding(ids, B) -> Gather(MXFP8Dequantize(B), ids)

Products are of float32 values, as in the nodes.

A node that becomes the standard ops of its body leaves a mark on the one that makes its first output: the op, its
name, and what its body was written for. `recompose.py` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, row_of
from mxfp8_graph.onnx_pass.graph import attribute, dtype_of, facts, is_op, label
from mxfp8_graph.tools.dialects.edit import Edit, Nodes, dims, heirs, operand, operands, rank_of, tensor_of
from mxfp8_ops import contract, onnx_functions, standard_ops
from mxfp8_ops.case import Case

MARK: Final = "mxfp8_graph.body_of."
"""Start of the metadata key of a mark; the op follows."""

ABSENT: Final[Mapping[str, Sequence[float]]] = {"attn_mask": [0], "past_key": [], "past_value": []}
"""What stands for an input that is not there: vectors; a mask of False would hide everything, so a Boolean is True."""


class Gemm(NamedTuple):
    """What a gemm of a stored matrix [N, K] has."""

    b: ir.Value
    scales: ir.Value
    bias: ir.Value | None
    elements: ir.TensorProtocol
    codes: ir.TensorProtocol
    weight_only: bool


def unfuse(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns the nodes that a fused node stands for, or None if it is none."""
    op = row_of(node)
    return None if op is None or op.is_plain else taken_apart(edit, node)


def taken_apart(edit: Edit, node: ir.Node) -> Nodes:
    """Returns the ops of a node's body in its place, marked; inputs that change nothing are left out."""
    inputs, absent = list(node.inputs), dict[str, tuple[str | None, int]]()
    for at, port in enumerate(contract.OPS[node.op_type].inputs[: len(inputs)]):
        stored = tensor_of(inputs[at]) if port.name in ABSENT else None
        if stored is not None and _is_absent(port.name, stored):
            absent[port.name], inputs[at] = (stored_name(inputs[at]), int(stored.dtype)), None
    try:
        nodes, case = _body(edit, node, inputs)
    except (ValueError, TypeError, OverflowError, LookupError) as error:
        advice = "rewrite the original model again"
        expected = "attributes of the contract"
        raise edit.refuse(node, f"an attribute is {error}", expected=expected, advice=advice) from None
    outputs = {str(new.name): new for new in heirs(node) if new.name}
    first = next(iter(outputs))
    for each in nodes:
        makes_first = any(value.name == first for value in each.outputs)
        if each.domain == contract.DOMAIN or makes_first:
            each.metadata_props.update(node.metadata_props)
        if each.domain == contract.DOMAIN:
            each.doc_string = node.doc_string
        if is_op(each, "QuantizeLinear"):  # of a whole tensor: it is known as ours by its mark alone
            each.metadata_props[MARK + each.op_type] = ""
        if makes_first:
            mark = {"name": node.name, "case": case.to_json(), "absent": absent}
            each.metadata_props[MARK + node.op_type] = json.dumps(mark)
        for value in each.outputs:
            if (heir := outputs.get(str(value.name))) is not None:
                value.type, value.shape, value.doc_string = heir.type, heir.shape, heir.doc_string
                value.metadata_props.update(heir.metadata_props)
                value.meta.update(heir.meta)
    return nodes


def stored_name(value: ir.Value | None) -> str | None:
    """Returns the name of a value that is there."""
    return None if value is None else value.name


def _body(edit: Edit, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[Nodes, Case]:
    """Returns the nodes of the body of `node` with these inputs, whose outputs are named as those of `node`."""
    plain = ir.to_proto(node)
    plain.input[:] = ["" if value is None else str(value.name) for value in inputs]
    ports = {str(value.name): value for value in inputs if value is not None}
    case = onnx_functions.case_of(plain, {name: facts(value) for name, value in ports.items()})
    graph = graph_of(standard_ops.in_place_of(plain, case, edit.fresh), ports)
    for port in graph.inputs:
        port.replace_all_uses_with(ports[str(port.name)])
    # Initializers, not Constant nodes: what infers shapes finds the values of an input there, and equal ones are one.
    for each in [each for each in graph if is_op(each, "Constant")]:
        each.outputs[0].replace_all_uses_with(edit.constant(each.attributes["value"].as_tensor()))
        graph.remove(each)
    nodes = list(graph)
    graph.remove(nodes)
    return nodes, case


def graph_of(body: Sequence[onnx.NodeProto], inputs: Iterable[str], outputs: Iterable[str] = ()) -> ir.Graph:
    """Returns the graph of some nodes, whose inputs and outputs have these names."""
    ports, ends = ([onnx.ValueInfoProto(name=name) for name in names] for names in (inputs, outputs))
    return ir.from_proto(onnx.GraphProto(node=body, input=ports, output=ends))


def _is_absent(port: str, stored: ir.TensorProtocol) -> bool:
    """Whether a stored tensor is what the contract has for an input that is not there."""
    if dims(stored) != (len(ABSENT[port]),):
        return False
    return dims(stored) == (0,) or stored.numpy().item() == (stored.dtype == contract.BOOL)


def is_marked(node: ir.Node) -> bool:
    """Whether a node makes the first output of one that was taken apart."""
    return any(key.startswith(MARK) for key in node.metadata_props)


def take_apart(edit: Edit, node: ir.Node) -> Nodes | None:
    """Returns dequantized operands and a standard product in place of a gemm or a lookup; None for other nodes."""
    op = row_of(node)
    if op is None or op.packed_at is None or not op.is_plain:
        return None
    if op.is_gemm and op.indices_at is None:
        return product(edit, node, _transposed(edit, node, op.packed_at))
    if not op.is_gemm and op.indices_at is not None:
        table = _dequantized(edit, node, op.packed_at, attribute(node, "output_dtype", contract.FLOAT))
        return [in_place_of(node, "Gather", [table, node.inputs[op.indices_at]], heirs(node))]
    return None


def gemm_of(node: ir.Node) -> Gemm | None:
    """Returns the parts of a gemm of one stored matrix that is not fused; None for other nodes."""
    op = row_of(node)
    if op is None or op.packed_at is None or not op.is_gemm or not op.is_plain or op.indices_at is not None:
        return None
    b, scales = operands(node, op.packed_at)
    elements, codes = tensor_of(b), tensor_of(scales)
    if elements is None or codes is None or len(dims(elements)) != 2:
        return None
    return Gemm(b, scales, operand(node, op.packed_at + 2), elements, codes, op.weight_only)


def _dequantized(edit: Edit, node: ir.Node, at: int, dtype: int = contract.FLOAT) -> ir.Value:
    """Returns the values of the operand whose elements are input `at`; one node for all that read it."""
    elements, scales = operands(node, at)
    settings = {**contract.DEQUANTIZE.attributes, "axis": -1, "output_dtype": dtype}

    def make() -> ir.Value:
        op, wanted = contract.DEQUANTIZE.name, f"{elements.name}_values"
        return edit.make(op, elements, scales, wanted=wanted, domain=contract.DOMAIN, **dict(sorted(settings.items())))

    return edit.shared(node.graph, "values", elements, scales, dtype, make=make)


def _activation(edit: Edit, node: ir.Node) -> ir.Value:
    """Returns the float32 values that a weight-only gemm multiplies."""
    x, dtype = operands(node)[0], attribute(node, "activation_dtype", contract.FLOAT)
    if dtype == contract.FLOAT and dtype_of(x) == contract.FLOAT:
        return x
    if dtype != contract.FLOAT:
        x = edit.cast(node, x, dtype, "rounded")
    return edit.cast(node, x, contract.FLOAT, "float")


def product(edit: Edit, node: ir.Node, b: ir.Value) -> Nodes:
    """Returns MatMul(A, b) + bias in the dtype of a gemm, for the values `b` [..., K, N] of its B."""
    row = contract.OPS[node.op_type]
    a = _activation(edit, node) if row.weight_only else _dequantized(edit, node, 0)
    dtype, bias = attribute(node, "output_dtype", contract.FLOAT), operand(node, (row.packed_at or 0) + 2)
    outputs = heirs(node)
    steps: list[tuple[str, list[ir.Value], dict[str, int]]] = []
    if bias is not None:
        steps.append(("Add", [bias], {}))
    if dtype != contract.FLOAT:
        steps.append(("Cast", [], {"to": dtype}))
    y = [ir.Value(name=edit.fresh(f"{label(node)}_product"))] if steps else outputs
    nodes = [in_place_of(node, "MatMul", [a, b], y)]
    for number, (op, others, settings) in enumerate(steps, 1):
        before = y
        y = outputs if number == len(steps) else [ir.Value(name=edit.fresh(f"{label(node)}_sum"))]
        name = edit.fresh(f"{label(node)}_{op.lower()}")
        nodes.append(ir.node(op, [*before, *others], settings, outputs=y, name=name))
    return nodes


def _transposed(edit: Edit, node: ir.Node, at: int) -> ir.Value:
    """Returns the values of B [..., N, K] as [..., K, N]."""
    elements, values = operands(node, at)[0], _dequantized(edit, node, at)
    stored = tensor_of(elements)
    rank = len(dims(stored)) if stored is not None else rank_of(elements)

    def make() -> ir.Value:
        wanted = f"{elements.name}_transposed"
        if rank is None:
            return edit.make("Einsum", values, wanted=wanted, equation="...nk->...kn")
        return edit.make("Transpose", values, wanted=wanted, perm=[*range(rank - 2), rank - 1, rank - 2])

    return edit.shared(node.graph, "transposed", values, make=make)
