"""Reads how each op multiplies: its operands, the axis that it contracts, and its further steps.

MatMul(a [..., M, K], b [..., K, N])
Gemm(a, b, c, transA, transB, alpha, beta)
FusedMatMul(a, b, transA, transB, transBatchA, transBatchB, alpha); TransposeMatMul, its older name
FusedMatMulActivation, FusedGemm        the same, and an activation, which becomes a node of its own
Attention of com.microsoft              one weight [K, 3 * N] for Q, K and V, and the attention behind it
Einsum                                  see `einsum.py`

A reader returns a `Form`; `ops.py` says which op has which reader. The fused ops are what ONNX Runtime's optimizer
makes of the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import MICROSOFT, attribute, shape_of
from mxfp8_graph.onnx_pass.views import Static


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The steps on an operand before the product: its axes are permuted, then it is reshaped."""

    perm: tuple[int, ...] | None = None
    """Permutation of all axes; None if they stay."""
    shape: tuple[int, ...] | None = None
    """As Reshape takes it: 0 leaves a dimension as it is. None if it stays."""

    def shape_after(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the shape that a tensor of `shape` has after these steps."""
        if self.perm is not None:
            shape = tuple(shape[axis] for axis in self.perm)
        if self.shape is not None:
            shape = tuple(size or shape[axis] for axis, size in enumerate(self.shape))
        return shape


AS_IS = Layout()


@dataclass(frozen=True, kw_only=True)
class EpilogueNode:
    """A node behind a product. Its inputs are all outputs of the step before, and then `inputs`."""

    op: str
    inputs: tuple[ir.Value | ir.TensorProtocol | tuple[ir.Value, float] | None, ...] = ()
    """Values, constants, or (value, factor): a value times a number."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1


@dataclass(frozen=True, kw_only=True)
class Form:
    """One matmul as its node states it: alpha * a @ b + beta * c, and then the steps `after`."""

    a: ir.Value
    b: ir.Value
    a_layout: Layout = AS_IS
    b_layout: Layout = AS_IS
    a_transposed: bool = False
    """After `a_layout`, `a` is [..., K, M] instead of [..., M, K]."""
    b_transposed: bool = True
    """After `b_layout`, `b` is [..., K, N] instead of [..., N, K]."""
    c: ir.Value | None = None
    """The input that the op itself adds."""
    alpha: float = 1.0
    beta: float = 1.0
    rank: int | None = None
    """Rank of both operands, where the op allows only one."""
    absorbs_add: bool = True
    """Whether the gemm may take over the bias of an Add after the op."""
    after: tuple[EpilogueNode, ...] = ()
    """Further steps of the op after the sum."""
    blocker: str | None = None
    """The reason why the op cannot be rewritten, or None."""


@dataclass(frozen=True, kw_only=True)
class Lookup(Form):
    """A node that multiplies nothing: `a` are ids, which pick rows of the table `b`."""

    b_transposed: bool = False
    absorbs_add: bool = False


Resolve = Callable[[ir.Value | None], Static | None]
"""Returns a value as stored data and views, or None if it is computed while the model runs."""

Reader = Callable[[ir.Node, Resolve], Form | None]
"""Returns the form of a node whose first two inputs are present; None if the node does not multiply."""

ACTIVATIONS: Final[Mapping[str, frozenset[str]]] = {
    "Elu": frozenset({"alpha"}),
    "HardSigmoid": frozenset({"alpha", "beta"}),
    "LeakyRelu": frozenset({"alpha"}),
    "Relu": frozenset(),
    "Selu": frozenset({"alpha", "gamma"}),
    "Sigmoid": frozenset(),
    "Softplus": frozenset(),
    "Softsign": frozenset(),
    "Tanh": frozenset(),
    "ThresholdedRelu": frozenset({"alpha"}),
}
"""The standard ops that ONNX Runtime fuses into a product, and the attributes of each."""


def first_two(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Returns the first two inputs of a node that has them."""
    a, b = cast("Sequence[ir.Value]", node.inputs[:2])
    return a, b


def optional(node: ir.Node, index: int) -> ir.Value | None:
    """Returns an input of a node, or None if it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def matmul(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of MatMul."""
    a, b = first_two(node)
    return Form(a=a, b=b)


def gemm(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of Gemm."""
    beta = float(attribute(node, "beta", 1.0))
    return replace(_transposable(node), c=optional(node, 2), beta=beta, rank=2, absorbs_add=False)


def fused_matmul(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of FusedMatMul and TransposeMatMul."""
    form = _transposable(node)
    a_layout, b_layout = _batch_first(form.a, node, "transBatchA"), _batch_first(form.b, node, "transBatchB")
    if a_layout is None or b_layout is None:
        return replace(form, blocker="its operands' axes are permuted and a rank is unknown; give it shape information")
    return replace(form, a_layout=a_layout, b_layout=b_layout)


def fused_matmul_activation(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of FusedMatMulActivation."""
    # Its activation comes between the product and an Add after the op.
    return _activated(replace(fused_matmul(node, resolve), absorbs_add=False), node)


def fused_gemm(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of FusedGemm."""
    return _activated(gemm(node, resolve), node)


def opaque_fused_op(node: ir.Node, resolve: Resolve) -> Form | None:
    """Returns a blocked form for a fused op that multiplies by a static operand; None without such an operand."""
    statics = ((value, resolve(value)) for value in node.inputs[1:] if value is not None)
    weight = next((value for value, static in statics if static and len(static.shape) > 1), None)
    if weight is None:
        return None
    reason = (
        f"{node.op_type} multiplies by it in a fused node; expected MatMul nodes; "
        "optimize the model without that fusion"
    )
    return Form(a=first_two(node)[0], b=weight, blocker=reason)


def _transposable(node: ir.Node) -> Form:
    """Returns the product of an op with transA, transB and alpha."""
    a, b = first_two(node)
    return Form(
        a=a,
        b=b,
        a_transposed=bool(attribute(node, "transA", 0)),
        b_transposed=not attribute(node, "transB", 0),
        alpha=float(attribute(node, "alpha", 1.0)),
    )


def _batch_first(value: ir.Value, node: ir.Node, name: str) -> Layout | None:
    """Returns the layout from [M, batch..., K] to [batch..., M, K] if the attribute is set; None if rank is unknown."""
    if not attribute(node, name, 0):
        return AS_IS
    shape = shape_of(value)
    if shape is None:
        return None
    rank = len(shape)
    return Layout(perm=(*range(1, rank - 1), 0, rank - 1)) if rank > 2 else AS_IS


def _activated(form: Form, node: ir.Node) -> Form:
    """Returns `form`, followed by the activation that the op names."""
    op = attribute(node, "activation", "")
    if not op:
        return form
    if op not in ACTIVATIONS:
        return replace(form, blocker=f"its activation {op!r} is not known; expected one of {', '.join(ACTIVATIONS)}")
    known = ((name, node.attributes.get(f"activation_{name}")) for name in ACTIVATIONS[op])
    attributes = {name: entry.value for name, entry in known if entry is not None}
    return replace(form, after=(EpilogueNode(op=op, attributes=attributes),))


# --- com.microsoft Attention ---
#
#     Attention(x, w, b, mask, , bias) -> MultiHeadAttention(*Split(gemm(x, packed w, b)), , mask, bias)
#
# ONNX Runtime computes both with the same kernels, so for the same Q, K and V the results are equal to the bit.

_KEPT: Final = ("num_heads", "unidirectional", "mask_filter_value", "scale")
"""The attributes that mean the same to MultiHeadAttention."""

_CACHE: Final = "it keeps keys and values of past tokens in a packed tensor; expected a model without past and present"


def packed_attention(node: ir.Node, resolve: Resolve) -> Form:
    """Returns the form of Attention; it is blocked where MultiHeadAttention computes something else."""
    x, w = first_two(node)
    bias, mask, past, attention_bias, past_length = (optional(node, index) for index in range(2, 7))
    static = resolve(w)
    sizes = _qkv_sizes(node, static.shape if static is not None else ())
    present = len(node.outputs) > 1 and bool(node.outputs[1].name)
    obstacle = None
    if past is not None or past_length is not None or present or attribute(node, "past_present_share_buffer", 0):
        obstacle = _CACHE
    elif attribute(node, "do_rotary", 0):
        obstacle = "it rotates positions (do_rotary), which MultiHeadAttention does not; expected none"
    elif mask is not None:
        obstacle = _mask_obstacle(mask, x)
    if static is None:
        obstacle = "its weight is computed while the model runs; expected a stored one"
    elif obstacle is None and sizes is None:
        obstacle = f"its heads do not divide its weight {list(static.shape)}; correct the model"
    attributes = {name: node.attributes[name].value for name in _KEPT if name in node.attributes}
    lengths = ir.tensor(sizes or (0, 0, 0), ir.DataType.INT64)
    after = (
        EpilogueNode(op="Split", inputs=(lengths,), attributes={"axis": -1}, outputs=3),
        EpilogueNode(
            op="MultiHeadAttention", inputs=(None, mask, attention_bias), attributes=attributes, domain=MICROSOFT
        ),
    )
    return Form(a=x, b=w, c=bias, absorbs_add=False, after=after, blocker=obstacle)


def _qkv_sizes(node: ir.Node, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the numbers of columns of the weight for Q, K and V, or None if they contradict its shape."""
    heads = attribute(node, "num_heads", 0)
    if len(shape) != 2 or heads < 1:
        return None
    sizes = tuple(attribute(node, "qkv_hidden_sizes", None) or [shape[1] // 3] * 3)
    # Q and K are multiplied with each other, so they have one width; V may have another.
    if len(sizes) != 3 or sum(sizes) != shape[1] or sizes[0] != sizes[1]:
        return None
    return sizes if all(size > 0 and size % heads == 0 for size in sizes) else None


def _mask_obstacle(mask: ir.Value, x: ir.Value) -> str | None:
    """Returns the reason why a mask means something else to MultiHeadAttention, or None.

    Both know one length per sequence [B], and one value per key [B, S] or per query and key [B, S, S]. Only Attention
    knows a first and a last position [2 * B] and [B, 1, most, most].
    """
    shape, x_shape, maker = shape_of(mask), shape_of(x), mask.producer()
    rank = None if shape is None else len(shape)
    if rank in (2, 3) or (maker is not None and maker.op_type == "EmbedLayerNormalization"):
        return None
    # [2 * B] has rank 1 as well: only a size equal to the batch's tells them apart.
    if rank == 1 and x_shape and shape and shape[0] is not None and shape[0] == x_shape[0]:
        return None
    kind = "of unknown rank" if shape is None else f"of shape {list(shape)}"
    return f"its mask is {kind}; expected one of shape [batch], [batch, keys] or [batch, queries, keys]"
