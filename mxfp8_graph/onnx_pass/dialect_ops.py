"""Recognizes the MXFP8 dialect of a node by its op, and the layout of TensorRT's scales by their shape."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.dialects import DIALECT_OF
from mxfp8_graph.onnx_pass.graph import STANDARD, attribute, default
from mxfp8_ops import contract
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.formats import BLOCK_SIZE


def is_blocked(node: ir.Node) -> bool:
    """Whether a node has the block size of MXFP8."""
    return bool(attribute(node, "block_size", 0) == BLOCK_SIZE)


def dialect_of(node: ir.Node) -> str | None:
    """Returns the dialect that a node's op belongs to; None for standard ops, whose operands decide."""
    if node.domain == contract.DOMAIN:
        return "mxfp8"
    return None if node.domain in STANDARD else DIALECT_OF.get((node.domain, node.op_type))


def foreign(model: ir.Model) -> tuple[str, ir.Node] | None:
    """Returns (dialect, node) of the first MXFP8 node of another dialect than ours, or None.

    MatMulNBits does not count: most models that have it are quantized in another way, and stay as they are.
    """
    for node in model.graph.all_nodes():
        dialect = dialect_of(node)
        if dialect is not None and dialect not in {"mxfp8", "nbits"}:
            return dialect, node
        # Blocks of 32 are common for other elements too, so their dtype decides.
        if node.op_type == "DequantizeLinear" and node.domain in STANDARD and is_blocked(node):
            tensor = default(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
            if tensor is not None and tensor.dtype in contract.ELEMENTS:
                return "qdq", node
    return None


def blocked_axis(dims: tuple[int, ...], scales: tuple[int, ...], axis: int | None) -> int | None:
    """Returns the axis of a stored TensorRT weight along which the blocks lie, counted from the end, or None.

    TensorRT's parser decides by the shapes, and so does this function. It takes the node's axis if the shapes fit that
    axis; if the node has none, the last axis that fits. Scales of a matrix may be padded to multiples of 128 x 4, as
    TransformerEngine pads them.

    Args:
        dims: of the elements.
        scales: dims of the scales.
        axis: the node's attribute of this name, or None.
    """
    rank = len(dims)
    fitting = [at for at in range(-1, -rank - 1, -1) if scales == scale_shape(dims, at)]
    if fitting:
        # Several axes fit if each of them has size 1 and so one block.
        if axis is None:
            return fitting[0]
        return axis % rank - rank if axis % rank - rank in fitting else None
    if rank != 2:
        return None
    blocks = scale_shape(dims, -1)
    padded = tuple(-(-n // size) * size for n, size in zip(blocks, (128, 4), strict=True))
    return -1 if scales == padded else None


def without_padding(codes: npt.NDArray[np.uint8], blocks: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Returns the scales of shape `blocks`, without TransformerEngine's padding, whose values mean nothing."""
    codes = codes.reshape([*[1] * (len(blocks) - codes.ndim), *codes.shape])
    return codes[tuple(slice(size) for size in blocks)]
