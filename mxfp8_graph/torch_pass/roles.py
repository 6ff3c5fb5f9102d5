"""Exported programs as `policy.roles` sees them: aten's op names by meaning, and a view of fx graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch.fx import Node

from mxfp8_graph.policy.roles import RoleOps
from mxfp8_graph.torch_pass import higher_order, internals
from mxfp8_graph.torch_pass.matmul_forms import FORMS
from mxfp8_graph.torch_pass.program import GraphScope, Program
from mxfp8_graph.torch_pass.static_operands import StaticOperands
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
        scope = self._program.scope_of(value)
        for user in value.users:
            if user.op == "output":
                yield from ((None, other) for other in _out_of(scope, value))
            elif higher_order.layout_of(user) is not None:
                inner = [s for s in self._program.scopes if s.call is user]
                for index, operand in enumerate(higher_order.operands(user)):
                    if operand is value:
                        yield from ((None, s.placeholders[index]) for s in inner)
            else:
                yield user, user

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


def _out_of(scope: GraphScope, node: Node) -> Iterator[Node]:
    """Yields the nodes that a subgraph's result becomes outside of it, and in a loop's next iteration."""
    if scope.call is None or (layout := higher_order.layout_of(scope.call)) is None:
        return
    # The condition of a while_loop returns one Boolean, which is no result of the call.
    if layout.looping and scope is not scope.siblings[layout.looping]:
        return
    for index, result in enumerate(scope.results):
        if result is node:
            yield from (u for u in scope.call.users if internals.op_name(u) == "getitem" and u.args[1] == index)
            if index < higher_order.carried_count(scope.call):
                yield from (sibling.placeholders[index] for sibling in scope.siblings)
