"""Nodes in training mode: Dropout is switched off, and what else depends on the mode is named."""

from __future__ import annotations

from collections import ChainMap, Counter

import onnx

from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import read
from mxfp8_graph.onnx_model.walk import STANDARD, iter_nodes, stored_in, subgraphs

_TRAINING_MODE = 2
"""Index of that input of Dropout."""


def switch_off(opened: OpenedModel) -> None:
    """Makes every Dropout that drops pass its input on, in place, and notes it.

    A flag that is an input of the graph is the caller's, and stays.
    """
    if count := _dropouts(opened.proto.graph, ChainMap(), opened):
        opened.notes.append(f"the model was exported in training mode; in the result Dropout is off ({count})")
    modes = Counter(
        node.op_type
        for node in iter_nodes(opened.proto.graph.node)
        if node.domain in STANDARD and any(a.name == "training_mode" and a.i for a in node.attribute)
    )
    for op, count in sorted(modes.items()):
        what = f"{count} {op} normalize(s) by the statistics of the batch, as the model was exported in training mode"
        opened.notes.append(f"{what}; export it in evaluation mode")


def _dropouts(graph: onnx.GraphProto, around: ChainMap[str, onnx.TensorProto], opened: OpenedModel) -> int:
    """Switches off the Dropout nodes of a graph and its subgraphs; returns how many."""
    given = {value.name for value in graph.input}
    stored = around.new_child({name: tensor for name, tensor in stored_in(graph).items() if name not in given})
    count = 0
    for node in graph.node:
        count += sum(_dropouts(inner, stored, opened) for _, inner in subgraphs(node))
        if node.op_type != "Dropout" or node.domain not in STANDARD or len(node.input) <= _TRAINING_MODE:
            continue
        flag = stored.get(node.input[_TRAINING_MODE])
        if flag is not None and read(flag, opened.folder, opened.name).any():
            del node.input[_TRAINING_MODE:]
            count += 1
    return count
