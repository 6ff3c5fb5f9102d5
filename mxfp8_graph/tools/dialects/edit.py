"""A model whose nodes are replaced one by one, and what the dialects ask of a node: stored tensors, dtypes, users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass import prepare, record
from mxfp8_graph.onnx_pass.fuse.replacement import REPLACES, Replacement, value_replacing
from mxfp8_graph.onnx_pass.fuse.run import apply
from mxfp8_graph.onnx_pass.graph import (
    INFERRED,
    attribute,
    dtype_of,
    fresh_names,
    label,
    name_of,
    shape_of,
    stored,
)
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, Option

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
Nodes = list[ir.Node]
Advice = str | Sequence[str | Option]
Step = Callable[["Edit", ir.Node], Nodes | None]
"""Returns the nodes that take the place of one, or of what follows it; None if it stays."""

AGAIN: Final = "export the model again"
OTHER: Final = "start from the model that is not quantized"


class Edit:
    """A model while its nodes are replaced."""

    def __init__(self, model: ir.Model, notes: list[str], allow: frozenset[str], accuracy_level: int) -> None:
        """`notes`: of the report, which `note` adds to; `allow` and `accuracy_level`: of `convert`."""
        self.model, self.notes, self.allow, self.accuracy_level = model, notes, allow, accuracy_level
        self.fresh: Final = fresh_names(self.model)
        """Makes a name like the one it takes, which nothing in the model has."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """How many weights and activations of each dialect were read: (dialect, "weights" or "activations")."""
        self.losses: Counter[str] = Counter()
        """What was allowed to be lost, and how often."""
        self.float_dtypes = _float_dtypes(self.model)
        """Dtypes of values that the model takes, gives, stores or casts to, before any was replaced."""
        self._before: Nodes = []
        """Nodes that go in front of the replacement that is being made."""
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def infer(self) -> None:
        """Finds dtypes and shapes of values, as far as onnx can with the function bodies of our nodes."""
        self.model.opset_imports.setdefault(contract.DOMAIN, contract.VERSION)
        record.add_bodies(self.model)
        prepare.infer(self.model, [])
        record.remove_bodies(self.model)

    def each(self, step: Step) -> bool:
        """Replaces nodes of every graph as `step` says, and drops what nothing uses any more; whether any was."""
        self._shared.clear()

        def replacement(node: ir.Node) -> Replacement | None:
            nodes = step(self, node)
            before, self._before = self._before, []
            if nodes is None:
                return None
            replaced = nodes[-1].outputs[0].meta.get(REPLACES)
            gone = node if replaced is None else replaced.producer()
            return Replacement(kind="", node=nodes[-1], gone=(gone,), before=(*before, *nodes[:-1]))

        return bool(apply(self.model, [replacement], lambda _: True))

    def make(self, op: str, *inputs: ir.Value, wanted: str, domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node in front of the replacement that is being made; returns its result, called `wanted` or alike."""
        value = ir.Value(name=self.fresh(wanted))
        self._before.append(ir.node(op, inputs, attributes, domain=domain, outputs=[value], name=value.name))
        return value

    def shared(self, graph: ir.Graph | None, *key: object, make: Callable[[], ir.Value]) -> ir.Value:
        """Returns what `make()` returned for this key in this graph, which is called at first use in a step."""
        whole = (graph, *key)
        if whole not in self._shared:
            self._shared[whole] = make()
        return self._shared[whole]

    def cast(self, node: ir.Node, value: ir.Value, dtype: int, wanted: str) -> ir.Value:
        """Returns a value in another dtype for a node; one Cast for all of its graph."""
        make = lambda: self.make("Cast", value, wanted=f"{value.name}_{wanted}", to=dtype)  # noqa: E731
        return self.shared(node.graph, "cast", value, dtype, make=make)

    def ending(
        self, last: ir.Node, wanted: str, to: ir.Value | int | None, make: Callable[[list[ir.Value]], ir.Node]
    ) -> Nodes:
        """Returns the node that `make` returns for its outputs, in place of `last`, and a Cast behind it.

        Args:
            last: whose outputs are replaced.
            wanted: name of what is cast.
            to: the dtype, or a value that has it; None for no Cast.
            make: takes outputs.
        """
        outputs = heirs(last)
        if to is None:
            return [make(outputs)]
        y = ir.Value(name=self.fresh(wanted))
        op, inputs, settings = ("CastLike", [y, to], {}) if isinstance(to, ir.Value) else ("Cast", [y], {"to": to})
        return [make([y]), ir.node(op, inputs, settings, outputs=outputs, name=y.name)]

    def store(self, graph: ir.Graph | None, wanted: str, dtype: int, array: Array) -> ir.Value:
        """Returns a new initializer of a graph."""
        graph = graph or self.model.graph
        element, name = ir.DataType(dtype), self.fresh(wanted)
        tensor = ir.Tensor(np.ascontiguousarray(array).view(element.numpy()), dtype=element, name=name)
        value = ir.Value(name=name, const_value=tensor)
        graph.register_initializer(value)
        return value

    def beside(self, value: ir.Value, wanted: str, dtype: int, make: Callable[[], Array], key: object = "") -> ir.Value:
        """Returns an initializer beside a stored value that it says otherwise: one in a step for this dtype and key."""
        store = lambda: self.store(value.graph, wanted, dtype, make())  # noqa: E731
        return self.shared(value.graph, value, dtype, key, make=store)

    def codes(self, tensor: ir.TensorProtocol) -> Codes:
        """Returns the values of a tensor of bytes, in its shape; ContractError if its values take another size."""
        if tensor.dtype.bitwidth != 8:
            where, what = f"{name_of(self.model)}: tensor {tensor.name!r}", f"is {tensor.dtype.name.lower()}"
            raise ContractError(where, what, expected="elements or scales of 8 bits", advice=AGAIN)
        return np.ascontiguousarray(tensor.numpy()).view(np.uint8).reshape(dims(tensor))

    def note(self, text: str) -> None:
        """Tells something in the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def require(self, holds: object, node: ir.Node, what: str, expected: str, advice: Advice = AGAIN) -> None:
        """Raises the error for a node that cannot be read or written, unless something holds."""
        if not holds:
            raise self.refuse(node, what, expected, advice)

    def refuse(self, node: ir.Node, what: str, expected: str, advice: Advice = AGAIN) -> ContractError:
        """Returns the error for a node that cannot be read or written."""
        where = f"{name_of(self.model)}: node {label(node)!r} ({node.op_type})"
        return ContractError(where, what, expected=expected, advice=advice)


def _float_dtypes(model: ir.Model) -> set[int]:
    values = [
        value for graph in model.graphs() for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())
    ]
    nodes = list(model.graph.all_nodes())
    values += [value for node in nodes if node.op_type == "Constant" for value in node.outputs]
    stored_dtypes = {int(tensor.dtype) for value in values if (tensor := stored(value)) is not None}
    cast = {attribute(node, "to", 0) for node in nodes if node.op_type == "Cast"}
    return (stored_dtypes | cast | {*map(dtype_of, values)}) & {*contract.VALUES}


def operands(node: ir.Node, start: int = 0, count: int = 2) -> list[ir.Value]:
    """Returns inputs that the op of a node requires, two if no count says otherwise."""
    return [value for value in node.inputs[start : start + count] if value is not None]


def operand(node: ir.Node, at: int) -> ir.Value | None:
    """Returns an input, or None if it is absent."""
    return node.inputs[at] if at < len(node.inputs) else None


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns what is stored for a value, or None if it is computed, absent or an input."""
    return None if value is None else stored(value)


def dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Returns the shape of a stored tensor."""
    return tuple(tensor.shape.numpy())


def rank_of(value: ir.Value) -> int | None:
    """Returns the number of dimensions of a value; None if it is unknown."""
    shape = shape_of(value)
    return None if shape is None else len(shape)


def heirs(node: ir.Node) -> list[ir.Value]:
    """Returns new values that take the place of those of a node; of unknown dtype, but for outputs of a graph."""
    values = [value_replacing(output) for output in node.outputs]
    for value, output in zip(values, node.outputs, strict=True):
        value.meta.pop(INFERRED, None)  # annotations of quantization, which onnx_ir keeps there, stay
        if not output.is_graph_output():
            value.type = value.shape = value.doc_string = None
            value.metadata_props.clear()
    return values


def settings_of(node: ir.Node) -> dict[str, Any]:
    """Returns every attribute of a node of the contract, with defaults for those that it leaves out."""
    return {**contract.OPS[node.op_type].attributes, **{entry.name: entry.value for entry in node.attributes.values()}}
