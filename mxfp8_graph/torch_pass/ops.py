"""The ops that multiply (`FORMS`): which argument is which operand, and along which axis they contract.

`lookup_of` reads the ops whose ids pick rows of a table [V, D]: embedding, index_select, w[ids]. The ids are operand a,
the table is b [N, K]. A table has two axes: a vector has no rows, and a stack of matrices holds experts. embedding_bag
adds up rows: it is reported and never rewritten.

To support another op that multiplies, add a row to `FORMS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.roles import RoleOps
from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.operands import Static, StaticOperands, permutation
from mxfp8_graph.torch_pass.program import Program
from mxfp8_ops import contract

LINEAR_TRAIN: Final = "mxfp8::linear_train"
GROUPED_TRAIN: Final = "mxfp8::grouped_linear_train"
ATTENTION: Final = "scaled_dot_product_attention"
_GROUPED: Final = ("grouped_mm", "grouped_mm_fallback")
"""Ends of the names of ops that run one matmul per group of rows, each group with its own weight."""
_FUSED_ATTENTION: Final = "_scaled_dot_product_"
"""Start of the names of the kernels that attention becomes once decomposed."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One matmul as its node states it: alpha * a @ b + beta * c."""

    a: Node
    """[..., M, K]."""
    b: Node
    b_transposed: bool = True
    """`b` is [..., K, N] instead of [..., N, K]."""
    c: Node | None = None
    """The op's own addend."""
    alpha: float = 1.0
    beta: float = 1.0
    offs: Node | None = None
    """int [E]: the end of the rows of `a` that each matrix of `b` multiplies; None if all rows meet one matrix."""


@dataclass(frozen=True)
class Arguments:
    """Names of an op's operands; `b_transposed` says that b is [..., K, N]."""

    a: str
    b: str
    c: str | None = None
    b_transposed: bool = True


FORMS: Final = {
    "linear": Arguments("input", "weight", "bias", b_transposed=False),
    LINEAR_TRAIN: Arguments("x", "weight", "bias", b_transposed=False),
    "matmul": Arguments("self", "other"),
    "mm": Arguments("self", "mat2"),
    "bmm": Arguments("self", "mat2"),
    "mv": Arguments("self", "vec"),
    "addmm": Arguments("mat1", "mat2", "self"),
    "baddbmm": Arguments("batch1", "batch2", "self"),
}
"""The ops that multiply two matrices, by name; see `Form` for a, b and c."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One side of the product."""

    node: Node
    transposed: bool = False
    """The static operand is [..., K, N] instead of [..., N, K]."""
    static: Static | None = None
    perm: tuple[int, ...] | None = None
    """Permutation that brings K of a run-time operand to the end; None if it is there."""

    @property
    def rank(self) -> int:
        """Number of axes of the operand."""
        return len(self.static.shape) if self.static else int(self.node.meta["val"].dim())

    @property
    def shape(self) -> Sequence[Any]:
        """Sizes with K last."""
        if self.static is not None:
            return k_last(self.static.shape, self.transposed)
        sizes = self.node.meta["val"].shape
        return sizes if self.perm is None else [sizes[axis] for axis in self.perm]


def form_of(node: Node) -> Form | None:
    """Returns the operands and factors of `node`, or None if it does not multiply."""
    op = internals.op_name(node)
    operands: list[Any]
    rest: dict[str, Any]
    if op.endswith(_GROUPED) or op == GROUPED_TRAIN:
        operands = list(node.args[:2])
        rest = {"offs": internals.argument(node, "offs"), "b_transposed": op != GROUPED_TRAIN}
    elif names := FORMS.get(op):
        operands = [internals.argument(node, name) for name in (names.a, names.b)]
        alpha, beta = (float(internals.argument(node, name, 1)) for name in ("alpha", "beta"))
        # With beta = 0 torch ignores c, even a NaN in it.
        c = internals.argument(node, names.c) if names.c and beta else None
        rest = {"b_transposed": names.b_transposed, "c": c, "alpha": alpha, "beta": beta}
    else:
        return None
    if any(_value(each) is None for each in (*operands, node)):
        return None
    return Form(a=operands[0], b=operands[1], **rest)


def operands_of(form: Form, statics: StaticOperands) -> tuple[Operand, Operand, bool]:
    """Returns (the activation, the weight, whether the weight came first so that the product is transposed)."""
    left, right = statics.resolve(form.a), statics.resolve(form.b)
    # Y^T = X^T @ W^T: a weight that comes first is the second operand of the transposed product.
    if left is not None and right is None:
        x = run_time(form.b, form.b_transposed)
        return x, _static(form.a, left, False), x.rank != 1  # matrix times vector is a vector: nothing to swap back
    if right is not None:
        return run_time(form.a, False), _static(form.b, right, form.b_transposed), False
    return run_time(form.a, False), run_time(form.b, form.b_transposed), False


def is_attention(node: Node) -> bool:
    """Whether `node` holds the two products of attention."""
    op = internals.op_name(node)
    return op == ATTENTION or (op.startswith(_FUSED_ATTENTION) and not op.endswith("backward"))


def _static(node: Node, static: Static, transposed: bool) -> Operand:
    """Returns a static operand without leading dimensions of 1."""
    # A leading 1 only broadcasts; without it the weight is a plain matrix, which every gemm takes.
    while len(static.shape) > 2 and static.shape[0] == 1 and static.gather is None:
        static = static.first()
    return Operand(node=node, transposed=transposed, static=static)


def run_time(node: Node, transposed: bool) -> Operand:
    """Returns an operand that a run computes, with its permutation to K last, which includes a transpose before it."""
    rank = node.meta["val"].dim()
    if not transposed or rank < 2:
        return Operand(node=node)
    before = permutation(node, rank)
    if before is None:
        return Operand(node=node, perm=k_last(range(rank)))
    perm = k_last(before)
    return Operand(node=node.all_input_nodes[0], perm=None if perm == tuple(range(rank)) else perm)


_BAGS: Final = internals.op_names("embedding_bag _embedding_bag _embedding_bag_forward_only")
_RENORM: Final = "embedding_renorm"
"""Scales rows of a table down to max_norm; its in-place form writes to the table."""


@dataclass(frozen=True, kw_only=True)
class Lookup(Form):
    """A node whose ids pick rows of a table."""

    unfit: str | None
    """The reason why the lookup cannot be rewritten, or None."""


def lookup_of(node: Node, statics: StaticOperands) -> Lookup | None:
    """Returns the ids and the table if `node` looks up rows of a stored table, or None."""
    table, ids = _operands(node)
    rows, picks = _value(table), _value(ids)
    if rows is None or rows.dim() != 2 or not rows.is_floating_point():
        return None
    if picks is None or picks.dtype not in {torch.int32, torch.int64}:
        return None
    # embedding_renorm writes to the table, so a packed copy would miss its changes.
    renormed = internals.op_name(table) == _RENORM
    # A table that is computed from inputs is an activation, so its lookup is no site.
    if not (renormed or statics.is_constant(table) or statics.writer_of(table)):
        return None
    unfit = None
    if renormed:
        unfit = "its table is changed by embedding_renorm (max_norm) while the program runs; expected it fixed"
    elif internals.op_name(node) in _BAGS:
        unfit = "an EmbeddingBag adds up the rows it picks; expected an Embedding, and a sum after it"
    elif statics.is_constant(ids):
        unfit = "its ids are constant; fold the constants of the model first"
    return Lookup(a=ids, b=table, b_transposed=False, unfit=unfit)


def _operands(node: Node) -> tuple[Any, Any]:
    """Returns the table and the ids of an op that picks along the first axis, or (None, None)."""
    op = internals.op_name(node)
    if op == "embedding" or op in _BAGS:
        return internals.argument(node, "weight"), internals.argument(node, "indices")
    if op == "index_select" and internals.argument(node, "dim") == 0:
        return internals.argument(node, "self"), internals.argument(node, "index")
    if op == "index":
        # Several indices pick single elements of the table, not rows.
        ids, *rest = internals.argument(node, "indices")
        return (None, None) if any(rest) else (internals.argument(node, "self"), ids)
    return None, None


def _value(node: Any) -> torch.Tensor | None:
    """Returns the fake value of a node that makes one tensor, or None."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


# --- Roles ---------------------------------------------------------------------------------------------------------

ROLE_OPS: Final = RoleOps(
    compute=contract.TORCH_GEMMS
    | FORMS.keys()
    | internals.op_names(
        "mxfp8::conv addmv einsum bilinear _grouped_mm transformers::grouped_mm_fallback "
        "scaled_dot_product_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention flex_attention "
        "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "lstm gru rnn_tanh rnn_relu"
    ),
    choices=internals.op_names("topk argmax sort argsort"),
    softmax=internals.op_names("softmax _softmax _safe_softmax"),
    views=internals.op_names(
        "to _to_copy type_as view _unsafe_view reshape transpose swapaxes permute t numpy_T mT alias detach clone "
        "contiguous squeeze unsqueeze flatten unflatten getitem dropout"
    ),
    to_output=internals.op_names(
        "slice select narrow split split_with_sizes chunk unbind index_select gather "
        "softmax _softmax log_softmax _log_softmax sigmoid"
    ),
    to_softmax=internals.op_names(
        "add sub rsub mul div where masked_fill clamp clamp_min clamp_max maximum minimum tanh expand cat"
    ),
    from_softmax=internals.op_names("native_dropout where masked_fill mul slice split split_with_sizes expand"),
    affine=internals.op_names("add sub mul div"),
    add="add",
    tanh="tanh",
    multiply="mul",
)


class TorchView:
    """The graphs of one program as a `policy.roles.GraphView`. A node is both an op and the value it makes."""

    def __init__(self, program: Program, statics: StaticOperands) -> None:
        self.is_constant = statics.is_constant
        self._program = program

    def consumers(self, value: Node) -> Iterator[tuple[Node | None, Node]]:
        """See `GraphView`."""
        yield from ((user, user) for user in value.users if user.op != "output")

    def producer(self, value: Any) -> Node | None:
        """See `GraphView`."""
        # Placeholders, and numbers among the operands, have no producer.
        return value if isinstance(value, Node) and value.op == "call_function" else None

    def operands(self, op: Node) -> Sequence[Any]:
        """See `GraphView`; numbers are operands too."""
        return (*op.args, *op.kwargs.values())

    def name(self, op: Node) -> str:
        """See `GraphView`; an in-place op (add_) has the name of its functional form."""
        name = internals.op_name(op)
        return name[:-1] if name.endswith("_") and not name.endswith("__") else name

    def is_model_output(self, value: Node) -> bool:
        """See `GraphView`."""
        return value in self._program.outputs
