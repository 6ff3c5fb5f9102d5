"""Adds nodes before one node of a graph, each with the fake value that it computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.ops import Operand
from mxfp8_graph.torch_pass.program import Program

_ATEN: Final = torch.ops.aten
_INHERITED: Final = ("nn_module_stack", "stack_trace", "custom")
"""Metadata that a new node copies from the node that it stands before."""

Shared = dict[tuple[object, ...], Node]
"""Added nodes, by a key of the value that each computes."""


class Builder:
    """Adds nodes before `anchor`, and reuses nodes that earlier builders with the same `shared` added."""

    def __init__(self, program: Program, anchor: Node, shared: Shared | None = None) -> None:
        self._program = program
        self._anchor = anchor
        self._shared: Shared = {} if shared is None else shared
        self.new: list[Node] = []

    def add(self, name: str, target: Any, *arguments: Any, **keywords: Any) -> Node:
        """Returns a new node that calls `target`. It is called `name`, with a number if the graph has that name."""
        graph = self._anchor.graph
        with graph.inserting_before(self._anchor):
            node = graph.create_node("call_function", target, arguments, keywords, name=name)
        for key in _INHERITED:
            if key in self._anchor.meta:
                node.meta[key] = self._anchor.meta[key]
        node.meta["val"] = self.evaluate(target, arguments, keywords)
        self.new.append(node)
        return node

    def evaluate(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Returns the fake value of a call."""
        # Ops run on fake tensors, so that a new node has the shape, dtype and symbolic sizes that torch.export records.
        values: Any = map_arg((arguments, keywords), lambda node: node.meta["val"])
        with self._program.fake_mode, torch.no_grad(), internals.enable_python_dispatcher():
            return target(*values[0], **values[1])

    def size(self, node: Node, axis: int) -> Any:
        """Returns the size of `node` along `axis`: a number, or a node that computes it."""
        size = node.meta["val"].shape[axis]
        # A symbolic size needs a node: a number would fix a dimension that may vary.
        if isinstance(size, int):
            return size
        return self._once(("size", node, axis), lambda: self.add("sym_size", _ATEN.sym_size.int, node, axis))

    def k_last(self, operand: Operand) -> Node:
        """Returns the operand's node, permuted so that K is last."""
        return operand.node if operand.perm is None else self.permute(operand.node, operand.perm)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Returns `node` in a dtype."""
        same = node.meta["val"].dtype == dtype
        return node if same else self.add(f"{node.name}_cast", _ATEN._to_copy.default, node, dtype=dtype)

    def permute(self, node: Node, perm: tuple[int, ...]) -> Node:
        """Returns `node` with its axes permuted."""
        name = f"{node.name}_k_last"
        return self._once(("permute", node, perm), lambda: self.add(name, _ATEN.permute.default, node, list(perm)))

    def pick(self, node: Node, gather: Node) -> Node:
        """Returns a node that picks entries of `node` by the indices of `gather`.

        It calls index_select, which copies whole matrices in a tenth of the time of `index`.
        """

        def select() -> Node:
            indices = self._indices(gather, int(node.meta["val"].shape[0]))
            return self.add(f"{node.name}_chosen", _ATEN.index_select.default, node, 0, indices)

        return self._once(("pick", node, gather), select)

    def quantize(self, node: Node, element_format: str, scale_rounding: str, epoch: int) -> list[Node]:
        """Returns the nodes of the activation's elements and scales.

        `epoch` is the number of in-place ops before the matmul: each of them may change the activation.
        """
        name, op = f"{node.name}_mxfp8", torch.ops.mxfp8.quantize.default
        settings = internals.unusual(op, {"element_format": element_format, "scale_rounding": scale_rounding})
        # One quantize for all matmuls that read the same activation in the same format, such as Q, K and V projections.
        key = ("quantize", node, element_format, scale_rounding, epoch)
        both = self._once(key, lambda: self.add(name, op, node, **settings))
        elements = self._once(("elements", both), lambda: self.add(f"{name}_elements", operator.getitem, both, 0))
        scales = self._once(("scales", both), lambda: self.add(f"{name}_scales", operator.getitem, both, 1))
        return [elements, scales]

    def dequantize(self, elements: Node, scales: Node, element_format: str, dtype: torch.dtype) -> Node:
        """Returns the node of the values of a packed weight."""
        op, settings = torch.ops.mxfp8.dequantize.default, {"element_format": element_format}
        settings = internals.unusual(op, {**settings, "dtype": None if dtype == torch.float32 else dtype})
        make = partial(self.add, f"{elements.name}_values", op, elements, scales, **settings)
        return self._once(("dequantize", elements, element_format, dtype), make)

    def _once(self, key: tuple[object, ...], make: Callable[[], Node]) -> Node:
        """Returns the shared node of `key`, which `make` adds the first time."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _indices(self, gather: Node, size: int) -> Any:
        """Returns the indices of `gather`, int [S], without negative ones, which index_select refuses."""
        # A `gather` that is an index_select has no negative indices.
        if internals.op_name(gather) != "index":
            return internals.argument(gather, "index")
        (ids, *_), name = internals.argument(gather, "indices"), gather.name

        def from_start() -> Node:
            from_end = self.add(f"{name}_from_end", _ATEN.add.Tensor, ids, size)
            negative = self.add(f"{name}_negative", _ATEN.lt.Scalar, ids, 0)
            return self.add(f"{name}_ids", _ATEN.where.self, negative, from_end, ids)

        return self._once(("indices", gather), from_start)
