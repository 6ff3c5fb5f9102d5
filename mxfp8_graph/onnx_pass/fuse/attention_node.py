"""Writes MXFP8Attention, and in front of it what it needs: heads side by side, one mask, constants for what is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from mxfp8_graph.onnx_pass.fuse.attention_heads import HEADS_APART, Source
from mxfp8_graph.onnx_pass.fuse.attention_scores import Attention, Mask
from mxfp8_graph.onnx_pass.fuse.graph_view import GraphView
from mxfp8_ops import contract


def build(view: GraphView, found: Attention, output: str, activation_dtype: int) -> tuple[onnx.NodeProto, ...]:
    """Returns the nodes that make `output` of what was found, MXFP8Attention last."""
    q, k, v, last = found.q, found.k, found.v, found.inside[-1]
    writer = _Writer(view, view.type_of(q.name).dtype)
    inputs = [*map(writer.side_by_side, (q, k, v)), writer.mask(found.masks), *map(writer.past, (k, v))]
    outputs = [output, k.present, v.present]
    attributes: dict[str, Any] = {
        **contract.ATTENTION.attributes,
        "q_num_heads": q.heads.count,
        "kv_num_heads": k.heads.count,
        "is_causal": int(found.is_causal),
        "scale": found.scale,
        "activation_dtype": activation_dtype,
        "nan_guard": int(found.nan_guard),
    }
    name = last.name or view.fresh(f"{output}_attention")
    node = helper.make_node(contract.ATTENTION.name, inputs, outputs, name=name, domain=contract.DOMAIN, **attributes)
    node.metadata_props.MergeFrom(last.metadata_props)
    if last.doc_string:
        node.doc_string = last.doc_string
    return (*writer.nodes, node)


class _Writer:
    """Collects nodes."""

    def __init__(self, view: GraphView, dtype: int) -> None:
        """`dtype`: that of Q, K and V."""
        self.nodes: list[onnx.NodeProto] = []
        self._fresh = view.fresh
        self._type_of = view.type_of
        self._dtype = dtype

    def add(self, op: str, inputs: Sequence[str], wanted: str, **attributes: Any) -> str:
        """Adds a node of the standard domain and returns its output, called `wanted` or like it."""
        output = self._fresh(wanted)
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def constant(self, wanted: str, dtype: int, values: Sequence[float], *, scalar: bool = False) -> str:
        """Returns a vector of numbers, or one number."""
        dims = [] if scalar else [len(values)]
        return self.add("Constant", [], wanted, value=helper.make_tensor(wanted, dtype, dims, values))

    def side_by_side(self, source: Source) -> str:
        """Returns [B, S, H * D]."""
        name = source.name
        if source.layout == "merged":
            return name
        if source.layout == "heads":
            name = self.add("Transpose", [name], f"{name}_split", perm=HEADS_APART)
        shape = self.constant(f"{source.name}_width", contract.INT64, [0, 0, source.heads.count * source.heads.size])
        return self.add("Reshape", [name, shape], f"{source.name}_merged")

    def mask(self, masks: Sequence[Mask]) -> str:
        """Returns the sum of all masks."""
        if not masks:
            return self.constant("no_mask", self._dtype, [0.0])
        name, *others = map(self._addend, masks)
        for other in others:
            name = self.add("Add", [name, other], f"{name}_sum")
        return name

    def past(self, source: Source) -> str:
        """Returns the past of K or V."""
        return source.past or self.constant("no_past", self._dtype, [])

    def _addend(self, mask: Mask) -> str:
        """Returns what is added to scores."""
        if not mask.fill:
            return mask.name
        zero = self.constant(f"{mask.name}_zero", self._type_of(mask.fill).dtype, [0.0], scalar=True)
        either = (zero, mask.fill) if mask.counts else (mask.fill, zero)
        return self.add("Where", [mask.name, *either], f"{mask.name}_added")
