"""Counts the bytes of every tensor that a model stores, and says which nodes use it: the ONNX half of `report.account`.

Counted are initializers and the tensors in attributes (those of Constant nodes above all) of every graph and local
function. The function bodies of our own nodes are not part of the model: they say what kernels do.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx
from onnx import AttributeProto, TensorProto

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import byte_length
from mxfp8_graph.onnx_model.walk import STANDARD, FunctionKey, called_function, function_key, node_label, subgraphs
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.static_operands import QUANTIZED, VIEW_OPS
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.account import Account, OpKinds, StoredTensor, Use
from mxfp8_ops import contract

OP_KINDS: Final = OpKinds(
    lookups=frozenset({"Gather", "GatherND", "GatherElements", "EmbedLayerNormalization"}),
    convolutions=frozenset({"Conv", "ConvTranspose", "DeformConv", "FusedConv", "NhwcConv", "NhwcFusedConv"}),
    recurrent=frozenset({"LSTM", "GRU", "RNN", "AttnLSTM"}),
    quantized=QUANTIZED
    | {
        *("QuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat", "MatMulInteger16", "DynamicQuantizeMatMul"),
        *("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized", "ConvInteger", "DynamicQuantizeLSTM"),
        *("QAttention", "QGemm", "QMoE", "QEmbedLayerNormalization", "DequantizeBFP"),
    },
)
_QUANTIZED_FAMILIES: Final = ("QLinear", "QOrdered")
"""How the names of further such ops begin."""

Key = tuple[str, str]
"""What tells a stored tensor from others: path of the graph or function that holds it, name."""

Held = MutableMapping[str, tuple[Key, ...]]
"""Name of a value -> the stored tensors that it was made of, and of nothing else."""

Planned = tuple[OnnxSite, Decision]

_OPERANDS: Final = 2
"""The first inputs of a matmul; what comes after is added to the product."""

_LISTS: Final = {"value_float": 4, "value_floats": 4, "value_int": 8, "value_ints": 8}
"""Attributes of a Constant that are a tensor without being one, and bytes per value."""


@dataclass(frozen=True)
class Stored:
    """Size and type of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    byte_size: int


@dataclass(frozen=True)
class Inventory:
    """What a model stores, at one moment of its rewrite."""

    tensors: Mapping[Key, Stored]
    graphs: Sequence[tuple[str, onnx.GraphProto]]
    """Every graph with its path."""
    functions: Sequence[tuple[str, onnx.FunctionProto]]
    """Every local function, but for our own nodes' bodies, with its path."""


def inventory(opened: OpenedModel) -> Inventory:
    """Returns what the model stores now."""
    tensors: dict[Key, Stored] = {}
    paths: set[str] = set()
    main = opened.proto.graph
    graphs = [("", main), *_graphs_below(main.node, "", paths)]
    functions = []
    for function in opened.proto.functions:
        if function.domain != contract.DOMAIN:
            path = take_name(f"{function.domain}::{function.name}", paths, "#")
            functions.append((path, function))
            _add_nodes(tensors, path, function.node)
            graphs += _graphs_below(function.node, path, paths)
    for path, graph in graphs:
        _add_graph(tensors, path, graph, opened.tensors if graph is main else {})
    return Inventory(tensors, graphs, functions)


def uses(
    opened: OpenedModel, now: Inventory, sites: Iterable[OnnxSite], decisions: Iterable[Decision]
) -> dict[Key, list[Use]]:
    """Returns the nodes that read each stored tensor, through views and constant computations; `now`: its inventory."""
    finder = _Uses(now, {(id(s.scope.proto), s.index): (s, d) for s, d in zip(sites, decisions, strict=True)})
    finder.of_graph(opened.proto.graph, {})
    finder.of_functions()
    return finder.found


def account(
    before: Inventory,
    planned: Inventory,
    found: Mapping[Key, Sequence[Use]],
    after: Inventory,
    made_from: Mapping[str, tuple[int, str]],
) -> Account:
    """Returns where the bytes are.

    Args:
        before: what the model stored when it was opened.
        planned: what it stored when its sites were found: functions inlined, opset converted.
        found: see `uses`, at that time.
        after: what the result stores.
        made_from: tensors that the rewrite added, and what each was made of: id of the graph that held it, name.
    """
    paths = {id(graph): path for path, graph in planned.graphs}
    made: dict[Key, int] = {}
    parts: set[Key] = set()
    for key, stored in after.tensors.items():
        graph, name = made_from.get(key[1], (0, ""))
        source = (paths.get(graph, ""), name)
        if key not in before.tensors and source in planned.tensors:
            made[source] = made.get(source, 0) + stored.byte_size
            parts.add(key)
    tensors = []
    for key in dict.fromkeys((*before.tensors, *planned.tensors, *after.tensors)):
        if key in parts:
            continue
        known = before.tensors.get(key) or planned.tensors.get(key) or after.tensors[key]
        tensors.append(
            StoredTensor(
                name="/".join(filter(None, key)),
                dtype=known.dtype,
                shape=known.shape,
                bytes_before=before.tensors[key].byte_size if key in before.tensors else 0,
                bytes_kept=after.tensors[key].byte_size if key in after.tensors else 0,
                bytes_new=made.get(key, 0),
                uses=tuple(found.get(key, ())),
            )
        )
    return Account(tuple(tensors))


class _Uses:
    """Follows stored tensors to the nodes that read them."""

    def __init__(self, now: Inventory, sites: Mapping[tuple[int, int], Planned]) -> None:
        """`sites`: by id of the graph and index of the node."""
        self.found: dict[Key, list[Use]] = {}
        self._sites = sites
        self._paths = {id(graph): path for path, graph in now.graphs}
        self._functions = {function_key(function): (path, function) for path, function in now.functions}
        self._read_by: dict[FunctionKey, Mapping[str, Sequence[Use]]] = {}
        self._count = 0

    def of_graph(self, graph: onnx.GraphProto, outer: Mapping[str, tuple[Key, ...]]) -> None:
        """Finds the uses in `graph` and below it; `outer`: what values of the graphs around it were made of."""
        path = self._paths[id(graph)]
        names = [*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer)]
        own: dict[str, tuple[Key, ...]] = {name: ((path, name),) for name in names}
        held: Held = ChainMap(own, dict(outer)) if outer else own
        for index, node in enumerate(graph.node):
            self._of_node(path, node, held, self._sites.get((id(graph), index)))
        self._count += 1
        result = Use(node=self._count, op="graph output", what=OP_KINDS.describe(""))
        for value in graph.output:
            for key in held.get(value.name, ()):
                self.found.setdefault(key, []).append(result)

    def of_functions(self) -> None:
        """Finds the uses in local functions that nothing calls, or not with a stored tensor."""
        for key in self._functions:
            self._of_function(key)

    def _of_node(self, path: str, node: onnx.NodeProto, held: Held, planned: Planned | None) -> None:
        if not node.input and node.op_type == "Constant" and node.output:
            held[node.output[0]] = ((path, node.output[0]),)
            return
        keys = [held.get(name, ()) for name in node.input]
        if planned or (any(keys) and not _passes_on(node, keys, held)):
            self._count += 1
            found = self._of_matmul(*planned, keys) if planned else self._of_other(node, keys)
            for key, use in found:
                self.found.setdefault(key, []).append(use)
        if node.attribute:
            for _, inner in subgraphs(node):
                self.of_graph(inner, held)

    def _of_matmul(
        self, site: OnnxSite, decision: Decision, keys: Sequence[tuple[Key, ...]]
    ) -> Iterator[tuple[Key, Use]]:
        static, op = site.w.static, site.matmul.op
        weight = (self._paths[id(static.owner)], static.name) if static else None
        if weight is not None:
            yield weight, Use(node=self._count, op=op, decision=decision)
        for position, group in enumerate(keys):
            kept = position < _OPERANDS and not decision.quantize
            for key in group:
                if key != weight:
                    yield key, Use(node=self._count, op=op, decision=decision if kept else None)

    def _of_other(self, node: onnx.NodeProto, keys: Sequence[tuple[Key, ...]]) -> Iterator[tuple[Key, Use]]:
        """Yields what reads the inputs of `node`; those of a local function are read inside it."""
        op, function = node.op_type, called_function(node)
        quantized = op in OP_KINDS.quantized or op.startswith(_QUANTIZED_FAMILIES) or node.domain == contract.DOMAIN
        use = Use(node=self._count, op=op, what=OP_KINDS.describe(op), quantized=quantized)
        inside = self._of_function(function) if function in self._functions else None
        formals = self._functions[function][1].input if inside is not None else ()
        for position, group in enumerate(keys):
            reading = [use]
            if inside is not None:
                within = inside.get(formals[position], ()) if position < len(formals) else ()
                reading = [replace(other, node=self._count) for other in within]
            for key in group:
                yield from ((key, one) for one in reading)

    def _of_function(self, key: FunctionKey) -> Mapping[str, Sequence[Use]]:
        """Returns what reads each input of a local function inside it; none calls itself, the model was validated."""
        if key not in self._read_by:
            path, function = self._functions[key]
            held: Held = {name: ((path, f"<{name}>"),) for name in function.input}  # stands for what a caller gives
            for node in function.node:
                self._of_node(path, node, held, None)
            self._read_by[key] = {name: self.found.pop((path, f"<{name}>"), []) for name in function.input}
        return self._read_by[key]


def _passes_on(node: onnx.NodeProto, keys: Sequence[tuple[Key, ...]], held: Held) -> bool:
    """Whether `node` is a view or computes constants: what reads its outputs then reads the stored tensors."""
    if node.op_type in OP_KINDS.quantized or node.domain not in STANDARD:
        return False
    view = node.op_type in VIEW_OPS
    constant = all(key or not name for key, name in zip(keys, node.input, strict=True))
    if not (constant or (view and keys[0])):
        return False
    made_of = keys[0] if view else tuple(dict.fromkeys(key for group in keys for key in group))
    for output in node.output:
        held[output] = made_of
    return True


def _graphs_below(nodes: Iterable[onnx.NodeProto], path: str, paths: set[str]) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yields every graph below `nodes`, which are at `path`, with a path of its own."""
    for node in nodes:
        if node.attribute:  # most have none, and large models many nodes
            for name, inner in subgraphs(node):
                below = take_name("/".join(filter(None, (path, node_label(node), name))), paths, "#")
                yield below, inner
                yield from _graphs_below(inner.node, below, paths)


def _add_graph(
    tensors: dict[Key, Stored], path: str, graph: onnx.GraphProto, elsewhere: Mapping[str, TensorProto]
) -> None:
    """Adds what one graph stores; `elsewhere` has the data that the skeleton left out."""
    for tensor in graph.initializer:
        _add(tensors, (path, tensor.name), elsewhere.get(tensor.name, tensor))
    for sparse in graph.sparse_initializer:
        _add(tensors, (path, sparse.values.name), sparse.values)
        _add(tensors, (path, f"{sparse.values.name}.indices"), sparse.indices)
    _add_nodes(tensors, path, graph.node)


def _add_nodes(tensors: dict[Key, Stored], path: str, nodes: Iterable[onnx.NodeProto]) -> None:
    """Adds the tensors that nodes have as attributes: a Constant's under the name of its output."""
    for node in nodes:
        for attribute in node.attribute:
            constant = node.op_type == "Constant" and bool(node.output)
            name = node.output[0] if constant else f"{node_label(node)}.{attribute.name}"
            if attribute.type == AttributeProto.TENSOR:
                _add(tensors, (path, name), attribute.t)
            elif attribute.type == AttributeProto.TENSORS:
                for tensor in attribute.tensors:
                    _add(tensors, (path, name), tensor)
            elif constant and (width := _LISTS.get(attribute.name)):
                count = len(attribute.floats) + len(attribute.ints)
                shape = (count,) if attribute.name.endswith("s") else ()
                dtype = "int64" if width == _LISTS["value_int"] else "float32"
                _put(tensors, (path, name), Stored(dtype, shape, width * math.prod(shape)))


def _add(tensors: dict[Key, Stored], key: Key, tensor: TensorProto) -> None:
    text = tensor.data_type == TensorProto.STRING
    size = sum(map(len, tensor.string_data)) if text else byte_length(tensor)
    name = TensorProto.DataType.Name(tensor.data_type).lower()
    _put(tensors, key, Stored(_NAMES.get(name, name), tuple(tensor.dims), size))


_NAMES: Final = {"float": "float32", "double": "float64"}
"""Dtypes that ONNX calls otherwise than NumPy."""


def _put(tensors: dict[Key, Stored], key: Key, stored: Stored) -> None:
    path, name = key
    number = 1
    while key in tensors:  # two nodes with one label
        number += 1
        key = (path, f"{name}#{number}")
    tensors[key] = stored
