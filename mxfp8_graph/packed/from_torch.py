"""Packed weights of exported programs: the uint8 buffers that mxfp8 ops read, through higher-order ops too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mxfp8_graph.packed.weight import Array, Contents, PackedWeight, Tensor, original_name, plain_name
from mxfp8_graph.policy.plan import unique_name
from mxfp8_graph.torch_pass.static_operands import GATHERS
from mxfp8_graph.torch_program import internals, record
from mxfp8_graph.torch_program.program import Program

_NAMES: Final[Mapping[str, tuple[str, str, str]]] = {
    "mxfp8::gemm": ("b", "b_scales", "b_format"),
    "mxfp8::weight_gemm": ("b", "b_scales", "b_format"),
    "mxfp8::grouped_gemm": ("b", "b_scales", "b_format"),
    "mxfp8::dequantize": ("elements", "scales", "element_format"),
}
"""What each op calls a weight's elements, its scales and its format."""

_DTYPES: Final = {torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}
"""Dtypes that NumPy lacks; torch and NumPy call the others the same."""


def contents(program: ExportedProgram, where: str) -> Contents:
    """Returns what an exported program stores.

    Raises:
        BackendError: this torch is not one the pass knows.
    """
    internals.check_torch()
    view = Program(program)
    weights: dict[str, PackedWeight] = {}
    taken: set[str] = set()
    packed: set[str] = set()
    for scope in view.scopes:
        for node in scope.module.graph.nodes:
            op = internals.op_name(node)
            if op not in _NAMES:
                continue
            elements, scales = (_stored(view, internals.argument(node, name)) for name in _NAMES[op][:2])
            if elements is None or scales is None or internals.argument(node, "axis", -1) != -1:
                continue
            packed |= {elements, scales}
            if elements not in weights:
                name = unique_name(original_name(elements), taken, "_")
                weights[elements] = _weight(view, node, name, (elements, scales))
            elif weights[elements].weight_only and _weight_only(node) is False:
                weights[elements] = replace(weights[elements], weight_only=False)
    users = {view.stored_name(node): next(iter(node.users), None) for node in view.scopes[0].placeholders}
    others = [
        _other(plain_name(name, view.state.keys()), _module(users.get(name)), tensor)
        for name, tensor in view.state.items()
        if name not in packed
    ]
    made = record.find(program)
    recipe = made.recipe if made else None
    return Contents(where=where, weights={w.name: w for w in weights.values()}, others=others, recipe=recipe)


def _stored(view: Program, node: Any) -> str | None:
    """Returns the name of the buffer that an operand is or picks experts from, or None if it is computed."""
    if isinstance(node, Node) and internals.op_name(node) in GATHERS:
        node = node.args[0]
    origin = view.origin(node) if isinstance(node, Node) and node.op == "placeholder" else None
    return view.stored_name(origin) if origin is not None else None


def _weight(view: Program, node: Node, name: str, buffers: tuple[str, str]) -> PackedWeight:
    op = internals.op_name(node)
    elements, scales = (view.tensor(buffer) for buffer in buffers)
    return PackedWeight(
        name=name,
        module=_module(node),
        shape=tuple(elements.shape),
        element_format=internals.argument(node, _NAMES[op][2]),
        weight_only=_weight_only(node),
        read_elements=lambda: _array(elements),
        read_scales=lambda: _array(scales),
    )


def _weight_only(node: Node) -> bool | None:
    """Whether an op multiplies activations as they are; None if it does not multiply."""
    op = internals.op_name(node)
    if op == "mxfp8::dequantize":
        return None
    return op == "mxfp8::weight_gemm" or (op == "mxfp8::grouped_gemm" and internals.argument(node, "a_scales") is None)


def _module(node: Node | None) -> str | None:
    """Returns the path of the module that a node belongs to."""
    stack = node.meta.get("nn_module_stack") or {} if node is not None else {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] or None if paths else None


def _other(name: str, module: str | None, tensor: torch.Tensor) -> Tensor:
    dtype = _DTYPES.get(tensor.dtype) or np.dtype(str(tensor.dtype).removeprefix("torch."))
    return Tensor(
        name=name,
        module=module,
        dtype=dtype,
        shape=tuple(tensor.shape),
        read=lambda: _array(tensor),
    )


def _array(tensor: torch.Tensor) -> Array:
    """Returns the values as NumPy has them; without a copy where they are contiguous and on the CPU."""
    values = tensor.detach().cpu().contiguous()
    if values.dtype in _DTYPES:
        return values.view(torch.int16).numpy().view(_DTYPES[values.dtype])
    return np.asarray(values.numpy())
