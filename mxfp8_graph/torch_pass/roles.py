"""Exported programs as `policy.roles` sees them: aten's op names by meaning, and a view of fx graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch.fx import Node

from mxfp8_graph.policy.roles import RoleOps
from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.matmul_forms import FORMS
from mxfp8_graph.torch_pass.program import Program
from mxfp8_graph.torch_pass.static_operands import COPIES, CUTS, LAYOUTS, StaticOperands
from mxfp8_ops import contract

ROLE_OPS: Final = RoleOps(
    compute=contract.TORCH_GEMMS
    | FORMS.keys()
    | internals.op_names(
        "addmv einsum bilinear _grouped_mm transformers::grouped_mm_fallback "
        "scaled_dot_product_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention flex_attention "
        "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "lstm gru rnn_tanh rnn_relu"
    ),
    choices=internals.op_names("topk argmax sort argsort"),
    softmax=internals.op_names("softmax _softmax _safe_softmax"),
    views=COPIES | LAYOUTS | {"dropout"},
    to_output=CUTS | internals.op_names("index_select gather softmax _softmax log_softmax _log_softmax sigmoid"),
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
