"""Switches off Dropout that was exported in training mode."""

from __future__ import annotations

from collections import ChainMap

import onnx

from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import read
from mxfp8_graph.onnx_model.walk import STANDARD, stored_in, subgraphs


def switch_off(opened: OpenedModel) -> None:
    """Makes every Dropout that drops pass its input on, in place, and notes it; but not where the caller chooses."""
    if count := _dropouts(opened.proto.graph, ChainMap(), opened):
        opened.notes.append(f"the model was exported in training mode; in the result Dropout is off ({count})")


def _dropouts(graph: onnx.GraphProto, around: ChainMap[str, onnx.TensorProto], opened: OpenedModel) -> int:
    """Switches off the Dropout nodes of a graph and its subgraphs; returns how many."""
    inputs = {value.name for value in graph.input}  # an initializer among them is a default
    stored = around.new_child({name: tensor for name, tensor in stored_in(graph).items() if name not in inputs})
    count = 0
    for node in graph.node:
        count += sum(_dropouts(inner, stored, opened) for _, inner in subgraphs(node))
        flag = stored.get(node.input[2]) if len(node.input) == 3 else None
        is_dropout = node.op_type == "Dropout" and node.domain in STANDARD
        if is_dropout and flag is not None and read(flag, opened.folder, opened.name).any():
            node.input.pop()
            count += 1
    return count
