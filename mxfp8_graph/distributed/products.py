"""The products with weights in the graphs of a module, and the reasons against splitting one among processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.fx import Node

from mxfp8_graph.torch_pass import internals
from mxfp8_ops import contract
from mxfp8_ops.formats import BLOCK_SIZE

_WEIGHTS: Final[Mapping[str, Sequence[str]]] = {
    **{op.full_name: (op.weight or ("weight",))[:2] for op in contract.TORCH_OPS.values() if op.multiplies},
    "linear": ("weight",),
}
"""Arguments with the weight [..., N, K] of each op that multiplies: its values, or its elements and scales."""
_SWAPS: Final = internals.op_names("t transpose permute numpy_T mT")
_VIEWS: Final = internals.op_names("view reshape _unsafe_view unflatten")
_CUTS: Final = internals.op_names("split split_with_sizes chunk")


@dataclass(frozen=True)
class Product:
    """A product with a weight that the module stores."""

    node: Node
    weights: tuple[str, ...]
    """Names of the tensors of the weight: its values, or its elements and scales."""
    bias: str | None
    """Name of the bias, if there is one."""
    n: int
    k: int
    transposed: bool
    """Whether the weight is stored as [..., K, N]."""
    readers: tuple[Node, ...]
    """Nodes that read the result."""
    others: tuple[str, ...]
    """Other nodes that read a tensor of the weight."""

    def obstacle(self, word: str, world: int) -> str | None:
        """Returns the reason against a split along N ("column") or K ("row") among `world` processes, or None."""
        name, size = internals.op_name(self.node), self.n if word == "column" else self.k
        # Sums need whole blocks in each process: a product sums over K, its gradient of x over N.
        blocked = name in contract.TORCH_GEMMS and (word == "row" or name in contract.TRAINING_OPS)
        if self.others:
            return f"{', '.join(self.others)} reads it too"
        if size % (world * (BLOCK_SIZE if blocked else 1)):
            parts = f"{world} equal parts" + f" of whole blocks of {BLOCK_SIZE}" * blocked
            return f"{'N' if word == 'column' else 'K'} = {size} is not {parts}"
        cuts = (_cut(reader, size, world) for reader in self.readers if word == "column")
        return next(filter(None, cuts), None)


def _cut(reader: Node, n: int, world: int) -> str | None:
    """Returns the reason why `reader` cannot work on a process's part of the result [..., N], or None."""
    name = internals.op_name(reader)
    value: Any = reader.meta.get("val")
    if name in _CUTS and any(part.shape[-1] != n for part in value):
        return f"{reader.name} cuts its result along N; export the parts as linears of their own"
    if name in _VIEWS:
        # A split along N divides the first of the axes that N becomes, such as the number of heads.
        size = 1
        for parts in reversed(value.shape):
            size *= parts
            if size == n and parts % world:
                return (
                    f"{reader.name} views its result as {tuple(value.shape)}, and {parts} is not divisible by {world}; "
                    "export q, k and v as linears of their own, with a number of heads that is"
                )
            if size >= n:
                break
    return None


def find(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[Product]:
    """Returns the products with a weight in `tensors`, which are all tensors of the module by name."""
    callers: dict[int, list[Node]] = defaultdict(list)
    users: dict[int, set[Node]] = defaultdict(set)
    for path, owner, graph in internals.graphs(module):
        prefix = f"{path}." if path else ""
        for node in graph.nodes:
            if node.op == "call_module":
                callers[id(owner.get_submodule(str(node.target)))].append(node)
            elif node.op == "get_attr" and (tensor := tensors.get(prefix + str(node.target))) is not None:
                users[id(tensor)].update(_readers(node))
    products = []
    for path, owner, graph in internals.graphs(module):
        prefix = f"{path}." if path else ""
        for node in graph.nodes:
            stored = [_stored(internals.argument(node, name)) for name in _WEIGHTS.get(internals.op_name(node), ())]
            weights = tuple(prefix + str(at.target) for at, _ in filter(None, stored))
            if not weights or not all(name in tensors for name in weights):
                continue
            bias = _stored(internals.argument(node, "bias"))
            shape = tensors[weights[0]].shape
            transposed = bool(stored[0] and stored[0][1])
            n, k = shape[-2:] if not transposed else (shape[-1], shape[-2])
            others = {user.name for name in weights for user in users[id(tensors[name])] - {node}}
            read_by = tuple(_results(node, owner, callers))
            name = prefix + str(bias[0].target) if bias else None
            products.append(Product(node, weights, name, n, k, transposed, read_by, tuple(sorted(others))))
    return products


def _stored(node: Any) -> tuple[Node, bool] | None:
    """Returns (the get_attr node behind transposes, whether they transpose it); None if `node` is computed."""
    transposed = False
    while isinstance(node, Node) and internals.op_name(node) in _SWAPS:
        node, transposed = node.all_input_nodes[0], not transposed
    return (node, transposed) if isinstance(node, Node) and node.op == "get_attr" else None


def _readers(node: Node) -> Iterable[Node]:
    for user in node.users:
        yield from _readers(user) if internals.op_name(user) in _SWAPS else (user,)


def _results(node: Node, owner: nn.Module, callers: Mapping[int, Sequence[Node]]) -> Iterator[Node]:
    """Yields the nodes that read the result of `node`, also in graphs that call the module of `node`."""
    for user in node.users:
        if user.op == "output":
            for call in callers.get(id(owner), ()):
                yield from call.users
        else:
            yield user
