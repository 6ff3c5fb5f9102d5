"""A model whose nodes are replaced one by one, helpers that read a node, and the checks before a model is read.

onnx's checker does not know the ops of other dialects; the standard ones were checked when the model was opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass import prepare, record
from mxfp8_graph.onnx_pass.dialect_ops import dialect_of, is_blocked
from mxfp8_graph.onnx_pass.dialects import TRT
from mxfp8_graph.onnx_pass.graph import (
    INFERRED,
    MICROSOFT,
    STANDARD,
    attribute,
    dtype_of,
    fresh_names,
    is_op,
    label,
    name_of,
    shape_of,
    stored,
)
from mxfp8_graph.onnx_pass.replacement import REPLACES, NewNodes, Replacement, apply, value_replacing
from mxfp8_graph.tools.dialects.rows import OPS
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, Option

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
Nodes = list[ir.Node]
Advice = str | Sequence[str | Option]
Step = Callable[["Edit", ir.Node], Nodes | None]
"""Returns the nodes that replace a node, or a node after it; None if nothing is replaced."""

MARK: Final = "mxfp8_graph.body_of."
"""Start of the metadata key of a mark; the op follows."""

AGAIN: Final = "export the model again"
OTHER: Final = "start from the model that is not quantized"
NOT_MX: Final = f"convert reads MXFP8 only; {OTHER}"

_QUANTIZED: Final = {
    "": {
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"),
        *("MatMulInteger", "ConvInteger"),
    },
    MICROSOFT: {
        *("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "QAttention", "QGemm", "DynamicQuantizeMatMul"),
        *("MatMulIntegerToFloat", "MatMulBlockQuantizedFp4Weight", "QMoE", "GemmFloat8", "QuantizeLinear"),
        *("DequantizeLinear", "QEmbedLayerNormalization", "DynamicQuantizeLSTM"),
    },
    "com.amd.quark": {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear", "BFPQuantizeDequantize"},
    "com.vai.quantize": {"VitisQuantizeLinear", "VitisDequantizeLinear", "BFPFixNeuron"},
}
"""Ops that quantize, or read quantized values, in another format or perhaps in MXFP8."""

_KINDS: Final = {
    **dict.fromkeys(("axis", "block_size", "output_dtype", "rounding_mode"), ir.AttributeType.INT),
    **dict.fromkeys(("element_dtype", "scale_dtype"), ir.AttributeType.STRING),
}


class Edit:
    """A model while its nodes are replaced."""

    def __init__(self, model: ir.Model, notes: list[str], allow: frozenset[str], accuracy_level: int) -> None:
        """`note` adds to `notes`, which the report has; `allow` and `accuracy_level` are arguments of `convert`."""
        self.model, self.notes, self.allow, self.accuracy_level = model, notes, allow, accuracy_level
        self.fresh: Final = fresh_names(self.model)
        """Returns a name like its argument that nothing in the model has."""
        self.counts: Counter[tuple[str, str]] = Counter()
        """(dialect, "weights" or "activations") -> number of those that were read."""
        self.losses: Counter[str] = Counter()
        """Loss that the user allowed -> number of places."""
        self.float_dtypes = _float_dtypes(self.model)
        """Float dtypes of the model's inputs, outputs, stored values and casts, before the first replacement."""
        self._new = NewNodes(self.fresh)
        """Nodes to insert before the current replacement."""
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def infer(self) -> None:
        """Infers dtypes and shapes of values, as far as onnx can with the function bodies of our nodes."""
        self.model.opset_imports.setdefault(contract.DOMAIN, contract.VERSION)
        # onnx infers the results of our nodes through their bodies only.
        record.add_bodies(self.model)
        prepare.infer(self.model)
        record.remove_bodies(self.model)

    def each(self, step: Step) -> bool:
        """Replaces nodes of every graph by the result of `step`, and removes unused ones; whether any was replaced."""
        self._shared.clear()  # an earlier step may have removed shared values

        def replacement(node: ir.Node) -> Replacement | None:
            self._new = NewNodes(self.fresh)
            nodes = step(self, node)
            if nodes is None:
                return None
            replaced = nodes[-1].outputs[0].meta.get(REPLACES)
            gone = node if replaced is None else replaced.producer()
            return Replacement(node=nodes[-1], gone=(gone,), before=(*self._new.nodes, *nodes[:-1]))

        return bool(apply(self.model, [replacement], lambda _: True))

    def make(self, op: str, *inputs: ir.Value, wanted: str, domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node before the current replacement; returns its result, called `wanted` or similar."""
        return self._new.result(op, *inputs, wanted=wanted, domain=domain, **attributes)

    def shared(self, graph: ir.Graph | None, *key: object, make: Callable[[], ir.Value]) -> ir.Value:
        """Returns the result of `make()` for this key in this graph; each step calls it once."""
        whole = (graph, *key)
        if whole not in self._shared:
            self._shared[whole] = make()
        return self._shared[whole]

    def cast(self, node: ir.Node, value: ir.Value, dtype: int, wanted: str) -> ir.Value:
        """Returns a value in another dtype for a node; one Cast serves the whole graph."""
        make = lambda: self.make("Cast", value, wanted=f"{value.name}_{wanted}", to=dtype)  # noqa: E731
        return self.shared(node.graph, "cast", value, dtype, make=make)

    def with_cast(
        self, last: ir.Node, wanted: str, to: ir.Value | int | None, make: Callable[[list[ir.Value]], ir.Node]
    ) -> Nodes:
        """Returns the node of `make` in place of `last`, and a Cast behind it; `make` takes the outputs of its node.

        `to` is the dtype of the Cast, or a value that has it; None for no Cast. `wanted` is the name between the two.
        """
        outputs = replacing_outputs(last)
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
        """Returns an initializer with another form of a stored value; each step makes one per dtype and key."""
        store = lambda: self.store(value.graph, wanted, dtype, make())  # noqa: E731
        return self.shared(value.graph, value, dtype, key, make=store)

    def codes(self, tensor: ir.TensorProtocol) -> Codes:
        """Returns the bytes of a tensor, in its shape; raises ContractError if its values do not have 8 bits."""
        if tensor.dtype.bitwidth != 8:
            where, what = f"{name_of(self.model)}: tensor {tensor.name!r}", f"is {tensor.dtype.name.lower()}"
            raise ContractError(where, what, expected="elements or scales of 8 bits", advice=AGAIN)
        return np.ascontiguousarray(tensor.numpy()).view(np.uint8).reshape(dims(tensor))

    def note(self, text: str) -> None:
        """Adds a note to the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def require(self, holds: object, node: ir.Node, what: str, expected: str, advice: Advice = AGAIN) -> None:
        """Raises the error of `refuse` unless `holds` is true."""
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
    """Returns `count` required inputs of a node, from index `start`."""
    return [value for value in node.inputs[start : start + count] if value is not None]


def operand(node: ir.Node, at: int) -> ir.Value | None:
    """Returns an input, or None if it is absent."""
    return node.inputs[at] if at < len(node.inputs) else None


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Returns the stored tensor of a value, or None if it is computed, absent or an input."""
    return None if value is None else stored(value)


def dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Returns the shape of a stored tensor."""
    return tuple(tensor.shape.numpy())


def rank_of(value: ir.Value) -> int | None:
    """Returns the number of dimensions of a value; None if it is unknown."""
    shape = shape_of(value)
    return None if shape is None else len(shape)


def replacing_outputs(node: ir.Node) -> list[ir.Value]:
    """Returns new values that replace the outputs of a node; only outputs of a graph keep dtype and shape."""
    values = [value_replacing(output) for output in node.outputs]
    for value, output in zip(values, node.outputs, strict=True):
        value.meta.pop(INFERRED, None)  # only this key: onnx_ir keeps quantization annotations in `meta`, too
        if not output.is_graph_output():
            value.type = value.shape = value.doc_string = None
            value.metadata_props.clear()
    return values


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Returns every attribute of a node of the contract, with defaults for missing ones."""
    return {**contract.OPS[node.op_type].attributes, **{entry.name: entry.value for entry in node.attributes.values()}}


def marks(node: ir.Node) -> dict[str, str]:
    """Returns the marks of a node, which computes the first output of a replaced node."""
    return {key: text for key, text in node.metadata_props.items() if key.startswith(MARK)}


def refuse_others(model: ir.Model) -> None:
    """Raises ContractError if a node is quantized in another format than MXFP8."""
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    others = [node for graph in graphs for node in graph.all_nodes() if _is_other(node)]
    if others:
        kinds = Counter(f"{node.domain + '.' if node.domain else ''}{node.op_type}" for node in others)
        what = ", ".join(f"{count} {name}" for name, count in kinds.items())
        where = f"{name_of(model)}: node {label(others[0])!r}"
        advice = "start from the model that is not quantized: mxfp8-graph rewrite"
        raise ContractError(where, f"quantized, but not in MXFP8 ({what})", expected="MXFP8 alone", advice=advice)


def _is_other(node: ir.Node) -> bool:
    """Whether a node is quantized in another format than MXFP8, judged by its op, mark and blocks."""
    if marks(node):
        return False
    if node.domain == TRT:
        return (dialect_of(node) is None and "uantize" in node.op_type) or "QDQ" in node.op_type
    if node.op_type not in _QUANTIZED.get("" if node.domain in STANDARD else node.domain, ()):
        return False
    if is_op(node, "QuantizeLinear"):
        return not is_blocked(node)
    if dialect_of(node) == "nbits":
        return not is_blocked(node) or attribute(node, "bits", 4) != 8
    return not is_op(node, "DequantizeLinear")  # its operands decide


def check_node(edit: Edit, node: ir.Node) -> None:
    """Raises ContractError for a node of another dialect that is damaged or unknown; other nodes are left alone."""
    key = node.domain, node.op_type
    row = OPS.get(key)
    if row is None or (is_op(node, "QuantizeLinear") and not is_blocked(node)):
        return
    least, most, outputs = row.ops[key]
    has_inputs = len(node.inputs) >= least and all(node.inputs[:least]) and not any(node.inputs[most:])
    names = [value.name if value is not None else "" for value in node.inputs]
    results = [output.name for output in node.outputs]
    what, range_ = f"inputs {names}, outputs {results}", f"{least}{'' if most == least else f' to {most}'}"
    has_outputs = len(results) == outputs and all(results)
    edit.require(has_inputs and has_outputs, node, what, f"{range_} inputs and {outputs}")
    if row.name == "trt":
        check_zero_point(edit, node)
    for entry in node.attributes.values():
        is_known, kind = not row.attributes or entry.name in row.attributes, _KINDS.get(entry.name, entry.type)
        expected = f"{', '.join(row.attributes)} alone, which are known to convert"
        edit.require(is_known, node, f"attribute {entry.name!r}", expected)
        is_value = entry.type == kind and not entry.is_ref()  # a reference means something in a function alone
        edit.require(is_value, node, f"{entry.name} of another type", kind.name.lower())
    axis, value = attribute(node, "axis", None), node.inputs[0]
    rank = None if value is None else rank_of(value)
    is_axis = axis is None or rank is None or -rank <= axis < max(rank, 1)
    edit.require(is_axis, node, f"axis {axis}", f"one of {rank} dimensions")


def check_zero_point(edit: Edit, node: ir.Node, advice: Advice = AGAIN) -> None:
    """Raises ContractError unless the zero point of a node, its third input, is absent or stored zeros."""
    value = operand(node, 2)
    stored = tensor_of(value)
    is_none = value is None or (stored is not None and not np.any(stored.numpy() != 0))
    edit.require(is_none, node, f"zero point {value and value.name!r}", "none, or stored zeros", advice)
