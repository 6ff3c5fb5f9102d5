"""A matmul of a program: what `plan` sees of it, and what the edits need to replace it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from mxfp8_graph.policy.plan import MatMulSite
from mxfp8_graph.torch_pass.static_operands import Static
from mxfp8_graph.torch_program.program import Program, Scope
from mxfp8_graph.torch_program.values import storage_of


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of the product."""

    node: Node
    rank: int
    transposed: bool = False
    """K is the last axis but one."""
    static: Static | None = None
    perm: tuple[int, ...] | None = None
    """Of a run-time operand: what brings K to the end; None if it is there."""


@dataclass(frozen=True, kw_only=True)
class TorchSite:
    """A site and what `edit.py` needs to replace it."""

    site: MatMulSite
    scope: Scope
    node: Node
    """The matmul; the nodes it needs go in front of it."""
    output: Node
    """Whose value the gemm computes: `node`, or the add after it."""
    x: Operand | None = None
    w: Operand | None = None
    swapped: bool = False
    """The gemm computes the transpose of the result."""
    alpha: float = 1.0
    beta: float = 1.0
    offs: Node | None = None
    """Of a grouped matmul: where the rows of each expert end."""
    bias: Node | None = None
    """Absorbed into the gemm: one value per column, times beta."""
    bias_static: Static | None = None
    addend: Node | None = None
    """What is added by nodes of its own, times beta."""
    packed: str | None = None
    """Element format of the static operand, if torchao packed it."""
    unfit: str | None = None
    """Why it cannot be rewritten even if a recipe says so; the policy's own reasons come first."""


def identity(program: Program, static: Static) -> tuple[object, ...]:
    """Returns what two names of one tensor have in common: where its values lie."""
    tensor = program.tensor(static.name)
    at = storage_of(tensor)
    if not at:
        return (static.name,)
    return (at, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def module_of(node: Node) -> str:
    """Returns the path of the module that made the node, such as "model.layers.0.mlp.up_proj"; "" for the model."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""
