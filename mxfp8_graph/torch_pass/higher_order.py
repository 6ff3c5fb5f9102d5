"""Operands of higher-order ops, and the placeholders of their graphs.

    cond(pred, true, false, operands)
    while_loop(cond, body, carried, additional)
    map_impl(body, mapped, additional)
    scan(body, init, mapped, additional)
    wrap_with_set_grad_enabled(enabled, body, *operands)
    wrap_with_autocast(device, dtype, enabled, cache, body, *operands)

A graph's placeholders are the operands in that order. Only those that are the same in every iteration can be weights,
and only to those can one be added: at the end, in the call and in every graph it holds. A graph that several calls run
would get the operands of all of them, so each call first gets its own copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch.fx import GraphModule, Node

from mxfp8_graph.naming import unique_name
from mxfp8_graph.torch_pass import internals


@dataclass(frozen=True)
class Layout:
    """Positions of a higher-order op's operands among its arguments."""

    invariant: int
    """The list of operands that are the same in every iteration; for a flat layout, where they begin."""
    variant: tuple[int, ...] = ()
    """Lists of operands that change from iteration to iteration; they come first."""
    flat: bool = False
    """Operands are arguments of the call, not items of a list among them."""
    carried: int | None = None
    """The list among `variant` that a graph's first outputs feed in the next iteration."""
    looping: int = 0
    """Index of the graph that computes the results; the others are conditions."""


_LAYOUTS: Final = {
    "cond": Layout(3),
    "while_loop": Layout(3, (2,), carried=2, looping=1),
    "map_impl": Layout(2, (1,)),
    "scan": Layout(3, (1, 2), carried=1),
    "wrap_with_set_grad_enabled": Layout(2, flat=True),
    "wrap_with_autocast": Layout(5, flat=True),
}


def layout_of(call: Node) -> Layout | None:
    """Returns the layout of a higher-order call, or None for an op that is not known."""
    return _LAYOUTS.get(internals.op_name(call))


def graphs(module: GraphModule, call: Node) -> list[tuple[int, str, GraphModule]]:
    """Returns (position among the arguments, name in `module`, graph) of each graph that a call runs."""
    names = [(i, str(a.target)) for i, a in enumerate(call.args) if isinstance(a, Node) and a.op == "get_attr"]
    arguments = [(position, name, getattr(module, name, None)) for position, name in names]
    return [(position, name, graph) for position, name, graph in arguments if isinstance(graph, GraphModule)]


def operands(call: Node) -> list[Any]:
    """Returns the operands in the order of the graphs' placeholders."""
    layout = _layout(call)
    variant: list[Any] = [item for position in layout.variant for item in _list(call, position)]
    return [*variant, *(call.args[layout.invariant :] if layout.flat else _list(call, layout.invariant))]


def variant_count(call: Node) -> int:
    """Returns how many operands, the first ones, change from iteration to iteration."""
    return sum(len(_list(call, position)) for position in _layout(call).variant)


def carried_count(call: Node) -> int:
    """Returns how many outputs of the looping graph are its first inputs in the next iteration."""
    layout = _layout(call)
    return 0 if layout.carried is None else len(_list(call, layout.carried))


def append_operand(call: Node, operand: Node) -> None:
    """Adds an operand at the end."""
    layout = _layout(call)
    if layout.flat:
        call.args = (*call.args, operand)
    else:
        _set_list(call, layout.invariant, [*_list(call, layout.invariant), operand])


def remove_operand(call: Node, index: int) -> None:
    """Removes the operand at `index` of `operands`, which must be the same in every iteration."""
    layout = _layout(call)
    index -= variant_count(call)
    if layout.flat:
        at = layout.invariant + index
        call.args = (*call.args[:at], *call.args[at + 1 :])
    else:
        items = list(_list(call, layout.invariant))
        del items[index]
        _set_list(call, layout.invariant, items)


def unshare(module: GraphModule) -> None:
    """Makes copies of graphs that several higher-order calls in `module` run, at any depth: one graph for each call."""
    taken: set[int] = set()
    for inner in [module, *module.modules()]:
        if isinstance(inner, GraphModule):
            # A call of an op without a known layout keeps its graphs, since nothing is added to them; the others copy
            # theirs.
            calls = [node for node in inner.graph.nodes if internals.is_higher_order(node) and layout_of(node) is None]
            taken.update(id(m) for call in calls for *_, graph in graphs(inner, call) for m in graph.modules())
    _unshare(module, taken)


def _unshare(module: GraphModule, taken: set[int]) -> None:
    for call in [node for node in module.graph.nodes if layout_of(node) is not None]:
        for position, name, graph in graphs(module, call):
            own = internals.clone(graph) if id(graph) in taken else graph
            if own is not graph:
                new = unique_name(name, dict(module.named_children()))
                module.add_module(new, own)
                with module.graph.inserting_before(call):
                    _set(call, position, module.graph.get_attr(new))
            taken.add(id(own))
            _unshare(own, taken)


def _layout(call: Node) -> Layout:
    return _LAYOUTS[internals.op_name(call)]


def _list(call: Node, position: int) -> Any:
    return call.args[position]


def _set_list(call: Node, position: int, items: list[Any]) -> None:
    _set(call, position, tuple(items) if isinstance(_list(call, position), tuple) else items)


def _set(call: Node, position: int, argument: Any) -> None:
    call.args = (*call.args[:position], argument, *call.args[position + 1 :])
