"""scaled_dot_product_attention in ONNX, with the result of torch for rows from which a mask hides all keys: 0.

torch's exporter and ONNX Runtime give other results there:

    opset 18 to 22, boolean mask     the exporter adds the lowest float, not -Inf: the mean of V
    opset 18 to 22, float mask       a softmax over -Inf alone: NaN
    Attention, boolean mask          NaN in ONNX Runtime 1.23, 0 in 1.31
    Attention, float mask            ONNX Runtime 1.31 takes a row of the lowest float for one of -Inf: 0, where torch
                                     adds it to the scores and gives the mean of V

So attention with a mask becomes single ops at every opset, and its mask sets hidden rows to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import onnx_ir as ir
from onnxscript import opset18, opset23
from onnxscript.function_libs.torch_lib.ops import nn

_OPS: Final[Any] = opset18
_ATTENTION_OPSET: Final = 23
"""The first opset with Attention."""


def translation(opset: int) -> Callable[..., Any]:
    """Returns the function that builds the nodes of scaled_dot_product_attention at an opset."""

    def scaled_dot_product_attention(  # noqa: PLR0913, PLR0917 - the signature of the op
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        if attn_mask is None:
            if opset >= _ATTENTION_OPSET and dropout_p == 0:
                # It counts heads by the shapes, so `enable_gqa` needs no attribute.
                return opset23.Attention(query, key, value, scale=scale, is_causal=int(is_causal))[0]
            return nn.aten_scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, **settings)
        zero, hidden = (_OPS.Constant(value=ir.tensor(number, dtype=query.dtype)) for number in (0.0, -math.inf))
        mask = _OPS.Where(attn_mask, zero, hidden) if attn_mask.dtype == ir.DataType.BOOL else attn_mask
        y = nn.aten_scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **settings)
        # Not by IsNaN(y): a NaN that comes from Q, K or V must stay one.
        largest = _OPS.ReduceMax(mask, _OPS.Constant(value_ints=[-1]), keepdims=1)
        return _OPS.Where(_OPS.Equal(largest, hidden), zero, y)

    return scaled_dot_product_attention
