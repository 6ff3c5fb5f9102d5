"""Removes weights, biases and the views of them that have no user after a rewrite. Nothing else."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch.fx import Node

from mxfp8_graph.torch_pass.static_operands import GATHERS, VIEW_OPS
from mxfp8_graph.torch_program import higher_order, internals
from mxfp8_graph.torch_program.internals import storage_of
from mxfp8_graph.torch_program.program import Program


def prune(program: Program, suspects: Sequence[Node], sources: Set[object]) -> None:
    """Removes the nodes in `suspects` that nothing uses, and in turn what only they used.

    Dead code that was in the program before stays: only `suspects`, what feeds them, and other names of the storages
    in `sources` are looked at. User inputs stay.
    """
    stack = list(suspects)
    gone: set[Node] = set()
    while stack:
        node = stack.pop()
        # A node is met again when its last user goes, since that pushes its inputs.
        if node in gone or node.users:
            continue
        if node.op == "placeholder":
            removed, feeding = _placeholder(program, node)
        elif internals.op_name(node) in VIEW_OPS | GATHERS:
            removed, feeding = [node], node.all_input_nodes
            node.graph.erase_node(node)
        else:
            continue
        gone.update(removed)
        stack += feeding
    for node in program.scopes[0].placeholders:  # a tied weight has two names, one of which export leaves unused
        name = None if node.users else program.stored_name(node)
        if name is not None and storage_of(program.tensor(name)) in sources:
            program.forget(node)


def _placeholder(program: Program, node: Node) -> tuple[list[Node], list[Node]]:
    """Removes an unused input that is a weight; returns (the removed nodes, the nodes that they read)."""
    scope = program.scope_of(node)
    # In the main graph a placeholder is the tensor itself; in a subgraph it is an operand of the call that runs it.
    if scope.parent is None or scope.call is None:
        if program.stored_name(node) is None:
            return [], []
        program.forget(node)
        return [node], []
    index = scope.placeholders.index(node)
    # An operand that changes between iterations is no weight, and an unknown op may rely on its number of operands.
    if higher_order.layout_of(scope.call) is None or index < higher_order.variant_count(scope.call):
        return [], []
    twins = [sibling.placeholders[index] for sibling in scope.siblings]
    # All graphs of a call take the same operands: cond passes each to both branches.
    if any(twin.users for twin in twins):
        return [], []
    operand = higher_order.operands(scope.call)[index]
    higher_order.remove_operand(scope.call, index)
    for twin in twins:
        twin.graph.erase_node(twin)
    return twins, [operand] if isinstance(operand, Node) else []
