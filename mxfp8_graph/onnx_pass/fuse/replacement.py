"""The result of a fusion, `Replacement`, and helpers that make its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import Dim, dtype_of, settings_of, shape_of
from mxfp8_ops import contract

REPLACES: Final = "replaces"
"""Key of `Value.meta`: the value of the graph whose place a new value takes."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One node in place of several.

    The new nodes compute all results of `gone` that other nodes use. Nodes that only `gone` uses, such as constants, go
    away by themselves.
    """

    kind: str
    """The fused ops, for reports: "gemm + gelu"."""
    node: ir.Node
    gone: tuple[ir.Node, ...]
    """Nodes of one graph."""
    before: tuple[ir.Node, ...] = ()
    """Further new nodes that compute what `node` reads: constants, views."""
    after: tuple[ir.Node, ...] = ()
    """Further new nodes that read what `node` computes."""

    @property
    def new(self) -> tuple[ir.Node, ...]:
        """The new nodes, in order."""
        return (*self.before, self.node, *self.after)


Fusion = Callable[[ir.Node], Replacement | str | None]
"""Returns the replacement of the pattern that begins or ends at a node; None if the pattern is not there, and the
reason, for reports, if it is there and cannot be replaced."""


def value_replacing(value: ir.Value | None) -> ir.Value:
    """Returns a new value that takes the place of `value`; for None, one without a name, which is an absent output."""
    if value is None:
        return ir.Value(name="")
    # The type is the one that the file declares, and `meta` has the inferred one: the saved model declares no more.
    new = ir.Value(name=value.name, shape=value.shape, type=value.type, doc_string=value.doc_string)
    new.metadata_props.update(value.metadata_props)
    new.meta.update(value.meta)
    new.meta[REPLACES] = value
    return new


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
