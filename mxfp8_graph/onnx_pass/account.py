"""Yields the tensors that a model stores, for `report.account`."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from mxfp8_graph.onnx_pass.find import paths_of
from mxfp8_graph.onnx_pass.graph import label
from mxfp8_graph.report.data import StoredTensor


def stored_tensors(model: ir.Model) -> Iterator[StoredTensor]:
    """Yields initializers and the tensors in attributes, those of Constant nodes above all, of every graph.

    The function bodies of our own nodes are no part of the model: they say what kernels do. Strings are no numbers that
    could be quantized, and onnx_ir does not know their size.
    """
    for name, tensor in _named_tensors(model):
        if tensor.dtype != ir.DataType.STRING:
            yield StoredTensor((name,), tuple(tensor.shape.numpy()), tensor.dtype.numpy().name, tensor.nbytes)


def _named_tensors(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    for graph in paths_of(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield str(value.name), value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    constant = node.op_type == "Constant" and node.outputs
                    name = str(node.outputs[0].name) if constant else f"{label(node)}.{attribute.name}"
                    yield name, attribute.as_tensor()
