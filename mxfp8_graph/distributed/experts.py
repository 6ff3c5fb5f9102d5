"""Expert parallelism: each process holds the weights of some experts, and their rows are sent to it in MXFP8.

In the graph of a module, the experts are the products `grouped_linear_train` with the same `offs`, and the ops between
them, which compute row by row (an activation, a gate). Their rows are sent once:

    h = grouped_linear_train(x, up, offs)           route = route(x, offs)
    h = silu(h)                               ->    h = grouped_linear_train(dispatch(x, route), up, route.offs)
    y = grouped_linear_train(h, down, offs)         h = silu(h)
                                                    y = combine(grouped_linear_train(h, down, route.offs), route)

The graph is edited, since an exported program has no model code in which a user could call dispatch and combine.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Graph, GraphModule, Node

from mxfp8_graph.distributed import routes
from mxfp8_graph.torch_pass import internals
from mxfp8_ops.errors import ContractError
from mxfp8_ops.torch_ops.gradients import GRADIENT_FORMATS

_WHERE: Final = "distributed.expert_parallel"
_TRAIN: Final = "mxfp8::grouped_linear_train"
_OWN: Final = "a parameter that one product of experts reads"
_KEEP: Final = "keep these experts in each process"
_LAST_AXIS: Final = internals.op_names("chunk split split_with_sizes slice narrow")
"""Ops that cut every row alike if their argument `dim` is the last axis."""
_NO_VALUE: Final = "_assert_tensor_metadata"
"""Checks dtype and device; export adds it to casts."""


@dataclass(frozen=True)
class ExpertReport:
    """The experts that this process holds."""

    weights: Mapping[str, range]
    """Name of each stack of weights -> its experts in this process."""

    def __str__(self) -> str:
        """Returns a line for each stack of weights."""
        return "\n".join(f"{name}: experts {held.start} to {held.stop - 1}" for name, held in self.weights.items())


def expert_parallel(module: nn.Module, mesh: DeviceMesh) -> ExpertReport:
    """Shards the experts of a module over processes, and sends them their rows in MXFP8; edits the module in place.

    Call it in every process, before an optimizer gets the parameters. Each process then runs the module on its own
    inputs. A stack of weights [E, ...] becomes a DTensor whose local part has E / P experts. Its gradient is the sum
    over the rows of all processes, so compute the loss as a sum over the local rows, divided by the same number in all
    processes. Sum the gradients of other parameters instead of averaging them, and keep these weights out of DDP and
    FSDP2.

    Results and gradients of rows have the same bits as in one process with all rows. The gradient of a weight has
    blocks along the rows of an expert, which come from several processes. Its x and dy were rounded for the exchange
    before, in blocks along the other axis. Both blocks round a value to the same 4 significant bits (3 in E5M2), so the
    gradient is the same unless the value is subnormal in a block of either axis or, with scale_rounding "floor" or
    "even", saturates in one. A float16 of 63488 or more (61440 in E5M2) arrives as infinity. torch.compile does not
    compile the exchange.

    Args:
        module: the module of a program that `mxfp8_graph.rewrite(..., training=True)` returned: `tuned.module()`, or
            `distributed.module(tuned)`.
        mesh: the processes that share the experts, in one dimension.

    Returns:
        The experts that this process holds.

    Raises:
        ContractError: the module has no experts, or they cannot be split: their number is no multiple of the number of
            processes, another op reads their weights, or an op between the products mixes rows.
    """
    if mesh.ndim != 1:
        advice = 'pass one of its dimensions, such as mesh["experts"]'
        raise ContractError(_WHERE, f"a mesh of {mesh.ndim} dimensions", expected="one dimension", advice=advice)
    regions = [(each, region) for _, each, graph in internals.graphs(module) for region in _regions(graph)]
    if not regions:
        advice = "pass the module of what mxfp8_graph.rewrite(..., training=True) returned"
        raise ContractError(_WHERE, f"the module has no {_TRAIN}", expected="experts to train", advice=advice)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    held: dict[str, range] = {}
    for owner, products in regions:  # all checks come before the first change, so an error leaves the module as it was
        _check_between(owner, products)
        for product in products:
            stack = _parameter(owner, _stored(product))
            called = names.get(id(stack), [])
            if len(called) != 1 or called[0] in held:
                what = f"the weight of {product.name!r} is {'tied' if called else 'no parameter'}"
                raise ContractError(_WHERE, what, expected=_OWN, advice=_KEEP)
            held[called[0]] = _held(called[0], stack, mesh)
    for owner, products in regions:
        for stored in dict.fromkeys(map(_stored, products)):
            _shard(owner, stored, mesh)
        _send(products, mesh.get_group().group_name)
    for _, each, _ in internals.graphs(module):
        if isinstance(each, GraphModule):
            each.recompile()
    return ExpertReport(held)


def _regions(graph: Graph) -> list[list[Node]]:
    """Returns the products of each mixture of experts in a graph."""
    by_offs: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if internals.op_name(node) == _TRAIN:
            by_offs.setdefault(internals.argument(node, "offs"), []).append(node)
    return list(by_offs.values())


def _between(products: list[Node]) -> list[Node]:
    """Returns the nodes through which a product depends on another one."""
    graph = products[0].graph
    after, before = set(products), set(products)
    for node in graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(graph.nodes):
        if not before.isdisjoint(node.users):
            before.add(node)
    return [node for node in graph.nodes if node in after & before and node not in products]


def _check_between(owner: nn.Module, products: list[Node]) -> None:
    """Raises ContractError if a node between the products mixes rows, reads other nodes, or is read by them."""
    between = _between(products)
    inside = {*products, *between}
    for node in between:
        others = [each.name for each in node.all_input_nodes if each not in inside]
        users = [each.name for each in node.users if each not in inside and internals.op_name(each) != _NO_VALUE]
        what = None
        if not _keeps_rows(owner, node):
            what = f"node {node.name!r} between experts is {internals.op_name(node) or node.op}"
        elif others or users:
            what = f"node {node.name!r} between experts {'reads' if others else 'is read by'} {(others or users)[0]!r}"
        if what:
            expected = "results of experts only, and each row computed on its own"
            raise ContractError(_WHERE, what, expected=expected, advice=_KEEP)


def _keeps_rows(owner: nn.Module, node: Node) -> bool:
    """Whether a node computes each row of its result from the same row of its operands only."""
    if node.op == "call_module":  # in an unflattened program an activation may be a module of its own
        inner = owner.get_submodule(str(node.target))
        graphs = [graph for _, each, graph in internals.graphs(inner) if each is inner]
        compute = [each for graph in graphs for each in graph.nodes if each.op not in {"placeholder", "output"}]
        return bool(graphs) and all(_keeps_rows(inner, each) for each in compute)
    if internals.op_name(node) in _LAST_AXIS:
        dim, value = internals.argument(node, "dim", 0), node.all_input_nodes[0].meta.get("val")
        return dim == -1 or (isinstance(value, Tensor) and dim == value.dim() - 1)
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    casts = internals.op_name(node) in {"to", "_to_copy", _NO_VALUE}
    return pointwise or casts or node.target is operator.getitem


def _stored(product: Node) -> Node:
    """Returns the node of a product's weight, behind its transposes.

    Raises:
        ContractError: the weight is computed, or another node reads it.
    """
    node: Node = internals.argument(product, "weight")
    alone = len(node.users) == 1
    while internals.op_name(node) in {"permute", "transpose", "mT"}:
        node = node.all_input_nodes[0]
        alone = alone and len(node.users) == 1
    if node.op != "get_attr" or not alone:
        what = f"the weight of {product.name!r} is computed, or read by another node"
        raise ContractError(_WHERE, what, expected=_OWN, advice=_KEEP)
    return node


def _parameter(owner: nn.Module, stored: Node) -> Tensor:
    parameter: Tensor = operator.attrgetter(str(stored.target))(owner)
    return parameter


def _held(name: str, parameter: Tensor, mesh: DeviceMesh) -> range:
    """Returns the experts of a stack of weights that this process holds."""
    count, processes = parameter.shape[0], mesh.size()
    if isinstance(parameter, DTensor) or count % processes:
        what = f"{name!r} is sharded" if isinstance(parameter, DTensor) else f"{count} experts in {name!r}"
        expected = f"a plain parameter with a multiple of {processes} experts, the number of processes"
        raise ContractError(_WHERE, what, expected=expected, advice="choose another number of processes")
    each = count // processes
    return range(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)


def _shard(owner: nn.Module, stored: Node, mesh: DeviceMesh) -> None:
    """Replaces a parameter by a DTensor of the local experts; users of the parameter read its local part."""
    parameter = _parameter(owner, stored)
    held = _held(str(stored.target), parameter, mesh)
    part = parameter.detach()[held.start : held.stop].clone()  # a view would keep the memory of all experts
    path, _, attribute = str(stored.target).rpartition(".")
    sharded = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False), parameter.requires_grad)
    setattr(owner.get_submodule(path), attribute, sharded)
    with stored.graph.inserting_after(stored):
        local = stored.graph.call_method("to_local", (stored,))
    stored.replace_all_uses_with(local, delete_user_cb=lambda user: user is not local)


def _send(products: list[Node], group_name: str) -> None:
    """Sends rows to the products, and sends back the results that other nodes read."""
    graph, inside = products[0].graph, {*products, *_between(products)}
    rows: dict[Node, Node] = {}
    first = internals.argument(products[0], "x")
    with graph.inserting_before(products[0]):
        route = graph.call_function(routes.route, (first, internals.argument(products[0], "offs"), group_name))
        offs = graph.call_function(getattr, (route, "offs"))
    for product in products:
        rounding = str(internals.argument(product, "scale_rounding"))
        x = internals.argument(product, "x")
        # Products that share x, such as up and gate, share one dispatch.
        if x not in inside and x not in rows:
            with graph.inserting_before(product):
                rows[x] = graph.call_function(routes.dispatch, (x, route, rounding))
        internals.set_argument(product, "x", rows.get(x, x))
        internals.set_argument(product, "offs", offs)
        outside = [user for user in product.users if user not in inside]
        if outside:
            settings: tuple[Any, ...] = GRADIENT_FORMATS[internals.argument(product, "fp8_format")], rounding
            with graph.inserting_after(product):
                result = graph.call_function(routes.combine, (product, route, *settings))
            for user in outside:
                user.replace_input_with(product, result)
