"""Merges the nodes behind a convolution into its node: an activation, and the sum with a residual.

Relu(MXFP8Conv(...))                        -> MXFP8Conv(..., epilogue "relu"); likewise gelu, silu
Clip, LeakyRelu, HardSwish, in any spelling -> "clip", "leaky_relu", "hard_swish" with their constants
MXFP8Conv(...) + r                          -> MXFP8Conv(..., r), added before an activation behind the sum
Activation(MXFP8Conv(...)) + r              -> MXFP8Conv(..., r), added after the activation
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse.elementwise import POINTS, Array, activation_of, gemm_epilogue, is_near
from mxfp8_graph.onnx_pass.fuse.nodes import is_ours, node_derived_from, type_of
from mxfp8_graph.onnx_pass.graph import attribute, fresh_names, is_op, only_used_by
from mxfp8_graph.onnx_pass.replacement import Replacement
from mxfp8_ops import contract
from mxfp8_ops.nodes.conv import epilogue_function

_RESIDUAL: Final = len(contract.CONV.inputs) - 1
"""Index of the input "residual"."""
_LARGEST: Final = float(np.finfo(np.float32).max)

Epilogue = tuple[str, float, float]
"""The attributes `epilogue`, `alpha` and `beta`."""


def fuse_conv_activation(node: ir.Node) -> Replacement | str | None:
    """Returns the convolution with the activation behind it."""
    if not is_ours(node, contract.CONV) or attribute(node, "epilogue", "none") != "none":
        return None
    output = node.outputs[0]
    activation = activation_of(output, attribute(node, "output_dtype", contract.FLOAT), conv_epilogue)
    if activation is None:
        users = list(output.consumers())
        is_shared = len(users) > 1 or output.is_graph_output()
        plain = next((user for user in users if is_op(user, "Relu", "Clip", "LeakyRelu", "HardSwish")), None)
        return f"the input of its {plain.op_type} is needed elsewhere too" if plain and is_shared else None
    (epilogue, alpha, beta), nodes = activation
    constants = {"epilogue": epilogue, "alpha": alpha, "beta": beta}
    fused = node_derived_from(node, contract.CONV, node.inputs, nodes[-1].outputs, **constants)
    return Replacement(kind=f"convolution + {epilogue}", node=fused, gone=(node, *nodes))


def fuse_residual(node: ir.Node) -> Replacement | str | None:
    """Returns the convolution with the value that an Add behind it adds."""
    if not is_ours(node, contract.CONV) or len(node.inputs) > _RESIDUAL:
        return None
    output = node.outputs[0]
    add = next(iter(output.consumers()), None)
    if add is None or not is_op(add, "Add") or add.graph is not node.graph:
        return None
    residual = add.inputs[1] if add.inputs[0] is output else add.inputs[0]
    if residual is output or residual is None or not only_used_by(output, (add,)):
        return None
    one, other = type_of(output), type_of(residual)
    # A residual that is repeated along an axis has another shape. X and residual have one dtype.
    if one.shape is None or None in one.shape or one != other or type_of(node.inputs[0]).dtype != other.dtype:
        return "the shapes of the two summands differ, or one is unknown"
    operands = [*node.inputs, *[None] * (_RESIDUAL - len(node.inputs)), residual]
    at = "before" if attribute(node, "epilogue", "none") == "none" else "after"
    fused = node_derived_from(node, contract.CONV, operands, add.outputs, residual_at=at)
    return Replacement(kind="convolution + residual", node=fused, gone=(node, add))


def conv_epilogue(values: Array, dtype: int) -> Epilogue | None:
    """Returns the epilogue of a convolution with these values at `POINTS`, within the tolerance of the dtype."""
    if (name := gemm_epilogue(values, dtype)) is not None:
        return name, 0.0, 0.0
    if not np.isfinite(values).all():
        return None
    # The constants of each function, if it is this one: the check below tells.
    small, far = 1e-3, 1e4
    lowest, left, right, highest = (float(values[x == POINTS][0]) for x in (-far, -small, small, far))
    low, high = (bound if abs(bound) < far else math.copysign(_LARGEST, bound) for bound in (lowest, highest))
    left, right = left / -small, right / small
    candidates: tuple[Epilogue, ...] = (
        ("leaky_relu", lowest / -far, 0.0),
        ("clip", low, high),
        ("hard_swish", (right - left) / (2 * small), (right + left) / 2),  # near 0 it is x * (alpha * x + beta)
    )
    wanted = {each: epilogue_function(*each).function(POINTS) for each in candidates}
    return next((each for each in candidates if is_near(values, wanted[each], dtype)), None)


def add_stand_ins(model: ir.Model) -> None:
    """Gives the convolutions without a residual one zero for it, in place, if others of the model have a residual.

    One function body serves all nodes of an op, and an absent input cannot be told from a present one in it.
    """
    nodes = [node for node in model.graph.all_nodes() if is_ours(node, contract.CONV)]
    alone = [node for node in nodes if len(node.inputs) <= _RESIDUAL]
    stand_ins: dict[int, ir.Value] = {}
    if len(alone) == len(nodes):
        return
    fresh = fresh_names(model)
    for node in alone:
        dtype = type_of(node.inputs[0]).dtype or contract.FLOAT
        if dtype not in stand_ins:
            zero = np.zeros(1, ir.DataType(dtype).numpy())
            tensor = ir.tensor(zero, ir.DataType(dtype), name=fresh("no_residual"))
            stand_ins[dtype] = ir.Value(name=tensor.name, const_value=tensor)
            model.graph.register_initializer(stand_ins[dtype])
        node.resize_inputs(_RESIDUAL + 1)
        node.replace_input_with(_RESIDUAL, stand_ins[dtype])
