"""Which nodes use each tensor that a model stores: at once, or through views and constant computations.

initializer -> Transpose -> Conv             a use by Conv
initializer -> DequantizeLinear -> MatMul    a use by DequantizeLinear, which says that it is quantized already
initializer -> call of a local function      a use by what reads it in there
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Final

import onnx

from mxfp8_graph.onnx_model.walk import STANDARD, FunctionKey, called_function, function_key, subgraphs
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.static_operands import QUANTIZED, VIEW_OPS
from mxfp8_graph.onnx_pass.stored_bytes import Inventory, Key, key_of
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.account import OpKinds, Use
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
"""How the names of further ops for quantized weights begin."""

_VIEWS: Final = frozenset(VIEW_OPS)

_OPERANDS: Final = 2
"""The first inputs of a matmul; what comes after is added to the product."""

Held = MutableMapping[str, tuple[Key, ...]]
"""Name of a value -> the stored tensors that it was made of, and of nothing else."""


def find_uses(
    graph: onnx.GraphProto, now: Inventory, sites: Iterable[OnnxSite], decisions: Iterable[Decision]
) -> dict[Key, list[Use]]:
    """Returns the uses of each tensor that a model stores: `now`, in its main graph `graph` and elsewhere."""
    by_graph: dict[int, dict[int, tuple[OnnxSite, Decision]]] = {}
    for site, decision in zip(sites, decisions, strict=True):
        by_graph.setdefault(id(site.scope.proto), {})[site.index] = site, decision
    finder = _Finder(now, by_graph)
    finder.graph(graph, {})
    for key in finder.functions:
        finder.function(key)
    return finder.found


class _Finder:
    """Finds the uses, one graph after another."""

    def __init__(self, now: Inventory, sites: Mapping[int, Mapping[int, tuple[OnnxSite, Decision]]]) -> None:
        """`sites`: by id of the graph and, in each, by index of the node."""
        self.found: dict[Key, list[Use]] = {}
        self.functions = {function_key(function): (path, function) for path, function in now.functions}
        self._sites = sites
        self._paths = now.paths
        self._read_by: dict[FunctionKey, Mapping[str, Sequence[Use]]] = {}
        self._count = 0

    def graph(self, graph: onnx.GraphProto, outer: Held) -> None:
        """Finds the uses in `graph` and below it; `outer`: what values of the graphs around it were made of."""
        path = self._paths[id(graph)]
        own: Held = {tensor.name: (key_of(path, tensor.name),) for tensor in graph.initializer}
        own.update({sparse.values.name: (key_of(path, sparse.values.name),) for sparse in graph.sparse_initializer})
        held: Held = ChainMap(own, dict(outer)) if outer else own
        self._nodes(path, graph.node, held, self._sites.get(id(graph), {}))
        result = Use(self._next(), "graph output", OP_KINDS.describe(""))
        for value in graph.output:
            self._add(held.get(value.name, ()), (result,))

    def function(self, key: FunctionKey) -> Mapping[str, Sequence[Use]]:
        """Returns what reads each input of a local function inside it. None calls itself: the model was validated."""
        if key not in self._read_by:
            path, function = self.functions[key]
            given = {name: key_of(path, f"<{name}>") for name in function.input}  # stands for what a caller gives
            held: Held = {name: (key,) for name, key in given.items()}
            self._nodes(path, function.node, held, {}, constants=False)
            self._read_by[key] = {name: self.found.pop(key, []) for name, key in given.items()}
        return self._read_by[key]

    def _nodes(
        self,
        path: str,
        nodes: Iterable[onnx.NodeProto],
        held: Held,
        sites: Mapping[int, tuple[OnnxSite, Decision]],
        *,
        constants: bool = True,
    ) -> None:
        """Finds the uses by nodes; without `constants`, what is `held` from the start may be no constants."""
        for index, node in enumerate(nodes):
            keys = [held.get(name, ()) for name in node.input]
            if index in sites:
                self._by_matmul(*sites[index], keys)
            elif any(keys):
                if not _passes_on(node, keys, held, constants=constants):
                    for group, uses in zip(keys, self._by_other(node), strict=False):
                        self._add(group, uses)
            elif not keys and node.op_type == "Constant" and node.output:
                held[node.output[0]] = (key_of(path, node.output[0]),)
            if node.attribute:  # most have none, and large models many nodes
                for _, inner in subgraphs(node):
                    self.graph(inner, held)

    def _by_matmul(self, site: OnnxSite, decision: Decision, keys: Sequence[tuple[Key, ...]]) -> None:
        """Adds the use of the weight, wherever it comes from, and of what else the node reads."""
        number, static, op = self._next(), site.w.static, site.matmul.op
        weight = key_of(self._paths[id(static.owner)], static.name) if static else None
        if weight is not None:
            self._add((weight,), (Use(number, op, decision=decision),))
        for position, group in enumerate(keys):
            operand = position < _OPERANDS and not decision.quantize
            for key in group:
                if key != weight:
                    self._add((key,), (Use(number, op, decision=decision if operand else None),))

    def _by_other(self, node: onnx.NodeProto) -> Iterator[Sequence[Use]]:
        """Yields the uses of each input of `node`; those of a local function are read inside it."""
        number, op, called = self._next(), node.op_type, called_function(node)
        if called in self.functions:
            inside = self.function(called)
            for formal in self.functions[called][1].input:
                yield [use._replace(node=number) for use in inside[formal]]
            return
        quantized = op in OP_KINDS.quantized or op.startswith(_QUANTIZED_FAMILIES) or node.domain == contract.DOMAIN
        use = Use(number, op, OP_KINDS.describe(op), quantized)
        yield from ((use,) for _ in node.input)

    def _add(self, keys: Iterable[Key], uses: Sequence[Use]) -> None:
        for key in keys:
            self.found.setdefault(key, []).extend(uses)

    def _next(self) -> int:
        self._count += 1
        return self._count


def _passes_on(node: onnx.NodeProto, keys: Sequence[tuple[Key, ...]], held: Held, *, constants: bool) -> bool:
    """Whether `node` is a view or, if `constants` may be, computes one: then its readers read the stored tensors."""
    if node.op_type in OP_KINDS.quantized or node.domain not in STANDARD:
        return False
    view = node.op_type in _VIEWS and bool(keys[0])
    if not view and not (constants and all(key or not name for key, name in zip(keys, node.input, strict=True))):
        return False
    made_of = keys[0] if view else tuple(dict.fromkeys(key for group in keys for key in group))
    for output in node.output:
        held[output] = made_of
    return True
