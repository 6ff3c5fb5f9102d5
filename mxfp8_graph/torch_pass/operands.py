"""Operands whose value is known before the program runs: a parameter, buffer or constant, behind view-like ops.

placeholder -> (t | transpose | permute | view | slice | chunk | to | expand | ...)* -> operand

A stack of experts may also have some of them picked while the program runs, by a vector of indices:

placeholder [E, N, K] -> ... -> index(.., [ids [S]]) -> (transpose | to | ...)* -> operand [S, N, K]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.fx import Node

from mxfp8_graph.packing import Rows
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.internals import to_numpy
from mxfp8_graph.torch_pass.program import Program, place_of, storage_of
from mxfp8_ops.errors import ContractError

COPIES: Final = internals.op_names("alias detach clone contiguous lift_fresh_copy to _to_copy")

VIEW_OPS: Final = COPIES | internals.op_names(
    "slice select narrow chunk split split_with_sizes unbind t transpose swapaxes permute numpy_T mT view _unsafe_view "
    "reshape flatten unflatten unsqueeze squeeze getitem type_as expand"
)
"""The ops that may stand between a weight and the matmul."""

GATHERS: Final = internals.op_names("index index_select")
"""The ops that may pick experts of a stack."""

Step = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""(target, arguments, keyword arguments) of a call on a tensor."""

_RANDOM: Final = internals.op_names(
    "rand randn randint randperm normal bernoulli multinomial dropout native_dropout rand_like randn_like"
)


@dataclass(frozen=True, kw_only=True)
class Static:
    """A tensor with a known value: a stored tensor, and the steps from it to the consumer's operand."""

    name: str
    """Name of the parameter, buffer or constant."""
    shape: tuple[int, ...]
    """Shape after the steps."""
    dtype: torch.dtype
    """Dtype after the steps."""
    steps: tuple[Step, ...] = ()
    """Calls on the stored tensor, first to last."""
    broadcast: bool = False
    """The operand has further leading dimensions, along which the value repeats."""
    gather: Node | None = None
    """Node that picks entries of the first axis at run time, or None; `shape` counts all entries."""

    @property
    def byte_size(self) -> int:
        """Bytes of the tensor after the steps."""
        return math.prod(self.shape) * self.dtype.itemsize

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the stored `tensor` after the steps; a view wherever torch can give one."""
        value: Any = tensor.detach()
        with torch.no_grad():
            for target, arguments, keywords in self.steps:
                value = target(value, *arguments, **dict(keywords))
        result: torch.Tensor = value
        return result

    def first(self) -> Static:
        """Returns this tensor [1, ...] without its first axis."""
        squeeze: Step = (torch.ops.aten.squeeze.dim, (0,), ())
        return replace(self, steps=(*self.steps, squeeze), shape=self.shape[1:])


def identity(program: Program, static: Static) -> tuple[object, ...]:
    """Returns a key that is equal for two names of one stored tensor; see `place_of`."""
    tensor = program.tensor(static.name)
    # A tensor without memory (meta, fake, torchao's subclasses) is identified by its name alone.
    return place_of(tensor) if storage_of(tensor) else (static.name,)


class StaticOperands:
    """Resolves operands of one program to `Static` values."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._written: dict[str, str] = dict.fromkeys(program.mutated, "the program")
        """Name of each tensor that the program changes -> the op that changes it."""
        self._constant: set[Node] = set()
        for node in program.module.graph.nodes:  # in the order it runs: no recursion
            for argument in internals.written(node):
                if name := program.stored_name(_behind_views(argument)):
                    self._written[name] = internals.op_name(node)
        for node in program.module.graph.nodes:
            if self._depends_on_no_input(node):
                self._constant.add(node)

    def resolve(self, node: Any) -> Static | None:
        """Returns `node` as a stored tensor and steps, or None if it is not static in that way."""
        if not isinstance(node, Node):
            return None
        if node.op == "placeholder":
            return self._stored(node)
        op = internals.op_name(node)
        if op not in VIEW_OPS | GATHERS or not node.args or not isinstance(node.args[0], Node):
            return None
        before = self.resolve(node.args[0])
        if before is None:
            return None
        value = node.meta.get("val")
        if op in GATHERS:
            return _gathered(node, before)
        if before.gather is not None:
            return _after_gather(node, before)
        if op == "expand":
            return _expanded(node, before)
        if before.broadcast:
            same = isinstance(value, torch.Tensor) and str(value.shape) == str(node.args[0].meta["val"].shape)
            return before if same else None
        if len(node.all_input_nodes) > 1:  # a size or a type taken from another tensor
            return None
        after = replace(before, steps=(*before.steps, _step(node)))
        if not isinstance(value, torch.Tensor):  # chunk, split: getitem follows
            return after
        shape = tuple(value.shape)
        # A symbolic size would make the packed shape depend on an input.
        return replace(after, shape=shape, dtype=value.dtype) if all(isinstance(s, int) for s in shape) else None

    def is_constant(self, node: Any) -> bool:
        """Whether `node` depends on no user input, through any ops."""
        return not isinstance(node, Node) or node in self._constant

    def source_of(self, node: Node) -> str:
        """Returns the name of the op that computes a constant, behind its views."""
        node = _behind_views(node)
        return internals.op_name(node) or node.name

    def stored_below(self, node: Node) -> list[Node]:
        """Returns the placeholders that a constant is computed from."""
        stack, seen = [node], {node}
        while stack:
            fresh = [source for source in stack.pop().all_input_nodes if source not in seen]
            seen.update(fresh)
            stack += fresh
        return [source for source in seen if source.op == "placeholder"]

    def writer_of(self, node: Node) -> tuple[str, str] | None:
        """Returns (name, op) if `node` is a stored tensor that an op of the program changes."""
        name = self._program.stored_name(_behind_views(node))
        return (name, self._written[name]) if name in self._written else None

    def _depends_on_no_input(self, node: Node) -> bool:
        if node.op == "placeholder":
            return self._stored(node) is not None
        # A random op gives other values in each run; the graphs of a higher-order op are not analyzed here.
        if internals.is_higher_order(node) or internals.op_name(node) in _RANDOM or node.op != "call_function":
            return False
        return all(source in self._constant for source in node.all_input_nodes)

    def _stored(self, node: Node) -> Static | None:
        name, value = self._program.stored_name(node), node.meta.get("val")
        if name is None or name in self._written or not isinstance(value, torch.Tensor):
            return None
        return Static(name=name, shape=tuple(value.shape), dtype=value.dtype)


def _behind_views(node: Node) -> Node:
    """Returns the node that `node` is a view of, or `node` itself if it is no view."""
    while internals.op_name(node) in VIEW_OPS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _step(node: Node) -> Step:
    return (node.target, tuple(node.args[1:]), tuple(sorted(node.kwargs.items())))


def _gathered(node: Node, before: Static) -> Static | None:
    """Returns `before` [E, N, K] with the entries that `node` picks by a vector of indices, or None."""
    if internals.op_name(node) == "index":
        indices = list(node.args[1]) if len(node.args) > 1 else []  # type: ignore[arg-type]
        picks = [index for index in indices if index is not None]
        chosen = picks[0] if len(picks) == 1 and indices[0] is picks[0] else None
    else:
        chosen = internals.argument(node, "index") if internals.argument(node, "dim") == 0 else None
    value = chosen.meta.get("val") if isinstance(chosen, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in {torch.int32, torch.int64}:
        return None
    # One pick from a plain stack of matrices: a pick of a pick would need its indices composed.
    if before.gather is not None or before.broadcast or len(before.shape) != 3:
        return None
    return replace(before, gather=node)


def _after_gather(node: Node, before: Static) -> Static | None:
    """Returns `before` after the step of `node`, applied to all experts before the pick; None if it mixes experts."""
    value, axes = node.meta["val"], permutation(node, 3)
    if len(node.all_input_nodes) > 1 or (axes is None and internals.op_name(node) not in COPIES):
        return None
    # The axis of experts has to stay first: the packed stack is picked from along it.
    if axes is not None and axes[0] != 0:
        return None
    shape = before.shape if axes is None else tuple(before.shape[axis] for axis in axes)
    return replace(before, steps=(*before.steps, _step(node)), shape=shape, dtype=value.dtype)


def permutation(node: Node, rank: int) -> tuple[int, ...] | None:
    """Returns the permutation that `node` applies to the `rank` axes of its argument, or None if it is another op."""
    op = internals.op_name(node)
    axes = list(range(rank))
    if op == "mT" or (op in {"t", "numpy_T"} and rank == 2):
        return k_last(axes)
    if op in {"transpose", "swapaxes"}:
        one, two = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        axes[one], axes[two] = axes[two], axes[one]
        return tuple(axes)
    if op == "permute":
        return tuple(int(d) % rank for d in node.args[1])  # type: ignore[union-attr, arg-type]
    return None


def _expanded(node: Node, before: Static) -> Static | None:
    """Returns `before` as broadcast if `node` only repeats it along leading dimensions, as core ATen does for bmm."""
    sizes = list(internals.argument(node, "size"))
    trailing = sizes[len(sizes) - len(before.shape) :]
    if all(size in (-1, had) for size, had in zip(trailing, before.shape, strict=True)):
        return replace(before, broadcast=before.broadcast or len(sizes) > len(before.shape))
    # An expanded leading 1 is one matrix for every entry of the batch.
    if len(before.shape) == 3 and before.shape[0] == 1 and tuple(trailing[1:]) == before.shape[1:]:
        return replace(before.first(), broadcast=True)
    return None


_ATEN: Final = torch.ops.aten
_MOVES: Final = frozenset({_ATEN.t, _ATEN.transpose, _ATEN.permute, _ATEN.mT, _ATEN.detach, _ATEN.alias})
"""Steps that never copy a tensor."""
_CASTS: Final = (_ATEN.to.dtype, _ATEN._to_copy.default)


def layout_of(static: Static, stored: torch.Tensor, transposed: bool) -> tuple[object, ...]:
    """Returns a key of a view of `stored`: two views with equal keys have the same values in the same order.

    A table that an embedding reads as it is and an output projection reads through a transpose is one weight.
    """
    # A step that copies has no strides to compare, so its text is the key.
    if any(target.overloadpacket not in _MOVES for target, _, _ in static.steps):
        return (repr(static.steps), transposed)
    seen = static.apply(stored)
    seen = seen.mT if transposed else seen
    return (seen.storage_offset(), tuple(seen.shape), seen.stride())


def rows_of(static: Static, stored: torch.Tensor) -> tuple[Rows, bool]:
    """Returns (the operand [..., R, C] as rows contiguous in memory, whether those are its columns).

    Raises:
        ContractError: `stored` has no values (it is on the meta device, or fake).
    """
    if not internals.has_values(stored):
        what = "has a shape but no values"
        advice = "export the model with real tensors"
        raise ContractError(f"weight {static.name!r}", what, expected="a program that holds its weights", advice=advice)
    data = to_numpy(static.apply(stored))
    *_, height, width = data.strides
    # A transposed view is read along its columns, which are contiguous: by rows each value would be a cache miss.
    flipped = height == data.itemsize and width != data.itemsize
    seen = np.swapaxes(data, -1, -2) if flipped else data

    def index(at: tuple[int, ...]) -> list[int]:
        return _stored_index(static, stored, (*at[:-2], at[-1], at[-2]) if flipped else at)

    return Rows(shape=seen.shape, read=lambda at, start, stop: seen[at][start:stop], index=index), flipped


def _stored_index(static: Static, stored: torch.Tensor, at: tuple[int, ...]) -> list[int]:
    """Returns the index in `stored` of the value at index `at` of the operand."""
    # The steps run on positions instead of values, so that an error can name the index in the user's own tensor.
    positions = torch.arange(stored.numel()).reshape(stored.shape)
    for target, arguments, keywords in static.steps:
        # A cast to float16 would round the positions.
        if target not in _CASTS:
            positions = target(positions, *arguments, **dict(keywords))
    return [int(i) for i in np.unravel_index(int(positions[at]), tuple(stored.shape))]
