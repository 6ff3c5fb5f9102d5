"""Packed weights of exported programs: the uint8 buffers that mxfp8 ops read, through higher-order ops too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mxfp8_graph.naming import reserve_name
from mxfp8_graph.packed.contents import Contents, PackedWeight, Tensor, bias_name, original_name
from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.internals import to_numpy
from mxfp8_graph.torch_pass.operands import GATHERS
from mxfp8_graph.torch_pass.program import Program
from mxfp8_ops import contract
from mxfp8_ops.checks import dtype_name

_NAMES: Final = {name: op.weight for name, op in contract.TORCH_OPS.items() if op.weight is not None}
"""Op -> names of its arguments for a weight's elements, scales and format."""


def contents(program: ExportedProgram, where: str) -> Contents:
    """Returns the packed weights and the other parameters of an exported program."""
    internals.check_torch()
    view = Program(program)
    weights: dict[str, PackedWeight] = {}
    taken: set[str] = set()
    packed: set[str] = set()
    biases: set[str | None] = set()
    for scope in view.scopes:
        for node in scope.module.graph.nodes:
            op = internals.op_name(node)
            if op in contract.TORCH_OPS:
                # A bias may be a float32 copy, whose original name `bias_name` restores.
                biases.add(_stored(view, internals.argument(node, "bias")))
            if op not in _NAMES:
                continue
            elements, scales = (_stored(view, internals.argument(node, name)) for name in _NAMES[op][:2])
            # dequantize can take blocks along any axis; a PackedWeight has them along the last one.
            if elements is None or scales is None or internals.argument(node, "axis", -1) != -1:
                continue
            packed |= {elements, scales}
            if elements not in weights:
                name = reserve_name(original_name(elements), taken)
                weights[elements] = _weight(view, node, name, (elements, scales))
            elif weights[elements].weight_only and _weight_only(node) is False:
                weights[elements] = replace(weights[elements], weight_only=False)
    users = {view.stored_name(node): next(iter(node.users), None) for node in view.scopes[0].placeholders}
    others = [
        _other(bias_name(name, view.state.keys()) if name in biases else name, _module(users.get(name)), tensor)
        for name, tensor in view.state.items()
        if name not in packed
    ]
    rewrite_record = record.find(program)
    recipe = rewrite_record.recipe if rewrite_record else None
    return Contents(where=where, weights={w.name: w for w in weights.values()}, others=others, recipe=recipe)


def _stored(view: Program, node: Any) -> str | None:
    """Returns the name of the buffer that an operand reads or picks experts from, or None if it is computed."""
    if isinstance(node, Node) and internals.op_name(node) in GATHERS:
        node = node.args[0]
    return view.stored_name(node) if isinstance(node, Node) else None


def _weight(view: Program, node: Node, name: str, buffers: tuple[str, str]) -> PackedWeight:
    elements, scales = (view.tensor(buffer) for buffer in buffers)
    return PackedWeight(
        name=name,
        module=_module(node),
        shape=tuple(elements.shape),
        element_format=internals.argument(node, _NAMES[internals.op_name(node)][2]),
        weight_only=_weight_only(node),
        read_elements=lambda: to_numpy(elements.contiguous()),
        read_scales=lambda: to_numpy(scales.contiguous()),
    )


def _weight_only(node: Node) -> bool | None:
    """Whether the op of a packed weight leaves activations in high precision; None for other ops."""
    op = internals.op_name(node)
    if op == "mxfp8::conv":  # it quantizes its activations itself
        return False
    if op not in contract.PACKED_OPS:
        return None
    return op not in contract.TRAINING_OPS and internals.argument(node, "a_scales") is None


def _module(node: Node | None) -> str | None:
    """Returns the path of the module that a node belongs to."""
    return internals.module_path(node) or None if node is not None else None


def _other(name: str, module: str | None, tensor: torch.Tensor) -> Tensor:
    dtype = np.dtype(dtype_name(tensor.dtype))  # bfloat16 too, which ml_dtypes registers with NumPy
    shape = tuple(tensor.shape)
    return Tensor(name=name, module=module, dtype=dtype, shape=shape, read=lambda: to_numpy(tensor.contiguous()))
