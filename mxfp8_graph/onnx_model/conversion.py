"""Converts the opset of a model by onnx's converter, and sets right what that gets wrong.

The converter goes through an intermediate form that loses node metadata, so only the nodes it really changed are taken
from its result; every other node stays the very message it was.

It does not know some old ops, and changes the meaning of others silently: found by running every old form of every op
in ONNX Runtime, before and after. What can be set right in its result is; the rest is refused, by name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import onnx_calls
from mxfp8_graph.onnx_model.check_nodes import Place
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import is_external
from mxfp8_graph.onnx_model.walk import STANDARD, copy_fields, iter_graphs, node_label, stored_in, subgraphs
from mxfp8_ops.errors import ContractError

_ELSEWHERE = "mxfp8_graph.elsewhere"
"""The domain of what onnx's converter is to leave alone."""


def convert(opened: OpenedModel, opset: int, target: int) -> None:
    """Converts a model from `opset` up to `target`, in place; notes what was done.

    Raises:
        ContractError: an op cannot be converted, or its conversion would compute something else.
    """
    _prepare(opened.proto, opset, target, opened.name)
    converted = onnx_calls.convert(_without_unknown(opened.proto, opset), target, opened.name)
    notes = _repair(converted, opset, opened.name)
    _graft(opened.proto.graph, converted.graph, {n.name for g in iter_graphs(opened.proto.graph) for n in g.node})
    for entry in opened.proto.opset_import:
        if entry.domain in STANDARD:
            entry.version = target
    opened.notes += [f"converted opset {opset} to {target}", *notes]


def _without_unknown(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Returns a copy of `model` in which the ops that only ONNX Runtime has at `opset` are of another domain.

    onnx's converter refuses what it does not know in its own domain, and leaves other domains alone.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import.add(domain=_ELSEWHERE, version=1)
    for graph in iter_graphs(copy.graph):
        for node in graph.node:
            if node.domain in STANDARD and not onnx.defs.has(node.op_type, opset):
                node.domain = _ELSEWHERE
    return copy


def _graft(original: onnx.GraphProto, converted: onnx.GraphProto, names: set[str]) -> None:
    """Replaces the nodes of `original` by those of `converted`, keeping each node that did not change as it was.

    `names` are those of all nodes: the converter calls each node it adds like the one it adds it for.
    """
    known = {tuple(node.output): node for node in original.node}
    nodes: list[onnx.NodeProto] = []
    for node in converted.node:
        before = known.get(tuple(node.output))
        if before is None:
            if node.name:
                node.name = take_name(node.name, names)
            nodes.append(node)
            continue
        kept = onnx.NodeProto()
        kept.CopyFrom(before)
        inner = dict(subgraphs(node))
        for name, graph in subgraphs(kept):
            if name in inner:
                _graft(graph, inner[name], names)
        # A Constant means the same in every version, and where its data lies is dropped by the converter of onnx 1.18.
        if node.op_type != "Constant" and not _same(before, node):
            for name in ("op_type", "input", "attribute"):
                kept.ClearField(name)
            copy_fields(kept, node, skip={"output", "name", "doc_string", "metadata_props", "domain"})
        nodes.append(kept)
    del original.node[:]
    original.node.extend(nodes)
    have = {tensor.name for tensor in original.initializer}
    original.initializer.extend(t for t in converted.initializer if t.name not in have)


def _same(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    def plain(node: onnx.NodeProto) -> list[bytes]:
        kept = (x for x in node.attribute if x.type not in {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS})
        return sorted(_undocumented(x) for x in kept)

    return a.op_type == b.op_type and list(a.input) == list(b.input) and plain(a) == plain(b)


def _undocumented(attribute: onnx.AttributeProto) -> bytes:
    copy = onnx.AttributeProto()
    copy_fields(copy, attribute, skip={"doc_string"})
    return bytes(copy.SerializeToString(deterministic=True))


# --- Old ops ---------------------------------------------------------------------------------------------------

_RUNTIME_OPS: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "ThresholdedRelu"})
"""Ops that ONNX Runtime has in the default domain at every version; they never changed."""

_LOST: Final = {
    "Scan": (9, "it had a batch axis"),
    "GroupNormalization": (21, "its scale and bias were per group"),
}
"""Op -> the opset in which it became another, and what it was before."""

_MASKS: Final = 12
"""The opset in which Dropout's mask became one of what is kept."""


class _Scope:
    """A graph and what is known of the values that its nodes can read."""

    def __init__(self, graph: onnx.GraphProto, place: Place, around: _Scope | None = None) -> None:
        self.graph, self.place, self._around = graph, place, around

    @cached_property
    def types(self) -> ChainMap[str, onnx.TypeProto.Tensor]:
        """Types by name, as far as they are declared."""
        values = (*self.graph.input, *self.graph.output, *self.graph.value_info)
        own = {value.name: value.type.tensor_type for value in values if value.type.HasField("tensor_type")}
        return ChainMap(own, *(self._around.types.maps if self._around else ()))

    @cached_property
    def stored(self) -> ChainMap[str, onnx.TensorProto]:
        """Stored tensors by name."""
        return ChainMap(stored_in(self.graph), *(self._around.stored.maps if self._around else ()))

    def nodes(self) -> Iterator[tuple[onnx.NodeProto, _Scope]]:
        """Yields each node of the graph and of its subgraphs, with its scope."""
        for node in self.graph.node:
            yield node, self
            for name, inner in subgraphs(node):
                yield from _Scope(inner, self.place.within(node_label(node), name), self).nodes()


@dataclass(frozen=True)
class _Converted:
    """A node of the converter's result."""

    node: onnx.NodeProto
    scope: _Scope
    opset: int
    """That of the model before."""
    since: int
    """The opset in which its op became what it is."""

    @property
    def axis(self) -> int:
        """Its axis, by default 1 as in old versions."""
        return next((a.i for a in self.node.attribute if a.name == "axis"), 1)

    def rank(self, index: int) -> int | None:
        """Returns the rank of an input, None if it is not known."""
        known = self.scope.types.get(self.node.input[index])
        return len(known.shape.dim) if known is not None and known.HasField("shape") else None

    def constant(self, index: int) -> onnx.TensorProto | None:
        """Returns the stored tensor that an input is, None if it is computed."""
        return self.scope.stored.get(self.node.input[index]) if index < len(self.node.input) else None

    def put(self, name: str, value: str | int) -> None:
        """Sets an attribute."""
        kept = [attribute for attribute in self.node.attribute if attribute.name != name]
        del self.node.attribute[:]
        self.node.attribute.extend([*kept, helper.make_attribute(name, value)])

    def refusal(self, why: str) -> ContractError:
        return _refusal(self.node, self.scope.place, self.opset, self.since, why)


def _prepare(model: onnx.ModelProto, opset: int, target: int, name: str) -> None:
    """Drops, in place, the masks of Dropout nodes that nothing reads: the converter leaves them another dtype.

    Raises:
        ContractError: an op is none of `opset`, or is lost on the way to `target`.
    """
    read: set[str] = set()
    for graph in iter_graphs(model.graph):
        read.update(name for node in graph.node for name in node.input)
        read.update(output.name for output in graph.output)
    for node, scope in _Scope(model.graph, Place(name)).nodes():
        if node.domain not in STANDARD or node.op_type in _RUNTIME_OPS:
            continue
        if node.op_type == "Dropout" and opset < _MASKS < target and len(node.output) > 1:
            if node.output[1] in read:
                raise _refusal(node, scope.place, opset, _MASKS, "its mask was of zeros when nothing is dropped")
            del node.output[1]
        if not onnx.defs.has(node.op_type, opset):
            what = f"opset {opset} of the model has no such op, so that it cannot be converted to {target}"
            raise scope.place.node_error(node, what, f"an op of opset {opset}, or opset {target} or above")
        changed, why = _LOST.get(node.op_type, (0, ""))
        if opset < changed <= target:
            raise _refusal(node, scope.place, opset, changed, why)


def _repair(converted: onnx.ModelProto, opset: int, name: str) -> list[str]:
    """Sets right, in place, what the converter made of a model of `opset`; returns notes for the report.

    Raises:
        ContractError: a node would compute something else now, and nothing can be done about it.
    """
    notes = []
    for node, scope in _Scope(converted.graph, Place(name)).nodes():
        since, mend = _REPAIRS.get(node.op_type, (0, _nothing))
        if opset < since and node.domain in STANDARD:
            notes += mend(_Converted(node, scope, opset, since))
    return notes


def _refusal(node: onnx.NodeProto, place: Place, opset: int, needed: int, why: str) -> ContractError:
    what = f"is of opset {opset}, and onnx's converter would change what it computes: {why}"
    return place.node_error(node, what, f"opset {needed} or above")


def _nothing(converted: _Converted) -> list[str]:
    return []


def _limits(converted: _Converted) -> list[str]:
    """Gives the limits of Clip and the value of Pad, once attributes, the dtype of what they go with."""
    known = converted.scope.types.get(converted.node.input[0])
    for index in range(1, len(converted.node.input)):
        tensor = converted.constant(index)
        if known is not None and tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT:
            with np.errstate(over="ignore"):  # the lowest float32 is -inf in float16: no limit, as before
                values = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(known.elem_type))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return []


def _hardmax(converted: _Converted) -> list[str]:
    """Hardmax was over all axes from its own on, and is over one."""
    rank, axis = converted.rank(0), converted.axis
    if axis != -1 and (rank is None or axis != rank - 1):
        raise converted.refusal(f"it was over all axes from {axis} on")
    converted.put("axis", -1)
    return []


def _prelu(converted: _Converted) -> list[str]:
    """The slopes of PRelu were per channel, and are broadcast from the last axis on."""
    slope = converted.constant(1)
    if slope is None or any(dim != 1 for dim in slope.dims):
        raise converted.refusal("its slopes were per channel")
    return []


def _resize(converted: _Converted) -> list[str]:
    """Upsample, and Resize of opset 10, counted from the corner; to shrink, ONNX Runtime took the next value behind."""
    converted.put("coordinate_transformation_mode", "asymmetric")
    mode = next((a.s for a in converted.node.attribute if a.name == "mode"), b"nearest")
    if mode != b"nearest":
        return []
    tensor = converted.constant(2)
    scales = None if tensor is None or is_external(tensor) else numpy_helper.to_array(tensor)
    least, most = (1, 1) if scales is None else (scales.min(initial=1), scales.max(initial=1))
    if least < 1 < most:
        raise converted.refusal("it enlarges one axis and shrinks another, and rounds either its own way")
    converted.put("nearest_mode", "ceil" if least < 1 else "floor")
    if scales is not None or converted.opset < 10:  # Upsample only enlarges
        return []
    return [
        f"node {node_label(converted.node)!r} ({converted.node.op_type}) is assumed to enlarge: its scales are computed"
    ]


_REPAIRS: Final[dict[str, tuple[int, Callable[[_Converted], list[str]]]]] = {
    "Clip": (11, _limits),
    "Hardmax": (13, _hardmax),
    "Pad": (11, _limits),
    "PRelu": (7, _prelu),
    "Resize": (11, _resize),
}
"""Op, as it is after the conversion -> the opset in which it became that, and what sets it right."""
