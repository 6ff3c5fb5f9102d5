"""com.microsoft Attention: one weight [K, 3 * N] that makes Q, K and V, and the attention behind it.

Attention(x, w, b, mask, , bias) -> MultiHeadAttention(*Split(gemm(x, packed w, b)), , mask, bias)

ONNX Runtime computes both with the same kernels, so the result of Q, K and V is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx
import onnx_graphsurgeon as gs

from mxfp8_graph.onnx_model.walk import MICROSOFT
from mxfp8_graph.onnx_pass.form import Form, Step
from mxfp8_graph.onnx_pass.static_operands import StaticOperands

_KEPT: Final = ("num_heads", "unidirectional", "mask_filter_value", "scale")
"""The attributes that mean the same to MultiHeadAttention."""

_CACHE: Final = "it keeps keys and values of past tokens in a packed tensor; expected a model without past and present"


def read(node: gs.Node, statics: StaticOperands) -> Form:
    """Reads Attention; what MultiHeadAttention cannot do alike is in the reason."""
    x, w, *rest = node.inputs
    given = [None if tensor.is_empty() else tensor for tensor in rest]
    bias, mask, past, attention_bias, past_length = [*given, *[None] * 5][:5]
    static = statics.resolve(w)
    sizes = _sizes(node, static.shape if static is not None else ())
    present = len(node.outputs) > 1 and not node.outputs[1].is_empty()
    obstacle = None
    if past is not None or past_length is not None or present or node.attrs.get("past_present_share_buffer", 0):
        obstacle = _CACHE
    elif node.attrs.get("do_rotary", 0):
        obstacle = "it rotates positions (do_rotary), which MultiHeadAttention does not; expected none"
    elif mask is not None:
        obstacle = _mask_obstacle(mask, x)
    if static is None:
        obstacle = "its weight is computed while the model runs; expected a stored one"
    elif obstacle is None and sizes is None:
        obstacle = f"its heads do not divide its weight {list(static.shape)}; correct the model"
    inputs = ("", *("" if tensor is None else tensor.name for tensor in (mask, attention_bias)))
    attributes = {name: node.attrs[name] for name in _KEPT if name in node.attrs}
    lengths = onnx.helper.make_tensor("", onnx.TensorProto.INT64, [3], sizes or (0, 0, 0))
    after = (
        Step(op="Split", inputs=(lengths,), attributes={"axis": -1}, outputs=3),
        Step(op="MultiHeadAttention", inputs=inputs, attributes=attributes, domain=MICROSOFT),
    )
    return Form(a=x, b=w, c=bias, absorbs_add=False, after=after, blocker=obstacle)


def _sizes(node: gs.Node, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns how many columns of the weight make Q, K and V, or None if that contradicts its shape."""
    heads = node.attrs.get("num_heads", 0)
    if len(shape) != 2 or heads < 1:
        return None
    sizes = tuple(node.attrs.get("qkv_hidden_sizes") or [shape[1] // 3] * 3)
    if len(sizes) != 3 or sum(sizes) != shape[1] or sizes[0] != sizes[1]:
        return None
    return sizes if all(size > 0 and size % heads == 0 for size in sizes) else None


def _mask_obstacle(mask: gs.Tensor, x: gs.Tensor) -> str | None:
    """Returns why a mask does not mean the same to MultiHeadAttention, or None.

    Both know one length per sequence [B], and one value per key [B, S] or per query and key [B, S, S]. Only Attention
    knows a first and a last position [2 * B] and [B, 1, most, most].
    """
    rank = None if mask.shape is None else len(mask.shape)
    if rank in (2, 3):
        return None
    lengths = mask.inputs and mask.inputs[0].op == "EmbedLayerNormalization"
    if lengths or (rank == 1 and x.shape and mask.shape[0] is not None and mask.shape[0] == x.shape[0]):
        return None
    found = "of unknown rank" if rank is None else f"of shape {list(mask.shape)}"
    return f"its mask is {found}; expected one of shape [batch], [batch, keys] or [batch, queries, keys]"
