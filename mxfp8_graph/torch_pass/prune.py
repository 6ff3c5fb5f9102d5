"""Removes what a rewrite left without a user: weights, biases and the views in front of them. Nothing else."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch.fx import Node

from mxfp8_graph.torch_pass.static_operands import GATHERS, VIEW_OPS
from mxfp8_graph.torch_program import higher_order, internals
from mxfp8_graph.torch_program.program import Program
from mxfp8_graph.torch_program.values import storage_of


def prune(program: Program, suspects: Sequence[Node], sources: Set[object]) -> None:
    """Removes the nodes in `suspects` that nothing uses, and in turn what only they used.

    Dead code that was in the program before stays: only `suspects`, what feeds them, and other names of the storages
    in `sources` are looked at. User inputs stay.
    """
    stack = list(suspects)
    gone: set[Node] = set()
    while stack:
        node = stack.pop()
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
    """Removes an unused input that is a weight; returns (the nodes removed, what they were fed by)."""
    scope = program.scope_of(node)
    if scope.parent is None or scope.call is None:
        if program.stored_name(node) is None:
            return [], []
        program.forget(node)
        return [node], []
    index = scope.placeholders.index(node)
    if higher_order.layout_of(scope.call) is None or index < higher_order.variant_count(scope.call):
        return [], []
    twins = [sibling.placeholders[index] for sibling in scope.siblings]
    if any(twin.users for twin in twins):
        return [], []
    operand = higher_order.operands(scope.call)[index]
    higher_order.remove_operand(scope.call, index)
    for twin in twins:
        twin.graph.erase_node(twin)
    return twins, [operand] if isinstance(operand, Node) else []
