"""What a fusion can see of a graph. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from mxfp8_graph.onnx_model.graph import dtype_of, shape_of
from mxfp8_graph.onnx_model.tensor_data import is_apart
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs, subgraphs
from mxfp8_ops import contract

Dim = int | str | None
"""A size, a name for one that only a run shows, or nothing known."""


class TensorType(NamedTuple):
    """Dtype (onnx.TensorProto.DataType, 0 if unknown) and shape (None if unknown) of a value."""

    dtype: int
    shape: tuple[Dim, ...] | None


def types_of(graphs: Iterable[ir.Graph]) -> dict[str, TensorType]:
    """Returns what is known of every value by its name; a name that stands for two types is left out."""
    found: dict[str, TensorType] = {}
    ambiguous: set[str] = set()
    for graph in graphs:
        # Each once: an outer value stands for one type, however many nodes read it.
        values = dict.fromkeys(v for node in graph for v in (*node.inputs, *node.outputs) if v is not None)
        for value in values:
            known = TensorType(dtype_of(value), shape_of(value))
            if found.setdefault(str(value.name), known) != known:
                ambiguous.add(str(value.name))
    return {name: known for name, known in found.items() if name not in ambiguous}


class GraphView:
    """One graph: who makes and who reads each value, and what is known of it."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        types: Mapping[str, TensorType],
        stored: Mapping[str, onnx.TensorProto],
        *,
        unread: Container[str],
        fresh: Callable[[str], str],
    ) -> None:
        """Looks at one graph.

        Args:
            graph: the graph, as it is now.
            types: what is known of values, by name.
            stored: the constants that are stored here and in the graphs around it, by name.
            unread: names of stored tensors whose data is not at hand.
            fresh: makes a name that nothing in the model has.
        """
        self.fresh = fresh
        """Returns a name like the one it is given that nothing in the model has yet."""
        self.nodes: Sequence[onnx.NodeProto] = list(graph.node)
        """In order, each behind what it reads."""
        self._places = {id(node): place for place, node in enumerate(self.nodes)}
        self._types = types
        self._stored = stored
        self._unread = unread
        self._makers = {output: node for node in self.nodes for output in node.output if output}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._shared = {output.name for output in graph.output}
        self._read_inside: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for _, inner in subgraphs(node):
                for below in iter_graphs(inner):
                    names = {output.name for output in below.output}
                    names.update(name for node_below in below.node for name in node_below.input)
                    self._shared |= names
                    for name in names:
                        self._read_inside.setdefault(name, []).append(node)

    def maker(self, name: str, *ops: str) -> onnx.NodeProto | None:
        """Returns the node of this graph that makes a value; None for inputs, initializers and values from outside.

        With `ops` given, None as well if it is none of these ops of the standard domain.
        """
        node = self._makers.get(name)
        return node if not ops or is_op(node, *ops) else None

    def readers(self, name: str) -> Sequence[onnx.NodeProto]:
        """Returns the nodes of this graph that read a value, a node once for each time it does."""
        return self._readers.get(name, ())

    def place(self, node: onnx.NodeProto) -> int:
        """Returns where a node is in `nodes`."""
        return self._places[id(node)]

    def read_inside(self, name: str) -> Sequence[onnx.NodeProto]:
        """Returns the nodes of this graph in whose subgraphs a value is read."""
        return self._read_inside.get(name, ())

    def is_shared(self, name: str) -> bool:
        """Whether a value is an output of the graph, or read in a subgraph: it has to stay, whoever else reads it."""
        return name in self._shared

    def is_between(self, name: str, *nodes: onnx.NodeProto) -> bool:
        """Whether only `nodes` read a value, so that it may go away with them."""
        inside = {id(node) for node in nodes}
        return not self.is_shared(name) and all(id(reader) in inside for reader in self.readers(name))

    def sole_reader(self, name: str) -> onnx.NodeProto | None:
        """Returns the one node that reads a value, however often, and that nothing but it needs; or None."""
        readers = self.readers(name)
        return readers[0] if readers and self.is_between(name, readers[0]) else None

    def constant(self, name: str) -> npt.NDArray[Any] | None:
        """Returns the value of a small constant; None if it is none, or large: initializers above 4 KiB are."""
        tensor = self._stored.get(name)
        if tensor is None or name in self._unread or is_apart(tensor):
            return None
        return numpy_helper.to_array(tensor)

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a stored constant of any size, perhaps cast; None for any other value."""
        cast = self.maker(name, "Cast")
        tensor = self._stored.get(name if cast is None else cast.input[0])
        return None if tensor is None else tuple(tensor.dims)

    def scalar(self, name: str) -> float | None:
        """Returns the value of a constant that is one number, of whatever rank; None if it is none."""
        value = self.constant(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 and value.dtype != object else None

    def type_of(self, name: str) -> TensorType:
        """Returns what is known of a value, those that replaced matmuls brought included."""
        known = self._types.get(name)
        if known is not None and known.dtype and known.shape is not None:
            return known
        maker, stored = self.maker(name), self._stored.get(name)
        if stored is not None:
            return TensorType(stored.data_type, tuple(stored.dims))
        made = None if maker is None else self._made(maker)
        if made is None or known is None:
            return made or known or TensorType(0, None)
        return TensorType(known.dtype or made.dtype, made.shape if known.shape is None else known.shape)

    def _made(self, node: onnx.NodeProto) -> TensorType | None:
        """Returns the type of what a node makes that came with a replaced matmul; None for any other node."""
        if node.op_type == "Cast" and node.domain in STANDARD:
            return TensorType(attribute(node, "to", 0), self.type_of(node.input[0]).shape)
        op = contract.OPS.get(node.op_type) if node.domain == contract.DOMAIN else None
        if op is None or not op.is_gemm or op.quantizes or op.at("experts") is not None:
            return None
        left, right = (self.type_of(node.input[at or 0]).shape for at in (0, op.at("B")))
        shape = (*left[:-1], right[-2]) if left and right and len(right) == 2 else None
        return TensorType(attribute(node, "output_dtype", contract.FLOAT), shape)


def is_op(node: onnx.NodeProto | None, *ops: str) -> TypeGuard[onnx.NodeProto]:
    """Whether there is a node, and it is one of these ops of the standard domain."""
    return node is not None and node.domain in STANDARD and node.op_type in ops


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Returns an attribute of a node, text as str, or `default` if it is not given."""
    found = next((entry for entry in node.attribute if entry.name == name), None)
    value = default if found is None else helper.get_attribute_value(found)
    return value.decode() if isinstance(value, bytes) else value
