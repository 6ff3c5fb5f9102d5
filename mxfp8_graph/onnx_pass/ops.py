"""The table of ops, one row per op: how an op multiplies, or how it changes a weight.

All steps read this table. To add an op, add its row, and a reader in `forms.py` if the op multiplies in a new form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass import convolutions, einsum, forms, views
from mxfp8_graph.onnx_pass.dialects import TRT_DEQUANTIZE
from mxfp8_graph.onnx_pass.forms import Form, Reader, Resolve
from mxfp8_graph.onnx_pass.graph import MICROSOFT, STANDARD, attribute, is_op
from mxfp8_graph.onnx_pass.views import View
from mxfp8_graph.policy.roles import RoleOps


@dataclass(frozen=True, kw_only=True)
class Op:
    """One row of the table."""

    product: Reader | None = None
    """Reader of an op that multiplies matrices; None for other ops and for products that the pass does not replace."""
    view: View | None = None
    """Reader of an op that passes a weight on and computes nothing new; None for other ops."""
    gathers: bool = False
    """Whether it picks rows, or matrices, by indices in its second input."""


_UNKNOWN: Final = Op()

OPS: Final[dict[tuple[str, str], Op]] = {
    ("", "MatMul"): Op(product=forms.matmul),
    ("", "Gemm"): Op(product=forms.gemm),
    ("", "Einsum"): Op(product=einsum.read),
    ("", "Conv"): Op(product=convolutions.conv),
    ("", "ConvTranspose"): Op(product=convolutions.conv_transpose),
    (MICROSOFT, "FusedMatMul"): Op(product=forms.fused_matmul),
    (MICROSOFT, "TransposeMatMul"): Op(product=forms.fused_matmul),
    (MICROSOFT, "FusedMatMulActivation"): Op(product=forms.fused_matmul_activation),
    (MICROSOFT, "FusedGemm"): Op(product=forms.fused_gemm),
    (MICROSOFT, "Attention"): Op(product=forms.packed_attention),
    (MICROSOFT, "DecoderAttention"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "DecoderMaskedSelfAttention"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "GatedRelativePositionBias"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "GemmFastGelu"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "GemmFloat8"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "LongformerAttention"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "MoE"): Op(product=forms.opaque_fused_op),
    (MICROSOFT, "PackedAttention"): Op(product=forms.opaque_fused_op),
    ("", "Identity"): Op(view=views.identity),
    ("", "Transpose"): Op(view=views.transpose),
    ("", "Cast"): Op(view=views.cast),
    ("", "Reshape"): Op(view=views.reshape),
    ("", "Squeeze"): Op(view=views.reshape),
    ("", "Unsqueeze"): Op(view=views.reshape),
    ("", "Split"): Op(view=views.split),
    ("", "Slice"): Op(view=views.slice_),
    ("", "Expand"): Op(view=views.repeat),
    ("", "Tile"): Op(view=views.repeat),
    ("", "Gather"): Op(gathers=True),
    ("", "GatherND"): Op(gathers=True),
}
"""(domain, op type) -> row."""


def names(wanted: Callable[[Op], object]) -> frozenset[str]:
    """Returns the op types in the table for whose rows `wanted` is true."""
    return frozenset(name for (_, name), op in OPS.items() if wanted(op))


REPEATS: Final = names(lambda op: op.view is views.repeat)
"""The ops that may stand between a weight and its matmul if they only repeat it along leading dimensions."""

VIEW_OPS: Final = tuple(name for (_, name), op in OPS.items() if op.view is not None and name not in REPEATS)
"""The ops that may stand between a weight and its matmul."""

GATHERS: Final = names(lambda op: op.gathers)

READERS: Final = frozenset({*VIEW_OPS, *REPEATS, *GATHERS, "Constant", "Shape", "Concat"})
"""The ops that may be left over when a weight is replaced: views, and ops that compute the sizes of views."""

DEQUANTIZES: Final = frozenset({"DequantizeLinear", TRT_DEQUANTIZE})
"""The ops that dequantize: ONNX's, with any scale, and TensorRT's."""

_COMPUTES: Final = (
    *("DeformConv", "FusedConv", "NhwcConv", "NhwcFusedConv"),
    *("LSTM", "GRU", "RNN", "AttnLSTM"),
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention"),
    *("PackedMultiHeadAttention", "PagedAttention", "SparseAttention", "QAttention", "QMoE"),
    *("MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits"),
)
"""Further ops that multiply activations, in forms that the pass does not replace."""

ROLE_OPS: Final = RoleOps(
    compute=names(lambda op: op.product is not None).union(_COMPUTES),
    choices=frozenset({"TopK", "ArgMax"}),
    softmax=frozenset({"Softmax"}),
    # Slice and Split may be in two of the three places only: see `to_output` and `from_softmax`.
    views=frozenset({*VIEW_OPS, "Flatten"}) - {"Slice", "Split"},
    to_output=frozenset({"Slice", "Softmax", "LogSoftmax", "Sigmoid", "Split", "Gather"}),
    to_softmax=frozenset({"Add", "Sub", "Mul", "Div", "Where", "Clip", "Max", "Min", "Tanh", "Expand", "Concat"}),
    from_softmax=frozenset({"Dropout", "Where", "Mul", "Slice", "Split"}),
    affine=frozenset({"Add", "Sub", "Mul", "Div"}),
    add="Add",
    tanh="Tanh",
    multiply="Mul",
)


def op_of(domain: str, op_type: str) -> Op:
    """Returns the row of an op; an empty row for an unknown op."""
    return OPS.get(("" if domain in STANDARD else domain, op_type), _UNKNOWN)


def form_of(node: ir.Node, resolve: Resolve) -> Form | None:
    """Returns the form of a node that multiplies, or None."""
    read = op_of(node.domain, node.op_type).product
    if read is None or len(node.inputs) < 2 or None in node.inputs[:2]:
        return None
    return read(node, resolve)


def borders(node: ir.Node, inner: ir.Graph) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yields (value, the same value on the other side) for a control-flow node and one of its subgraphs."""
    skip = 1 if node.op_type == "Loop" else 0  # a Loop body's first output is its condition
    yield from zip(inner.outputs[skip:], node.outputs, strict=False)
    if is_op(node, "Loop", "Scan"):
        first = 2 * skip  # after the trip count and the condition
        carried = len(node.inputs) - (first or attribute(node, "num_scan_inputs", 0))
        taken = zip(node.inputs[first:], inner.inputs[first:], strict=False)
        yield from ((value, other) for value, other in taken if value is not None)
        yield from zip(inner.outputs[skip : skip + carried], inner.inputs[first:], strict=False)
