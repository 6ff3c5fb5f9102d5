"""Counts the bytes of every tensor that a model stores, and says which nodes use it: the ONNX half of `report.account`.

Counted are initializers and the tensors in attributes (those of Constant nodes above all) of every graph and local
function. The function bodies of our own nodes are not part of the model: they say what kernels do. A node uses a tensor
at once, or through views and constant computations:

    initializer -> Transpose -> Conv             a use by Conv
    initializer -> DequantizeLinear -> MatMul    a use by DequantizeLinear, which says that it is quantized already
    initializer -> call of a local function      a use by what reads it in there
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import onnx_ir as ir

from mxfp8_graph.naming import unique_name
from mxfp8_graph.onnx_pass.graph import label, proto_of, subgraphs_of
from mxfp8_graph.onnx_model.tensor_data import bit_width
from mxfp8_graph.onnx_pass.graph import STANDARD
from mxfp8_graph.onnx_pass.find import OnnxSite, paths_of
from mxfp8_graph.onnx_pass.ops import OP_KINDS, op_of
from mxfp8_graph.onnx_pass.views import repeat
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.account import Account, StoredTensor, Use
from mxfp8_ops import contract

Key = str
"""What tells a stored tensor from others, see `key_of`."""

_LISTS: Final = {
    "value_float": ("float32", 4),
    "value_floats": ("float32", 4),
    "value_int": ("int64", 8),
    "value_ints": ("int64", 8),
}
"""Attributes of a Constant that are a tensor without being one: dtype, bytes per value."""

_NAMES: Final = {"float": "float32", "double": "float64"}
"""Dtypes that ONNX calls otherwise than NumPy."""

_QUANTIZED_FAMILIES: Final = ("QLinear", "QOrdered")
"""How the names of further ops for quantized weights begin."""

_OPERANDS: Final = 2
"""The first inputs of a matmul; what comes after is added to the product."""

Stored = tuple[str, tuple[int, ...], int]
"""Dtype, shape and bytes of a stored tensor. No class of its own: Python's garbage collector passes over tuples of
constants, and large models have many."""


Inventory = Mapping[Key, Stored]
"""What a model stores, at one moment of its rewrite."""


def key_of(path: str, name: str) -> Key:
    """Returns the key of a tensor of the graph or function at `path`; "" is the main graph."""
    return f"{path}\0{name}" if path else name


def inventory(model: ir.Model) -> Inventory:
    """Returns what the model stores now: in the order of its graphs, each before those in its nodes."""
    found: dict[Key, Stored] = {}
    for graph, path in paths_of(model).items():
        for name, stored in _stored_in(graph):
            found[unique_name(key_of(path, name), found, "#")] = stored  # two nodes may have one label
    return found


def _stored_in(graph: ir.Graph) -> Iterator[tuple[str, Stored]]:
    """Yields what a graph stores, by name: the tensor of a Constant has that of its output."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            yield str(value.name), _sizes(value.const_value)
    for node in graph:
        if not node.attributes or node.domain == contract.DOMAIN:  # most have none, and large models many nodes
            continue
        constant = node.op_type == "Constant" and bool(node.outputs)
        for attribute in node.attributes.values():
            name = str(node.outputs[0].name) if constant else f"{label(node)}.{attribute.name}"
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                yield name, _sizes(attribute.as_tensor())
            elif attribute.type == ir.AttributeType.TENSORS:
                yield from ((name, _sizes(tensor)) for tensor in attribute.as_tensors())
            elif constant and attribute.name in _LISTS:
                dtype, width = _LISTS[attribute.name]
                shape = (len(attribute.value),) if attribute.name.endswith("s") else ()
                yield name, (dtype, shape, width * math.prod(shape))


def _sizes(tensor: ir.TensorProtocol) -> Stored:
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype == ir.DataType.STRING:
        return "string", shape, sum(map(len, proto_of(tensor).string_data))
    return _dtype(tensor.dtype), shape, -(-math.prod(shape) * bit_width(tensor.dtype) // 8)


def account(
    before: Inventory,
    planned: Inventory,
    uses: Mapping[Key, Sequence[Use]],
    after: Inventory,
    made_from: Mapping[str, Key],
) -> Account:
    """Returns where the bytes are.

    Args:
        before: what the model stored when it was opened.
        planned: what it stored when its sites were found: functions inlined, opset converted.
        uses: the uses of each tensor at that time.
        after: what the result stores.
        made_from: tensors that the rewrite added, by name, and what each was made of.
    """
    return Account(functools.partial(_accounted, before, planned, after, uses, made_from))


def _accounted(
    before: Inventory,
    planned: Inventory,
    after: Inventory,
    uses: Mapping[Key, Sequence[Use]],
    made_from: Mapping[str, Key],
) -> Iterator[StoredTensor]:
    """Yields every tensor that the model or the result stores; what was made of one is part of it."""
    made: dict[Key, int] = {}
    parts: set[Key] = set()
    for key, (_, _, size) in after.items():
        source = made_from.get(key.rpartition("\0")[2])
        if source is not None and source in planned and key not in before:
            made[source] = made.get(source, 0) + size
            parts.add(key)
    for key in dict.fromkeys((*before, *planned, *after)):
        if key not in parts:
            dtype, shape, _ = before.get(key) or planned.get(key) or after[key]
            yield StoredTensor(
                name=key.replace("\0", "/"),
                dtype=dtype,
                shape=shape,
                bytes_before=before[key][2] if key in before else 0,
                bytes_kept=after[key][2] if key in after else 0,
                bytes_new=made.get(key, 0),
                uses=tuple(uses.get(key, ())),
            )


@functools.cache
def _dtype(dtype: ir.DataType) -> str:
    name = dtype.name.lower()
    return _NAMES.get(name, name)


class Uses:
    """Finds the uses of each tensor that a model stores, when its sites have been planned."""

    def __init__(self, model: ir.Model, sites: Iterable[OnnxSite], decisions: Iterable[Decision]) -> None:
        self.of: dict[Key, list[Use]] = {}
        """The uses of each tensor."""
        self.paths = paths_of(model)
        self._sites = {site.node: (site, decision) for site, decision in zip(sites, decisions, strict=True)}
        self._made_of: dict[ir.Value, tuple[Key, ...]] = {}
        """The stored tensors that a value was made of, and of nothing else."""
        self._functions = {key: function for key, function in model.functions.items() if function.graph in self.paths}
        self._inside: dict[ir.Function, Sequence[Sequence[Use]]] = {}
        """What reads each input of a local function inside it."""
        self._count = 0
        self._graph(model.graph)
        for function in self._functions.values():
            self._function(function)

    def key(self, value: ir.Value) -> Key:
        """Returns the key of a stored tensor."""
        graph = value.graph
        return key_of("" if graph is None else self.paths[graph], str(value.name))

    def _graph(self, graph: ir.Graph) -> None:
        """Finds the uses in `graph` and below it."""
        self._made_of.update((value, (self.key(value),)) for value in graph.initializers.values())
        self._nodes(graph)
        result = Use(self._next(), "graph output", OP_KINDS.describe(""))
        for value in graph.outputs:
            self._add(self._made_of.get(value, ()), (result,))

    def _function(self, function: ir.Function) -> Sequence[Sequence[Use]]:
        """Returns what reads each input of a local function inside it. None calls itself: the model was validated."""
        if function not in self._inside:
            inputs = {key_of(self.paths[function.graph], f"<{value.name}>"): value for value in function.inputs}
            self._made_of.update((value, (key,)) for key, value in inputs.items())  # stands for what a caller passes
            self._nodes(function, constants=False)
            self._inside[function] = [self.of.pop(key, []) for key in inputs]
        return self._inside[function]

    def _nodes(self, nodes: Iterable[ir.Node], *, constants: bool = True) -> None:
        """Finds the uses by nodes; without `constants`, what comes from outside may be no constants."""
        for node in nodes:
            keys = [() if value is None else self._made_of.get(value, ()) for value in node.inputs]
            if node in self._sites:
                self._by_matmul(*self._sites[node], keys)
            elif any(keys):
                if not self._passes_on(node, keys, constants=constants):
                    for group, uses in zip(keys, self._by_other(node), strict=False):
                        self._add(group, uses)
            elif not keys and node.op_type == "Constant" and node.outputs:
                self._made_of[node.outputs[0]] = (self.key(node.outputs[0]),)
            for inner in subgraphs_of(node):
                self._graph(inner)

    def _by_matmul(self, site: OnnxSite, decision: Decision, keys: Sequence[tuple[Key, ...]]) -> None:
        """Adds the use of the weight, wherever it comes from, and of what else the node reads."""
        number, static, op = self._next(), site.w.static, site.matmul.op
        weight = self.key(static.value) if static else None
        if weight is not None:
            self._add((weight,), (Use(number, op, decision=decision),))
        for position, group in enumerate(keys):
            operand = position < _OPERANDS and not decision.quantize
            for key in group:
                if key != weight:
                    self._add((key,), (Use(number, op, decision=decision if operand else None),))

    def _by_other(self, node: ir.Node) -> Iterator[Sequence[Use]]:
        """Yields the uses of each input of `node`; those of a local function are read inside it."""
        number, op, called = self._next(), node.op_type, self._functions.get(node.op_identifier())
        if called is not None:
            yield from ([use._replace(node=number) for use in inside] for inside in self._function(called))
            return
        quantized = op in OP_KINDS.quantized or op.startswith(_QUANTIZED_FAMILIES) or node.domain == contract.DOMAIN
        use = Use(number, op, OP_KINDS.describe(op), quantized)
        yield from ((use,) for _ in node.inputs)

    def _passes_on(self, node: ir.Node, keys: Sequence[tuple[Key, ...]], *, constants: bool) -> bool:
        """Whether `node` is a view or, if `constants` may be, computes one: its readers then use the stored tensors."""
        if node.op_type in OP_KINDS.quantized or node.domain not in STANDARD:
            return False
        view = op_of(node.domain, node.op_type).view
        passes = view not in (None, repeat) and bool(keys[0])
        computed = (key or value is None for key, value in zip(keys, node.inputs, strict=True))
        if not passes and not (constants and all(computed)):
            return False
        made_of = keys[0] if passes else tuple(dict.fromkeys(key for group in keys for key in group))
        self._made_of.update(dict.fromkeys(node.outputs, made_of))
        return True

    def _add(self, keys: Iterable[Key], uses: Sequence[Use]) -> None:
        for key in keys:
            self.of.setdefault(key, []).extend(uses)

    def _next(self) -> int:
        self._count += 1
        return self._count
