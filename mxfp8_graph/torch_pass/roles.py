"""What a matmul is for, read off the graphs around it: output projection, router, attention scores or values.

The rules are those of the ONNX front end, in aten's words: the same model gets the same roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch.fx import Node

from mxfp8_graph.policy.plan import Role
from mxfp8_graph.torch_pass.static_operands import StaticOperands
from mxfp8_graph.torch_program import higher_order, internals
from mxfp8_graph.torch_program.program import Program, Scope

_COMPUTE: Final = internals.op_names(
    "linear matmul mm addmm bmm baddbmm mv addmv einsum bilinear _grouped_mm transformers::grouped_mm_fallback "
    "scaled_dot_product_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention flex_attention "
    "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d lstm gru rnn_tanh rnn_relu "
    "mxfp8::gemm mxfp8::weight_gemm mxfp8::grouped_gemm mxfp8::linear_train"
)
"""Ops that consume activations: a matmul that feeds one of these is inside the model, not at its end."""

_VIEWS: Final = internals.op_names(
    "to _to_copy type_as view _unsafe_view reshape transpose swapaxes permute t numpy_T mT alias detach clone "
    "contiguous squeeze unsqueeze flatten unflatten getitem dropout"
)
_CHOICES: Final = internals.op_names("topk argmax sort argsort")
"""Ops whose result jumps when their input changes a little."""

_TO_OUTPUT: Final = (
    _VIEWS
    | _CHOICES
    | internals.op_names(
        "slice select narrow split split_with_sizes chunk unbind index_select gather "
        "softmax _softmax log_softmax _log_softmax sigmoid"
    )
)
"""What may stand between an output projection and the output, besides a bias add, a constant factor or a soft cap."""

_TO_SOFTMAX: Final = _VIEWS | internals.op_names(
    "add sub rsub mul div where masked_fill clamp clamp_min clamp_max maximum minimum tanh expand cat"
)
"""Between Q @ K^T and its softmax: scaling, masking, soft-capping, attention sinks."""

_FROM_SOFTMAX: Final = _VIEWS | internals.op_names(
    "native_dropout where masked_fill mul slice split split_with_sizes expand"
)
"""Between a softmax and its product with V."""

_SOFTMAX: Final = internals.op_names("softmax _softmax _safe_softmax")


class Roles:
    """Answers for the matmuls of one program."""

    def __init__(self, program: Program, constants: StaticOperands) -> None:
        self._program = program
        self._constants = constants
        self._feeds_compute: dict[Node, bool] = {}

    def of_linear(self, node: Node) -> Role:
        """Returns the role of a matmul with a static operand.

        An output projection's result reaches a user output passively and feeds no later matmul: the second condition
        tells an LM head from the key and value projections of a decoder that returns its cache. Of a router's result,
        the model chooses.
        """
        reached = list(self._passively_from(node))
        if any(result in self._program.outputs for result in reached) and not self._compute_below(node):
            return "output_projection"
        return "router" if any(_name(result) in _CHOICES for result in reached[1:]) else "linear"

    def of_product(self, node: Node) -> Role:
        """Returns the role of a matmul both of whose operands are computed at run time."""
        if self._leads_to_softmax(node, 0):
            return "attention_scores"
        if any(_comes_from_softmax(source, 0) for source in node.all_input_nodes[:2]):
            return "attention_values"
        return "product"

    def _next(self, node: Node) -> Iterator[tuple[Node | None, Node]]:
        """Yields (consumer, what it makes of `node`); the border of a subgraph is crossed with no consumer."""
        scope = self._program.scope_of(node)
        for user in node.users:
            if user.op == "output":
                yield from ((None, other) for other in self._out_of(scope, node))
            elif higher_order.layout_of(user) is not None:
                inner = [s for s in self._program.scopes if s.call is user]
                for index, operand in enumerate(higher_order.operands(user)):
                    if operand is node:
                        yield from ((None, s.placeholders[index]) for s in inner)
            else:
                yield user, user

    def _out_of(self, scope: Scope, node: Node) -> Iterator[Node]:
        """Yields what a subgraph's result is outside of it, and in a loop's next iteration."""
        if scope.call is None or (layout := higher_order.layout_of(scope.call)) is None:
            return
        if layout.looping and scope is not scope.siblings[layout.looping]:
            return
        for index, result in enumerate(scope.results):
            if result is node:
                yield from (u for u in scope.call.users if internals.op_name(u) == "getitem" and u.args[1] == index)
                if index < higher_order.carried_count(scope.call):
                    yield from (sibling.placeholders[index] for sibling in scope.siblings)

    def _passively_from(self, start: Node) -> Iterator[Node]:
        """Yields `start` and what it becomes through passive ops only."""
        stack, seen = [start], {start}
        while stack:
            node = stack.pop()
            yield node
            for consumer, result in self._next(node):
                if result not in seen and (consumer is None or self._is_passive(consumer, node)):
                    seen.add(result)
                    stack.append(result)

    def _is_passive(self, consumer: Node, node: Node) -> bool:
        if _name(consumer) == "tanh":  # a soft cap, if it is scaled up again; an activation otherwise
            return bool(consumer.users) and all(
                _name(user) == "mul" and self._is_affine(user, consumer) for user in consumer.users
            )
        return _name(consumer) in _TO_OUTPUT or self._is_affine(consumer, node)

    def _is_affine(self, consumer: Node, node: Node) -> bool:
        """Whether `consumer` adds a constant to `node` or scales it by one."""
        others = [source for source in consumer.all_input_nodes if source is not node]
        return _name(consumer) in {"add", "sub", "mul", "div"} and all(map(self._constants.is_constant, others))

    def _compute_below(self, start: Node) -> bool:
        """Whether any matmul-like node lies downstream of `start`."""
        stack, seen = [start], {start}
        while stack:
            node = stack.pop()
            if self._feeds_compute.get(node):
                self._feeds_compute[start] = True
                return True
            for consumer, result in self._next(node):
                if consumer is not None and _name(consumer) in _COMPUTE:
                    self._feeds_compute[start] = True
                    return True
                if result not in seen:
                    seen.add(result)
                    stack.append(result)
        return False

    def _leads_to_softmax(self, node: Node, depth: int) -> bool:
        if depth > 16:
            return False
        return any(
            _name(consumer) in _SOFTMAX
            or (_name(consumer) in _TO_SOFTMAX and self._leads_to_softmax(result, depth + 1))
            for consumer, result in self._next(node)
            if consumer is not None
        )


def _comes_from_softmax(node: Node, depth: int) -> bool:
    if depth > 16 or node.op != "call_function":
        return False
    if _name(node) in _SOFTMAX:
        return True
    return _name(node) in _FROM_SOFTMAX and any(_comes_from_softmax(s, depth + 1) for s in node.all_input_nodes)


def _name(node: Node) -> str:
    """Returns the op's name; an in-place op counts as the op it is the in-place form of."""
    name = internals.op_name(node)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
