"""Makes nodes in place of others, and tells nodes of ours by their row of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import Dim, dtype_of, settings_of, shape_of
from mxfp8_graph.onnx_pass.replacement import value_replacing
from mxfp8_ops import contract


def in_place_of(
    node: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value],
    *,
    domain: str = "",
    **attributes: Any,
) -> ir.Node:
    """Returns a node with the name, the documentation and the metadata of the one whose place it takes."""
    return ir.Node(
        domain,
        op,
        inputs,
        settings_of(attributes),
        outputs=outputs,
        name=node.name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )


def mxfp8_node(
    node: ir.Node, op: contract.Op, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], **settings: Any
) -> ir.Node:
    """Returns a node of the contract in place of `node`.

    An attribute that is not passed has the contract's value. A passed one that `op` lacks is left out.
    """
    attributes = {name: settings.get(name, default) for name, default in sorted(op.attributes.items())}
    return in_place_of(node, op.name, inputs, outputs, domain=contract.DOMAIN, **attributes)


def node_derived_from(
    node: ir.Node,
    op: contract.Op,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value | None],
    **changes: Any,
) -> ir.Node:
    """Returns a node of type `op` with the name, the metadata and the attributes of `node`, as far as `op` has them.

    Its outputs replace `outputs`.
    """
    settings = {entry.name: entry.value for entry in node.attributes.values()} | changes
    return mxfp8_node(node, op, inputs, list(map(value_replacing, outputs)), **settings)


class TensorType(NamedTuple):
    """Dtype (onnx.TensorProto.DataType, 0 if unknown) and shape (None if unknown) of a value."""

    dtype: int
    shape: tuple[Dim, ...] | None


def type_of(value: ir.Value | None) -> TensorType:
    """Returns the declared or inferred dtype and shape of a value; (0, None) for None."""
    if value is None:
        return TensorType(0, None)
    return TensorType(dtype_of(value), shape_of(value))


def row_of(node: ir.Node | None) -> contract.Op | None:
    """Returns the contract's row for a node; None for other nodes."""
    return contract.OPS.get(node.op_type) if node is not None and node.domain == contract.DOMAIN else None


def fused_with(node: ir.Node | None, what: str) -> contract.Op | None:
    """Returns the row that fuses a node with `what`, "activation" or "gate"; None if the contract has none."""
    op = row_of(node)
    return None if op is None else next((row for row in contract.OPS.values() if row.fuses == (op.name, what)), None)


def is_ours(node: ir.Node | None, *ops: contract.Op) -> bool:
    """Whether there is a node, and its op is one of `ops` of the contract."""
    return node is not None and node.domain == contract.DOMAIN and node.op_type in {op.name for op in ops}
