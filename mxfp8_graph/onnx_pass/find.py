"""Finds the matmuls of an ONNX model and describes each as a `MatMulSite`.

Every form is read as the nodes compute it, Y [..., M, N] = X [..., M, K] @ W [..., N, K] transposed:

    MatMul(X, w [K, N])                 W = w^T
    MatMul(w [N, K], X)                 Y^T = X^T @ w^T: operands and result swapped
    Gemm(X, w, C), transA transB alpha beta
    Add(MatMul(X, w), b [N])            the gemm adds the bias; likewise the bias of BiasGelu
    Einsum(X, w), equation              one operand permuted, axes merged: see `einsum.py`
    FusedMatMul, FusedGemm, Attention   ONNX Runtime's own ops: see `forms.py`
    MatMul(X, Gather(w [E, K, N], i))   experts, picked while the model runs: see `operands.py`
    MatMul(Q, K^T), MatMul(softmax, V)  both operands computed at run time
    Conv, ConvTranspose                 pixels times taps: see `convolutions.py`
    Gather(w [N, K], ids)               rows picked, nothing multiplied
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.naming import reserve_name
from mxfp8_graph.onnx_pass.convolutions import Affine, Convolution, Floats, affine_behind, packed_weight
from mxfp8_graph.onnx_pass.forms import AS_IS, EpilogueNode, Form, Lookup
from mxfp8_graph.onnx_pass.graph import (
    MICROSOFT,
    NAME_SCOPES,
    dtype_of,
    is_op,
    is_overridable,
    label,
    module_of,
    shape_of,
    subgraphs_of,
)
from mxfp8_graph.onnx_pass.operands import Operand, Operands, is_decoded, origin_of, source_of
from mxfp8_graph.onnx_pass.ops import DEQUANTIZES, ROLE_OPS, VIEW_OPS, borders, form_of
from mxfp8_graph.onnx_pass.views import Static
from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Dim, MatMulSite, Role
from mxfp8_graph.policy.roles import Roles
from mxfp8_ops import contract


@dataclass(frozen=True, kw_only=True)
class Addend:
    """The addend of a product: a bias that the gemm adds, or C, which a node of its own adds."""

    bias: Static | None = None
    """The gemm adds it, times beta."""
    node: ir.Node | None = None
    """The Add or BiasGelu node that the bias came from, which goes away."""
    addend: ir.Value | None = None
    """C where the gemm cannot add it: a node of its own adds it, times beta."""
    after: tuple[EpilogueNode, ...] = ()
    """Further steps of `node` after the sum."""
    output: ir.Value
    """The sum."""


@dataclass(frozen=True, kw_only=True)
class OnnxSite:
    """A matmul: its description for `plan`, and the nodes and operands for `replace.py`."""

    matmul: MatMulSite
    node: ir.Node
    form: Form
    x: Operand
    w: Operand
    dtype: int
    """onnx.TensorProto.DataType of activations and result."""
    swapped: bool = False
    """The gemm computes the transpose of the result."""
    added: Addend
    affine: Affine | None = None
    """The steps behind a convolution; None for other sites."""

    @property
    def factor(self) -> float | Floats:
        """The factor of the weight, or one for each row of a matrix."""
        if self.affine is None or self.affine.factors is None or self.w.static is None:
            return self.form.alpha
        return np.repeat(self.affine.factors, self.w.static.shape[0] // self.affine.factors.size)

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes that go away if the site is replaced."""
        behind = (self.added.node,) if self.affine is None else self.affine.nodes
        return tuple(node for node in (self.node, *behind) if node is not None)


def find_sites(model: ir.Model) -> list[OnnxSite]:
    """Returns every matmul of the model and its subgraphs, in graph order, each with its role or blocker."""
    operands = Operands(model)
    nodes = (node for graph in model.graphs() for node in graph)
    read = ((node, form_of(node, operands.static) or operands.lookup_of(node)) for node in nodes)
    # All forms before the first site: a site says how many others use its weight.
    matmuls = [(node, form) for node, form in read if form]
    finder = _Finder(model, operands, [form for _, form in matmuls])
    return [finder.describe(*matmul) for matmul in matmuls]


def _paths(graph: ir.Graph, path: str, taken: set[str]) -> Iterator[tuple[ir.Graph, str]]:
    """Yields a graph and every subgraph with its path: the names of nodes and attributes down to it, unique."""
    yield graph, path
    for node in graph:
        for name, entry in node.attributes.items():
            several = entry.type == ir.AttributeType.GRAPHS
            inner = entry.as_graphs() if several else [entry.value] if entry.type == ir.AttributeType.GRAPH else []
            for index, below in enumerate(inner):
                steps = (path, label(node), f"{name}[{index}]" if several else name)
                yield from _paths(below, reserve_name("/".join(filter(None, steps)), taken, "#"), taken)


class _View:
    """The graphs of one model as a `policy.roles.GraphView`, which documents the methods."""

    def __init__(self, model: ir.Model, operands: Operands) -> None:
        self.is_constant = operands.is_constant
        self._outputs = set(model.graph.outputs)
        self._across: dict[ir.Value, list[ir.Value]] = {}
        """Value -> the same value on the other side of a subgraph's border."""
        for graph in model.graphs():
            for node in graph:
                for inner in subgraphs_of(node):
                    for start, end in borders(node, inner):
                        self._across.setdefault(start, []).append(end)

    def consumers(self, value: ir.Value) -> Iterator[tuple[ir.Node | None, ir.Value]]:
        for node, _ in value.uses():
            for output in node.outputs:
                yield node, output
        for other in self._across.get(value, ()):
            yield None, other

    def producer(self, value: ir.Value) -> ir.Node | None:
        return value.producer()

    def operands(self, op: ir.Node) -> Sequence[ir.Value]:
        return [value for value in op.inputs if value is not None]

    def name(self, op: ir.Node) -> str:
        return op.op_type

    def is_model_output(self, value: ir.Value) -> bool:
        return value in self._outputs


class _Finder:
    def __init__(self, model: ir.Model, operands: Operands, forms: Sequence[Form]) -> None:
        """`forms` has the forms of all matmuls, to count the users of each weight."""
        self._operands = operands
        self._roles = Roles(_View(model, operands), ROLE_OPS)
        self._paths = dict(_paths(model.graph, "", set()))
        self._names: set[str] = set()
        weights = map(operands.weight_of, forms)
        self._uses = Counter(weight.value for weight in weights if weight)

    def describe(self, node: ir.Node, form: Form) -> OnnxSite:
        """Returns the site of one matmul, or of one lookup in a table."""
        return self._DESCRIBE[type(form)](self, node, form)

    def _product(self, node: ir.Node, form: Form) -> OnnxSite:
        x, w, swapped = self._operands.operands_of(form)
        sizes = (None, None, None) if form.blocker else eligibility.sizes(x.shape, w.shape)
        dtype = w.static.dtype if w.static else dtype_of(form.a) or dtype_of(form.b)
        # After a swap a bias would be one value per row of the gemm's result; a grouped gemm has no bias.
        absorbed = None if swapped or w.picked else self._absorbed(node, form, sizes[1], dtype)
        added = absorbed or Addend(addend=form.c, output=node.outputs[0])
        matmul = self._site(
            node,
            w,
            dtype,
            role=self._role(node, form, w),
            sizes=sizes,
            weight_factor=form.alpha,
            has_bias=added.bias is not None,
            blocker=self._blocker(form, x, w, swapped, dtype) or _repeat_blocker(form, x, w, node.outputs[0]),
        )
        return OnnxSite(matmul=matmul, node=node, form=form, x=x, w=w, dtype=dtype, swapped=swapped, added=added)

    def _lookup(self, node: ir.Node, form: Form) -> OnnxSite:
        static, shape = self._operands.static(form.b), shape_of(form.a)
        # The last axis of GatherND's ids holds one index, of size 1.
        lead = shape[:-1] if shape is not None and node.op_type == "GatherND" else shape
        x = Operand(value=form.a, rank=None if lead is None else len(lead), shape=lead)
        w = Operand(value=form.b, rank=2, shape=static.shape if static else shape_of(form.b), static=static)
        dtype = static.dtype if static else dtype_of(form.b)
        unfit = form.blocker or (None if static else self._weight_blocker(form.b))
        sizes = [None if lead is None else eligibility.rows(lead), *(eligibility.rows([n]) for n in w.shape or ())]
        blocker = unfit or eligibility.dtype_blocker(_dtype_name(dtype), "cast the model first")
        matmul = self._site(node, w, dtype, role="embedding", sizes=sizes, blocker=blocker)
        added = Addend(output=node.outputs[0])
        return OnnxSite(matmul=matmul, node=node, form=form, x=x, w=w, dtype=dtype, added=added)

    def _convolution(self, node: ir.Node, form: Convolution) -> OnnxSite:
        static, bias = self._operands.static(form.b), self._operands.static(form.c)
        dtype = static.dtype if static else dtype_of(form.a)
        blocker = form.blocker or eligibility.dtype_blocker(_dtype_name(dtype), "cast the model first")
        shape: tuple[int, ...] = ()
        affine = None
        if static is None or static.repeated_axes:
            blocker = blocker or self._weight_blocker(form.b) or "its weight is computed; expected a stored one"
            static = None
        elif not (blocker := blocker or eligibility.convolution_blocker(static.shape, form.group, bool(form.phases))):
            static, shape = packed_weight(static, form)
            outputs = shape[0] // math.prod(form.phases)
            if bias is not None and bias.shape != (outputs,):
                blocker = f"its bias has shape {list(bias.shape)}; expected [{outputs}]"
            else:
                affine = affine_behind(node, form, outputs, self._operands.static)
        if form.c is not None and bias is None:
            blocker = blocker or "its bias is computed; expected a stored one"
        x_shape, y_shape = shape_of(form.a), shape_of(node.outputs[0])
        rank = None if x_shape is None else len(x_shape)
        perm = None if rank is None else (0, *range(2, rank), 1)  # blocks are along the channels
        x = Operand(value=form.a, rank=rank, shape=x_shape, perm=perm)
        w = Operand(value=form.b, rank=len(shape), shape=shape, static=static)
        pixels = None if y_shape is None else eligibility.rows([*y_shape[:1], *y_shape[2:]])
        sizes = (pixels, shape[0], math.prod(shape[1:])) if shape else (pixels, None, None)
        matmul = self._site(
            node, w, dtype, role="convolution", sizes=sizes, has_bias=form.c is not None, blocker=blocker
        )
        added = Addend(output=affine.output if affine else node.outputs[0])
        factor = math.nan if affine is not None and affine.factors is not None else 1.0
        matmul = replace(matmul, weight_shape=shape, weight_factor=factor)
        return OnnxSite(matmul=matmul, node=node, form=form, x=x, w=w, dtype=dtype, added=added, affine=affine)

    _DESCRIBE: Final[Mapping[type[Form], Callable[..., OnnxSite]]] = {
        Form: _product,
        Lookup: _lookup,
        Convolution: _convolution,
    }
    """Form -> the function that describes its site, as `_NODES` of replace.py has the one that makes its node."""

    def _site(self, node: ir.Node, w: Operand, dtype: int, *, sizes: Sequence[Dim], **more: Any) -> MatMulSite:
        m, n, k = sizes
        return MatMulSite(
            name=reserve_name(node.name or f"{node.op_type}_{node.outputs[0].name}", self._names, "#"),
            op=node.op_type,
            module=module_of(node.metadata_props.get(NAME_SCOPES, "")),
            subgraph=self._paths[node.graph] if node.graph is not None else "",
            m=m,
            n=n,
            k=k,
            dtype=_dtype_name(dtype),
            weight=w.static.name if w.static else None,
            weight_shape=k_last(w.static.shape, w.transposed) if w.static else (),
            weight_bytes=w.static.byte_size if w.static else 0,
            shared_with=self._uses[w.static.value] - 1 if w.static else 0,
            **more,
        )

    def _role(self, node: ir.Node, form: Form, w: Operand) -> Role:
        if w.static is None:
            return self._roles.of_product(node.outputs[0])
        # The op's own further steps come between the product and the next node.
        passive = ROLE_OPS.views | ROLE_OPS.to_output
        return self._roles.of_linear(node.outputs[0]) if all(s.op in passive for s in form.after) else "linear"

    def _absorbed(self, node: ir.Node, form: Form, n: Dim, dtype: int) -> Addend | None:
        """Returns the op's own c, or the static operand of a following Add, if the gemm can add it exactly."""
        product = output = node.outputs[0]
        c, add = form.c, None
        after: tuple[EpilogueNode, ...] = ()
        if c is None:
            add = next((user for user, _ in product.uses()), None)
            # Another user of the product, or the caller, needs it without the bias.
            if add is None or len(product.uses()) > 1 or product.is_graph_output() or not form.absorbs_add:
                return None
            # ONNX Runtime's optimizer fuses an Add to the product and a Gelu into BiasGelu.
            is_bias_gelu = (add.domain, add.op_type) == (MICROSOFT, "BiasGelu") and add.inputs[0] is product
            if add.graph is not node.graph or not (is_op(add, "Add") or is_bias_gelu):
                return None
            after = () if is_op(add, "Add") else (EpilogueNode(op="Gelu"),)
            c = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
            output = add.outputs[0]
        bias = self._operands.static(c)
        shape = shape_of(product)
        rank = form.rank or len(shape or (n,))
        if bias is None or bias.repeated_axes or bias.dtype != dtype or not isinstance(n, int):
            return None
        if not eligibility.is_bias(bias.shape, _dtype_name(bias.dtype), n=n, rank=rank):
            return None
        return Addend(bias=bias, node=add, output=output, after=after)

    def _blocker(self, form: Form, x: Operand, w: Operand, swapped: bool, dtype: int) -> str | None:
        """Returns the reason why no recipe can rewrite a site, or None."""
        if w.static and self._operands.is_constant(form.a) and self._operands.is_constant(form.b):
            return eligibility.BOTH_CONSTANT
        if reason := form.blocker:
            return reason
        if reason := eligibility.dtype_blocker(_dtype_name(dtype), "cast the model or give it shape information"):
            return reason
        if w.static is None:
            reasons = filter(None, map(self._weight_blocker, (form.a, form.b)))
            unknown = x.rank is None or w.rank is None or min(x.rank, w.rank) < 2
            low = "an operand's rank is unknown or below 2; give the model shape information"
            return next(reasons, low if unknown else None)
        if reason := eligibility.weight_blocker(w.static.shape):
            return reason
        # The indices of experts belong to the axes before M, so those must be known.
        if w.picked and (x.rank is None or x.rank < 2):
            return "the activation's rank is unknown or below 2; give the model shape information"
        if x.rank is None and (x.transposed or swapped):
            return "the activation must be transposed and its rank is unknown; give the model shape information"
        return None

    def _weight_blocker(self, value: ir.Value) -> str | None:
        """Returns the reason why an operand that comes from stored data cannot be packed, or None."""
        if is_overridable(origin := origin_of(value)):
            return (
                f"weight {origin.name!r} is also a graph input that a caller may replace; remove it from the inputs: "
                "python -m onnxruntime.tools.remove_initializer_from_input --input MODEL --output NEW_MODEL"
            )
        if self._operands.is_constant(value):
            via = source_of(value)
            if via in DEQUANTIZES or is_decoded(value):
                return (
                    f"weight {value.name!r} is quantized already, by {via}, and would be rounded twice; rewrite the "
                    "model it was quantized from"
                )
            allowed = ", ".join(VIEW_OPS)
            return f"weight {value.name!r} comes through {via}; expected only {allowed}; fold the constants first"
        if reason := self._operands.experts_blocker(value):
            return reason
        if repeated := self._operands.repeated(value):
            return (
                f"weight {repeated!r} is repeated along dimensions that are not constant; expected constant ones; "
                "give the model shape information"
            )
        return None


def _repeat_blocker(form: Form, x: Operand, w: Operand, result: ir.Value) -> str | None:
    """Returns the reason why a weight that repeats along leading dimensions cannot be packed, or None."""
    if w.static is None or not w.static.repeated_axes:
        return None
    if form.a_layout != AS_IS or form.b_layout != AS_IS:
        return "the weight is repeated along a dimension, and its axes are permuted; expected only one of the two"
    # One matrix for all gives a result of the same shape only if X has the batch of the result already.
    batch, seen = (None if shape is None else list(shape[:-2]) for shape in (x.shape, shape_of(result)))
    if batch is not None and None not in batch and batch == seen:
        return None
    return "the weight is repeated along a batch that the activation lacks; expand the result instead"


def _dtype_name(code: int) -> str | None:
    if code in contract.VALUE_NAMES:
        return contract.VALUE_NAMES[code]
    return ir.DataType(code).name.lower() if code in ir.DataType.__members__.values() and code else None
